#!/usr/bin/env bash
# Checks what is shipped for operators, with the tools of requirements-deploy.lock on the PATH. promtool and
# systemd-analyze are no Python packages: they check where they are installed, and are said to be missing where not.
set -euo pipefail
cd "$(dirname "$0")"

hadolint Dockerfile
yamllint --strict -c .yamllint .
check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml
kubernetes-validate --strict --quiet kubernetes/deployment.yaml kubernetes/job.yaml

if command -v promtool >/dev/null; then
    (cd prometheus && promtool check config scrape.yml && promtool test rules kvharbor.rules.test.yml)
else
    echo "not checked: prometheus/, as promtool is not installed (Debian: apt-get install prometheus)"
fi

if command -v systemd-analyze >/dev/null; then
    unit=$(mktemp -d)/kvharbor.service
    # The program lies elsewhere on this machine, and verify wants to see it.
    sed 's|^ExecStart=[^ ]*|ExecStart=/bin/true|' systemd/kvharbor.service >"$unit"
    warnings=$(systemd-analyze verify --man=no "$unit" 2>&1 | grep -F kvharbor.service || true)
    rm -r "$(dirname "$unit")"
    [ -z "$warnings" ] || { echo "$warnings"; exit 1; }
else
    echo "not checked: systemd/, as systemd-analyze is not installed"
fi
