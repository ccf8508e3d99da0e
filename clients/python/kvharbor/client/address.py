"""Where a service is: a Unix socket, which gives a session, or TCP, which does not."""

import os
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import quote

from kvharbor.client.errors import InvalidField

SOCKET_VARIABLE = "KVHARBOR_SOCKET"
DEFAULT_SOCKET = "/run/kvharbor/kvharbor.sock"
MAX_PATH_BYTES = 107
"""The kernel's limit on the path of a Unix socket."""


@dataclass(frozen=True, slots=True)
class Address:
    """A gRPC target and the side socket beside it; `side_path` is None over TCP."""

    target: str
    side_path: str | None


def parse(target: str | None) -> Address:
    """Reads "unix:/path", "unix:///path", "/path" or "host:port"; None means KVHARBOR_SOCKET, else the default.

    Raises InvalidField for anything else and for a path that is too long for a socket.
    """
    text = target if target is not None else os.environ.get(SOCKET_VARIABLE, DEFAULT_SOCKET)
    path = text.removeprefix("unix:") if text.startswith("unix:") else text
    if path.startswith("//") and text.startswith("unix:"):
        path = path.removeprefix("//")
    if path.startswith("/") or text.startswith("unix:"):
        return _unix(text, path)
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal():
        raise InvalidField.of(
            "target",
            text,
            limit='"unix:/path", an absolute path or "host:port"',
            remedy=f"name the socket of `kvharbor serve`, e.g. unix:{DEFAULT_SOCKET}",
        )
    return Address(text, None)


def side_path(path: str) -> str:
    """Returns the path of the side socket that belongs to a gRPC socket."""
    return f"{path.removesuffix('.sock')}.side"


def _unix(text: str, path: str) -> Address:
    if not PurePosixPath(path).is_absolute():
        raise InvalidField.of("target", text, limit="an absolute path", remedy="write unix:/path/to/socket")
    side = side_path(path)
    longest = max(len(os.fsencode(path)), len(os.fsencode(side)))
    if longest > MAX_PATH_BYTES:
        raise InvalidField.of(
            "target", f"{longest} bytes", limit=f"at most {MAX_PATH_BYTES} bytes", remedy="use a shorter path"
        )
    # A target is a URI, which gRPC decodes.
    return Address(f"unix:{quote(os.fsencode(path))}", side)
