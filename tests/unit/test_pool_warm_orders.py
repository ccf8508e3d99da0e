"""What the pool knows of pins that are ordered now and filled later."""

import struct

import pytest

from kvharbor.pool import Commit, PinView, Pool, PoolConfig, Prompt
from kvharbor.pool.errors import RequestIdReused, WarmBudgetExceeded
from kvharbor.pool.steps import finish


def prompt(*ids: int) -> Prompt:
    return Prompt(struct.pack(f"<{len(ids)}I", *ids))


@pytest.fixture
def pool() -> Pool:
    """16 blocks of 2 tokens, 4 of which may be pinned, and two sessions."""
    made = Pool(PoolConfig(16, 2))
    made.open_session(1, "t")
    made.open_session(2, "t")
    return made


def put(pool: Pool, *ids: int) -> None:
    view = finish(pool.allocate(1, prompt(*ids)))
    finish(pool.commit(1, view.number, Commit(len(ids))))
    finish(pool.release(1, view.number))


def test_room_for_all_counts_what_is_missing_and_promises_nothing(pool: Pool) -> None:
    """Present blocks and missing ones together must fit; without it only the present ones must."""
    put(pool, 1, 2, 3, 4)
    order = prompt(*range(1, 11))
    with pytest.raises(WarmBudgetExceeded) as refused:
        finish(pool.warmup("t", None, order, "w", present_only=True, room_for_all=True))
    assert refused.value.attributes["needed_block_count"] == 5
    assert pool.pin("t", "w") is None
    finish(pool.warmup("t", None, order, "w", present_only=True))
    assert (pool.pin("t", "w"), pool.stats().warm_budget_used_block_count) == (PinView(4, 0, filling=False), 2)
    # Moving the pin frees its own place, so as much fits as in an empty pool.
    finish(pool.warmup("t", None, prompt(*range(1, 9)), "w", present_only=True, room_for_all=True))
    pool.check_invariants()


def test_a_pin_says_how_far_it_is(pool: Pool) -> None:
    """While it is filled, and when its sequence ends before the whole is there."""
    view = finish(pool.warmup("t", 1, prompt(1, 2, 3, 4), "w")).sequence
    assert view is not None
    assert (pool.pin("t", "w"), pool.pin("u", "w")) == (PinView(0, 4, filling=True), None)
    finish(pool.commit(1, view.number, Commit(2)))
    assert pool.pin("t", "w") == PinView(2, 2, filling=True)
    finish(pool.release(1, view.number))
    assert pool.pin("t", "w") == PinView(2, 2, filling=False)


def test_a_filling_sequence_is_found_and_ended_by_its_request_id(pool: Pool) -> None:
    """A request_id that names another sequence of the session is refused, and changes nothing."""
    first = finish(pool.warmup("t", 1, prompt(1, 2), "w", request_id="r")).sequence
    assert first is not None
    assert finish(pool.warmup("t", 1, prompt(1, 2), "w", request_id="r")).sequence == first
    for call in (pool.warmup("t", 1, prompt(3, 4), "x", request_id="r"), pool.allocate(1, prompt(3), request_id="r")):
        with pytest.raises(RequestIdReused):
            finish(call)
    assert (pool.pin("t", "x"), finish(pool.warmup("t", 2, prompt(3, 4), "x", request_id="r")).missing_tokens) == (
        None,
        2,
    )
    assert finish(pool.release_request(1, "r")) == 1
    assert pool.pin("t", "w") is None
    pool.check_invariants()
