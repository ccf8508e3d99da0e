"""The entry point of `kvharbor`. A client's installation has it too, without the packages that the commands need."""

import sys
from typing import Final, NoReturn

SERVER_PACKAGES: Final = frozenset(
    {"grpc_health", "grpc_reflection", "prometheus_client", "pydantic", "rich", "structlog", "typer"}
)
"""What the extra `server` installs, by the names for import."""
_EXIT_UNUSABLE = 2


def main() -> NoReturn:
    """Runs the command line; without its packages it says in one line how to get them, with exit status 2."""
    try:
        from kvharbor.server import cli

        cli.main()
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in SERVER_PACKAGES:
            raise
        sys.stderr.write("kvharbor: the command line needs more packages: pip install 'kvharbor[server]'\n")
        sys.exit(_EXIT_UNUSABLE)
