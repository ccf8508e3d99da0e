"""The connector's plans: what is loaded is what was asked for, what is published has been stored, and nothing is left.

Two engines with caches of their own on one pool, all in memory: a block's bytes are its key. Blocks of the engines and
of the pool are used again as soon as they are free, so that a copy from or to the wrong one does not go unseen.
"""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fake_blocks import FakeCalls, FakeOwner
from kvharbor.engines.vllm_connector.messages import Plan, Report
from kvharbor.engines.vllm_connector.scheduler_half import Limits, SchedulerHalf

BLOCK_TOKENS = 4
LIMITS = Limits(6, 64)


@dataclass(eq=False)
class Request:
    """What the connector sees of vLLM's."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int
    num_computed_tokens: int = 0
    own_blocks: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Step:
    """A step that has not run: requests with their tokens before and after, and whether its stores fail."""

    plan: Plan
    computed: list[tuple[Request, int, int]]
    fails: bool


class Engine:
    """One engine: its own cache, without reuse, and the connector's two halves, the worker's played here."""

    def __init__(self, owner: FakeOwner, pool_bytes: dict[int, bytes], **roles: bool) -> None:
        self.calls: FakeCalls = owner.session()
        harbor = SimpleNamespace(join_token="token")
        self.link = SimpleNamespace(pool=SimpleNamespace(blocks=self.calls), life="first", harbor=harbor)
        self.half = SchedulerHalf(
            cast("Any", self.link), "scheme", BLOCK_TOKENS, LIMITS, **{"loads": True, "stores": True, **roles}
        )
        self.pool_bytes = pool_bytes
        self.own_bytes: dict[int, bytes] = {}
        self.free = list(range(1, 25))
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.scheduled: list[Step] = []
        self.flying: list[tuple[Plan, bool]] = []
        self.loaded_count = 0

    def come(self, request: Request) -> None:
        """A request comes, and waits."""
        self.waiting[request.request_id] = request
        self.half.arrived(request)

    def admit_waiting(self) -> None:
        """Admits those who wait, in order, as far as there is room."""
        while self.waiting and len(self.running) < LIMITS.request_count:
            request = next(iter(self.waiting.values()))
            if not self.admit(request):
                return
            del self.waiting[request.request_id]

    def admit(self, request: Request) -> bool:
        """vLLM's admission; False when its own cache has no room."""
        matched = self.half.matched_tokens(request, 0)
        block_count = -(-request.num_tokens // BLOCK_TOKENS)
        if block_count > len(self.free):
            return False
        request.own_blocks = [self.free.pop(0) for _ in range(block_count)]
        request.num_computed_tokens = matched
        self.half.admitted(request, request.own_blocks, matched)
        self.running[request.request_id] = request
        return True

    def schedule(self, chosen: random.Random, *, fails: bool = False) -> None:
        """Schedules some tokens of every running request; steps are run later, in order."""
        scheduled = {
            name: min(chosen.randrange(1, 9), request.num_tokens - request.num_computed_tokens)
            for name, request in self.running.items()
            if request.num_computed_tokens < request.num_tokens
        }
        plan = self.half.plan(scheduled, lambda name: (self.running[name].own_blocks,))
        computed = []
        for name, token_count in scheduled.items():
            request = self.running[name]
            computed.append((request, request.num_computed_tokens, request.num_computed_tokens + token_count))
            request.num_computed_tokens += token_count
        self.scheduled.append(Step(plan, computed, fails and bool(plan.stores)))

    def run(self) -> None:
        """Runs the oldest step that has been scheduled; its results stay on their way."""
        step = self.scheduled.pop(0)
        for source, own in step.plan.loads:
            self.own_bytes[own] = self.pool_bytes[source]
            self.loaded_count += 1
        for request, before, after in step.computed:
            first, full = before // BLOCK_TOKENS, after // BLOCK_TOKENS
            for place in range(first):
                assert self.own_bytes[request.own_blocks[place]] == request.block_hashes[place]
            for place in range(first, full):
                self.own_bytes[request.own_blocks[place]] = request.block_hashes[place]
        if not step.fails:
            for own, target in step.plan.stores:
                self.pool_bytes[target] = self.own_bytes[own]
        if step.plan.loads or step.plan.stores:
            self.flying.append((step.plan, not step.fails))

    def step(self, chosen: random.Random) -> None:
        """Schedules a step, and runs all that are."""
        self.schedule(chosen)
        while self.scheduled:
            self.run()

    def arrive(self) -> None:
        """The results of the oldest step."""
        plan, stored = self.flying.pop(0) if self.flying else (None, True)
        self.half.reported(Report({plan.number: stored}) if plan else None)

    def end(self, name: str) -> None:
        """A request finishes, is aborted or preempted."""
        request = self.running.pop(name)
        self.half.end(name)
        self.free += request.own_blocks  # to be written by later steps, when those that are scheduled have run


def request(chosen: random.Random, name: str, texts: list[list[bytes]]) -> Request:
    """A prompt that begins like one of the texts, and goes on in its own way."""
    keys = chosen.choice(texts)[: chosen.randrange(1, 7)]
    keys = [*keys, *(chosen.randbytes(32) for _ in range(chosen.randrange(3)))]
    return Request(name, keys, len(keys) * BLOCK_TOKENS + chosen.randrange(BLOCK_TOKENS))


def check(owner: FakeOwner, pool_bytes: dict[int, bytes]) -> None:
    """Every published block holds what it was published for."""
    for content, block in owner.index.items():
        assert pool_bytes[block.block_id] == content[-1]


@pytest.mark.parametrize("usable_count", [6, 12, 40])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_found_is_what_was_asked_for(usable_count: int, seed: int) -> None:
    """1,500 random events: every block that a step reads holds its key, and in the end nobody holds anything."""
    chosen = random.Random(seed)
    owner = FakeOwner(usable_count, 1, 1)
    pool_bytes: dict[int, bytes] = {}
    engines = [Engine(owner, pool_bytes) for _ in range(2)]
    texts = [[chosen.randbytes(32) for _ in range(7)] for _ in range(4)]
    for number in range(1500):
        engine = chosen.choice(engines)
        event = chosen.random()
        if event < 0.15 and len(engine.waiting) < 8:
            engine.come(request(chosen, f"r{number}", texts))
        elif event < 0.17 and engine.waiting:
            engine.half.end(name := chosen.choice(list(engine.waiting)))  # aborted, looked up or not
            del engine.waiting[name]
        elif event < 0.4:
            engine.admit_waiting()
            engine.schedule(chosen, fails=chosen.random() < 0.05)
        elif event < 0.65:
            if engine.scheduled:
                engine.run()
        elif event < 0.85:
            engine.arrive()
        elif engine.running:
            engine.end(chosen.choice(list(engine.running)))
        check(owner, pool_bytes)
    for engine in engines:
        for name in engine.waiting:
            engine.half.end(name)
        for name in list(engine.running):
            engine.end(name)
        engine.step(chosen)
        while engine.flying:
            engine.arrive()
        engine.arrive()
        assert engine.calls.held() == []
        assert not engine.calls.marks, "[E18] it is said to compute what it does not"
        assert engine.calls.stray_count == 0
        assert engine.loaded_count > 20
    assert len(owner.free) + len(owner.index) == usable_count


def test_nothing_is_published_before_it_is_reported(rng: random.Random) -> None:
    """A step that has been planned and even run is not there for others; its report makes it so."""
    owner = FakeOwner(20, 1, 1)
    pool_bytes: dict[int, bytes] = {}
    first, second = Engine(owner, pool_bytes), Engine(owner, pool_bytes)
    keys = [rng.randbytes(32) for _ in range(5)]
    first.admit(Request("a", keys, 21))
    while first.running["a"].num_computed_tokens < 21:
        first.step(rng)
    assert second.half.matched_tokens(Request("b", keys, 21), 0) == 0
    second.half.end("b")
    while first.flying:
        first.arrive()
    assert second.half.matched_tokens(Request("b", keys, 21), 0) == 20


def test_a_step_is_under_way_from_its_plan_to_its_results(rng: random.Random) -> None:
    """[E17] And is none where nothing is scheduled."""
    owner = FakeOwner(20, 1, 1)
    engine = Engine(owner, {})
    engine.admit(Request("a", [rng.randbytes(32) for _ in range(5)], 21))
    engine.schedule(rng)
    assert engine.calls.computing.is_under_way
    engine.run()
    engine.arrive()
    assert not engine.calls.computing.is_under_way
    engine.end("a")
    engine.schedule(rng)
    assert not engine.calls.computing.is_under_way


def test_a_whole_prompt_that_is_there_leaves_a_block_to_compute(rng: random.Random) -> None:
    """One token at least is computed, so its block is not loaded; tokens that vLLM has itself are not counted."""
    owner = FakeOwner(20, 1, 1)
    pool_bytes: dict[int, bytes] = {}
    engine = Engine(owner, pool_bytes)
    keys = [rng.randbytes(32) for _ in range(5)]
    engine.admit(Request("a", keys, 20))
    while engine.running["a"].num_computed_tokens < 20:
        engine.step(rng)
        engine.arrive()
    assert engine.half.matched_tokens(Request("b", keys, 20), 0) == 16
    assert engine.half.matched_tokens(Request("b", keys, 20), 8) == 8
    assert engine.calls.calls.count("acquire") == 2


def test_those_who_fit_into_a_step_are_looked_up_at_once(rng: random.Random) -> None:
    """One round trip for them; who does not fit in any more holds nothing yet, and who has ended neither."""
    owner = FakeOwner(20, 1, 1)
    engine = Engine(owner, {})
    keys = [rng.randbytes(32) for _ in range(5)]
    engine.admit(Request("first", keys, 20))
    while engine.running["first"].num_computed_tokens < 20:
        engine.step(rng)
        engine.arrive()
    assert "lease" not in engine.calls.calls, "room comes with what is found"
    engine.end("first")
    engine.arrive()
    asked_before = engine.calls.calls.count("acquire")
    for name in ("a", "b", "ended", "c", "d"):
        engine.come(Request(name, keys, 20))
    engine.half.end("ended")
    del engine.waiting["ended"]
    for name in ("a", "b", "c"):
        assert engine.half.matched_tokens(engine.waiting[name], 0) == 16
        assert engine.calls.calls.count("acquire") == asked_before + 1
    for name in ("a", "b", "c"):
        engine.half.end(name)
    assert engine.calls.held() == []
    assert engine.half.matched_tokens(engine.waiting["d"], 0) == 16
    assert engine.calls.calls.count("acquire") == asked_before + 2


def test_a_pool_without_room_still_gives_what_it_has(rng: random.Random) -> None:
    """What cannot be stored for want of room is asked for without, and nobody is told that it is computed."""
    owner = FakeOwner(6, 1, 1)
    engine = Engine(owner, {})
    keys = [rng.randbytes(32) for _ in range(6)]
    engine.admit(Request("a", keys[:4], 16))
    while engine.running["a"].num_computed_tokens < 16:
        engine.step(rng)
        engine.arrive()
    engine.end("a")
    engine.arrive()
    other = owner.session()
    other.lease(2, 2)
    calls: Any = engine.calls
    acquire, asked = calls.acquire, list[Any]()

    def noting(chains: list[Any]) -> Any:
        asked.extend(chains)
        return acquire(chains)

    calls.acquire = noting
    for name in ("b", "c"):
        engine.come(Request(name, keys, 24))
    assert [engine.half.matched_tokens(engine.waiting[name], 0) for name in ("b", "c")] == [16, 16]
    assert [(chain.table_block_count, chain.computes) for chain in asked] == [(6, True)] * 2 + [(0, False)] * 2
    for name in ("b", "c"):
        engine.half.end(name)
    assert engine.calls.held() == []


def test_roles_take_or_give_only(rng: random.Random) -> None:
    """A consumer leases and writes nothing; a producer finds nothing, but knows what need not be stored again.

    What it finds so counts as no reuse.
    """
    owner = FakeOwner(20, 1, 1)
    pool_bytes: dict[int, bytes] = {}
    keys = [rng.randbytes(32) for _ in range(5)]
    for roles, found, counted in (({"loads": False}, 0, []), ({"loads": False}, 0, []), ({"stores": False}, 16, [4])):
        engine = Engine(owner, pool_bytes, **roles)
        asked = Request("a", keys, 20)
        engine.admit(asked)
        assert asked.num_computed_tokens == found
        while asked.num_computed_tokens < 20:
            engine.step(rng)
            engine.arrive()
        assert len(owner.index) == 5
        assert owner.reused_counts == counted
        engine.end("a")
        engine.arrive()
        assert engine.calls.held() == []


def test_a_new_epoch_voids_what_was_held(rng: random.Random) -> None:
    """Nothing of the old epoch is planned, published or released; new requests find what the new one has."""
    owner = FakeOwner(20, 1, 1)
    pool_bytes: dict[int, bytes] = {}
    engine = Engine(owner, pool_bytes)
    keys = [rng.randbytes(32) for _ in range(5)]
    engine.admit(Request("a", keys, 20))
    engine.step(rng)
    engine.calls.owner = FakeOwner(20, 1, 1)
    engine.link.life = "second"
    engine.half.reported(Report(dict.fromkeys(range(3), False)))
    engine.flying.clear()
    while engine.running["a"].num_computed_tokens < 20:
        engine.step(rng)
        assert not engine.flying
    engine.end("a")
    engine.admit(Request("b", keys, 20))
    while engine.running["b"].num_computed_tokens < 20:
        engine.step(rng)
        engine.arrive()
    engine.end("b")
    engine.arrive()
    assert engine.calls.held() == []
    assert len(engine.calls.owner.index) == 5


@pytest.fixture
def rng() -> random.Random:
    """The same numbers each time."""
    return random.Random(3)
