"""Tokens on their way to the wire."""

from typing import Any

import numpy as np
import pytest
import torch

from kvharbor.client import InvalidField
from kvharbor.client.tokens import prompt_bytes, token_bytes

EXPECTED = b"\x01\x00\x00\x00\x02\x01\x00\x00\xff\xff\x00\x00"
TOKENS = [1, 258, 65535]


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        EXPECTED,
        bytearray(EXPECTED),
        memoryview(EXPECTED),
        np.array(TOKENS),
        np.array(TOKENS, dtype=np.uint16),
        np.array(TOKENS, dtype=">u4"),
        np.array([1, 0, 258, 0, 65535])[::2],
        [np.int64(token) for token in TOKENS],
        torch.tensor(TOKENS),
        torch.tensor(TOKENS, dtype=torch.int32),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_every_form_of_tokens_becomes_the_same_little_endian_uint32(tokens: Any) -> None:
    """Lists, arrays of any integer type, order and stride, tensors and ready bytes."""
    assert token_bytes(tokens) == EXPECTED


def test_the_range_ends_at_the_largest_uint32() -> None:
    """2**32 - 1 is a token, the next number is none."""
    assert token_bytes([2**32 - 1]) == token_bytes(np.array([2**32 - 1])) == b"\xff\xff\xff\xff"


@pytest.mark.parametrize(
    ("tokens", "field"),
    [
        ([1, 2, -1], "token_ids[2]"),
        ([1, 2**32], "token_ids[1]"),
        ([1, "two"], "token_ids[1]"),
        ([1, 2.5], "token_ids[1]"),
        (np.array([3, -4]), "token_ids[1]"),
        (np.array([2**32, 1]), "token_ids[0]"),
        (np.array([1.0, 2.0]), "token_ids"),
        (np.array([True]), "token_ids"),
        (np.array([[1, 2]]), "token_ids"),
        (np.array(3), "token_ids"),
        (torch.tensor([-1]), "token_ids[0]"),
        (torch.tensor([1.5]), "token_ids"),
        (b"\x01\x00\x00", "token_ids"),
        ("hello", "token_ids"),
        (None, "token_ids"),
        (7, "token_ids"),
    ],
)
def test_what_is_no_token_is_refused_by_name(tokens: Any, field: str) -> None:
    """The error names the field, and the position where there is one."""
    with pytest.raises(InvalidField) as refused:
        token_bytes(tokens)
    assert refused.value.metadata["field"] == field
    assert {"value", "limit", "remedy"} < set(refused.value.metadata)


@pytest.mark.parametrize("tokens", [[], b"", np.array([], dtype=np.int64)])
def test_a_prompt_has_at_least_one_token(tokens: Any) -> None:
    """Where tokens may be missing they encode to nothing; as a prompt they are refused."""
    assert token_bytes(tokens) == b""
    with pytest.raises(InvalidField, match="at least one token"):
        prompt_bytes(tokens)


def test_the_message_of_a_refusal_stays_short() -> None:
    """A wrong prompt of a million characters must not become a message of a megabyte."""
    with pytest.raises(InvalidField) as refused:
        token_bytes([1, "x" * 10**6])  # type: ignore[list-item]
    assert len(str(refused.value)) < 300
