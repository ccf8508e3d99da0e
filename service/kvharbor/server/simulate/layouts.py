"""Ways to give out memory for KV, and what some requests take that run at once, at their full length.

Memory is cut into *units*. Static: a unit is a slot, as long as the longest request may be. Paged: it is a block, and
a request takes as many as it fills. Shared: blocks of equal prefixes are taken once.
"""

from dataclasses import dataclass
from typing import Self

from kvharbor.server.traces.trace import Request


@dataclass(frozen=True, slots=True)
class Layout:
    """One way. A request of more than `most_tokens`, if that is given, cannot be served."""

    name: str
    unit_tokens: int
    most_tokens: int | None = None
    shares: bool = False

    @classmethod
    def static(cls, slot_tokens: int) -> Self:
        """A slot a request."""
        return cls(f"static {slot_tokens:,}", slot_tokens, slot_tokens)

    @classmethod
    def paged(cls, block_tokens: int) -> Self:
        """Blocks, each one's own."""
        return cls(f"paged {block_tokens:,}", block_tokens)

    @classmethod
    def shared(cls, block_tokens: int) -> Self:
        """Blocks, equal ones in common."""
        return cls(f"shared {block_tokens:,}", block_tokens, shares=True)

    def serves(self, request: Request) -> bool:
        """Whether a request is not too long for a unit."""
        return self.most_tokens is None or _tokens(request) <= self.most_tokens

    def unit_count(self, request: Request) -> int:
        """Returns how many units a request takes that shares nothing."""
        return -(-_tokens(request) // self.unit_tokens)


class Occupied:
    """What requests that run at once take, all at their full length."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.request_count = 0
        self.unit_count = 0
        self.written_tokens = 0
        self._names: set[int] = set()

    @property
    def unused_tokens(self) -> int:
        """Tokens that the units have room for and that are never written."""
        return self.unit_count * self.layout.unit_tokens - self.written_tokens

    def added_unit_count(self, request: Request) -> int:
        """Returns how many units one more request would take."""
        return self.layout.unit_count(request) - len(self._present(request))

    def add(self, request: Request) -> None:
        """Takes one more request."""
        present = self._present(request)
        self.unit_count += self.layout.unit_count(request) - len(present)
        # The last of a prompt's blocks may be a full one in name only.
        shared_tokens = min(len(present) * self.layout.unit_tokens, request.input_tokens)
        self.written_tokens += _tokens(request) - shared_tokens
        self.request_count += 1
        if self.layout.shares:
            self._names.update(request.block_names)

    def _present(self, request: Request) -> list[int]:
        if not self.layout.shares:
            return []
        return [name for name in request.block_names if name in self._names]


def _tokens(request: Request) -> int:
    return request.input_tokens + request.output_tokens
