"""The second process of the two-process test, as the first starts it: `python -m kvharbor.gpumem.stamp_reader FD`.

It gets an export on the socket FD, maps the arena as any worker would, reads the stamp, writes the answer to it, and
says what it has read; or why it could not. What it did not foresee is a traceback on stderr.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Final

from kvharbor.gpumem.arena import Export, attach
from kvharbor.gpumem.errors import GpumemError
from kvharbor.gpumem.remedies import cause_and_remedy
from kvharbor.gpumem.stamps import answer_to, export_of, place_in

MESSAGE_BYTES: Final = 1 << 16
_MOST_FDS: Final = 253
"""As many as one message of a Unix socket carries."""


def main() -> None:
    """Answers one message: {"read": hex} or {"cause": text, "remedy": text}."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        message, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, _MOST_FDS)
        if message:
            channel.send(json.dumps(_reply(message, fds)).encode())


def _reply(message: bytes, fds: Sequence[int]) -> dict[str, str]:
    try:
        return {"read": _read_and_answered(export_of(message, fds)).hex()}
    except GpumemError as refusal:
        cause, remedy = cause_and_remedy(refusal)
        return {"cause": cause, "remedy": remedy}
    finally:
        for fd in fds:
            os.close(fd)


def _read_and_answered(export: Export) -> bytes:
    with contextlib.closing(attach(export, writable=True)) as mapped:
        place = place_in(mapped)
        stamp = place.read()
        place.write(answer_to(stamp))
    return stamp


if __name__ == "__main__":
    main()
