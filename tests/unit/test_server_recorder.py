"""Recorder: what is told of requests, under which names, and what becomes of a reader who is too slow."""

import asyncio
from array import array

import pytest

from kvharbor.pool import Commit, ExtraKey, Pool, PoolConfig, Prompt
from kvharbor.pool.steps import finish
from kvharbor.server.errors import Draining, WatcherTooSlow
from kvharbor.server.pools.recorder import NAME_BYTES, Ended, Recorder, Recording
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.owner import PoolOwner

BLOCK_TOKENS = 4


class Clock:
    """Seconds as a test sets them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def crash(failure: BaseException) -> None:
    raise failure


def new_recorder(clock: Clock, limit_bytes: int = 1 << 20) -> tuple[Recorder, Pool]:
    pool = Pool(PoolConfig(block_count=64, block_tokens=BLOCK_TOKENS))
    pool.open_session(1, "t")
    return Recorder(PoolOwner(pool, EventLog(1 << 20), clock, crash), limit_bytes), pool


def prompt(*tokens: int, extra_keys: tuple[ExtraKey, ...] = (), salt: bytes = b"") -> Prompt:
    return Prompt(array("I", tokens).tobytes(), extra_keys, salt=salt)


def names(encoded: bytes) -> list[bytes]:
    return [encoded[start : start + NAME_BYTES] for start in range(0, len(encoded), NAME_BYTES)]


def ended(blocks: int = 0) -> Ended:
    return Ended(0.0, 0, 0, 0.0, bytes(blocks * NAME_BYTES))


def test_a_request_is_told_of_when_it_ends() -> None:
    """Arrival from the begin of the recording, duration from the admission; output is what the prompt had not."""

    async def told() -> list[Ended]:
        clock = Clock()
        recorder, pool = new_recorder(clock)
        with recorder.recording() as recording:
            clock.now += 5
            asked = prompt(*range(1, 11))
            arrival = await recorder.arrived(asked, "t")
            clock.now += 1
            view = finish(pool.allocate(1, asked, reserve_tokens=10))
            recorder.admitted(arrival, view)
            recorder.admitted(arrival, view)  # repeated: told once
            clock.now += 2
            finish(pool.commit(1, view.number, Commit(10, array("I", [1, 2, 3]).tobytes())))
            assert await recording.take(0) == []
            finish(pool.release(1, view.number))
            return await recording.take(0)

    (one,) = asyncio.run(told())
    assert (one.arrival_s, one.duration_s) == (5, 2)
    assert (one.input_tokens, one.output_tokens) == (10, 3)
    assert len(names(one.block_names)) == 2


def test_a_name_is_of_everything_before_it_and_of_its_namespace() -> None:
    """[G8] And of the extra keys; under another recording's secret all are others."""

    async def of(recording: Recording, asked: Prompt, tenant: str = "t") -> list[bytes]:
        return names(await recording.names_of(asked, tenant, BLOCK_TOKENS))

    async def check() -> None:
        recording, other = Recording(0, 1), Recording(0, 1)
        plain = await of(recording, prompt(*range(12)))
        assert len(set(plain)) == 3
        assert await of(recording, prompt(*range(11))) == plain[:2]
        changed = await of(recording, prompt(*range(7), 99, 8, 9, 10, 11))
        assert changed[0] == plain[0]
        others = [
            changed[1:],
            await of(recording, prompt(*range(12)), "u"),
            await of(recording, prompt(*range(12), salt=b"s")),
            await of(recording, prompt(*range(12), extra_keys=(ExtraKey(1, b"image"),))),
            await of(other, prompt(*range(12))),
        ]
        everything = [name for listed in (plain, *others) for name in listed]
        assert len(set(everything)) == len(everything)

    asyncio.run(check())


def test_long_prompts_are_named_in_slices() -> None:
    """[S14] Others run in between."""

    async def turns() -> int:
        naming = asyncio.create_task(Recording(0, 1).names_of(prompt(*range(20_000)), "t", 1))
        count = 0
        while not naming.done():
            await asyncio.sleep(0)
            count += 1
        assert len(names(naming.result())) == 20_000
        return count

    assert asyncio.run(turns()) > 8


def test_a_slow_reader_is_cut_off() -> None:
    """[S9] What it has not read is not kept beyond the limit; one request is, whatever its size."""

    async def check() -> None:
        recording = Recording(0, 4_000)
        recording.add(ended(10_000))
        assert len(await recording.take(0)) == 1
        for _ in range(100):
            recording.add(ended())
        with pytest.raises(WatcherTooSlow, match="requests were not read in time"):
            await recording.take(0)

    asyncio.run(check())


def test_what_ends_the_pool_ends_the_recording_after_what_is_kept() -> None:
    """And those that would begin then."""

    async def check() -> None:
        recorder, _ = new_recorder(Clock())
        assert not recorder.is_on
        with recorder.recording() as recording:
            assert recorder.is_on
            recording.add(ended())
            recorder.end_with(Draining())
            assert len(await recording.take(10)) == 1
            with pytest.raises(Draining):
                await recording.take(10)
        assert not recorder.is_on
        with pytest.raises(Draining), recorder.recording():
            pass

    asyncio.run(check())


def test_whoever_stops_gets_what_has_ended_by_then_and_no_more() -> None:
    """However much goes on ending, so that a slow reader comes to the end."""

    async def told() -> None:
        recorder, _ = new_recorder(Clock())
        with recorder.recording() as recording:
            recording.add(ended(1))
            recording.stop()
            recording.add(ended(2))
            assert not recording.is_over
            assert await recording.take(0) == [ended(1)]
            assert recording.is_over
            assert await recording.take(1e6) == []

    asyncio.run(told())
