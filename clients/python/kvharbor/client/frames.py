"""Frames of the side socket (see side.proto): the length of a message as a little-endian uint32, then the message.

Descriptors come with the first byte of the frame that announces them.
"""

import array
import os
import socket
import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kvharbor.client.errors import ServiceBug
from kvharbor.v1 import side_pb2

MAX_FRAME_BYTES = 64 * 1024
MAX_DESCRIPTORS = 32
"""With one frame: as many as a device arena has chunks at most."""
_LENGTH = struct.Struct("<I")
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


@dataclass(frozen=True, slots=True)
class Frame:
    """A response with the descriptors that came with it, its receiver's to close.

    `cut`: more came than were taken, as there were more than MAX_DESCRIPTORS, or this process may open no more.
    """

    response: side_pb2.SideResponse
    fds: tuple[int, ...] = ()
    cut: bool = False


def framed(request: side_pb2.SideRequest) -> bytes:
    """Returns a request as it is sent."""
    payload = request.SerializeToString()
    return _LENGTH.pack(len(payload)) + payload


def receive(connection: socket.socket) -> Frame:
    """Returns the next frame.

    Raises EOFError at the end of the stream, ServiceBug for what is no frame, and what the socket raises; nothing
    that was received by then stays open.
    """
    head, ancillary, flags, _ = connection.recvmsg(_LENGTH.size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds = _descriptors(ancillary)
    try:
        return Frame(_response(connection, head), fds, cut=bool(flags & socket.MSG_CTRUNC))
    except BaseException:
        close_fds(fds)
        raise


def close_fds(fds: tuple[int, ...]) -> None:
    """Closes descriptors that nobody has a use for."""
    for fd in fds:
        os.close(fd)


def _response(connection: socket.socket, head: bytes) -> side_pb2.SideResponse:
    if not head:
        raise EOFError
    length = _LENGTH.unpack(head + _read(connection, _LENGTH.size - len(head)))[0]
    if length > MAX_FRAME_BYTES:
        raise ServiceBug(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
    try:
        return side_pb2.SideResponse.FromString(_read(connection, length))
    except DecodeError:
        raise ServiceBug("a frame that is no SideResponse") from None


def _read(connection: socket.socket, size_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        piece = connection.recv(size_bytes - len(received))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(fds)
