"""What the scheduler's half and the worker's tell each other, once a step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

Copy = tuple[int, int]
"""From a block to a block."""


@dataclass
class Plan(KVConnectorMetadata):  # type: ignore[misc]
    """What to copy around a step: `loads` from the pool before it, `stores` into the pool after it.

    It holds for one life of the pool: in another one `life` is another, and nothing is copied. `join_token`, a secret,
    makes the worker's process a member of the session that has made the plan.
    """

    number: int
    life: str
    join_token: str = ""
    loads: list[Copy] = field(default_factory=list)
    stores: list[Copy] = field(default_factory=list)


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What became of plans, by number: whether all of it was stored."""

    stored: dict[int, bool]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        """Joins what ranks or steps report: stored is what all have stored."""
        assert isinstance(other, Report)
        numbers = {*self.stored, *other.stored}
        return Report({n: self.stored.get(n, True) and other.stored.get(n, True) for n in numbers})
