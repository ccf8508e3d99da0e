"""One replay: a trace, a policy, a capacity, a mode."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvharbor.server.replay.modes import Mode, run_concurrently, run_sequentially
from kvharbor.server.replay.policies import cache_of
from kvharbor.server.traces.trace import Request, Trace

Watched = Callable[[Iterable[Request]], Iterable[Request]]
"""Passes requests on, one by one, and may tell somebody how far it is."""


@dataclass(frozen=True, slots=True)
class Setting:
    """With what a trace is replayed."""

    policy: str
    block_count: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. `asked_block_count` has the blocks of refused requests too: they are no hits."""

    setting: Setting
    asked_block_count: int
    hit_block_count: int
    evicted_block_count: int
    refused_request_count: int

    @property
    def hit_ratio(self) -> float:
        """Blocks that were there, of all that were asked for."""
        return self.hit_block_count / self.asked_block_count if self.asked_block_count else 0.0

    def record(self, trace_name: str) -> dict[str, str | int]:
        """Returns the outcome as programs get it."""
        return {
            "trace": trace_name,
            "policy": self.setting.policy,
            "blocks": self.setting.block_count,
            "mode": self.setting.mode.value,
            "asked_blocks": self.asked_block_count,
            "hit_blocks": self.hit_block_count,
            "evictions": self.evicted_block_count,
        }


def replay(trace: Trace, setting: Setting, watched: Watched = iter) -> Outcome:
    """Replays a trace from an empty memory. Requests larger than the whole memory are refused and left out."""
    is_concurrent = setting.mode is Mode.CONCURRENT

    def output_block_count(request: Request) -> int:
        return request.output_block_count(trace.block_tokens) if is_concurrent else 0

    fitting = [
        request
        for request in trace.requests
        if len(request.block_names) + output_block_count(request) <= setting.block_count
    ]
    cache = cache_of(setting.policy, setting.block_count, fitting)
    if is_concurrent:
        hit_count = run_concurrently(watched(fitting), cache, output_block_count).hit_block_count
    else:
        hit_count = run_sequentially(watched(fitting), cache)
    return Outcome(
        setting,
        asked_block_count=trace.asked_block_count,
        hit_block_count=hit_count,
        evicted_block_count=cache.evicted_block_count,
        refused_request_count=len(trace.requests) - len(fitting),
    )
