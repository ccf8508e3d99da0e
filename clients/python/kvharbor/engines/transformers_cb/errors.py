"""What this engine refuses. What the pool refuses comes through unchanged, as the client's own errors."""

from typing import ClassVar


class BatchingError(Exception):
    """The root of everything that this engine raises on purpose."""

    reason: ClassVar[str] = "BATCHING_ERROR"


class BatchingUnsupported(BatchingError):
    """Something asked of continuous batching that does not go together with memory that others share."""

    reason = "BATCHING_UNSUPPORTED"

    def __init__(self, feature: str, value: object, remedy: str) -> None:
        self.feature = feature
        self.value = value
        self.remedy = remedy
        super().__init__(f"continuous batching over a pool does not support {feature} (here {value}): {remedy}")


class PoolTaken(BatchingError):
    """The session's blocks in this pool are counted by another manager already."""

    reason = "POOL_TAKEN"

    def __init__(self, pool: str) -> None:
        self.pool = pool
        super().__init__(f"another manager of this process works on pool {pool}: connect once more for this one")


class RequestUnderWay(BatchingError):
    """A request fails, as there is one of its name that has not ended."""

    reason = "REQUEST_UNDER_WAY"

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request {request_id} is still under way: give each its own name, or none")


class StoppedWaiting(BatchingError):
    """A request fails: its engine stops, and other engines have the room or compute the prompt that it waits for."""

    reason = "STOPPED_WAITING"

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        super().__init__(f"the engine stops, and has waited {wait_s:g} s for other engines: ask another one")


class MemoryUnused(BatchingError):
    """The paged cache was built, and not over the pool's memory: the installed transformers is not as expected."""

    reason = "MEMORY_UNUSED"

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(f"the paged cache does not lie in the pool's memory ({found}): use transformers 5.24")
