"""Traces as files: every format, plain and gzip, and what is wrong with a line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvharbor.server.errors import CommandError
from kvharbor.server.traces.errors import BadTrace
from kvharbor.server.traces.reading import read_lengths, read_trace
from kvharbor.server.traces.recording import Recorded, write
from kvharbor.server.traces.trace import Trace

WriteFile = Callable[..., Path]

KVRUN1 = {"format": "kvrun1", "block_tokens": 64, "full_blocks_only": True}
KVSEG1 = {"format": "kvseg1"}
RECORDING = {"kvharbor_trace": 1, "block_tokens": 64}
MOONCAKE_LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
KVRUN1_LINE = {"t": 0, "in": 200, "out": 5, "d": 9, "h": [7, 2, 1, 1]}
KVSEG1_LINE = {"t": 0, "in": 1, "out": 5, "seg": [7, 64]}
RECORDED_LINE = {"arrival_ms": 0, "input_tokens": 70, "output_tokens": 5, "duration_ms": 9, "blocks": ["00c0ffee"]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def write_file(tmp_path: Path) -> WriteFile:
    """Writes lines, JSON for what is no text, into a file, and returns its path."""

    def write_lines(*lines: object, packed: bool = False) -> Path:
        path = tmp_path / "trace"
        text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines).encode()
        path.write_bytes(gzip.compress(text) if packed else text)
        return path

    return write_lines


def blocks(trace: Trace) -> list[list[int]]:
    """Returns the names that each request asks for."""
    return [list(request.block_names) for request in trace.requests]


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake(write_file: WriteFile, packed: bool) -> None:
    """Ids of 512 tokens, the last of a part; whether it is gzip is seen in the file, not in its name."""
    second = {"timestamp": 3, "input_length": 1025, "output_length": 0, "hash_ids": [7, 9, 10]}
    trace = read_trace(write_file(MOONCAKE_LINE, second, packed=packed))
    assert (trace.block_tokens, trace.unique_block_count, trace.asked_block_count) == (512, 4, 5)
    assert blocks(trace) == [[0, 1], [0, 2, 3]]
    first = trace.requests[0]
    assert (first.input_tokens, first.output_tokens, first.duration_ms) == (600, 5, None)


def test_kvrun1(write_file: WriteFile) -> None:
    """Runs of consecutive ids are written out; the trace's own durations are kept."""
    trace = read_trace(write_file(KVRUN1, KVRUN1_LINE, {"t": 1, "in": 128, "out": 0, "h": [7, 2]}))
    assert (trace.block_tokens, blocks(trace)) == (64, [[0, 1, 2], [0, 1]])
    assert [request.duration_ms for request in trace.requests] == [9, None]


def test_kvseg1_is_cut_into_blocks_of_any_size(write_file: WriteFile) -> None:
    """A block is the same for the same tokens behind the same ones; a rest is no block."""
    first = {"t": 0, "in": 9, "out": 0, "seg": [1, 3, 2, 4, 3, 2]}  # 1.0 1.1 1.2 2.0 | 2.1 2.2 2.3 3.0 | 3.1
    longer = {"t": 1, "in": 9, "out": 0, "seg": [1, 3, 2, 5]}  # 1.0 1.1 1.2 2.0 | 2.1 2.2 2.3 2.4
    file = write_file(KVSEG1, first, longer)
    assert blocks(read_trace(file, 4)) == [[0, 1], [0, 2]]
    assert blocks(read_trace(file, 2)) == [[0, 1, 2, 3], [0, 1, 2, 4]]
    assert blocks(read_trace(file)) == [[], []]


def test_a_recording_reads_as_it_was_written(tmp_path: Path) -> None:
    """kvharbor's own format; the same requests make the same bytes."""
    requests = [Recorded(5, 130, 7, 40, ("00c0ffee", "12345678")), Recorded(9, 70, 7, 50, ("00c0ffee",))]
    for path in (tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"):
        write(path, 64, requests)
        trace = read_trace(path)
        assert (trace.name, trace.block_tokens, blocks(trace)) == (path.name, 64, [[0, 1], [0]])
        assert (trace.requests[0].arrival_ms, trace.requests[0].duration_ms) == (5, 40)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_azure_knows_lengths_only(write_file: WriteFile) -> None:
    """They are of use for a simulation; to replay them would say that nothing is ever shared."""
    file = write_file(AZURE, "2023-11-16 18:17:03.9799600,4808,10\r\n", "2023-11-16 18:17:04.9799600,3180,8\r\n")
    first, second = read_lengths(file).requests
    assert (first.input_tokens, first.output_tokens, len(first.block_names)) == (4808, 10, 0)
    assert second.arrival_ms - first.arrival_ms == pytest.approx(1000)
    with pytest.raises(BadTrace, match=r"azure.*use it with kvharbor simulate"):
        read_trace(file)


def test_requests_are_by_arrival_and_ties_in_the_order_of_the_file(write_file: WriteFile) -> None:
    """As the bounds of the public traces are counted."""
    ids = [(2, 1), (1, 2), (2, 3), (1, 4)]
    lines = [{"timestamp": t, "input_length": 512, "output_length": i, "hash_ids": [i]} for t, i in ids]
    assert [request.output_tokens for request in read_trace(write_file(*lines)).requests] == [2, 4, 1, 3]


def test_larger_blocks_are_made_of_whole_ones(write_file: WriteFile) -> None:
    """A multiple of the file's size; what does not fill a block cannot be shared."""
    file = write_file(KVRUN1, KVRUN1_LINE, {"t": 1, "in": 256, "out": 0, "h": [7, 4]})
    assert blocks(read_trace(file, 128)) == [[0], [0, 1]]
    with pytest.raises(CommandError, match="blocks of 64 tokens, not 96: ask for a multiple of 64"):
        read_trace(file, 96)


def test_an_id_behind_another_prefix_is_another_block(write_file: WriteFile) -> None:
    """Whatever a file says: a pool would not take one for the other."""
    lines = [{"timestamp": 0, "input_length": 1024, "output_length": 0, "hash_ids": ids} for ids in ([1, 2], [3, 2])]
    assert blocks(read_trace(write_file(*lines))) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("header", "line", "change", "field", "limit"),
    [
        (None, MOONCAKE_LINE, {"timestamp": "soon"}, "timestamp", "milliseconds"),
        (None, MOONCAKE_LINE, {"timestamp": True}, "timestamp", "milliseconds"),
        (None, MOONCAKE_LINE, {"timestamp": float("nan")}, "timestamp", "milliseconds"),
        (None, MOONCAKE_LINE, {"timestamp": -1}, "timestamp", "milliseconds"),
        (None, MOONCAKE_LINE, {"output_length": 1.5}, "output_length", "a whole number"),
        (None, MOONCAKE_LINE, {"output_length": 1 << 60}, "output_length", "a whole number"),
        (None, MOONCAKE_LINE, {"hash_ids": [7]}, "hash_ids", "2 ids"),
        (None, MOONCAKE_LINE, {"hash_ids": 7}, "hash_ids", "a list"),
        (None, MOONCAKE_LINE, {"hash_ids": [7, None]}, "hash_ids[1]", "a whole number"),
        (KVRUN1, KVRUN1_LINE, {"h": [7, 2, 1]}, "h", "pairs"),
        (KVRUN1, KVRUN1_LINE, {"h": [7, 0]}, "h[1]", "a count"),
        (KVRUN1, KVRUN1_LINE, {"h": [7, 1 << 27]}, "h", "3 ids"),
        (KVRUN1, KVRUN1_LINE, {"d": None}, "d", "milliseconds"),
        (KVSEG1, KVSEG1_LINE, {"seg": [1, 1 << 28, 2, 1 << 28]}, "seg", "at most 268435456 tokens"),
        (KVSEG1, KVSEG1_LINE, {"out": 1 << 27}, "the request", "of at most 524288 blocks"),
        (RECORDING, RECORDED_LINE, {"blocks": ["00C0FFEE"]}, "blocks[0]", "hexadecimal"),
        (RECORDING, RECORDED_LINE, {"blocks": []}, "blocks", "1 hashes"),
        (RECORDING, RECORDED_LINE, {"input_tokens": None}, "input_tokens", "a whole number"),
    ],
)
def test_a_bad_field_is_named(
    write_file: WriteFile,
    header: dict[str, object] | None,
    line: dict[str, object],
    change: dict[str, object],
    field: str,
    limit: str,
) -> None:
    """File, line, field, limit and remedy; nothing is guessed, and no count is written out before it is checked."""
    lines = [line, {**line, **change}] if header is None else [header, line, {**line, **change}]
    file = write_file(*lines)
    with pytest.raises(BadTrace) as refused:
        read_trace(file)
    assert (refused.value.path, refused.value.line, refused.value.field) == (str(file), len(lines), field)
    assert limit in refused.value.limit
    assert str(refused.value).startswith(f"{file}, line {len(lines)}: {field} is ")
    assert str(refused.value).endswith(f"; {refused.value.remedy}")


@pytest.mark.parametrize(
    ("header", "line", "field"),
    [
        (None, MOONCAKE_LINE, "timestamp"),
        (KVRUN1, KVRUN1_LINE, "h"),
        (KVSEG1, KVSEG1_LINE, "seg"),
        (RECORDING, RECORDED_LINE, "output_tokens"),
    ],
)
def test_a_field_that_is_not_there_is_called_missing(
    write_file: WriteFile, header: dict[str, object] | None, line: dict[str, object], field: str
) -> None:
    """And not by a value that the line does not have."""
    cut = {name: value for name, value in line.items() if name != field}
    lines = [line, cut] if header is None else [header, line, cut]
    with pytest.raises(BadTrace, match=f"line {len(lines)}: {field} is missing; correct the line"):
        read_trace(write_file(*lines))


@pytest.mark.parametrize("header", [KVRUN1, KVSEG1, RECORDING, AZURE])
def test_a_header_alone_has_no_requests(write_file: WriteFile, header: object) -> None:
    """A recording in which nothing came to an end."""
    with pytest.raises(CommandError, match="has no requests, only a header"):
        read_lengths(write_file(header))


@pytest.mark.parametrize(
    "text", ["", "\n", "hello\n", "[1]\n", "{}\n", '{"format": "kvrun2"}\n', "1" * 5000, "[" * 5000]
)
def test_what_is_no_trace_is_refused(write_file: WriteFile, text: str) -> None:
    """By its first line; the message names the formats and stays short."""
    with pytest.raises(BadTrace, match="line 1") as refused:
        read_trace(write_file(text))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "cells",
    ["2023-11-16 18:17:03.9,1", "yesterday,1,2", "2023-11-16 18:17:03+01:00,1,2", "2023-11-16,x,2", "2023-11-16,1,-2"],
)
def test_a_bad_line_of_azure_is_refused(write_file: WriteFile, cells: str) -> None:
    """Too few cells, no time, a time of another kind, no number."""
    with pytest.raises(BadTrace, match="line 2"):
        read_lengths(write_file(AZURE, cells))


def test_a_later_version_of_a_recording_is_refused(write_file: WriteFile) -> None:
    """Its fields may mean something else."""
    with pytest.raises(BadTrace, match="kvharbor_trace is '2', must be 1"):
        read_trace(write_file({"kvharbor_trace": 2, "block_tokens": 64}))


def test_a_cut_off_gzip_file_is_told_as_such(write_file: WriteFile) -> None:
    """A download that was not finished."""
    file = write_file(*[MOONCAKE_LINE] * 50, packed=True)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(BadTrace, match="must be whole gzip data; fetch or compress it again"):
        read_trace(file)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """As every command says it."""
    with pytest.raises(CommandError, match=r"cannot read .*: No such file or directory"):
        read_trace(tmp_path / "absent")
