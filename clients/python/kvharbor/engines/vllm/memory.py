"""vLLM's KV cache in a pool's memory.

vLLM makes its whole KV cache by a single `torch.zeros` inside a context that a worker may choose. The context here
answers that call with the mapped pool [E20]: nothing is allocated and nothing is overwritten with zeros, for what lies
there may be other engines' prefixes.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvharbor.engines.vllm.errors import ContractBroken


class PoolAllocation(TorchFunctionMode):
    """While it is entered, `torch.zeros` of int8 gives the pool's memory: `memory`, flat int8, whole.

    Any other size raises ContractBroken, and so does a second such call: two caches in one memory would overwrite each
    other.
    """

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self.memory = memory
        self.answered = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answers the one allocation; all else goes its way."""
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.get("dtype") is not torch.int8:
            return func(*args, **kwargs)
        if args != (self.memory.numel(),) or self.answered:
            raise ContractBroken(
                f"vLLM asks for a KV cache of {args} bytes, as number {self.answered + 1}, and the pool has"
                f" {self.memory.numel()} for exactly one"
            )
        self.answered = 1
        return self.memory

    def require_answered(self, caches: Iterable[Tensor]) -> None:
        """Raises ContractBroken unless vLLM has asked once, and all of its caches lie in the pool's memory."""
        first, size_bytes = self.memory.data_ptr(), self.memory.numel()
        found = [(cache.untyped_storage().data_ptr(), cache.data_ptr()) for cache in caches]
        inside = all(storage == first and first <= start < first + size_bytes for storage, start in found)
        if not self.answered or not found or not inside:
            raise ContractBroken(
                f"of vLLM's {len(found)} layers some have their KV cache outside of the pool's memory,"
                f" or it was never asked for ({self.answered} times)"
            )
