"""From a step's blocks to the service: published when the step has run, and not before [E22].

vLLM gives blocks their hashes when it schedules the step that fills them. Told to others then, they would attend over
bytes that are not there yet. Those who wait for them are told that the step is under way [E17], and which prompts come
to nothing [E18].
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.request import Request

from kvharbor.client import NO_BLOCKS, BlockRun, Chain, CommitChain, Namespace
from kvharbor.client.chains import KEY_BYTES
from kvharbor.engines.announced import Announced
from kvharbor.engines.vllm.blocks import Filled, HarborBlockPool
from kvharbor.engines.vllm.candidates import Candidate
from kvharbor.engines.vllm.owner import BlockCalls


class Publication:
    """The steps that are under way, oldest first, and what each fills."""

    def __init__(self, pool: HarborBlockPool, calls: BlockCalls, namespace: Namespace) -> None:
        self._pool = pool
        self._calls = calls
        self._computing = calls.computing
        self._announced: Announced[str] = Announced(calls.abandon)
        self.namespace = namespace
        self._under_way: deque[tuple[Any, list[Filled]]] = deque()

    def announce(self, candidate: Candidate) -> None:
        """Takes in that others were told of a prompt that it is computed here."""
        if candidate.keys:
            chain = Chain(keys=b"".join(candidate.keys), namespace=self.namespace)
            self._announced.add(candidate.request.request_id, chain)

    def look(self, requests: Mapping[str, Request], goes_on: Callable[[Request], bool]) -> None:
        """Takes in which of these prompts are computed with the steps that are scheduled, and which are given up."""
        for name, chain in [*self._announced.chains.items()]:
            request = requests.get(name)
            computed_tokens = 0 if request is None else request.num_computed_tokens
            is_complete = computed_tokens >= len(chain.keys) // KEY_BYTES * self._pool.hash_block_size
            if is_complete or request is None or not goes_on(request):
                self._announced.end(name, self._last_step_of(name), is_complete=is_complete)
        self._tell_ended()

    def scheduled(self, output: Any) -> None:
        """Takes in what a step fills.

        What was given hashes for a request that this step leaves out after all, as one of more priority has taken its
        place, is never written, and loses them again.
        """
        self._under_way.append((output, self._kept(output) if self._pool.filled else []))
        if output.total_num_scheduled_tokens:
            self._computing.begin()

    def has_run(self, output: Any) -> None:
        """Publishes what this step has filled; vLLM tells of steps in the order in which it has scheduled them."""
        self._computing.end()
        while self._under_way:
            of_output, filled = self._under_way.popleft()
            if filled:
                self._publish(filled)
            if of_output is output:
                break
        self._tell_ended()
        if self._under_way:
            self._computing.begin()

    def written(self) -> None:
        """Publishes what was given hashes since the step's end, of which vLLM only then knows the last tokens."""
        self._publish(self._pool.take_filled())

    def forget(self) -> None:
        """What is under way is not published any more, as its hashes are void."""
        for _, filled in self._under_way:
            filled.clear()
        self._announced.abandon_all()

    def _last_step_of(self, request_id: str) -> Any:
        """Returns the last step under way that computes something for a request; None if there is none."""
        steps = (output for output, _ in reversed(self._under_way))
        return next((output for output in steps if request_id in output.num_scheduled_tokens), None)

    def _tell_ended(self) -> None:
        if self._announced.ended:
            self._announced.tell([output for output, _ in self._under_way])

    def _kept(self, output: Any) -> list[Filled]:
        kept = []
        for filled in reversed(self._pool.take_filled()):
            if filled.request_id in output.num_scheduled_tokens:
                kept.append(filled)
            else:
                self._pool.withdraw(filled)
        return kept[::-1]

    def _publish(self, filled: list[Filled]) -> None:
        self._calls.commit([self._chain(each) for each in filled])
        self._pool.published(filled)

    def _chain(self, filled: Filled) -> CommitChain:
        return CommitChain(
            parent=NO_BLOCKS if filled.parent is None else BlockRun.of([filled.parent]),
            blocks=BlockRun.of(filled.pairs),
            keys=b"".join(filled.keys),
            namespace=self.namespace,
        )
