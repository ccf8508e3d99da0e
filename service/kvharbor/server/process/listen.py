"""The addresses for gRPC: a Unix socket, and TCP by choice."""

import ipaddress
import socket
from pathlib import Path

import grpc
import structlog

from kvharbor.server.errors import StartupError
from kvharbor.server.supervision.paths import SocketAccess, SocketPaths, bind_published

log = structlog.get_logger(__name__)


def listen_unix(server: grpc.aio.Server, paths: SocketPaths, access: SocketAccess) -> None:
    """Binds gRPC to the service's Unix socket."""
    bind_published(paths.grpc, access, lambda name: server.add_insecure_port(f"unix:{name}"))


def listen_tcp(server: grpc.aio.Server, address: str, port_file: Path) -> str:
    """Binds gRPC to HOST:PORT and returns the address with its real port, which `port_file` has as well.

    A name stands for the first address that it resolves to. Raises StartupError when the address is taken
    or is not this host's.
    """
    host, _, port = address.rpartition(":")
    found = _resolved(host.strip("[]"), int(port), address)
    _require_free(found, address)
    numeric = f"[{found[0]}]" if ":" in found[0] else found[0]
    try:
        bound_port = server.add_insecure_port(f"{numeric}:{found[1]}")
    except RuntimeError:
        raise StartupError(f"cannot listen at {address}: somebody else has just taken it") from None
    port_file.write_text(f"{bound_port}\n", encoding="ascii")
    if not ipaddress.ip_address(found[0].partition("%")[0]).is_loopback:
        log.warning("listening in clear text beyond this host", listen=f"{numeric}:{bound_port}")
    return f"{numeric}:{bound_port}"


def listen_http(address: str) -> tuple[socket.socket, str]:
    """Returns a listening socket at HOST:PORT, the caller's to close, and the address with its real port.

    Raises StartupError when the address is taken or is not this host's.
    """
    host, _, port = address.rpartition(":")
    listener = _bound(_resolved(host.strip("[]"), int(port), address), address)
    name, bound_port = listener.getsockname()[:2]
    return listener, f"[{name}]:{bound_port}" if ":" in name else f"{name}:{bound_port}"


def _resolved(host: str, port: int, address: str) -> tuple[str, int]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as failure:
        raise StartupError(f"cannot listen at {address}: {failure.strerror}") from None
    return str(found[0][4][0]), port


def _require_free(found: tuple[str, int], address: str) -> None:
    """Binds and lets go: gRPC itself tells no cause, and writes lines of its own to stderr."""
    _bound(found, address).close()


def _bound(found: tuple[str, int], address: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in found[0] else socket.AF_INET, socket.SOCK_STREAM)
    # Like gRPC's own socket: connections of a dead service that linger must not hold up its successor.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(found)
        listener.listen()
    except OSError as failure:
        listener.close()
        raise StartupError(f"cannot listen at {address}: {failure.strerror}; set another address") from None
    return listener
