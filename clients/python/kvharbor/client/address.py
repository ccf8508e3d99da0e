"""Where a service is: a Unix socket, which gives a session, or TCP, which does not."""

import os
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import quote, unquote

from kvharbor.client.errors import InvalidField

SOCKET_VARIABLE = "KVHARBOR_SOCKET"
DEFAULT_SOCKET = "/run/kvharbor/kvharbor.sock"
MAX_PATH_BYTES = 107
"""The kernel's limit on the path of a Unix socket."""


Target = str | os.PathLike[str] | None
"""What `connect` takes for an address."""


@dataclass(frozen=True, slots=True)
class Address:
    """A gRPC target and the side socket beside it; `side_path` is None over TCP."""

    target: str
    side_path: str | None

    @property
    def text(self) -> str:
        """What people call it: the path of the gRPC socket, or HOST:PORT."""
        return unquote(self.target.removeprefix("unix:"), errors="surrogateescape")


def parse(target: Target) -> Address:
    """Reads "unix:/path", "unix:///path", a path or "host:port"; None means KVHARBOR_SOCKET, else the default.

    A path is a text with a "/" in it, or any os.PathLike; a relative one counts from the working directory. Raises
    InvalidField for anything else and for a path that is too long for a socket.
    """
    text = _text(target)
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
            limit='"unix:/path", a path with a "/" in it or "host:port"',
            remedy=f"name the socket of `kvharbor serve`, e.g. unix:{DEFAULT_SOCKET}; one in this folder as ./kv.sock",
        )
    return Address(text, None)


def side_path(path: str) -> str:
    """Returns the path of the side socket that belongs to a gRPC socket."""
    return f"{path.removesuffix('.sock')}.side"


def _text(target: Target) -> str:
    if target is None:
        target = os.environ.get(SOCKET_VARIABLE, DEFAULT_SOCKET)
    is_path = isinstance(target, os.PathLike)
    text = os.fsdecode(target)
    if is_path or ("/" in text and not text.startswith(("/", "unix:"))):
        return os.path.abspath(text)  # noqa: PTH100 - resolve() would follow a link at the path itself
    return text


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
