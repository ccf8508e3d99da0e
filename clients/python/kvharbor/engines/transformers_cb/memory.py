"""The one allocation of the paged cache, answered with the pool's memory.

`PagedAttentionCache.__init__` takes all of its memory by a single `torch.zeros(size, dtype=torch.uint8)`. A mode
that is in force meanwhile, in this thread only, returns a tensor over the mapping instead: nothing is allocated,
and nothing is zeroed that others have written.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvharbor.engines.transformers_cb.errors import MemoryUnused


class ArenaAllocation(TorchFunctionMode):
    """Answers the first `torch.zeros` of bytes with `arena`, uint8 `[size]`; one of another size is an error."""

    def __init__(self, arena: Tensor) -> None:
        super().__init__()
        self._arena = arena
        self.answered = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Lets everything through but that call."""
        keywords = dict(kwargs or {})
        if func is not torch.zeros or keywords.get("dtype") is not torch.uint8:
            return func(*args, **keywords)
        if self.answered or args != (self._arena.numel(),):
            raise MemoryUnused(f"it asks for {args} bytes, allocation {self.answered + 1}, of {self._arena.numel()}")
        self.answered += 1
        return self._arena
