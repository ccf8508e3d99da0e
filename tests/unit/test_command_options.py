"""The options that commands share: where tokens come from."""

import struct
from pathlib import Path

import pytest

from kvharbor.server.commands.options import tokens_of
from kvharbor.server.errors import CommandError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


@pytest.mark.parametrize("text", ["1,2,30", "1 2 30\n", "\ufeff1\n2\n30\n", "1,\t2,\r\n30"])
def test_a_file_of_text_has_ids(file: Path, text: str) -> None:
    """Commas and white space between, with or without a mark of UTF-8 before."""
    file.write_text(text, encoding="utf-8", newline="")
    assert tokens_of(str(file), None) == [1, 2, 30]


@pytest.mark.parametrize("ids", [(1, 2, 30), (0,), (2**24 - 1,), (0x20_21_22,) * 3, (2**32 - 1,)])
def test_a_file_that_is_no_text_has_raw_tokens(file: Path, ids: tuple[int, ...]) -> None:
    """Even if most of its bytes are letters."""
    raw = struct.pack(f"<{len(ids)}I", *ids)
    file.write_bytes(raw)
    assert tokens_of(str(file), None) == raw


@pytest.mark.parametrize(
    ("text", "number", "word"),
    [
        ("1 2 x3 4", 3, "x3"),
        ("12;3", 1, "12;3"),
        ("1,2,-3,4", 3, "-3"),
        ("1.5 o.k.", 1, "1.5"),
        ("größe 12 3", 1, "größe"),
    ],
)
def test_a_mistake_in_a_text_is_told_of_and_not_taken_for_raw_tokens(
    file: Path, text: str, number: int, word: str
) -> None:
    """Of four bytes or eight, which uint32 would be as well."""
    assert len(text.encode()) % 4 == 0
    file.write_text(text, encoding="utf-8")
    with pytest.raises(CommandError) as refused:
        tokens_of(str(file), None)
    assert str(refused.value).startswith(f"{file}: '{word}', number {number}, is no token id: ")


def test_a_file_that_was_given_as_ids_is_quoted_with_the_option_for_files(file: Path) -> None:
    """The value that was meant as a path."""
    with pytest.raises(CommandError, match=r"'/data/a\.bin', number 1, is no token id: .*for a file use --tokens"):
        tokens_of(None, "/data/a.bin")
