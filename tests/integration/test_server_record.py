"""Record over the wire and `kvharbor record`: what a live service is asked, and that its trace replays to the same."""

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from conftest import StartService
from kvharbor.client import Unavailable, connect
from kvharbor.v1 import blocks_pb2, types_pb2
from kvharbor.v1 import cache_service_pb2 as cache
from raw_caller import BLOCK_TOKENS, RawCaller, refused, tokens
from raw_stream import RawStream, chain, committing, count, first, last, releasing
from service_process import DEADLINE_S, ServiceProcess

pytestmark = pytest.mark.slow


def record(caller: RawCaller, pool_id: str) -> Any:
    """Begins a recording; returns the stream, which goes on until it is cancelled, once it has begun."""
    stream, _ = caller.record(pool_id)
    first = next(stream)
    assert (first.block_tokens, len(first.requests)) == (BLOCK_TOKENS, 0)
    return stream


def release(caller: RawCaller, pool_id: str, sequence_id: str) -> None:
    """Ends a sequence."""
    item = cache.ReleaseItem(sequence_id=sequence_id)
    caller.call(caller.cache.Release, cache.ReleaseRequest(pool_id=pool_id, items=[item]))


def ask(caller: RawCaller, pool_id: str, *ids: int) -> int:
    """Allocates, commits and releases a prompt; returns the tokens that were there."""
    sequence = caller.allocate(pool_id, *ids, max_cached_tokens=len(ids))
    caller.commit(pool_id, sequence.sequence_id, len(ids))
    release(caller, pool_id, sequence.sequence_id)
    return int(sequence.cached_tokens)


def told(stream: Any, count: int) -> list[cache.RecordedRequest]:
    """Reads so many requests."""
    found: list[cache.RecordedRequest] = []
    while len(found) < count:
        found += next(stream).requests
    return found


def test_what_came_in_since_is_told_in_order_of_the_ends(caller: RawCaller) -> None:
    """Requests that were there before, or are refused, are not; equal prefixes have equal names."""
    pool_id = caller.open_pool("record-order", block_count=16)
    before = caller.allocate(pool_id, *range(500, 516))
    stream = record(caller, pool_id)
    release(caller, pool_id, before.sequence_id)
    with refused():
        caller.allocate(pool_id, *range(BLOCK_TOKENS * 17))
    first = caller.allocate(pool_id, *range(40), reserve_tokens=8, request_id="first")
    assert caller.allocate(pool_id, *range(40), reserve_tokens=8, request_id="first") == first
    ask(caller, pool_id, *range(16), *range(100, 116))
    caller.commit(pool_id, first.sequence_id, 40, new_token_ids=tokens(1, 2, 3))
    release(caller, pool_id, first.sequence_id)
    second, one = told(stream, 2)
    assert [(each.input_tokens, each.output_tokens) for each in (one, second)] == [(40, 3), (32, 0)]
    assert len(one.block_names) == len(second.block_names) == 16
    assert one.block_names[:8] == second.block_names[:8]
    assert one.block_names[8:] != second.block_names[8:]
    assert one.arrival.ToNanoseconds() < second.arrival.ToNanoseconds()
    assert one.duration.ToNanoseconds() > second.duration.ToNanoseconds()
    stream.cancel()


def test_a_caller_who_closes_its_side_gets_all_that_has_ended(caller: RawCaller) -> None:
    """More than the way to the reader takes up: nothing of it is read before."""
    pool_id = caller.open_pool("record-stop", block_count=512)
    stream, stop = caller.record(pool_id)
    assert next(stream).block_tokens == BLOCK_TOKENS
    running = caller.allocate(pool_id, *range(7))
    for _ in range(300):
        ask(caller, pool_id, *range(400 * BLOCK_TOKENS))
    stop()
    assert [len(one.block_names) for reply in stream for one in reply.requests] == [400 * 8] * 300
    assert stream.code() == grpc.StatusCode.OK
    release(caller, pool_id, running.sequence_id)


def test_a_recording_is_asked_for_once(caller: RawCaller) -> None:
    """Neither not at all nor for two pools."""
    pool_id = caller.open_pool("record-once")
    for asked_count in (0, 2):
        with refused() as found:
            list(caller.call(caller.cache.Record, iter([cache.RecordRequest(pool_id=pool_id)] * asked_count)))
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert found[0].metadata["value"] == str(asked_count)


def test_two_recordings_have_no_name_in_common(caller: RawCaller) -> None:
    """[G8] Nobody can join them, nor test a guess with a name of an earlier one."""
    pool_id = caller.open_pool("record-two")
    streams = [record(caller, pool_id), record(caller, pool_id)]
    ask(caller, pool_id, *range(64))
    one, other = [told(stream, 1)[0].block_names for stream in streams]
    assert len(one) == len(other) == 4 * 8
    assert not {one[at : at + 8] for at in range(0, 32, 8)} & {other[at : at + 8] for at in range(0, 32, 8)}
    for stream in streams:
        stream.cancel()


def test_wherever_a_sequence_ends_it_is_told_of(harbor: str, caller: RawCaller) -> None:
    """With its session, or with whom it was handed to."""
    pool_id = caller.open_pool("record-ends")
    stream = record(caller, pool_id)
    with RawCaller(harbor) as other:
        other.open_pool("record-ends")
        other.allocate(pool_id, *range(20))
        given = other.allocate(pool_id, *range(30))
        commit = cache.CommitItem(sequence_id=given.sequence_id, computed_tokens=30)
        handoff = other.call(other.cache.Handoff, cache.HandoffRequest(pool_id=pool_id, commit=commit))
    assert [one.input_tokens for one in told(stream, 1)] == [20]
    adopting = cache.AdoptRequest(pool_id=pool_id, handoff_token=handoff.handoff_token)
    adopted = caller.call(caller.cache.Adopt, adopting).sequence
    caller.commit(pool_id, adopted.sequence_id, 30, new_token_ids=tokens(7, 7))
    release(caller, pool_id, adopted.sequence_id)
    assert [(one.input_tokens, one.output_tokens) for one in told(stream, 1)] == [(30, 2)]
    stream.cancel()


def test_what_is_acquired_is_told_of_too(harbor: str, caller: RawCaller) -> None:
    """Under the names that an Allocate of the tokens has, when the block behind its chain goes, or with its session."""
    pool_id = caller.open_pool("record-blocks", block_count=32)
    with RawCaller(harbor) as engine:
        engine.open_pool("record-blocks", block_count=32)
        with RawStream(engine) as stream:
            recorded = record(caller, pool_id)
            (probed,) = stream.acquire(pool_id, chain(1, 2))
            assert not probed.status.code
            caller.allocate(pool_id, *[9] * BLOCK_TOKENS)
            (standing_back,) = stream.acquire(pool_id, chain(9, table_block_count=1, unless_pending=True))
            assert standing_back.HasField("pending")
            (one, too_large) = stream.acquire(pool_id, chain(1, 2, table_block_count=4), chain(7, table_block_count=30))
            assert too_large.status.reason
            stream.ask(commit_blocks=committing(pool_id, first(one.leased, 2), 1, 2))
            opaque = blocks_pb2.BlockChain(
                namespace=types_pb2.NamespaceKey(scheme="s"), keys=b"a" * 32 + b"b" * 32, table_block_count=4
            )
            (keyed,) = stream.acquire(pool_id, opaque)
            stream.ask(release_blocks=releasing(pool_id, last(one.leased)))
            (kept,) = stream.acquire(pool_id, chain(1, 2, 3, table_block_count=4))
            assert (count(kept.held), count(kept.leased)) == (2, 2)
            stream.ask(release_blocks=releasing(pool_id, last(keyed.leased, 2)))
            stream.ask(release_blocks=releasing(pool_id, one.leased))
            ask(caller, pool_id, *[1] * BLOCK_TOKENS, *[2] * BLOCK_TOKENS, 5)
            told_first = told(recorded, 3)
        engine.close()
        told_last = told(recorded, 1)
    sizes = [(each.input_tokens, each.output_tokens, len(each.block_names)) for each in (*told_first, *told_last)]
    assert sizes == [(32, 0, 16), (32, 0, 16), (33, 0, 16), (48, 0, 24)]
    names = [each.block_names for each in (*told_first, *told_last)]
    assert names[1] == names[2] == names[3][:16]
    assert names[0][:8] not in names[1]
    assert told_last[0].duration.ToNanoseconds() > 0
    recorded.cancel()


def test_a_shutdown_and_the_end_of_the_process_end_it(start_fresh: StartService) -> None:
    """With what ended it, for whoever reads."""
    service = start_fresh()
    with connect(service.socket) as harbor:
        with RawCaller(str(service.socket)) as worker:
            worker.open_pool("p")
        recording = harbor.find_pool("p").record()
        assert recording.block_tokens == BLOCK_TOKENS
        service.restart_child()
        with pytest.raises(Unavailable, match="the recording with it: record anew"):
            next(iter(recording))
    with RawCaller(str(service.socket)) as caller:
        stream = record(caller, caller.open_pool("p"))
        service.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        assert "shut" in str(ended.value.details()) or "drain" in str(ended.value.details()).lower()


@contextmanager
def recording(service: ServiceProcess, file: Path, *flags: str) -> "Iterator[subprocess.Popen[str]]":
    """Runs the command, once it has begun; kills what a test has left running."""
    command = [sys.executable, "-m", "kvharbor.server.cli", "record", "p", str(file), f"--socket={service.socket}"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "recording pool p; interrupt to end\n"
        yield process
        process.kill()


def replayed(file: Path, blocks: int) -> dict[str, Any]:
    """Replays a trace."""
    command = [sys.executable, "-m", "kvharbor.server.cli", "replay", str(file), f"--blocks={blocks}", "--json"]
    done = subprocess.run([*command, "--policy=lru"], capture_output=True, text=True, check=True)
    (outcome,) = json.loads(done.stdout)
    return dict(outcome)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_trace_replays_to_the_hits_that_the_service_had(
    start_fresh: StartService, tmp_path: Path, how: signal.Signals
) -> None:
    """Block for block, in a pool that is too small for all; and no token is in the file."""
    service, file, chance = start_fresh(eviction_policy="lru"), tmp_path / "trace.jsonl", random.Random(1)
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=24)
        with recording(service, file) as process:
            hit_blocks = 0
            for _ in range(200):
                stem, leaf = chance.randrange(8), chance.randrange(6)
                ids = [*range(77_000 * stem, 77_000 * stem + 48), *range(1_000 * leaf, 1_000 * leaf + 32)]
                hit_blocks += ask(caller, pool_id, *ids) // BLOCK_TOKENS
            evicted = caller.stats(pool_id).counters.evicted_block_count
            process.send_signal(how)
            assert process.wait(DEADLINE_S) == 0
    outcome = replayed(file, 24)
    assert (outcome["asked_blocks"], outcome["hit_blocks"]) == (200 * 5, hit_blocks)
    assert 100 < hit_blocks < 900
    assert evicted > 0
    lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert {frozenset(line) for line in lines} == {
        frozenset(("arrival_ms", "input_tokens", "output_tokens", "duration_ms", "blocks"))
    }
    assert all(re.fullmatch("[0-9a-f]{16}", name) for line in lines for name in line["blocks"])


def test_interrupts_end_it_also_where_the_service_stands_still(start_fresh: StartService, tmp_path: Path) -> None:
    """The first one asks for what has ended, the second one ends the recording, the third one the command."""
    service, file = start_fresh(), tmp_path / "trace.jsonl"
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
        with recording(service, file) as process, service.standing_still():
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            assert process.stderr.readline() == f"{file}: 0 requests, in blocks of {BLOCK_TOKENS}\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == -signal.SIGTERM


def test_it_overwrites_nothing_unasked(start_fresh: StartService, tmp_path: Path) -> None:
    """An earlier recording may have taken a week."""
    service, file = start_fresh(), tmp_path / "trace.jsonl"
    file.write_text("mine")
    command = [sys.executable, "-m", "kvharbor.server.cli", "record", "p", str(file), f"--socket={service.socket}"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (refused.returncode, file.read_text()) == (1, "mine")
    assert refused.stderr == f"kvharbor: {file} is there already: name another file, or overwrite it with --force\n"
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
        with recording(service, file, "--force", "--for=0.01") as process:
            assert process.wait(DEADLINE_S) == 0
    assert json.loads(file.read_text()) == {"kvharbor_trace": 1, "block_tokens": BLOCK_TOKENS}


def test_where_it_cannot_write_it_does_not_say_that_it_records(service: ServiceProcess, tmp_path: Path) -> None:
    """One line says why."""
    file = tmp_path / "no-such-folder" / "trace.jsonl"
    command = [sys.executable, "-m", "kvharbor.server.cli", "record", "p", str(file), f"--socket={service.socket}"]
    with RawCaller(str(service.socket)) as caller:
        caller.open_pool("p")
        failed = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert failed.returncode == 1
    assert failed.stderr == f"kvharbor: cannot write {file}: No such file or directory\n"


def test_it_ends_by_itself_and_leaves_a_whole_file_when_the_service_goes(
    start_fresh: StartService, tmp_path: Path
) -> None:
    """After --for seconds with status 0; with status 1 and why, and all that has ended, after a shutdown."""
    service = start_fresh()
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p")
        with recording(service, tmp_path / "timed.jsonl", "--for=0.01") as process:
            assert process.wait(DEADLINE_S) == 0
        with recording(service, tmp_path / "cut.jsonl.gz") as process:
            ask(caller, pool_id, *range(32))
            ask(caller, pool_id, *range(32))
            assert service.stop() == 0
            _, error = process.communicate(timeout=DEADLINE_S)
            told, failure = error.splitlines()
            assert (process.returncode, told) == (
                1,
                f"{tmp_path / 'cut.jsonl.gz'}: 2 requests, in blocks of {BLOCK_TOKENS}",
            )
            assert failure.startswith("kvharbor: ")
    assert replayed(tmp_path / "cut.jsonl.gz", 4)["hit_blocks"] == 2
