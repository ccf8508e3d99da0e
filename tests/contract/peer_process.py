"""What the other process of a contract test runs: it may own an arena, and have one mapped."""

import dataclasses
import os
import pickle
import socket
import sys
from contextlib import closing

from contract.arena_kinds import KINDS
from contract.leaks import mapped_arenas, open_descriptors
from contract.peer import MESSAGE_BYTES, MOST_DESCRIPTORS, Refusal
from kvharbor.gpumem import Arena, Descriptor, Export, GpumemError, Mapped, attach


class Session:
    """Each method is a command of the test's."""

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.mapped: Mapped | None = None
        self.kind = KINDS["host"]
        self.descriptors = open_descriptors()

    def create(self, kind: str, size_bytes: int, device: str) -> Export:
        if self.arena is not None:
            self.arena.close()
        self.arena = KINDS[kind].create(size_bytes, device)
        return self.arena.export()

    def attach(self, kind: str, export: Export, writable: bool) -> None:
        self.kind = KINDS[kind]
        self.mapped = attach(export, writable=writable)

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        return self.kind.read(self.mapped, offset_bytes, size_bytes)

    def write(self, offset_bytes: int, content: bytes) -> None:
        self.kind.write(self.mapped, offset_bytes, content)

    def copy(self, descriptor: Descriptor, pairs: list[tuple[int, int]]) -> None:
        self.kind.copy(self.mapped, descriptor, pairs)

    def store(self) -> None:
        self.kind.store(self.mapped)

    def detach(self) -> int:
        """Closes the mapping; returns how often an arena still stands in the memory map."""
        if self.mapped is not None:
            self.mapped.close()
        self.mapped = None
        return len(mapped_arenas())

    def fork(self) -> int:
        """Returns how often an arena stands in the memory map of a forked child."""
        child = os.fork()
        if child == 0:
            os._exit(len(mapped_arenas()))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def reset(self) -> tuple[int, dict[str, str]]:
        """Lets go of everything; returns what is left: how many arenas are mapped, and which descriptors are new."""
        self.detach()
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        left = {fd: what for fd, what in open_descriptors().items() if self.descriptors.get(fd) != what}
        return len(mapped_arenas()), left


def serve(channel: socket.socket, session: Session) -> None:
    """Does what it is told, until the test closes its end."""
    while True:
        message, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not message:
            return
        command, arguments = pickle.loads(message)
        sent: tuple[int, ...] = ()
        if command == "attach":
            kind, export, writable = arguments
            arguments = (kind, dataclasses.replace(export, fds=tuple(fds)), writable)
        try:
            answer = getattr(session, command)(*arguments)
        except GpumemError as refusal:
            answer = Refusal(refusal.reason, refusal.metadata())
        for fd in fds:
            os.close(fd)
        if isinstance(answer, Export):
            answer, sent = dataclasses.replace(answer, fds=()), answer.fds
        socket.send_fds(channel, [pickle.dumps(answer)], sent)


if __name__ == "__main__":
    with closing(socket.socket(fileno=int(sys.argv[1]))) as inherited:
        serve(inherited, Session())
