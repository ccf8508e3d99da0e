"""Each rule P1 to P7 of docs/invariants.md, in the smallest story that would break it."""

from calls import allocate, cache, classes, commit, new_pool, present, prompt, publish, release, span

from kvharbor.pool import Commit, ExtraKey, Shadow
from kvharbor.pool.steps import finish


def test_nothing_is_indexed_before_its_commit() -> None:
    """[P1] Reserved blocks are no hit, not even half written; the entry is made when the block is full."""
    pool = new_pool(8)
    view = allocate(pool, span(1, 8))
    assert (present(pool, span(1, 8)), classes(pool.stats())) == (0, {"free": 6, "reserved": 2})
    commit(pool, view, 7)
    assert present(pool, span(1, 8)) == 4
    commit(pool, view, 8)
    assert present(pool, span(1, 8)) == 8


def test_a_cached_block_is_a_hit_and_revives() -> None:
    """[P2] Unheld blocks stay until they are needed, and the next match holds them again."""
    pool = new_pool(8)
    first = cache(pool, span(1, 8))
    assert classes(pool.stats()) == {"free": 6, "cached": 2}
    again = allocate(pool, span(1, 9), session=2)
    assert (again.cached_tokens, again.block_ids[:2]) == (8, first.block_ids)
    assert classes(pool.stats()) == {"free": 5, "active": 2, "reserved": 1}


def test_a_block_is_shared_once_it_has_two_holders() -> None:
    """[P2] `shared` counts blocks of two or more holders beside the classes, each once."""
    pool = new_pool(8)
    views = [publish(pool, span(1, 4))] + [allocate(pool, span(1, 5), session=2) for _ in range(3)]
    assert (pool.stats().shared_block_count, pool.stats().active_block_count) == (1, 1)
    for view in views[:3]:
        release(pool, view)
    assert pool.stats().shared_block_count == 0


def test_a_generation_names_one_content() -> None:
    """[P3] Each time that a block becomes free its generation rises, reserved or committed."""
    pool = new_pool(1)
    ages = []
    for tokens in (span(1, 4), span(11, 14)):
        view = cache(pool, tokens)
        ages.append(view.generations[0])
    uncommitted = allocate(pool, [99])
    release(pool, uncommitted)
    ages += [uncommitted.generations[0], allocate(pool, [98]).generations[0]]
    assert ages == [1, 2, 3, 4]


def test_a_sequence_is_released_once() -> None:
    """[P4] The second Release says that there was nothing left, and frees nothing of the next owner."""
    pool = new_pool(2)
    view = allocate(pool, [1, 2])
    assert (release(pool, view), release(pool, view)) == (1, 0)
    other = allocate(pool, [3, 4], session=2)
    assert release(pool, view) == 0
    assert pool.stats().reserved_block_count == 1
    release(pool, other)
    pool.check_invariants()


def test_a_table_grows_in_one_run_and_evicts_last() -> None:
    """[P5] Extend takes the blocks right behind the table, and free ones before any is evicted."""
    pool = new_pool(8)
    cache(pool, span(51, 58))
    view = allocate(pool, span(1, 4))
    added = finish(pool.extend(1, view.number, 16))
    blocks = [*view.block_ids, *added.block_ids]
    assert blocks == list(range(blocks[0], blocks[0] + 4))
    assert pool.stats().counters.evicted_block_count == 0
    finish(pool.extend(1, view.number, 28))
    assert pool.stats().counters.evicted_block_count == 1


def test_scratch_blocks_are_never_handed_out() -> None:
    """[P6] Ids begin behind the scratch blocks, which the total does not count."""
    pool = new_pool(3, scratch_blocks=2)
    view = allocate(pool, span(1, 12))
    assert sorted(view.block_ids) == [2, 3, 4]
    stats = pool.stats()
    assert (stats.total_block_count, stats.scratch_block_count, stats.free_block_count) == (3, 2, 0)


def test_the_second_to_publish_gets_a_shadow() -> None:
    """[P7] The loser of a race holds the canonical block, keeps its own until it switches, and goes on from it."""
    pool = new_pool(8)
    first, second = allocate(pool, span(1, 8)), allocate(pool, span(1, 8), session=2)
    commit(pool, first, 4)
    done = commit(pool, second, 8)
    assert done.shadows == (Shadow(0, first.block_ids[0], first.generations[0]),)
    assert (pool.stats().active_block_count, pool.stats().shared_block_count) == (3, 1)
    assert present(pool, span(1, 8)) == 8
    child = finish(pool.fork(2, second.number, 1))
    (view,) = pool.finish_fork(child)
    assert list(view.block_ids) == [first.block_ids[0], second.block_ids[1]]
    release(pool, first)
    finish(pool.commit(2, second.number, Commit(8, switched=(0, 0))))
    assert classes(pool.stats()) == {"free": 6, "active": 2}
    assert finish(pool.commit(2, second.number, Commit(8, switched=(0,)))).shadows == ()
    pool.check_invariants()


def test_a_shadow_keeps_its_canonical_block_through_a_handoff() -> None:
    """[P7] Whoever adopts a shadowed sequence reads its own copy, holds the canonical one, and can switch."""
    pool = new_pool(8)
    first, second = allocate(pool, span(1, 4)), allocate(pool, span(1, 4), session=2)
    commit(pool, first, 4)
    finish(pool.handoff(2, second.number, Commit(4), token="x", expires_at=9.0))
    release(pool, first)
    assert classes(pool.stats()) == {"free": 6, "active": 2}
    adopted = pool.adopt(1, "x").view
    assert adopted.block_ids == second.block_ids
    finish(pool.commit(1, adopted.number, Commit(4, switched=(0,))))
    assert pool._state.view(pool._state.sequence(1, adopted.number)).block_ids == first.block_ids
    finish(pool.release(1, adopted.number))
    assert classes(pool.stats()) == {"free": 7, "cached": 1}


def test_extra_keys_follow_their_tokens() -> None:
    """[G1] A key given at Allocate or at the commit of its token makes the same block."""
    pool = new_pool(8)
    key = ExtraKey(5, b"image")
    whole = finish(pool.allocate(1, prompt(span(1, 8), [key])))
    commit(pool, whole, 8)
    grown = allocate(pool, span(1, 5), reserve=3, session=2)
    assert grown.cached_tokens == 4
    later = Commit(8, prompt(span(6, 8)).token_ids, (key,))
    assert [shadow.position for shadow in finish(pool.commit(2, grown.number, later)).shadows] == [1]
    found = finish(pool.lookup("t", prompt(span(1, 8), [key])))
    other = finish(pool.lookup("t", prompt(span(1, 8), [ExtraKey(5, b"other")])))
    assert (found.present_tokens, other.present_tokens, present(pool, span(1, 8))) == (8, 4, 4)


def test_each_block_keeps_its_own_extra_keys() -> None:
    """[G1] Keys of neighbouring blocks are published each with its block, in one commit or in several."""
    keys = [ExtraKey(1, b"a"), ExtraKey(4, b"b"), ExtraKey(10, b"c")]
    for steps in ((12,), (4, 8, 12)):
        pool = new_pool(8)
        view = finish(pool.allocate(1, prompt(span(1, 12), keys)))
        for computed in steps:
            commit(pool, view, computed)
        assert finish(pool.lookup("t", prompt(span(1, 12), keys))).present_tokens == 12
        assert finish(pool.lookup("t", prompt(span(1, 12), keys[:2]))).present_tokens == 8
        assert finish(pool.lookup("t", prompt(span(1, 12), keys[:1]))).present_tokens == 4


def test_one_token_is_left_to_compute_unless_asked_otherwise() -> None:
    """A fully cached prompt gives all blocks but the last by default, all with its length as limit, none with 0."""
    pool = new_pool(8)
    cache(pool, span(1, 8))
    for most, cached in ((None, 4), (8, 8), (7, 4), (0, 0)):
        assert finish(pool.lookup("t", prompt(span(1, 8)), most)).cached_tokens == cached
        view = allocate(pool, span(1, 8), most=most)
        assert view.cached_tokens == cached
        release(pool, view)


def test_a_match_below_the_minimum_is_ignored() -> None:
    """A pool that reuses nothing short says so in Lookup and does so in Allocate, whatever the slices."""
    for slice_blocks in (1, 2, 512):
        pool = new_pool(16, slice_blocks=slice_blocks, min_reuse_tokens=12)
        cache(pool, span(1, 8))
        cache(pool, span(21, 32))
        assert finish(pool.lookup("t", prompt(span(1, 9)))).cached_tokens == 0
        assert allocate(pool, span(1, 9)).cached_tokens == 0
        assert allocate(pool, span(21, 33)).cached_tokens == 12
        pool.check_invariants()
