"""B4: nothing that only looks keeps blocks from being evicted, and no release strips another reader."""

from calls import allocate, cache, classes, new_pool, present, release, span


def test_a_thousand_lookups_pin_nothing() -> None:
    """B4, the form without holds: after 1,000 Lookups everything can still be evicted."""
    pool = new_pool(4)
    cache(pool, span(1, 16))
    revision = pool.revision
    assert [present(pool, span(1, 16)) for _ in range(1_000)] == [16] * 1_000
    assert (pool.revision, classes(pool.stats())) == (revision, {"cached": 4})
    assert len(allocate(pool, span(101, 116)).block_ids) == 4


def test_a_second_release_strips_nobody() -> None:
    """B4: released twice by one reader, the blocks stay held by the other."""
    pool = new_pool(6)
    cache(pool, span(1, 16))
    one, other = allocate(pool, span(1, 17)), allocate(pool, span(1, 17), session=2)
    assert [release(pool, one), release(pool, one), release(pool, one)] == [1, 0, 0]
    assert classes(pool.stats()) == {"free": 1, "reserved": 1, "active": 4}
    assert release(pool, other) == 1
    assert classes(pool.stats()) == {"free": 2, "cached": 4}
