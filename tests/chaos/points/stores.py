"""Memory that can be killed between two stores into it, and in the middle of a long one."""

from collections.abc import Callable
from typing import Any


class Stores:
    """A memoryview in all but its stores: `passed` is called before each, halfway through a long one, and after."""

    def __init__(self, memory: memoryview, passed: Callable[[], None]) -> None:
        self._memory = memory
        self._passed = passed

    def __setitem__(self, place: int | slice, value: Any) -> None:
        self._passed()
        if isinstance(place, slice):
            first, end, _ = place.indices(len(self._memory))
            middle = (end - first) // 2
            self._memory[first : first + middle] = value[:middle]
            self._passed()
            self._memory[first + middle : end] = value[middle:]
        else:
            self._memory[place] = value
        self._passed()

    def __getitem__(self, place: int | slice) -> Any:
        return self._memory[place]

    def __len__(self) -> int:
        return len(self._memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)
