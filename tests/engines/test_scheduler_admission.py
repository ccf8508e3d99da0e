"""Who is asked for, in which order, and for how much [E11]."""

from collections.abc import Sequence
from typing import Any

import pytest

from engines.churn import Churn
from engines.scheduler_configs import BLOCK_TOKENS
from engines.scheduler_world import Engine
from kvharbor.client import Acquired, Chain, Unavailable
from kvharbor.engines.vllm import admission

pytestmark = pytest.mark.timeout(300)

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
ALIKE = [*range(4 * BLOCK_TOKENS)]


def asked_for(engine: Engine) -> list[list[Chain]]:
    """Notes, from now on, what an engine asks for in each call."""
    calls: Any = engine.calls
    acquire, asked = calls.acquire, []

    def noting(chains: Sequence[Chain], **more: Any) -> list[Acquired]:
        asked.append([*chains])
        found: list[Acquired] = acquire(chains, **more)
        return found

    calls.acquire = noting
    return asked


def prepare(engine: Engine) -> None:
    engine.scheduler._admission.prepare(engine.scheduler)


@KINDS
def test_nobody_overtakes_who_waits_for_room(asynchronous: bool) -> None:
    """Though there is room for the small one behind it: it would wait as long as small ones come."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine, _ = churn.engines
    others = churn.owner.session()
    others.lease(36, 36)
    churn.ask("large", engine, [*range(100)], 4)
    churn.ask("small", engine, [7], 4)
    asked = asked_for(engine)
    for _ in range(3):
        engine.step()
    assert [len(chains) for chains in asked] == [1]
    assert not engine.cached
    others.close()
    churn.drain()
    churn.check()


@KINDS
def test_no_more_are_given_blocks_than_may_run(asynchronous: bool) -> None:
    """And none while all places are taken."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine, _ = churn.engines
    engine.scheduler.max_num_running_reqs = engine.scheduler.max_num_active_reqs = 2
    for number in range(4):
        churn.ask(f"r{number}", engine, [number, 7], 4)
    prepare(engine)
    assert [*engine.scheduler._admission._reserved] == ["r0", "r1"]
    engine.step()
    prepare(engine)
    assert not engine.scheduler._admission._reserved
    churn.drain()
    churn.check()


@KINDS
def test_a_service_that_is_away_is_asked_now_and_then(asynchronous: bool) -> None:
    """Each call may take long, and what runs waits for it."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine, _ = churn.engines
    calls: Any = engine.calls
    acquire, now, count = calls.acquire, 5.0, 0

    def away(*_: Any, **__: Any) -> list[Acquired]:
        nonlocal count
        count += 1
        raise Unavailable("away")

    calls.acquire = away
    engine.scheduler._admission._clock = lambda: now
    churn.ask("r", engine, [*range(100)], 4)
    for expected in (1, 2):
        for _ in range(3):
            engine.step()
        assert count == expected
        now += admission.AWAY_S
    calls.acquire = acquire
    churn.drain()
    churn.check()


@KINDS
def test_what_a_step_under_way_fills_needs_no_room(asynchronous: bool) -> None:
    """Two find the beginning that is computed just now, and each asks for its own end, in one call."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine, _ = churn.engines
    churn.ask("computes", engine, [*ALIKE, *range(100, 200)], 4)
    engine.schedule()
    for number in range(2):
        churn.ask(f"finds{number}", engine, [*ALIKE, number], 4)
    asked = asked_for(engine)
    prepare(engine)
    assert [[chain.table_block_count for chain in chains] for chains in asked] == [[1, 1]]
    assert engine.scheduler._admission.lacking == 2
    churn.drain()
    churn.check()
    assert [engine.cached[f"finds{number}"] for number in range(2)] == [len(ALIKE)] * 2


@KINDS
@pytest.mark.parametrize("others_wait", [False, True])
def test_a_prompt_gets_room_for_its_first_new_token(asynchronous: bool, others_wait: bool) -> None:
    """E27: and for one block more, unless others want it."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine, _ = churn.engines
    others = churn.owner.session()
    others.lease(20, 20)
    if others_wait:
        namespace = engine.scheduler._admission.namespace
        (full,) = others.acquire([Chain(keys=b"", namespace=namespace, table_block_count=30)], wait_s=1.0)
        assert full.waiting
    churn.ask("r", engine, [*range(2 * BLOCK_TOKENS)], 4)
    asked = asked_for(engine)
    prepare(engine)
    assert [[chain.table_block_count for chain in chains] for chains in asked] == [[3 if others_wait else 4]]
    others.close()
    churn.drain()
    churn.check()


@KINDS
def test_the_last_newcomer_gives_way(asynchronous: bool) -> None:
    """Where a block of theirs is gone, and another engine waits for room: it was there before them."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine, _ = churn.engines
    scheduler, others = engine.scheduler, churn.owner.session()
    for number in range(2):
        churn.ask(f"r{number}", engine, [number] * 20, 4)
    prepare(engine)
    assert [*scheduler._admission._reserved] == ["r0", "r1"]
    scheduler._pool.give_back_free(scheduler._room.free_count - scheduler._admission.lacking + 1)
    scheduler._flush()
    others.lease(30, 30)
    namespace = scheduler._admission.namespace
    (full,) = others.acquire([Chain(keys=b"", namespace=namespace, table_block_count=30)], wait_s=1.0)
    assert full.waiting
    scheduler._make_room()
    assert [*scheduler._admission._reserved] == ["r0"]
    others.close()
    churn.drain()
    churn.check()


@KINDS
def test_a_wait_that_is_cancelled_may_have_been_granted_just_then(asynchronous: bool) -> None:
    """All of it goes back."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine, _ = churn.engines
    others = churn.owner.session()
    others.lease(36, 36)
    churn.ask("waits", engine, [*range(100)], 4)
    prepare(engine)
    grant = engine.scheduler._admission._waits["waits"].grant
    cancel = grant.cancel

    def cancelled() -> None:
        others.close()
        cancel()

    grant.cancel = cancelled
    churn.aborted.add("waits")
    engine.abort("waits")
    assert not engine.calls.direct
    churn.drain()
    churn.check()


@KINDS
def test_others_are_told_of_a_grant_that_has_not_come_here_yet(asynchronous: bool) -> None:
    """[E18] It ends with its wait; the prompt was announced all the same."""
    churn = Churn(asynchronous=asynchronous, seed=1)
    engine, _ = churn.engines
    others = churn.owner.session()
    others.lease(36, 36)
    churn.ask("waits", engine, [*range(100)], 4)
    prepare(engine)
    grant = engine.scheduler._admission._waits["waits"].grant
    others.close()
    granted = grant.poll()
    assert churn.owner.marks
    grant.poll = lambda: None
    grant.cancel = lambda: engine.calls.release(granted.leased)
    churn.aborted.add("waits")
    engine.abort("waits")
    churn.drain()
    churn.check()
