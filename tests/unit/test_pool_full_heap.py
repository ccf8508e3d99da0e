"""Blocks whose extra keys the ledger had no room for [L8]: they end as any other."""

from calls import prompt, span

from kvharbor.pool import Commit, ExtraKey, Pool, PoolConfig
from kvharbor.pool.ledger import Ledger, ledger_bytes
from kvharbor.pool.steps import finish


def test_an_unrecorded_block_is_evicted_and_used_anew() -> None:
    """It has no cell that could be given back."""
    config = PoolConfig(4, 4)
    ledger = Ledger.create(config, bytearray(ledger_bytes(config)))
    pool = Pool(config, ledger)
    pool.open_session(1, "t")
    plain = finish(pool.allocate(1, prompt(span(1, 4))))  # so that the namespace has its cell
    finish(pool.commit(1, plain.number, Commit(4)))
    keyed = finish(pool.allocate(1, prompt(span(5, 12), [ExtraKey(5, b"image")])))
    room, ledger.cells._count = ledger.cells._count, ledger.cells._touched  # full
    finish(pool.commit(1, keyed.number, Commit(8)))
    ledger.cells._count = room
    assert pool.stats().unrecorded_count == 1
    for view in (plain, keyed):
        finish(pool.release(1, view.number))
    assert finish(pool.evict_unheld()) == 3
    again = finish(pool.allocate(1, prompt(span(20, 35), [ExtraKey(5, b"other")])))
    finish(pool.commit(1, again.number, Commit(16)))
    assert pool.stats().active_block_count == 4
    pool.check_invariants()
