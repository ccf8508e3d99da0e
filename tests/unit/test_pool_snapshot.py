"""The index as it stood: read later, in parts, and never with anything that came after."""

from array import array

from kvharbor.pool import Commit, Pool, PoolConfig, Prompt
from kvharbor.pool.events import BlocksStored
from kvharbor.pool.steps import finish

BLOCK_TOKENS = 4


def new_pool(block_count: int = 64) -> Pool:
    """Returns a pool with one session, 1, of tenant "t", and one, 2, of tenant "u"."""
    pool = Pool(PoolConfig(block_count, BLOCK_TOKENS))
    pool.open_session(1, "t")
    pool.open_session(2, "u")
    return pool


def put(pool: Pool, *tokens: int, session: int = 1) -> None:
    """Publishes a prompt and lets it go."""
    prompt = Prompt(array("I", tokens).tobytes())
    view = finish(pool.allocate(session, prompt))
    finish(pool.commit(session, view.number, Commit(view.token_count)))
    finish(pool.release(session, view.number))


def links(chains: "list[BlocksStored]") -> dict[bytes, tuple[bytes, int, int]]:
    """Returns each digest's parent digest, block and generation; fails unless parents come before children."""
    found: dict[bytes, tuple[bytes, int, int]] = {}
    roots: set[bytes] = set()
    for chain in chains:
        parent = chain.parent_digest
        if parent not in found:
            roots.add(parent)
        for digest, block, generation in zip(chain.digests, chain.block_ids, chain.generations, strict=True):
            found[digest] = parent, block, generation
            parent = digest
    assert not roots & found.keys(), "a parent came after its child"
    return found


def forest(pool: Pool) -> None:
    """Publishes chains that part at every depth, and siblings at the root."""
    for first in range(3):
        for second in range(3):
            put(pool, *[first] * 8, *[second] * 4, 7, 7, 7, 7)
    put(pool, *range(100, 140))


def test_a_snapshot_that_is_read_later_is_of_its_call() -> None:
    """What is published and evicted meanwhile is not in it; its revision is that of the call."""
    pool = new_pool()
    forest(pool)
    expected, revision = links(list(pool.index_chains())), pool.revision
    reading = pool.index_chains()
    first = next(reading)
    finish(pool.evict_unheld())
    put(pool, *[999] * 40)
    chains = [first, *reading]
    assert links(chains) == expected
    assert {chain.revision for chain in chains} == {revision}
    assert len(expected) == 3 * (2 + 3 * 2) + 10


def test_parts_of_a_chain_continue_each_other() -> None:
    """However short they are: together they are the same index, parents first."""
    pool = new_pool()
    forest(pool)
    whole = links(list(pool.index_chains()))
    for most_blocks in (1, 2, 3, 100):
        chains = list(pool.index_chains(most_blocks=most_blocks))
        assert links(chains) == whole
        assert max(len(chain.digests) for chain in chains) == min(most_blocks, 10)


def test_a_snapshot_tells_one_tenant_or_all() -> None:
    """Each chain is told with its tenant."""
    pool = new_pool()
    put(pool, *range(8))
    put(pool, *range(8), session=2)
    assert [chain.tenant for chain in pool.index_chains("u")] == ["u"]
    assert sorted(chain.tenant for chain in pool.index_chains()) == ["t", "u"]
    assert list(pool.index_chains("nobody")) == []
