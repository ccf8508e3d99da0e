"""Real traces: the exact integers that another implementation of the same model has found.

The agent trace asks for three million blocks, which the pool takes four seconds for on an idle machine. What adds
little to the others runs with KVHARBOR_ALL_TRACES=1.
"""

import os
from functools import cache

import pytest

from kvharbor.server.replay.modes import Mode
from kvharbor.server.replay.run import Setting, replay
from kvharbor.server.traces.reading import read_trace
from kvharbor.server.traces.trace import Trace
from trace_files import real_trace

pytestmark = pytest.mark.slow

CONVERSATION, AGENTS, RAG = "mooncake_conversation.jsonl.gz", "claudecode_a.jsonl.gz", "ragpulse_a.jsonl.gz"
SEQUENTIAL, CONCURRENT = Mode.SEQUENTIAL, Mode.CONCURRENT
long_replay = pytest.mark.skipif(
    not os.environ.get("KVHARBOR_ALL_TRACES"), reason="takes seconds; set KVHARBOR_ALL_TRACES=1 to run it"
)


@cache
def trace_named(name: str) -> Trace:
    return read_trace(real_trace(name))


@pytest.mark.parametrize(
    ("name", "request_count", "asked", "unique", "ceiling"),
    [
        (CONVERSATION, 12_031, 288_500, 182_790, 0.3664),
        (AGENTS, 2_207, 3_126_911, 114_167, 0.9635),
        (RAG, 3_553, 160_006, 108_930, 0.3192),
    ],
)
def test_traces_ask_for_what_is_known_of_them(
    name: str, request_count: int, asked: int, unique: int, ceiling: float
) -> None:
    """Requests, blocks asked for, distinct ones, and what memory without end would have."""
    trace = trace_named(name)
    assert (len(trace.requests), trace.asked_block_count, trace.unique_block_count) == (request_count, asked, unique)
    assert round(trace.hit_ceiling, 4) == ceiling


@pytest.mark.parametrize(
    ("name", "mode", "block_count", "hits", "evictions"),
    [
        (CONVERSATION, SEQUENTIAL, 9_140, 56_483, 222_877),
        pytest.param(CONVERSATION, SEQUENTIAL, 45_698, 101_978, 140_824, marks=long_replay),
        (CONVERSATION, CONCURRENT, 9_140, 57_270, 222_150),
        (RAG, SEQUENTIAL, 5_447, 51_060, 103_499),
        (AGENTS, SEQUENTIAL, 5_709, 1_812_320, 1_308_882),
        pytest.param(AGENTS, SEQUENTIAL, 28_542, 3_003_611, 94_758, marks=long_replay),
        pytest.param(AGENTS, CONCURRENT, 5_709, 1_600_125, 1_521_084, marks=long_replay),
    ],
)
def test_lru_of_the_real_pool(name: str, mode: Mode, block_count: int, hits: int, evictions: int) -> None:
    """Tail first, by the time of release."""
    outcome = replay(trace_named(name), Setting("lru", block_count, mode))
    assert (outcome.hit_block_count, outcome.evicted_block_count) == (hits, evictions)
    assert outcome.refused_request_count == 0


# The best ratio of LRU, FIFO, LFU, S3-FIFO, ARC and SIEVE at each capacity, as the traces' own page has them.
@pytest.mark.parametrize(
    ("name", "block_count", "best"),
    [
        (CONVERSATION, 1_828, 0.0767),
        (CONVERSATION, 9_140, 0.2101),
        (CONVERSATION, 18_279, 0.2843),
        (CONVERSATION, 45_698, 0.3535),
        pytest.param(AGENTS, 2_855, 0.2689, marks=long_replay),
        pytest.param(AGENTS, 5_709, 0.5796, marks=long_replay),
        pytest.param(AGENTS, 11_417, 0.8636, marks=long_replay),
        pytest.param(AGENTS, 28_542, 0.9606, marks=long_replay),
        (RAG, 1_090, 0.3192),
    ],
)
def test_auto_is_as_good_as_the_best_known_policy(name: str, block_count: int, best: float) -> None:
    """No policy of the six is the best everywhere; `auto` has at least 0.98 of the best one at each."""
    trace = trace_named(name)
    outcome = replay(trace, Setting("auto", block_count, SEQUENTIAL))
    assert outcome.refused_request_count == 0
    assert outcome.hit_block_count / trace.asked_block_count >= 0.98 * best


@pytest.mark.parametrize(
    ("name", "block_count", "hits", "evictions"),
    [
        (CONVERSATION, 1_828, 28_989, 257_683),
        (CONVERSATION, 45_698, 102_116, 140_686),
        (RAG, 1_090, 50_980, 107_936),
        pytest.param(AGENTS, 2_855, 832_926, 2_291_130, marks=long_replay),
    ],
)
def test_auto_of_the_real_pool(name: str, block_count: int, hits: int, evictions: int) -> None:
    """[H1] Block by block the same, however it is computed, as long as nobody gives hints."""
    outcome = replay(trace_named(name), Setting("auto", block_count, SEQUENTIAL))
    assert (outcome.hit_block_count, outcome.evicted_block_count) == (hits, evictions)


@pytest.mark.parametrize(
    ("name", "mode", "block_count", "hits"),
    [
        (CONVERSATION, SEQUENTIAL, 9_140, 105_710),
        (CONVERSATION, SEQUENTIAL, 45_698, 105_710),
        (CONVERSATION, CONCURRENT, 9_140, 105_531),
        (RAG, SEQUENTIAL, 5_447, 51_076),
        (AGENTS, SEQUENTIAL, 5_709, 2_280_948),
        pytest.param(AGENTS, SEQUENTIAL, 28_542, 3_012_744, marks=long_replay),
        pytest.param(AGENTS, CONCURRENT, 5_709, 1_832_622, marks=long_replay),
    ],
)
def test_the_offline_optimum(name: str, mode: Mode, block_count: int, hits: int) -> None:
    """What nobody can beat."""
    assert replay(trace_named(name), Setting("min", block_count, mode)).hit_block_count == hits
