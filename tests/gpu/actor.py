"""Another process that can also keep a device busy, and be watched as it dies."""

import select
from typing import Any

from contract.peer import Peer, Refusal


class Actor(Peer):
    """A peer of the contract tests whose program knows kernels too."""

    program = "gpu.actor_process"

    @property
    def channel_fd(self) -> int:
        """Our end of a socket whose other end is the process's alone, as a side socket's is."""
        return self._channel.fileno()

    def outcome(self, command: str, *arguments: object) -> str:
        """Runs a command for what becomes of it: "ok", the code of the call of CUDA that failed, or how it ended."""
        try:
            return outcome_of(self.ask(command, *arguments))
        except EOFError:
            return f"the process ended with status {self.process.wait(30)}"


def outcome_of(answer: Any) -> str:
    """Says what an answer amounts to: "ok", or the code or reason of the refusal."""
    if isinstance(answer, Refusal):
        return answer.metadata.get("code", answer.reason)
    return "ok"


def ready(fd: int) -> bool:
    """Whether a descriptor can be read, or has come to its end, now."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
