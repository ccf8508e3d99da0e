"""The log of events that watchers read: bounded, by position, and honest about what is gone."""

import asyncio
import time

import pytest

from kvharbor.pool.events import BlocksRemoved, BlocksStored, PinEnded
from kvharbor.server.errors import Draining, RevisionCompacted, WatcherTooSlow
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.v1 import cache_service_pb2 as pb


def removed(revision: int) -> BlocksRemoved:
    """Returns an event of about 40 bytes."""
    return BlocksRemoved(revision, "t", (bytes(32),))


def revisions(log: EventLog, position: int) -> list[int]:
    """Returns the revisions of all events from a position on."""
    return [recorded.revision for recorded in log.read(position, 1 << 30)]


def test_events_are_read_from_any_position() -> None:
    """And resuming after a revision finds the first event behind it."""
    log = EventLog(1 << 20)
    log.append([removed(3), removed(3), removed(5)])
    assert revisions(log, 0) == [3, 3, 5]
    assert [log.position_after(revision) for revision in (0, 3, 4, 5)] == [0, 2, 2, 3]


def test_what_is_over_the_limit_goes_oldest_first_and_is_reported() -> None:
    """A watcher that is behind is cut off, and one that resumes is told from where it could."""
    log = EventLog(100)
    log.append([removed(1), removed(2), removed(3), removed(4)])
    assert log.compact_revision == 2
    with pytest.raises(WatcherTooSlow) as slow:
        log.read(0, 1 << 20)
    assert slow.value.pending_event_count == 4
    with pytest.raises(RevisionCompacted) as compacted:
        log.position_after(1)
    assert compacted.value.metadata() == {"startRevision": "1", "compactRevision": "2"}
    assert revisions(log, log.position_after(2)) == [3, 4]


def test_the_newest_event_is_kept_however_large() -> None:
    """Otherwise a watcher that is up to date could never see it."""
    log = EventLog(1)
    log.append([BlocksRemoved(7, "t", (bytes(32),) * 1000)])
    assert revisions(log, 0) == [7]


def test_one_read_is_bounded_in_bytes() -> None:
    """It ends with the event that passes the bound, so that it always gets on."""
    log = EventLog(1 << 20)
    log.append([removed(revision) for revision in range(1, 11)])
    assert [recorded.revision for recorded in log.read(0, 1)] == [1]
    assert len(log.read(0, 100)) == 3


def test_events_are_kept_as_messages() -> None:
    """What was stored, removed and ended comes out as the API shows it."""
    log = EventLog(1 << 20)
    log.append(
        [
            BlocksStored(1, "t", b"p" * 32, (b"a" * 32, b"b" * 32), (5, 6), (1, 2)),
            PinEnded(2, "t", "system", expired=True),
        ]
    )
    stored, ended = [pb.WatchEvent.FromString(recorded.encoded) for recorded in log.read(0, 1 << 20)]
    assert (stored.revision, stored.stored.parent_digest) == (1, b"p" * 32)
    assert stored.stored.digests == b"a" * 32 + b"b" * 32
    assert stored.stored.blocks.block_ids == bytes([5, 0, 0, 0, 6, 0, 0, 0])
    assert len(stored.stored.blocks.generations) == 16
    assert (ended.pin_ended.name, ended.pin_ended.expired) == ("system", True)


def test_waiting_ends_with_an_event_with_the_end_or_with_time() -> None:
    """Several watchers wait for the same event; one that leaves takes nobody with it."""

    async def scenario() -> list[bool]:
        log = EventLog(1 << 20)
        timed_out = await log.wait_beyond(0, 0.001)
        waiting = [asyncio.create_task(log.wait_beyond(0, 10)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting.pop().cancel()
        log.append([removed(1)])
        woken = await asyncio.gather(*waiting)
        last = asyncio.create_task(log.wait_beyond(1, 10))
        await asyncio.sleep(0)
        log.end_with(Draining())
        return [timed_out, *woken, await last]

    assert asyncio.run(scenario()) == [False, True, True, True]


def test_a_watcher_that_keeps_up_reads_at_once_however_long_the_log() -> None:
    """It does not walk past what it has seen: with hundreds of watchers that was most of an event's cost."""
    log = EventLog(1 << 30)
    log.append([removed(revision) for revision in range(1, 100_001)])
    start = time.thread_time()
    for _ in range(1_000):
        assert len(log.read(log.end - 1, 1 << 20)) == 1
    assert time.thread_time() - start < 0.1
