"""`kvharbor simulate`: numbers worked out by hand.

A 13B model (40 layers, 40 KV heads of 128, fp16) on a card of 16 GB, with slots of 2,048 tokens.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvharbor.server.cli import app
from kvharbor.server.errors import CommandError
from kvharbor.server.simulate.drawn import Lengths, Span, drawn
from kvharbor.server.simulate.fits import bytes_needed, fit
from kvharbor.server.simulate.layouts import Layout
from kvharbor.server.simulate.room import ModelShape, Room
from kvharbor.server.simulate.waits import waits
from trace_files import asked, trace_of

MODEL = ("--memory", "16GB", "--layers", "40", "--kv-heads", "40", "--head-dim", "128")
TOKEN_BYTES = 2 * 40 * 40 * 128 * 2


def simulated(*arguments: str) -> dict[str, dict[str, float]]:
    """Runs the command and returns its layouts by name."""
    done = CliRunner().invoke(app, ["simulate", *MODEL, *arguments, "--json"])
    assert done.exception is None
    return {one["layout"]: one for one in json.loads(done.stdout)["layouts"]}


def test_a_token_of_the_13b_model_takes_819200_bytes() -> None:
    """K and V, 40 layers, 5,120 elements each, two bytes: a slot of 2,048 tokens is 1.68 GB, not 2.8."""
    assert ModelShape(40, 40, 128).token_bytes == TOKEN_BYTES == 819_200
    assert 2_048 * TOKEN_BYTES == 1_677_721_600
    assert ModelShape(1, 1, 1, element_bits=4).token_bytes == 1


def test_the_weights_in_fp16_do_not_fit_on_the_card() -> None:
    """26 GB: it says so, and what would."""
    failed = CliRunner().invoke(app, ["simulate", *MODEL, "--weights", "26GB"])
    assert isinstance(failed.exception, CommandError)
    assert "leave no room for KV" in str(failed.exception)
    assert "4 bits: half a byte" in str(failed.exception)


def test_with_8_bit_weights_there_is_one_slot() -> None:
    """3 GB are left: one slot of 1.68 GB. Paged, 228 blocks of 16 tokens: 7 requests of 500 tokens, 32 blocks."""
    found = simulated("--weights", "13GB", "--block-tokens", "16", "--prompt-tokens", "150", "--output-tokens", "350")
    assert [found["static 2,048"]["at_once"], found["paged 16"]["at_once"]] == [1, 7]


def test_with_4_bit_weights_paging_serves_four_times_as_many() -> None:
    """9.5 GB: 5 slots, or 724 blocks of 13,107,200 bytes, which are 22 requests of 32 blocks.

    With 128 of the 150 prompt tokens in common, 8 blocks, the others need 24: (724 - 8) / 24 = 29.
    """
    found = simulated(
        *("--weights", "6.5GB", "--block-tokens", "16", "--prompt-tokens", "150", "--output-tokens", "350"),
        *("--shared-tokens", "128", "--concurrency", "22"),
    )
    static, paged, shared = found["static 2,048"], found["paged 16"], found["shared 16"]
    assert [one["at_once"] for one in (static, paged, shared)] == [5, 22, 29]
    # Reserved, never written: 1,548 tokens a slot; 12 tokens of a last block.
    assert static["unused_bytes"] == 5 * (2_048 - 500) * TOKEN_BYTES
    assert paged["unused_bytes"] == 22 * 12 * TOKEN_BYTES
    assert shared["unused_bytes"] == 29 * 12 * TOKEN_BYTES
    assert static["written_bytes"] == 5 * 500 * TOKEN_BYTES
    assert paged["written_bytes"] == 22 * 500 * TOKEN_BYTES
    assert shared["written_bytes"] == (128 + 29 * 372) * TOKEN_BYTES
    for one in (static, paged, shared):
        assert one["written_bytes"] + one["unused_bytes"] + one["left_over_bytes"] == 9_500_000_000
    # What 22 at once need.
    assert static["needed_bytes"] == 22 * 2_048 * TOKEN_BYTES
    assert paged["needed_bytes"] == 22 * 32 * 16 * TOKEN_BYTES
    assert shared["needed_bytes"] == (8 + 22 * 24) * 16 * TOKEN_BYTES


def test_outputs_of_200_to_500_tokens_fit_by_their_own_lengths() -> None:
    """Blocks are counted for each request: between what the longest and the shortest would allow, 724/41 and 724/22."""
    found = simulated(
        "--weights", "6.5GB", "--block-tokens", "16", "--prompt-tokens", "150", "--output-tokens", "200-500"
    )
    paged = found["paged 16"]
    assert 724 // 41 <= paged["at_once_least"] < paged["at_once"] < paged["at_once_most"] <= 724 // 22


def test_the_same_seed_draws_the_same_lengths() -> None:
    """And all of them lie in their span."""
    lengths = Lengths(Span(3, 5), Span(7, 7), shared_tokens=4)
    trace = drawn(lengths, 2, seed=1)
    assert trace == drawn(lengths, 2, seed=1) != drawn(lengths, 2, seed=2)
    assert {one.input_tokens for one in trace.requests} == {3, 4, 5}
    # As much of what is shared as the prompt has, in whole blocks.
    assert {len(one.block_names) for one in trace.requests if one.input_tokens == 3} == {1}


def test_a_prefix_takes_room_once_for_all_that_run_at_once() -> None:
    """In five blocks: ab, ac and xy where a is shared, else ab and ac."""
    requests, room = trace_of("ab", "ac", "xy", "q").requests, Room(5, 0, 1)
    shared, paged = (fit(requests, layout, room) for layout in (Layout.shared(1), Layout.paged(1)))
    assert (shared.least_count, shared.most_count) == (3, 3)
    assert (paged.least_count, paged.most_count) == (2, 2)
    assert (shared.left_over_bytes, paged.left_over_bytes) == (0, 1)


def test_a_trace_that_fits_as_a_whole_says_so() -> None:
    """There is no telling how many more would fit."""
    found = fit(trace_of("ab", "cd").requests, Layout.paged(1), Room(100, 0, 1))
    assert (found.is_all, found.most_count, found.left_over_bytes) == (True, 2, 96)


def test_requests_longer_than_a_slot_cannot_be_served() -> None:
    """They are counted, and no part of the rest."""
    found = fit(trace_of("abc", "d", "e", "f").requests, Layout.static(2), Room(4, 0, 1))
    assert (found.too_long_count, found.served_count, found.most_count) == (1, 3, 2)


def test_more_at_once_than_there_are_requests_is_refused() -> None:
    """It would be told too little."""
    with pytest.raises(CommandError, match="only 2 can be served"):
        bytes_needed(trace_of("ab", "cd").requests, Layout.paged(1), 1, 3)


def test_requests_wait_by_how_memory_is_given_out() -> None:
    """Four tokens of memory; three requests for ab and one of output, 10 ms each, a millisecond apart.

    In one slot, or in blocks of their own, they run one after the other. Sharing ab, the second runs beside the first,
    and the third in its turn when the first has ended.
    """
    trace = trace_of(*[asked("ab", at_ms=at, output_tokens=1, duration_ms=10) for at in (0, 1, 2)])
    room = Room(4, 0, 1)
    assert waits(trace.requests, Layout.static(4), room).waited_ms == 9 + 18
    assert waits(trace.requests, Layout.paged(1), room).waited_ms == 9 + 18
    assert waits(trace.requests, Layout.shared(1), room).waited_ms == 8


def test_lengths_alone_are_compared_without_sharing(tmp_path: Path) -> None:
    """A trace of Azure's kind has no blocks."""
    file = tmp_path / "azure.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:17:03.9799600,480,10\n" * 50)
    found = simulated("--weights", "6.5GB", "--trace", str(file), "--slot-tokens", "2048")
    assert list(found) == ["static 2,048", "paged 64"]
    assert found["static 2,048"]["waited_requests"] == 45


def test_a_slot_holds_the_longest_request_of_the_trace(tmp_path: Path) -> None:
    """Unless another size is asked for: none is left out."""
    file = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:17:03.9799600,{prompt},10\n" for prompt in (480, 3_000, 20)]
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    found = simulated("--weights", "6.5GB", "--trace", str(file))
    assert found["static 3,010"]["too_long_requests"] == 0
    assert simulated("--trace", str(file), "--slot-tokens", "500")["static 500"]["too_long_requests"] == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*MODEL, "--token-bytes", "100"), "--token-bytes says all of it: leave out --layers, --kv-heads, --head-dim"),
        (("--memory", "1GB", "--token-bytes", "100", "--kv-bits", "8"), "leave out --kv-bits"),
        ((*MODEL, "--prompt-tokens", "100-200", "--shared-tokens", "201"), "no prompt has more than 200 tokens"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: tuple[str, ...], told: str) -> None:
    """Not one of them is left aside."""
    failed = CliRunner().invoke(app, ["simulate", *arguments])
    assert told in str(failed.exception)


@pytest.mark.parametrize(
    "arguments",
    [("--output-tokens", "500-200"), ("--output-tokens", "0"), ("--prompt-tokens", "few"), ("--weights", "6")],
)
def test_a_wrong_option_is_named(arguments: tuple[str, str]) -> None:
    """In one line."""
    failed = CliRunner().invoke(app, ["simulate", *MODEL, *arguments])
    assert str(failed.exception).startswith(arguments[0])
