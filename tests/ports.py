"""Ports for tests that have to know one before anybody listens there."""

import contextlib
import random
import socket

_PORTS = range(20_000, 32_768)
"""Below those that the kernel gives to who asks for any: other tests ask for some meanwhile."""
# Not the dice of this process, which workers of one run have in common.
_DICE = random.SystemRandom()


def free_port() -> int:
    """Returns a port that nobody has at the moment."""
    while True:
        port = _DICE.choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
