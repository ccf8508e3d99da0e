"""Hints as callers write them: what is none is refused by name, before anything is sent."""

from typing import Any

import pytest

from kvharbor.client import ExpectedReuse, Hints, InvalidField
from kvharbor.client.hints import hints_message


@pytest.mark.parametrize(
    ("hints", "field"),
    [
        ("much", "hints"),
        (None, "hints"),
        (Hints(expected_reuse=3), "hints.expected_reuse"),  # type: ignore[arg-type]
        (Hints(retention_s=-1), "hints.retention_s"),
        (Hints(retention_s=float("nan")), "hints.retention_s"),
        (Hints(priority=2**31), "priority"),
    ],
)
def test_wrong_hints_are_named(hints: Any, field: str) -> None:
    """With the value, what it must be, and what to do."""
    with pytest.raises(InvalidField) as refused:
        hints_message(hints)
    assert refused.value.metadata["field"] == field


def test_no_hints_are_not_sent() -> None:
    """And what is unknown is not said."""
    assert hints_message(Hints()) is None
    message = hints_message(Hints(expected_reuse=ExpectedReuse.MUCH))
    assert message is not None
    assert not message.HasField("retention")
