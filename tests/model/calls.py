"""Short forms of a pool's calls, for tests that tell a story."""

from array import array
from collections.abc import Iterable

from kvharbor.pool import Commit, Committed, ExtraKey, Pool, PoolConfig, PoolStats, Prompt, SequenceView
from kvharbor.pool.steps import finish


def encode(tokens: Iterable[int]) -> bytes:
    return array("I", tokens).tobytes()


def span(first: int, last: int) -> list[int]:
    """The consecutive token ids first to last."""
    return list(range(first, last + 1))


def prompt(tokens: Iterable[int], extra_keys: Iterable[ExtraKey] = (), salt: bytes = b"") -> Prompt:
    return Prompt(encode(tokens), tuple(extra_keys), salt=salt)


def new_pool(block_count: int, block_tokens: int = 4, slice_blocks: int = 512, **config: float | str) -> Pool:
    """A pool with sessions 1 and 2 of tenant "t" and session 3 of tenant "u"."""
    pool = Pool(PoolConfig(block_count, block_tokens, slice_blocks=slice_blocks, **config))  # type: ignore[arg-type]
    for session, tenant in ((1, "t"), (2, "t"), (3, "u")):
        pool.open_session(session, tenant)
    return pool


def allocate(
    pool: Pool,
    tokens: Iterable[int],
    session: int = 1,
    *,
    reserve: int = 0,
    most: int | None = None,
    request_id: str = "",
    group: str = "",
    salt: bytes = b"",
) -> SequenceView:
    return finish(
        pool.allocate(
            session,
            prompt(tokens, salt=salt),
            reserve_tokens=reserve,
            max_cached_tokens=most,
            request_id=request_id,
            group=group,
        )
    )


def commit(pool: Pool, view: SequenceView, computed: int, new: Iterable[int] = ()) -> Committed:
    return finish(pool.commit(view.session, view.number, Commit(computed, encode(new))))


def publish(pool: Pool, tokens: list[int], session: int = 1, salt: bytes = b"") -> SequenceView:
    """Allocates and commits a prompt, and holds it."""
    view = allocate(pool, tokens, session, salt=salt)
    commit(pool, view, len(tokens))
    return view


def cache(pool: Pool, tokens: list[int], session: int = 1, salt: bytes = b"") -> SequenceView:
    """Leaves a prompt in the cache, held by nobody."""
    view = publish(pool, tokens, session, salt)
    release(pool, view)
    return view


def release(pool: Pool, view: SequenceView) -> int:
    return finish(pool.release(view.session, view.number))


def present(pool: Pool, tokens: Iterable[int], tenant: str = "t", salt: bytes = b"") -> int:
    return finish(pool.lookup(tenant, prompt(tokens, salt=salt))).present_tokens


def classes(stats: PoolStats) -> dict[str, int]:
    """The classes that are not empty; they sum to the total ([G5])."""
    counts = {
        "free": stats.free_block_count,
        "reserved": stats.reserved_block_count,
        "active": stats.active_block_count,
        "cached": stats.cached_block_count,
        "warm": stats.warm_block_count,
        "quarantined": stats.quarantined_block_count,
    }
    assert sum(counts.values()) == stats.total_block_count
    return {name: count for name, count in counts.items() if count}
