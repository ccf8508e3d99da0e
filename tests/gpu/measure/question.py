"""A question and its answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu.rig import Rig

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found, in a sentence made from the figures, and the figures. Values are what JSON knows."""

    answer: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Question:
    """Something that nobody knows without a device. `ask` finds it out, in a process that it may spoil."""

    name: str
    text: str
    ask: Callable[[Rig], Answer]
    needs_hardware: bool = False
    """Whether the stub cannot even go through the motions."""
