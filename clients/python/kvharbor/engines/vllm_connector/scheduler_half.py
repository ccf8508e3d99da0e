"""The scheduler's half: what is in the pool of a prompt, what to copy, and what has become publishable.

A request holds the blocks of the pool that it begins with, and those that its own are copied to, from its admission to
its end: so that each has a parent when it is published. Publication comes after the copy [E10]: a plan goes out with a
step, and the report that comes back with the step's results says that it was carried out.
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvharbor.client import NO_BLOCKS, Acquired, BlockRun, Chain, EpochEnded, Namespace, Unavailable
from kvharbor.client.chains import KEY_BYTES
from kvharbor.engines.announced import Announced
from kvharbor.engines.request_blocks import MOST_AHEAD, RequestBlocks
from kvharbor.engines.spared_calls import SparedCalls
from kvharbor.engines.vllm_connector.engine import Engine
from kvharbor.engines.vllm_connector.messages import Copy, Plan, Report

_LOG = logging.getLogger(__name__)


class Request(Protocol):
    """What is used of vLLM's request."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The keys of its whole blocks, as far as their tokens are known."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one step: how many requests run in it at most, and how many tokens of them."""

    request_count: int
    token_count: int


@dataclass(eq=False, slots=True)
class _Admission:
    """One admission of a request: `table` are blocks of the pool, the first `published` of them with content."""

    request: Request
    table: list[int] = field(default_factory=list)
    published: int = 0
    admitted: bool = False
    plan_count: int = 0
    ended: bool = False
    stores: bool = True


Planned = tuple[_Admission, int, int]


class SchedulerHalf:
    """Plans copies for one engine. `loads`, `stores`: what the engine's role allows; `limits`: what a step takes."""

    def __init__(
        self, engine: Engine, scheme: str, block_tokens: int, limits: Limits, *, loads: bool, stores: bool
    ) -> None:
        self._engine = engine
        self._calls = SparedCalls(engine.pool.blocks)
        self._namespace = Namespace(scheme=scheme)
        self._held = RequestBlocks(self._calls, self._namespace)
        self._announced: Announced[_Admission] = Announced(self._held.abandon)
        engine.pool.blocks.on_recall = self._held.recall
        self._block_tokens = block_tokens
        self._limits = limits
        self._loads = loads
        self._stores = stores
        self._life = engine.life
        self._new: dict[str, Request] = {}
        self._admissions: dict[str, _Admission] = {}
        self._plans: dict[int, list[Planned]] = {}
        self._plan = self._next_plan(1)

    def arrived(self, request: Request) -> None:
        """Takes in that a request has come; it is looked up with those that it may be admitted with."""
        self._new[request.request_id] = request

    def matched_tokens(self, request: Request, own_tokens: int) -> int:
        """Returns how many tokens behind vLLM's own `own_tokens` can be loaded. May be asked again."""
        ready = self._ready()
        admission = self._admissions.get(request.request_id)
        if admission is None or admission.admitted:
            self.end(request.request_id)
            if ready:
                self._look_up([request, *self._others_of_its_step(request)])
            else:
                self._admissions[request.request_id] = _Admission(request, stores=False)
            admission = self._admissions[request.request_id]
        matched_tokens = admission.published * self._block_tokens
        return max(0, matched_tokens - own_tokens) if self._loads else 0

    def admitted(self, request: Request, own_blocks: Sequence[int], loaded_tokens: int) -> None:
        """Takes in that vLLM has given a request blocks, of which those of `loaded_tokens` are to be loaded."""
        admission = self._admissions.get(request.request_id)
        if admission is None:
            return
        admission.admitted = True
        if loaded_tokens:
            first = admission.published - loaded_tokens // self._block_tokens
            self._plan.loads += zip(admission.table[first:], own_blocks[first : admission.published], strict=True)
            self._planned(admission, admission.published, admission.published)

    def plan(self, scheduled_tokens: dict[str, int], resolve_own_blocks: Any) -> Plan:
        """Returns what to copy around a step, of so many tokens by request; that step begins."""
        if scheduled_tokens:
            self._calls.computing.begin()
        if self._ready() and self._stores:
            for request_id, token_count in scheduled_tokens.items():
                admission = self._admissions.get(request_id)
                if admission is not None and admission.admitted and admission.stores:
                    self._plan_stores(admission, token_count, resolve_own_blocks)
        plan, self._plan = self._plan, self._next_plan(self._plan.number + 1)
        return plan

    def reported(self, report: Report | None) -> None:
        """Publishes what was stored; a step is over."""
        self._calls.computing.end()
        self._ready()
        for number, stored in sorted(report.stored.items()) if report else ():
            for admission, first, end in self._plans.pop(number, ()):
                self._carried_out(admission, first, end, stored=stored)
        if not self._admissions:
            self._give_back_unused()

    def end(self, request_id: str) -> None:
        """Takes in that a request has ended, or begins again: its holds end when its last plan is carried out."""
        self._new.pop(request_id, None)
        admission = self._admissions.pop(request_id, None)
        if admission is not None:
            admission.ended = True
            self._look(admission)
            self._drop_if_over(admission)
            self._give_back_unused()

    def reset(self) -> None:
        """Moves on to a namespace of its own: nothing that was stored is found any more."""
        self._announced.abandon_all()
        self._namespace = dataclasses.replace(self._namespace, version=self._calls.leave_version())
        self._held.namespace = self._namespace
        for admission in self._admissions.values():
            admission.stores = False

    def close(self) -> None:
        """Ends the session."""
        self._engine.close()

    def _others_of_its_step(self, request: Request) -> list[Request]:
        """Takes those out of the new ones that fit into a step with a request: one round trip serves them all."""
        places = self._limits.request_count - len(self._admissions) - 1
        tokens = self._limits.token_count - request.num_tokens
        others: list[Request] = []
        for other in self._new.values():
            tokens -= other.num_tokens
            if len(others) >= places or tokens < 0:
                break
            others.append(other)
        for other in others:
            del self._new[other.request_id]
        return others

    def _look_up(self, requests: Sequence[Request]) -> None:
        """Holds what the pool has of prompts, and leases the rest of each to store it, where there is room."""
        found = self._acquired([self._chain(request, leases=self._stores) for request in requests])
        if found is not None and any(each.refusal is not None for each in found):
            without = [index for index, each in enumerate(found) if each.refusal is not None]
            again = self._acquired([self._chain(requests[index], leases=False) for index in without])
            if again is not None:
                for index, each in zip(without, again, strict=True):
                    found[index] = each
        for index, request in enumerate(requests):
            admission = _Admission(request, stores=found is not None)
            if found is not None:
                held = found[index].held
                admission.table, admission.published = self._held.adopt(held, NO_BLOCKS), len(held)
                self._held.keep(found[index].leased)
                if self._stores and self._loads and found[index].refusal is None:
                    self._announced.add(admission, Chain(keys=self._keys(request), namespace=self._namespace))
            self._admissions[request.request_id] = admission

    def _acquired(self, chains: list[Chain]) -> list[Acquired] | None:
        """Returns what was got; None where nothing is known and nothing held."""
        try:
            found = self._calls.acquire(chains)
        except Unavailable as away:
            _LOG.warning("what the pool has of %s requests is not known: %s", len(chains), away)
            return None
        except EpochEnded:
            return None
        if self._engine.life == self._life:
            return found
        # What has come is of another epoch.
        self._calls.release(BlockRun.join(run for each in found for run in (each.held, each.leased)))
        return None

    def _chain(self, request: Request, *, leases: bool) -> Chain:
        chain = Chain(keys=self._keys(request), namespace=self._namespace)
        if not self._loads:
            # It only asks what need not be stored again: who takes nothing is no request that reuses or misses it.
            return chain
        # Others are not to wait for what there is no room to store.
        table_block_count = len(request.block_hashes) if leases else 0
        return dataclasses.replace(chain, table_block_count=table_block_count, computes=leases, uses=True)

    def _keys(self, request: Request) -> bytes:
        # One token at least is left to compute, for its logits.
        return b"".join(request.block_hashes[: (request.num_tokens - 1) // self._block_tokens])

    def _give_back_unused(self) -> None:
        """Keeps of the spare blocks those that prompts are still to be stored in, and a few if anything runs [E14]."""
        admissions = [each for each in self._admissions.values() if each.stores]
        lacking = sum(max(len(each.request.block_hashes) - len(each.table), 0) for each in admissions)
        self._held.give_back_spare(lacking + MOST_AHEAD if admissions else 0)

    def _plan_stores(self, admission: _Admission, token_count: int, resolve_own_blocks: Any) -> None:
        request = admission.request
        computed_tokens = request.num_computed_tokens + token_count
        full = min(computed_tokens // self._block_tokens, len(request.block_hashes))
        first = len(admission.table)
        if full <= first:
            return
        try:
            taken = self._held.take_some(full - first, MOST_AHEAD)
        except EpochEnded:
            return
        if not taken:
            return
        own_blocks = resolve_own_blocks(request.request_id)[0]
        admission.table += taken
        stores: list[Copy] = list(zip(own_blocks[first : first + len(taken)], taken, strict=True))
        self._plan.stores += stores
        self._planned(admission, first, len(admission.table))

    def _planned(self, admission: _Admission, first: int, end: int) -> None:
        admission.plan_count += 1
        self._plans.setdefault(self._plan.number, []).append((admission, first, end))

    def _carried_out(self, admission: _Admission, first: int, end: int, *, stored: bool) -> None:
        admission.plan_count -= 1
        admission.stores = admission.stores and stored
        if admission.stores and end > first:
            keys = b"".join(admission.request.block_hashes[first:end])
            self._held.publish(admission.table, first, end, keys=keys)
            admission.published = end
        self._look(admission)
        self._drop_if_over(admission)

    def _look(self, admission: _Admission) -> None:
        """Takes in whether the rest of a prompt is still to be published, and nothing of it is under way."""
        chain = self._announced.chains.get(admission)
        if chain is not None and not (admission.stores and (admission.plan_count or not admission.ended)):
            is_complete = admission.published >= len(chain.keys) // KEY_BYTES
            self._announced.end(admission, is_complete=is_complete)
            self._announced.tell()

    def _drop_if_over(self, admission: _Admission) -> None:
        if admission.ended and not admission.plan_count:
            self._held.drop(admission.table)
            admission.table = []

    def _ready(self) -> bool:
        """Forgets what was held when another epoch has begun; False in between, when nothing can be held."""
        life = self._engine.life
        if life and life != self._life:
            self._life = life
            for planned in [*self._plans.values(), [(each, 0, 0) for each in self._admissions.values()]]:
                for admission, _, _ in planned:
                    admission.table, admission.published, admission.stores = [], 0, False
            self._plans.clear()
            self._plan = self._next_plan(self._plan.number + 1)
            self._held.forget()
            self._announced.forget()
        return bool(life) and not self._held.epoch_ended

    def _next_plan(self, number: int) -> Plan:
        return Plan(number, self._life, self._engine.harbor.join_token)
