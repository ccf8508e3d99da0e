"""`kvharbor serve`: a flag for every setting, except the tables, which belong in a file."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

_Text = str | None


def _flag(meaning: str, default: str) -> Any:
    # The settings have their defaults, but are not imported for help; a test keeps these the same.
    return typer.Option(help=f"{meaning} Default: {default}.")


def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file with settings. Also KVHARBOR_CONFIG.")] = None,
    socket: Annotated[_Text, _flag("Path of the Unix socket for gRPC.", "/run/kvharbor/kvharbor.sock")] = None,
    socket_mode: Annotated[_Text, _flag("File mode of the sockets, octal.", "0600")] = None,
    socket_group: Annotated[_Text, _flag("Group of the sockets.", "that of the process")] = None,
    listen: Annotated[_Text, _flag("HOST:PORT for gRPC over TCP beside the socket; port 0: any.", "none")] = None,
    metrics_listen: Annotated[_Text, _flag("HOST:PORT for Prometheus and probes over HTTP.", "none")] = None,
    metrics_max_tenants: Annotated[_Text, _flag("Tenants, pools and engines with metrics of their own.", "100")] = None,
    memory: Annotated[_Text, _flag("Memory for all pools: 2GiB, 2GB, or a share of what there is.", "80%")] = None,
    arena: Annotated[_Text, _flag("host, cuda_ipc or cuda_vmm.", "cuda_ipc with devices, else host")] = None,
    devices: Annotated[_Text, _flag("UUIDs of devices for pools, with commas between.", "all visible")] = None,
    device_grace_s: Annotated[_Text, _flag("Seconds that a dead worker's device work may go on.", "1")] = None,
    allow_mps: Annotated[_Text, _flag("true: processes may use devices through CUDA MPS.", "false")] = None,
    cuda_runtime: Annotated[_Text, _flag("cupy or driver, for the arena cuda_ipc.", "cupy")] = None,
    eviction_policy: Annotated[_Text, _flag("Which cached blocks go first: auto or lru.", "auto")] = None,
    warm_budget_ratio: Annotated[_Text, _flag("Part of a pool that warm pins may hold.", "0.25")] = None,
    min_reuse_tokens: Annotated[_Text, _flag("Matches shorter than this are not reused.", "0")] = None,
    guarantee_ratio: Annotated[
        _Text, _flag("Part of a pool of which its sessions have equal shares; one with less goes first.", "0.5")
    ] = None,
    anonymous_tenant: Annotated[_Text, _flag("Tenant of callers without a session.", "none")] = None,
    handoff_ttl_s: Annotated[_Text, _flag("Seconds that a hand-off waits for its Adopt.", "30")] = None,
    hello_timeout_s: Annotated[_Text, _flag("Seconds that a side socket has to say hello.", "5")] = None,
    watch_backlog: Annotated[_Text, _flag("Events kept a pool for watchers.", "4MiB")] = None,
    watch_progress_s: Annotated[_Text, _flag("Seconds after which an idle watch gets progress.", "5")] = None,
    max_message_bytes: Annotated[_Text, _flag("Largest gRPC message.", "16777216")] = None,
    max_sessions: Annotated[_Text, _flag("Processes with a session at a time.", "1024")] = None,
    grace_s: Annotated[_Text, _flag("Seconds that calls in flight have at shutdown.", "5")] = None,
    watchdog_s: Annotated[_Text, _flag("Seconds without a turn after which the process is replaced.", "20")] = None,
    log_level: Annotated[_Text, _flag("debug, info, warning or error.", "info")] = None,
    log_format: Annotated[_Text, _flag("json or console.", "json")] = None,
) -> None:
    """Owns the memory and serves it, until SIGTERM.

    Flags win over the environment (KVHARBOR_NAME), that over the file, that over the defaults. The tables pools
    and tenants and the list admin_uids have no flag: they belong in the file.
    """
    flags = {name: value for name, value in locals().items() if name != "config" and value is not None}
    # Until the supervisor handles signals itself, SIGTERM unwinds what has been set up so far.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    from kvharbor.server.configuration.logs import configure
    from kvharbor.server.configuration.sources import load_settings

    loaded = load_settings(flags, os.environ, config)
    configure(loaded.settings.log_level, loaded.settings.log_format)

    from kvharbor.server.supervision.supervisor import supervise

    # The service's process reads the same flags, environment and file. The socket's path is the supervisor's, whatever
    # the file says by then: beside it is the side socket, and workers look for both there.
    access = {"socket": str(loaded.settings.socket), "socket_mode": f"{loaded.settings.socket_mode:o}"}
    if loaded.settings.socket_group is not None:
        access["socket_group"] = loaded.settings.socket_group
    status = supervise(loaded, [json.dumps([flags | access, None if config is None else str(config)])])
    raise typer.Exit(status)
