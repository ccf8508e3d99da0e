"""Frames of the side socket: the length of a message as a little-endian uint32, then the message (see side.proto)."""

import asyncio
import socket
import struct
from typing import Final

from google.protobuf.message import DecodeError

from kvharbor.v1 import side_pb2

MAX_FRAME_BYTES: Final = 64 * 1024
_LENGTH = struct.Struct("<I")


class StreamEnded(Exception):
    """The other side has closed the socket."""


class FrameInvalid(Exception):
    """The other side speaks something else."""


class Frames:
    """One connection, read by one task and written by any: frames never mix. The socket stays the caller's."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = asyncio.Lock()

    async def receive(self) -> side_pb2.SideRequest:
        """Waits for the next frame; raises StreamEnded, FrameInvalid, OSError."""
        (length,) = _LENGTH.unpack(await self._receive_exactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise FrameInvalid(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
        try:
            return side_pb2.SideRequest.FromString(await self._receive_exactly(length))
        except DecodeError:
            raise FrameInvalid("a frame that is no SideRequest") from None

    async def send(self, response: side_pb2.SideResponse, fds: tuple[int, ...] = ()) -> None:
        """Sends a frame, and descriptors with its first bytes; raises OSError."""
        encoded = response.SerializeToString()
        frame = _LENGTH.pack(len(encoded)) + encoded
        async with self._sending:
            sent = await self._send_with_fds(frame, fds) if fds else 0
            await asyncio.get_running_loop().sock_sendall(self._connection, frame[sent:])

    async def _receive_exactly(self, size_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        received = bytearray()
        while len(received) < size_bytes:
            piece = await loop.sock_recv(self._connection, size_bytes - len(received))
            if not piece:
                raise StreamEnded
            received += piece
        return bytes(received)

    async def _send_with_fds(self, frame: bytes, fds: tuple[int, ...]) -> int:
        """Sends the descriptors with the first bytes of a frame; returns how many bytes went."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return socket.send_fds(self._connection, [frame], list(fds))
            except BlockingIOError:
                writable = loop.create_future()
                loop.add_writer(self._connection, writable.set_result, None)
                try:
                    await writable
                finally:
                    loop.remove_writer(self._connection)
