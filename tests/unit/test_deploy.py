"""What is shipped for operators works as it stands, and says the same thing in every place."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvharbor.server.configuration.settings import Settings
from kvharbor.server.sizes import parse_size

DEPLOY = Path(__file__).parents[2] / "deploy"
PODS = ("deployment.yaml", "job.yaml")
LEAST_BESIDE_BYTES = 400 * 2**20
"""What docs/operations.md asks for beside the pools, for the processes."""


def settings(name: str) -> Settings:
    """Returns the settings of a shipped file."""
    return Settings(**tomllib.loads((DEPLOY / name).read_text()))


def pod(name: str) -> dict[str, Any]:
    """Returns the pod of a manifest."""
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())["spec"]["template"]["spec"]
    return found


def sidecar(name: str) -> dict[str, Any]:
    """Returns the container of the service."""
    (found,) = pod(name)["initContainers"]
    assert isinstance(found, dict)
    return found


def test_the_example_settings_are_valid() -> None:
    """An operator can start from the example file."""
    assert settings("kvharbor.toml").pool_rules("main").size == 2 * 2**30
    assert settings("kvharbor.toml").socket_mode == 0o660


def test_the_settings_of_the_pod_are_valid_and_declare_its_pool() -> None:
    """The pool is made before the workers start, for the tenant that they are."""
    found = settings("kubernetes/kvharbor.toml")
    rules = found.pools["main"]
    assert rules.layout is not None
    assert rules.layout.layout().block_tokens == 64
    users = {container["securityContext"]["runAsUser"] for name in PODS for container in pod(name)["containers"]}
    assert {found.tenant_of(user) for user in users} == {rules.tenant}


@pytest.mark.parametrize("name", PODS)
def test_the_service_is_a_native_sidecar_that_holds_the_workers_back(name: str) -> None:
    """It starts before them, by a startupProbe, and nothing stops it before they end."""
    container = sidecar(name)
    assert container["restartPolicy"] == "Always"
    assert container["startupProbe"]["exec"]["command"] == ["kvharbor", "health"]
    assert "lifecycle" not in container
    assert pod(name)["shareProcessNamespace"] is True


@pytest.mark.parametrize("name", PODS)
def test_the_memory_limit_holds_the_pools(name: str) -> None:
    """The arena counts against the container that reserves it."""
    memory = settings("kubernetes/kvharbor.toml").memory
    limit = sidecar(name)["resources"]["limits"]["memory"]
    assert isinstance(memory, int)
    assert parse_size(f"{limit}B") >= memory + LEAST_BESIDE_BYTES


@pytest.mark.parametrize("name", PODS)
def test_the_containers_share_folder_and_group(name: str) -> None:
    """The socket's group is the pod's, and all see one folder of sockets."""
    found = settings("kubernetes/kvharbor.toml")
    assert found.socket_group == str(pod(name)["securityContext"]["fsGroup"])
    containers = [sidecar(name), *pod(name)["containers"]]
    folders = {
        mount["mountPath"] for each in containers for mount in each["volumeMounts"] if mount["name"] == "sockets"
    }
    assert folders == {str(Path(found.socket).parent)}
    assert all(each["securityContext"]["runAsUser"] for each in containers)


@pytest.mark.parametrize("name", PODS)
def test_the_grace_of_the_pod_is_longer_than_that_of_the_service(name: str) -> None:
    """Workers use up some of it first."""
    assert pod(name)["terminationGracePeriodSeconds"] > 2 * settings("kubernetes/kvharbor.toml").grace_s


def test_compose_and_the_unit_wait_longer_than_the_grace() -> None:
    """A hard end would cost every worker its session."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["kvharbor"]
    unit = (DEPLOY / "systemd" / "kvharbor.service").read_text()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    (watchdog_s,) = re.findall(r"^WatchdogSec=(\d+)$", unit, re.MULTILINE)
    grace_s = Settings().grace_s
    assert min(int(stop_s), int(compose["stop_grace_period"].removesuffix("s"))) >= 2 * grace_s
    assert int(watchdog_s) > 2 * Settings().watchdog_s


def test_the_image_runs_the_command_as_a_user_that_is_not_root() -> None:
    """As process 1, without a shell around it."""
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = dict(line.split(" ", 1) for line in lines if line and not line.startswith(("#", " ")))
    assert (steps["ENTRYPOINT"], steps["CMD"]) == ('["kvharbor"]', '["serve"]')
    assert steps["ARG"] == "UID=10001"
    assert steps["USER"] == "${UID}:${UID}"
    assert shlex.split(steps["HEALTHCHECK"])[-2:] == ["[kvharbor,", "health]"]


def test_the_image_is_built_from_files_that_exist() -> None:
    """What the Dockerfile copies is what .dockerignore lets through."""
    root = DEPLOY.parent
    allowed = [line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert sorted(" ".join(copied).split()) == sorted(allowed)
    assert [name for name in allowed if not (root / name).exists()] == []
