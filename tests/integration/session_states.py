"""Sessions as the service tells of them."""

import socket

from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import RawCaller


def ended(connection: socket.socket) -> bool:
    """Waits for the end of what the service says on a socket."""
    return connection.recv(1) == b""


def states(caller: RawCaller) -> dict[str, int]:
    """Returns the states of all sessions by id."""
    response = caller.call(caller.pools.ListSessions, pools.ListSessionsRequest())
    return {session.session_id: session.state for session in response.sessions}
