"""What the benchmarks measure gets into the document as it is, and nothing else of the document changes."""

import json
from pathlib import Path

import pytest

from bench import page
from bench.figures import Figure, interleaved_parts, write

SLOW = Figure("slow_ms", 2_345.6, "ms", 1_000.0)
FAST = Figure("fast_over_slow", 4.321, "ratio", 4.0, "higher")
PLAIN = Figure("plain_us", 0.01234, "us", None)


def test_a_command_replaces_what_it_wrote_before_and_leaves_what_others_wrote(tmp_path: Path) -> None:
    """Both commands write into one file; a figure that is measured no more goes with the next run of its command."""
    path = tmp_path / "bench.json"
    write([SLOW], path, "bench")
    write([FAST], path, "bench-peers")
    write([PLAIN], path, "bench")
    entries = json.loads(path.read_text())
    assert [(entry["name"], entry["command"]) for entry in entries] == [
        ("fast_over_slow", "bench-peers"),
        ("plain_us", "bench"),
    ]


def test_a_table_has_a_row_a_figure_with_what_became_of_its_aim() -> None:
    """Values keep three digits that mean something; an aim is missed in bold."""
    assert page.table([SLOW, FAST, PLAIN]).splitlines()[2:] == [
        "| `slow_ms` | 2,346 ms | ≤ 1,000 | **missed** |",
        "| `fast_over_slow` | 4.32 | ≥ 4 | reached |",
        "| `plain_us` | 0.0123 µs |  |  |",
    ]


def test_only_what_is_between_the_marks_changes() -> None:
    """The rest of the document is a person's; a document without the marks, or with two pairs, is refused."""
    text = "before\n<!-- bench -->\nold\n<!-- end of bench -->\nafter <!-- bench-peers -->"
    assert page.between(text, "bench", "new") == text.replace("old", "new")
    with pytest.raises(RuntimeError, match="0 places"):
        page.between("nothing", "bench", "new")


def test_parts_of_a_sample_have_medians_of_their_own() -> None:
    """Samples are taken in turn, and each of their parts is a median."""
    values = iter([{"a": 1.0, "b": 9.0}, {"a": 5.0, "b": 7.0}, {"a": 2.0, "b": 8.0}])
    assert interleaved_parts({"one": lambda: next(values)}, 3) == {"one": {"a": 2.0, "b": 8.0}}
