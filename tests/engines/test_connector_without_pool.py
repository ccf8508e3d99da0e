"""The connector of an engine whose session has ended, and one that resets its cache while the service is away. [E16]"""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fake_blocks import FakeCalls, FakeOwner
from kvharbor.client import Chain, CommitChain, HarborError, PoolSizeMismatch, ServiceAway, SessionLost
from kvharbor.engines.vllm_connector.messages import Report
from kvharbor.engines.vllm_connector.scheduler_half import Limits, SchedulerHalf

BLOCK_TOKENS = 4
KEYS = [bytes([number]) * 32 for number in range(1, 5)]


class Seen(FakeCalls):
    """Calls that are noted, and refused once there is an error for them."""

    def __init__(self) -> None:
        super().__init__(FakeOwner(8, 1))
        self.error: HarborError | None = None
        self.versions: list[str] = []
        self.version = "own"

    def _asked(self, chains: Any) -> None:
        if self.error is not None:
            raise self.error
        self.versions += [chain.namespace.version or self.version for chain in chains]

    def acquire(self, chains: list[Chain], **options: Any) -> Any:
        self._asked(chains)
        return super().acquire(chains, **options)

    def lease(self, *arguments: Any, **options: Any) -> Any:
        self._asked(())
        return super().lease(*arguments, **options)

    def commit(self, chains: list[CommitChain]) -> None:
        self._asked(chains)
        super().commit(chains)

    def release(self, blocks: Any) -> None:
        self._asked(())
        super().release(blocks)

    def bump_namespace(self, version: str = "") -> str:
        self._asked(())
        self.version = version or "private"
        return self.version


def half_on(calls: Seen) -> SchedulerHalf:
    engine = SimpleNamespace(
        pool=SimpleNamespace(blocks=calls), life="first", harbor=SimpleNamespace(join_token="token")
    )
    return SchedulerHalf(cast("Any", engine), "scheme", BLOCK_TOKENS, Limits(6, 64), loads=True, stores=True)


def answered(half: SchedulerHalf, name: str) -> int:
    """Takes a request through its life; returns how many tokens the pool had."""
    request: Any = SimpleNamespace(
        request_id=name, num_tokens=4 * BLOCK_TOKENS + 1, num_computed_tokens=0, block_hashes=KEYS
    )
    matched = half.matched_tokens(request, 0)
    half.admitted(request, range(1, 6), matched)
    request.num_computed_tokens = matched
    plan = half.plan({name: request.num_tokens - matched}, lambda _: ([*range(1, 6)],))
    half.reported(Report({plan.number: True}))
    half.end(name)
    return matched


@pytest.mark.parametrize("end", [SessionLost("ended"), PoolSizeMismatch("another size in the new epoch")])
def test_an_engine_whose_session_has_ended_computes(end: HarborError) -> None:
    """Requests that are under way end as well."""
    calls = Seen()
    half = half_on(calls)
    assert answered(half, "first") == 0
    assert answered(half, "second") == 4 * BLOCK_TOKENS
    calls.error = end
    assert answered(half, "third") == 0
    half.reset()
    assert answered(half, "fourth") == 0


def test_a_reset_finds_nothing_of_before_even_while_the_service_is_away() -> None:
    """What follows is in a version of its own, whether the service knows of it or not."""
    calls = Seen()
    half = half_on(calls)
    answered(half, "first")
    calls.error = ServiceAway("away")
    half.reset()
    calls.error = None
    answered(half, "second")
    half.reset()
    answered(half, "third")
    first, second, third = dict.fromkeys(calls.versions)
    assert (first, third) == ("own", "private")
    assert second not in ("", first, third)
