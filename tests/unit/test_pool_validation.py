"""Bad input: the right typed error with value, limit and remedy, and nothing changed."""

from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
from calls import allocate, commit, encode, new_pool, prompt, publish, span

from kvharbor.pool import Commit, ExtraKey, Pool, PoolConfig, PoolStats, Prompt
from kvharbor.pool.errors import (
    BlockHeld,
    BlockNotFound,
    CommitBackwards,
    CursorOutOfRange,
    HandoffNotFound,
    InvalidField,
    PinNotFound,
    PoolError,
    PoolExhausted,
    RequestIdReused,
    RequestTooLarge,
    SequenceNotFound,
    StaleGeneration,
    WarmBudgetExceeded,
)
from kvharbor.pool.steps import finish
from kvharbor.pool.validate import MAX_TOKENS

LONG = "x" * 129
WORD = encode([1])


def shared_pool() -> Pool:
    """Sequence 1.1: 6 of 8 prompt tokens computed, one block committed, room for 12; 12 blocks in all."""
    pool = new_pool(12, warm_budget_ratio=0.25)
    view = allocate(pool, span(1, 8), reserve=4, request_id="r", group="g")
    commit(pool, view, 6)
    return pool


def visible(pool: Pool) -> tuple[PoolStats, list[object], dict[int, object]]:
    """All that a refusal may not change; that it was counted is no change."""
    stats = pool.stats()
    counters = replace(stats.counters, refused_count=0)
    order = list(pool._state.blocks.evictable)
    views = {number: pool._state.view(one) for number, one in pool._state.sessions[1].sequences.items()}
    return replace(stats, counters=counters), [*order, pool.usage(), len(pool._state.namespaces)], dict(views)


def ask(**fields: object) -> Callable[[Pool], object]:
    token_ids = fields.pop("token_ids", WORD)
    names = {key: fields.pop(key) for key in ("extra_keys", "version", "adapter", "salt") if key in fields}
    return lambda pool: pool.allocate(1, Prompt(token_ids, **names), **fields)  # type: ignore[arg-type]


def put(computed: int, **fields: object) -> Callable[[Pool], object]:
    return lambda pool: pool.commit(1, 1, Commit(computed, **fields))  # type: ignore[arg-type]


def named(blocks: list[int], generations: list[int]) -> "tuple[array[int], array[int]]":
    return array("I", blocks), array("Q", generations)


REFUSED: list[tuple[str, Callable[[Pool], object], type[PoolError], list[str]]] = [
    ("an empty prompt", ask(token_ids=b""), InvalidField, ["token_ids", "empty", "at least one"]),
    ("half a token", ask(token_ids=b"12345"), InvalidField, ["token_ids", "5 bytes", "multiple of 4", "uint32"]),
    ("a prompt larger than the pool", ask(token_ids=WORD * 49), RequestTooLarge, ["13", "12", "larger"]),
    ("a reserve larger than the pool", ask(reserve_tokens=48), RequestTooLarge, ["13", "12", "larger"]),
    ("a prompt larger than what is left", ask(token_ids=WORD * 44), PoolExhausted, ["11", "9", "wait"]),
    ("a negative reserve", ask(reserve_tokens=-1), InvalidField, ["reserve_tokens", "-1", f"0 to {MAX_TOKENS}"]),
    ("an endless reserve", ask(reserve_tokens=1 << 63), InvalidField, ["reserve_tokens", str(1 << 63)]),
    ("a negative limit", ask(max_cached_tokens=-1), InvalidField, ["max_cached_tokens", "-1", "0 to 1"]),
    ("a limit beyond the prompt", ask(max_cached_tokens=2), InvalidField, ["max_cached_tokens", "2", "0 to 1"]),
    ("a long request_id", ask(request_id=LONG), InvalidField, ["request_id", "129 bytes", "128", "shorten"]),
    ("a long group", ask(group=LONG), InvalidField, ["group", "129 bytes", "128"]),
    ("a group long in bytes alone", ask(group="é" * 65), InvalidField, ["group", "130 bytes", "128"]),
    ("a version that is no text", ask(version="v\ud800"), InvalidField, ["version", "1", "UTF-8"]),
    ("a long version", ask(version="v" * 257), InvalidField, ["version", "257", "256"]),
    ("a long adapter", ask(adapter="v" * 257), InvalidField, ["adapter", "257", "256"]),
    ("a long salt", ask(salt=b"s" * 257), InvalidField, ["salt", "257", "256"]),
    ("a key behind the prompt", ask(extra_keys=(ExtraKey(1, b"k"),)), InvalidField, ["token_offset", "1", "[0, 1)"]),
    ("a key before it", ask(extra_keys=(ExtraKey(-1, b"k"),)), InvalidField, ["token_offset", "-1", "[0, 1)"]),
    (
        "keys out of order",
        ask(token_ids=WORD * 4, extra_keys=(ExtraKey(2, b"k"), ExtraKey(1, b"k"))),
        InvalidField,
        ["token_offset", "1", "[2, 4)", "sort"],
    ),
    ("a key without a value", ask(extra_keys=(ExtraKey(0, b""),)), InvalidField, ["value", "0 bytes", "1 to 256"]),
    ("a long key", ask(extra_keys=(ExtraKey(0, b"k" * 257),)), InvalidField, ["value", "257 bytes", "1 to 256"]),
    ("a reused request_id", ask(request_id="r"), RequestIdReused, ["'r'", "token_ids", "fresh"]),
    ("a commit backwards", put(5), CommitBackwards, ["1.1", "6", "5", "forwards"]),
    ("a commit beyond the known tokens", put(9), CursorOutOfRange, ["1.1", "9", "8", "new_token_ids"]),
    ("a negative commit", put(-1), CursorOutOfRange, ["1.1", "-1", "8"]),
    ("tokens beyond the room", put(6, new_token_ids=WORD * 5), CursorOutOfRange, ["1.1", "13", "12", "extend"]),
    ("half a new token", put(6, new_token_ids=b"123"), InvalidField, ["new_token_ids", "3 bytes"]),
    (
        "an extra key for an old token",
        put(6, new_token_ids=WORD, extra_keys=(ExtraKey(7, b"k"),)),
        InvalidField,
        ["token_offset", "7", "[8, 9)"],
    ),
    ("a key without a token", put(6, extra_keys=(ExtraKey(8, b"k"),)), InvalidField, ["token_offset", "[8, 8)"]),
    ("too few named blocks", put(8, written=named([], [])), InvalidField, ["written", "0 blocks", "1 blocks"]),
    ("ids without ages", put(8, written=named([1], [])), InvalidField, ["written", "0 generations"]),
    ("a block of another place", put(8, written=named([0], [1])), StaleGeneration, ["1.1", "0", "1", "again"]),
    ("a block of another age", put(8, written=named([1], [7])), StaleGeneration, ["1.1", "7", "again"]),
    ("a switch of what is no shadow yet", put(6, switched=(1,)), InvalidField, ["switched_positions", "1", "0 to 0"]),
    ("a switch before the table", put(6, switched=(-1,)), InvalidField, ["switched_positions", "-1"]),
    ("a commit of nothing known", lambda pool: pool.commit(1, 7, Commit(1)), SequenceNotFound, ["1.7", "adopt"]),
    ("another's sequence", lambda pool: pool.commit(2, 1, Commit(1)), SequenceNotFound, ["2.1"]),
    ("a commit of no session", lambda pool: pool.commit(9, 1, Commit(1)), SequenceNotFound, ["9.1"]),
    ("an Extend of nothing known", lambda pool: pool.extend(1, 7, 4), SequenceNotFound, ["1.7"]),
    ("a negative Extend", lambda pool: pool.extend(1, 1, -1), InvalidField, ["capacity_tokens", "-1"]),
    ("an Extend beyond the pool", lambda pool: pool.extend(1, 1, 49), RequestTooLarge, ["13", "12"]),
    ("an endless Extend", lambda pool: pool.extend(1, 1, MAX_TOKENS + 1), InvalidField, ["capacity_tokens"]),
    ("a Fork into nothing", lambda pool: pool.fork(1, 1, 0), InvalidField, ["child_count", "0", "1 to 1024"]),
    ("a Fork into too many", lambda pool: pool.fork(1, 1, 1025), InvalidField, ["child_count", "1025", "several"]),
    ("a Fork of nothing known", lambda pool: pool.fork(1, 7, 1), SequenceNotFound, ["1.7"]),
    (
        "a Fork that never fits beside its source",
        lambda pool: pool.fork(1, 1, 10),
        RequestTooLarge,
        ["13", "12", "larger"],
    ),
    (
        "a Fork with a long id",
        lambda pool: pool.fork(1, 1, 1, request_id="x" * 124),
        InvalidField,
        ["request_id", "124", "123"],
    ),
    ("a Release of nothing known", lambda pool: pool.release(1, 7), SequenceNotFound, ["1.7"]),
    ("a Release of number 0", lambda pool: pool.release(1, 0), SequenceNotFound, ["1.0"]),
    ("a pin without a name", lambda pool: pool.warmup("t", 1, prompt(span(1, 4)), ""), InvalidField, ["name"]),
    ("a pin with a long name", lambda pool: pool.warmup("t", 1, prompt(span(1, 4)), LONG), InvalidField, ["129"]),
    (
        "a pin of half a block",
        lambda pool: pool.warmup("t", 1, prompt([1]), "w"),
        InvalidField,
        ["1 tokens", "4 tokens", "whole blocks"],
    ),
    (
        "a pin over the budget",
        lambda pool: pool.warmup("t", 1, prompt(span(1, 16)), "w"),
        WarmBudgetExceeded,
        ["4", "0 of 3", "unwarm"],
    ),
    (
        "a pin larger than the pool",
        lambda pool: pool.warmup("t", 1, prompt(span(1, 52)), "w"),
        RequestTooLarge,
        ["13", "12"],
    ),
    ("an Unwarm of nothing", lambda pool: pool.unwarm("t", "w"), PinNotFound, ["'w'", "expired"]),
    ("a Lookup of nothing", lambda pool: pool.lookup("t", Prompt(b"")), InvalidField, ["token_ids", "empty"]),
    ("a Lookup beyond", lambda pool: pool.lookup("t", Prompt(WORD), 2), InvalidField, ["max_cached_tokens", "2"]),
    ("an Evict of a held block", lambda pool: pool.evict_block(0, 1), BlockHeld, ["0", "1", "release"]),
    ("an Evict of a reserved block", lambda pool: pool.evict_block(1, 1), BlockNotFound, ["1", "committed"]),
    ("an Evict of an old content", lambda pool: pool.evict_block(0, 2), BlockNotFound, ["0", "2"]),
    ("an Evict of no block", lambda pool: pool.evict_block(12, 1), BlockNotFound, ["12"]),
    ("an Evict of a negative one", lambda pool: pool.evict_block(-1, 1), BlockNotFound, ["-1"]),
    ("an Evict of another tenant's", lambda pool: pool.evict_block(0, 1, "u"), BlockNotFound, ["0", "1"]),
    (
        "a Handoff of more than is known",
        lambda pool: pool.handoff(1, 1, Commit(9), token="x", expires_at=1.0),
        CursorOutOfRange,
        ["9", "8"],
    ),
]


@pytest.mark.parametrize(("call", "kind", "parts"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_refusal_is_typed_and_changes_nothing(
    call: Callable[[Pool], object], kind: type[PoolError], parts: list[str]
) -> None:
    """[G4] The message has the value, the limit and what to do; the pool stays as it was."""
    pool = shared_pool()
    before = visible(pool)
    with pytest.raises(kind) as refused:
        finish(call(pool))  # type: ignore[arg-type]
    assert type(refused.value) is kind
    assert [part for part in parts if part not in str(refused.value)] == []
    assert visible(pool) == before
    pool.check_invariants()


def test_an_unknown_token_is_refused_like_another_tenants() -> None:
    """[G8] Whether a token is unknown, used or another tenant's cannot be told apart."""
    pool = shared_pool()
    finish(pool.handoff(1, 1, Commit(6), token="secret", expires_at=1.0))
    messages = set()
    for session, token in ((3, "secret"), (1, "other")):
        with pytest.raises(HandoffNotFound) as refused:
            pool.adopt(session, token)
        messages.add((str(refused.value), *refused.value.metadata()))
    assert len(messages) == 1
    assert pool.adopt(2, "secret").view.computed_tokens == 6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_count", 0),
        ("block_count", 1 << 31),
        ("block_tokens", 0),
        ("scratch_blocks", -1),
        ("min_reuse_tokens", -1),
        ("slice_blocks", 0),
        ("warm_budget_ratio", 1.01),
        ("warm_budget_ratio", float("nan")),
    ],
)
def test_a_pool_that_cannot_be_is_refused(field: str, value: float) -> None:
    """Each number of the configuration has bounds, and the refusal names field, value and bounds."""
    good = PoolConfig(8, 4)
    with pytest.raises(InvalidField) as refused:
        Pool(replace(good, **{field: value}))  # type: ignore[arg-type]
    assert refused.value.attributes["field"] == field
    assert refused.value.attributes["value"] is value


def test_the_largest_allowed_names_are_taken() -> None:
    """Limits are inclusive."""
    pool = new_pool(4)
    most = Prompt(WORD, (ExtraKey(0, b"k" * 256),), "v" * 256, "a" * 256, b"s" * 256)
    view = finish(pool.allocate(1, most, request_id="é" * 64, group="g" * 128))
    assert view.request_id == "é" * 64
    pool.check_invariants()


def test_a_refused_prompt_keeps_the_order_of_eviction() -> None:
    """[G4] A prompt that matches and does not fit leaves recency as it was."""
    pool = new_pool(6)
    for first in (1, 11, 21):
        publish(pool, span(first, first + 3))
    for number in (1, 2, 3):
        finish(pool.release(1, number))
    publish(pool, span(51, 62))
    order = list(pool._state.blocks.evictable)
    with pytest.raises(PoolExhausted):
        allocate(pool, [*span(1, 4), *span(71, 82)])
    assert list(pool._state.blocks.evictable) == order
