"""[G4] Calls whose reply was lost are repeated, and take effect once."""

import pytest
from calls import allocate, classes, encode, new_pool, present, publish, span

from kvharbor.pool import Commit, ExtraKey, Prompt, Shadow
from kvharbor.pool.errors import CommitBackwards, CursorOutOfRange, HandoffNotFound, RequestIdReused
from kvharbor.pool.steps import finish


def test_a_repeated_commit_changes_nothing_and_tells_the_shadows_again() -> None:
    """Known by the token count before it; its tokens are not appended twice."""
    pool = new_pool(16)
    twin = publish(pool, span(1, 8), session=2)
    view = allocate(pool, span(1, 6), reserve=6, most=0)
    asked = Commit(8, encode([7, 8, 9]), known_token_count=6)
    first = finish(pool.commit(1, view.number, asked))
    assert list(first.shadows) == [Shadow(at, twin.block_ids[at], twin.generations[at]) for at in range(2)]
    revision = pool.revision
    for _ in range(2):
        assert finish(pool.commit(1, view.number, asked)) == first
    assert pool.revision == revision
    held = finish(pool.extend(1, view.number, 0, 0))
    assert len(held.block_ids) == 3
    finish(pool.commit(1, view.number, Commit(12, encode([10, 11, 12]), known_token_count=9)))
    assert present(pool, span(1, 12)) == 12
    pool.check_invariants()


def test_a_repeated_commit_may_name_its_blocks_and_its_switches() -> None:
    """What was right the first time is right again, although the table is another by now."""
    pool = new_pool(16)
    publish(pool, span(1, 4), session=2)
    view = allocate(pool, span(1, 8), most=0)
    finish(pool.commit(1, view.number, Commit(4)))
    asked = Commit(8, written=(view.block_ids[1:], view.generations[1:]), switched=(0,), known_token_count=8)
    assert finish(pool.commit(1, view.number, asked)).committed_tokens == 8
    assert finish(pool.commit(1, view.number, asked)).shadows == ()
    assert classes(pool.stats()) == {"active": 2, "free": 14}
    pool.check_invariants()


@pytest.mark.parametrize(("known", "new"), [(5, [7, 8]), (9, []), (8, [9, 9]), (6, [7])])
def test_a_commit_that_neither_follows_nor_repeats_is_refused(known: int, new: list[int]) -> None:
    """A commit cannot be skipped over, nor repeated in part."""
    pool = new_pool(16)
    view = allocate(pool, span(1, 6), reserve=6)
    finish(pool.commit(1, view.number, Commit(7, encode([7, 8, 9, 10]), known_token_count=6)))
    with pytest.raises(CursorOutOfRange, match="known_token_count would be"):
        finish(pool.commit(1, view.number, Commit(7, encode(new), known_token_count=known)))
    with pytest.raises(CommitBackwards):
        finish(pool.commit(1, view.number, Commit(6, known_token_count=10)))


def test_an_extension_is_told_from_where_the_caller_knows() -> None:
    """The blocks of a reply that was lost come with the next."""
    pool = new_pool(8)
    view = allocate(pool, span(1, 6))
    first = finish(pool.extend(1, view.number, 16, 2))
    again = finish(pool.extend(1, view.number, 16, 2))
    assert (first, len(first.block_ids)) == (again, 2)
    assert finish(pool.extend(1, view.number, 16, 0)).block_ids == view.block_ids + first.block_ids
    assert len(finish(pool.extend(1, view.number, 16)).block_ids) == 0
    for known in (-1, 5):
        with pytest.raises(CursorOutOfRange, match="known_block_count"):
            finish(pool.extend(1, view.number, 20, known))
    assert classes(pool.stats()) == {"reserved": 4, "free": 4}


def test_a_repeated_handoff_tells_the_first_token() -> None:
    """As long as nobody has adopted it; its tokens are committed once."""
    pool = new_pool(8)
    view = allocate(pool, span(1, 6), reserve=2)
    asked = Commit(7, encode([7]), known_token_count=6)
    first = finish(pool.handoff(1, view.number, asked, token="a", expires_at=5.0))
    again = finish(pool.handoff(1, view.number, asked, token="b", expires_at=9.0))
    assert ((first.token, first.expires_at), again) == (("a", 5.0), first)
    with pytest.raises(HandoffNotFound):
        pool.adopt(2, "b")
    assert pool.adopt(2, "a").view.token_count == 7
    pool.check_invariants()


def test_an_adoption_tells_all_that_a_resume_needs() -> None:
    """Namespace, committed tokens, and the tokens and extra keys behind them; repeated by request_id."""
    pool = new_pool(8)
    keys = (ExtraKey(1, b"a"), ExtraKey(5, b"b"), ExtraKey(5, b"c"))
    prompt = Prompt(encode(span(1, 6)), keys, version="v", adapter="l", salt=b"s")
    view = finish(pool.allocate(1, prompt, reserve_tokens=4))
    asked = Commit(7, encode([7, 8, 9]), (ExtraKey(8, b"d"),))
    finish(pool.handoff(1, view.number, asked, token="a", expires_at=5.0))
    adopted = pool.adopt(2, "a", request_id="r")
    assert pool.adopt(2, "a", request_id="r") == adopted
    assert (adopted.version, adopted.adapter, adopted.salt) == ("v", "l", b"s")
    assert (adopted.committed_tokens, adopted.tail_token_ids) == (4, encode(span(5, 9)))
    assert adopted.extra_keys == (*keys[1:], ExtraKey(8, b"d"))
    with pytest.raises(RequestIdReused):
        pool.adopt(2, "other", request_id="r")
