"""Checks of all of a pool's invariants in the service's process itself, where nothing can change meanwhile."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chaos.board import Board, Head


@dataclass(frozen=True, slots=True)
class Checked:
    """A method of an object with a `pool`, after every `period`-th call of which that pool is checked."""

    module: str
    function: str
    period: int


_OWNER = "kvharbor.server.scheduling.owner"

CHECKED = (
    # Just made, or just recovered.
    Checked(_OWNER, "PoolOwner.__init__", 1),
    # Between two slices.
    Checked(_OWNER, "PoolOwner._settle", 16),
)


def checking(board: Board, checked: Checked, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method with the check."""
    calls = 0

    @functools.wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        result = function(self, *args, **options)
        calls += 1
        if not calls % checked.period:
            self.pool.check_invariants()
            board.set_head(Head.CHECKS, board.head(Head.CHECKS) + 1)
        return result

    return call
