"""Frames of a side socket, as either side writes them, and the other side of a client reads them."""

import socket
import struct

from kvharbor.client.options import Options
from kvharbor.client.side import SideSocket
from kvharbor.v1 import side_pb2

WELCOME = side_pb2.SideResponse(
    welcome=side_pb2.Welcome(session_id="s1", session_token="secret", epoch="e1", tenant="uid-1")
)


def frame(message: side_pb2.SideRequest | side_pb2.SideResponse) -> bytes:
    """Returns a message as it is on the wire."""
    payload = message.SerializeToString()
    return struct.pack("<I", len(payload)) + payload


def read_request(connection: socket.socket) -> side_pb2.SideRequest:
    """Reads one whole request."""
    (length,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
    return side_pb2.SideRequest.FromString(connection.recv(length, socket.MSG_WAITALL))


def open_side(path: str, timeout_s: float = 5.0) -> SideSocket:
    """Opens a session."""
    side, _ = SideSocket.open(path, Options(client_name="w").hello(), timeout_s=timeout_s)
    return side


def notice(pool_id: str) -> bytes:
    """Returns the frame that tells of a warm task."""
    return frame(side_pb2.SideResponse(warm_tasks_pending=side_pb2.WarmTasksPending(pool_id=pool_id)))
