"""Ports for tests that have to know one before anybody listens there."""

import socket


def free_port() -> int:
    """Returns a port that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
