"""Options that several commands share."""

import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvharbor.server.errors import CommandError

if TYPE_CHECKING:
    from pathlib import Path

    from kvharbor.client import Harbor, HarborError, Namespace

SocketOption = Annotated[
    str | None,
    typer.Option("--socket", help="Where the service is: a socket path or HOST:PORT. Also KVHARBOR_SOCKET."),
]
PoolArgument = Annotated[str, typer.Argument(metavar="POOL", help="Name of the pool.")]
TenantOption = Annotated[
    str | None,
    typer.Option(
        "--tenant", help="Whose pool, for administrators. Default: the own tenant's, else the only one of the name."
    ),
]
PinArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the pin.")]
TokensOption = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        help="File with the tokens, - for stdin: ids as text, with commas or white space between, or, where it is no "
        "text, little-endian uint32.",
    ),
]
IdsOption = Annotated[str | None, typer.Option("--ids", help='The tokens themselves: 1,2,3 or "1 2 3".')]
VersionOption = Annotated[str, typer.Option("--version", help="Part of the namespace: version of the weights.")]
AdapterOption = Annotated[str, typer.Option("--adapter", help="Part of the namespace: adapter.")]
SaltFileOption = Annotated[
    str | None, typer.Option("--salt-file", help="Part of the namespace: file with the salt, a secret.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
EXIT_USAGE: Final = 2
"""Of a command that was asked in a way that cannot be meant, whatever the service would say."""
_START_OR_NAME: Final = "start one with `kvharbor serve`, or name its socket with --socket or KVHARBOR_SOCKET"
_OVER_TCP: Final = (
    "over TCP there are no sessions: name the Unix socket of the service; lookup, watch and stats work where it has "
    "anonymous_tenant, too"
)


def seconds(least_s: float = 0.0) -> Callable[[str | float], float]:
    """Returns what reads an option in seconds, which are `least_s` at least."""

    def read(value: str | float) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not least_s <= number < math.inf:
            least = f", {least_s:g} at least" if least_s else ""
            raise typer.BadParameter(f"{value!r}: write seconds, e.g. 5{least}")
        return number

    return read


def connected(socket: str | None) -> "Harbor":
    """Returns a session with the service, the caller's to close."""
    from kvharbor.client import connect

    return connect(socket, client_name="kvharbor-cli")


def start_or_name(address: str) -> str:
    """Returns what to do where no service answers; at the default socket a misspelt variable may be why."""
    from kvharbor.client.address import DEFAULT_SOCKET, SOCKET_VARIABLE
    from kvharbor.server.configuration.sources import unknown_variables

    if address.removeprefix("unix:") != DEFAULT_SOCKET or SOCKET_VARIABLE in os.environ:
        return _START_OR_NAME
    return "; ".join([_START_OR_NAME, *(f"the environment has the {told}" for told in unknown_variables(os.environ))])


def in_own_words(refusal: "HarborError") -> str:
    """Returns what the client says; where no service or no session is there, in words of a command line.

    The client's own are for programs, and the cause that gRPC gives ends with the system's words.
    """
    if refusal.reason == "SESSION_REQUIRED":
        return _OVER_TCP
    if refusal.reason != "SERVICE_UNREACHABLE" or not {"cause", "remedy"} <= refusal.metadata.keys():
        return str(refusal)
    address = refusal.metadata["address"].removeprefix("unix:")
    cause = refusal.metadata["cause"].rpartition(": ")[2].rstrip("])")
    return f"no kvharbor service answers at {address} ({cause}): {start_or_name(address)}"


def namespace_of(version: str, adapter: str, salt_file: str | None) -> "Namespace":
    """Returns the namespace of the options; a salt comes from a file, as arguments show in process listings."""
    from kvharbor.client import Namespace

    salt = b"" if salt_file is None else read_bytes(salt_file)
    return Namespace(version=version, adapter=adapter, salt=salt)


def tokens_of(tokens: str | None, ids: str | None) -> bytes | list[int]:
    """Returns the tokens of exactly one of the two options."""
    if (tokens is None) == (ids is None):
        raise CommandError("name the tokens with either --tokens or --ids", status=EXIT_USAGE)
    if ids is not None:
        return _ids(ids, "--ids", "write whole numbers below 2^32 like 1,2,3; for a file use --tokens")
    data = read_bytes(tokens or "")
    text = _text(data)
    if text is None:
        return data
    return _ids(text, "stdin" if tokens == "-" else str(tokens), "write whole numbers below 2^32, or raw uint32")


def require_new(file: "Path", *, force: bool) -> None:
    """Raises CommandError where the file is there already, unless it is to be overwritten."""
    if file.is_file() and not force:
        raise CommandError(f"{file} is there already: name another file, or overwrite it with --force")


def read_bytes(path: str) -> bytes:
    """Returns what a file has, or stdin for "-"."""
    import sys
    from pathlib import Path

    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as failure:
        raise CommandError(f"cannot read {path}: {failure.strerror}") from None


def _text(data: bytes) -> str | None:
    """Returns what the bytes are as text, None if they are none: a uint32 below 2^24 has a byte that no text has."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return text if all(sign.isprintable() or sign.isspace() for sign in text) else None


def _ids(text: str, source: str, remedy: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words:
        raise CommandError(f"{source} has no token ids: {remedy}", status=EXIT_USAGE)
    for number, word in enumerate(words, start=1):
        if not re.fullmatch("[0-9]{1,10}", word):
            # One word of it only: what stands where token ids belong may be a prompt.
            told = f"{source}: {word[:40]!r}, number {number}, is no token id: {remedy}"
            raise CommandError(told, status=EXIT_USAGE)
    return [int(word) for word in words]
