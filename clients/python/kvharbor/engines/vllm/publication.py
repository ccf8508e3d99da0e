"""From a step's blocks to the service: published when the step has run, and not before [E22].

vLLM gives blocks their hashes when it schedules the step that fills them. Told to others then, they would attend over
bytes that are not there yet. Those who wait for them are told that the step is under way [E17].
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvharbor.client import BlockRun, CommitChain, Namespace
from kvharbor.engines.vllm.blocks import Filled, HarborBlockPool
from kvharbor.engines.vllm.owner import BlockCalls


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    output: Any
    filled: list[Filled]


class Publication:
    """The steps that are under way, oldest first, and what each fills."""

    def __init__(self, pool: HarborBlockPool, calls: BlockCalls, namespace: Namespace) -> None:
        self._pool = pool
        self._calls = calls
        self._computing = calls.computing
        self.namespace = namespace
        self._under_way: deque[_Step] = deque()

    @property
    def idle(self) -> bool:
        """Whether no step is under way."""
        return not self._under_way

    def scheduled(self, output: Any) -> None:
        """Takes in what a step fills.

        What was given hashes for a request that this step leaves out after all, as one of more priority has taken its
        place, is never written, and loses them again.
        """
        kept: list[Filled] = []
        for filled in reversed(self._pool.take_filled()):
            if filled.request_id in output.num_scheduled_tokens:
                kept.append(filled)
            else:
                self._pool.withdraw(filled)
        self._under_way.append(_Step(output, kept[::-1]))
        if output.total_num_scheduled_tokens:
            self._computing.begin()

    def has_run(self, output: Any) -> None:
        """Publishes what this step has filled; vLLM tells of steps in the order in which it has scheduled them."""
        self._computing.end()
        while self._under_way:
            step = self._under_way.popleft()
            self._publish(step.filled)
            if step.output is output:
                break
        if self._under_way:
            self._computing.begin()

    def written(self) -> None:
        """Publishes what was given hashes since the step's end, of which vLLM only then knows the last tokens."""
        self._publish(self._pool.take_filled())

    def forget(self) -> None:
        """What is under way is not published any more, as its hashes are void."""
        for step in self._under_way:
            step.filled.clear()

    def _publish(self, filled: Iterable[Filled]) -> None:
        listed = [*filled]
        if listed:
            self._calls.commit([self._chain(each) for each in listed])
            self._pool.published(listed)

    def _chain(self, filled: Filled) -> CommitChain:
        return CommitChain(
            parent=BlockRun.of(() if filled.parent is None else (filled.parent,)),
            blocks=BlockRun.of(filled.pairs),
            keys=b"".join(filled.keys),
            namespace=self.namespace,
        )
