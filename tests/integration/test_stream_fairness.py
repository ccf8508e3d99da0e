"""Two engines on a pool that is too small for both: each gets on, neither spins [S34], [S35]."""

import threading
import time
from dataclasses import dataclass, field

import pytest
from google.protobuf import duration_pb2

from integration.stream_pools import Parties, Party
from integration.stream_pools import parties as parties
from kvharbor.v1 import blocks_pb2, types_pb2
from raw_stream import chain, count, leasing, releasing
from waiting import DEADLINE_S, quickest, until

pytestmark = pytest.mark.alone

POOL_BLOCKS = 20
LARGEST = 18
ROUNDS = 30


@dataclass
class Engine:
    """Asks for blocks for one request after the other, waits for them, and gives them back: as fast as it can."""

    party: Party
    sizes: tuple[int, ...]
    wait_s: float = 10.0
    done: int = 0
    asked: int = 0
    longest_s: float = 0.0
    is_told_to_stop: bool = False
    failures: list[str] = field(default_factory=list)

    def run(self, rounds: int) -> None:
        """Serves so many requests."""
        stream, pool_id = self.party.stream, self.party.pool_id
        for number in range(rounds):
            if self.is_told_to_stop:
                return
            size = self.sizes[number % len(self.sizes)]
            wait = duration_pb2.Duration(nanos=int(self.wait_s * 1e9) % 10**9, seconds=int(self.wait_s))
            began_at = time.monotonic()
            sent = stream.send(lease=leasing(pool_id, size, wait=wait))
            self.asked += 1
            answer = stream.answer(sent)
            leased = stream.granted(sent).result.leased if answer.waiting else answer.leased
            self.longest_s = max(self.longest_s, time.monotonic() - began_at)
            if count(leased) != size:
                self.failures.append(f"{count(leased)} of {size} blocks")
                return
            stream.ask(release_blocks=releasing(pool_id, leased))
            self.done += 1


def run(*engines: Engine, rounds: int = ROUNDS) -> None:
    """Runs engines side by side to their end."""
    threads = [threading.Thread(target=engine.run, args=(rounds,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S * 2)
    assert not any(thread.is_alive() for thread in threads)
    assert [engine.failures for engine in engines] == [[]] * len(engines)


def test_two_engines_that_need_nearly_all_of_it_take_turns(parties: Parties) -> None:
    """Each of them: one call a request, whatever the other does."""
    engines = [Engine(parties.join(block_count=POOL_BLOCKS), (LARGEST,)) for _ in range(2)]
    run(*engines)
    assert [(engine.done, engine.asked) for engine in engines] == [(ROUNDS, ROUNDS)] * 2


def test_a_large_request_is_not_starved_by_small_ones(parties: Parties) -> None:
    """It waits half of its time at most while smaller ones pass; then the room gathers for it."""
    large = Engine(parties.join(block_count=POOL_BLOCKS), (LARGEST,), wait_s=2.0)
    small = [Engine(parties.join(block_count=POOL_BLOCKS), (3, 5, 4)) for _ in range(2)]
    threads = [threading.Thread(target=engine.run, args=(10_000,), daemon=True) for engine in small]
    for thread in threads:
        thread.start()

    def longest_s() -> float:
        large.longest_s = 0.0
        large.run(10)
        return large.longest_s

    assert quickest(longest_s, 2.0) < 2.0
    assert (large.done, large.failures) == (large.asked, [])
    before = [engine.done for engine in small]
    until(lambda: all(engine.done > done for engine, done in zip(small, before, strict=True)))
    for engine in small:
        engine.is_told_to_stop = True
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [engine.failures for engine in small] == [[], []]


def test_an_engine_that_sits_on_credits_gives_them_up(parties: Parties) -> None:
    """What it does not use comes back on a recall, so that the other gets on at once."""

    def longest_s() -> float:
        idle, busy = parties.join(block_count=POOL_BLOCKS), Engine(parties.join(block_count=POOL_BLOCKS), (LARGEST,))
        credits = idle.stream.lease(idle.pool_id, POOL_BLOCKS).leased

        def give_back() -> None:
            idle.stream.recall()
            idle.stream.ask(release_blocks=releasing(idle.pool_id, credits))

        answering = threading.Thread(target=give_back)
        answering.start()
        run(busy, rounds=3)
        answering.join(DEADLINE_S)
        return busy.longest_s

    assert quickest(longest_s, 1.0) < 1.0


def test_who_has_less_than_his_guarantee_goes_first(parties: Parties) -> None:
    """Whoever has more of the pool waits behind him, even if he has come before and would fit."""
    rich, poor = parties.join(block_count=POOL_BLOCKS), parties.join(block_count=POOL_BLOCKS)
    room = rich.stream.lease(rich.pool_id, POOL_BLOCKS).leased
    long = duration_pb2.Duration(seconds=20)
    second = rich.stream.send(lease=leasing(rich.pool_id, 2, wait=long))
    assert rich.stream.answer(second).waiting
    first_claim = poor.stream.send(lease=leasing(poor.pool_id, 5, wait=long))
    assert poor.stream.answer(first_claim).waiting
    rich.stream.ask(release_blocks=_part(rich.pool_id, room, 0, 3))
    assert rich.stream.lease(rich.pool_id, 1).reason
    (refused,) = rich.stream.acquire(rich.pool_id, chain(1, table_block_count=1))
    assert refused.status.reason
    assert rich.caller.stats(rich.pool_id).waiting_count == 2
    rich.stream.ask(release_blocks=_part(rich.pool_id, room, 3, 5))
    assert count(poor.stream.granted(first_claim).result.leased) == 5
    rich.stream.ask(release_blocks=_part(rich.pool_id, room, 5, 7))
    assert count(rich.stream.granted(second).result.leased) == 2


def _part(pool_id: str, table: types_pb2.BlockTable, start: int, end: int) -> blocks_pb2.ReleaseBlocksRequest:
    part = types_pb2.BlockTable(
        block_ids=table.block_ids[4 * start : 4 * end], generations=table.generations[8 * start : 8 * end]
    )
    return releasing(pool_id, part)
