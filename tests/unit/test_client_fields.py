"""Values of a wrong kind are named by their field, whichever call they came with."""

from typing import Any

import numpy as np
import pytest

from kvharbor.client import InvalidField, Namespace
from kvharbor.client.calls import PoolCalls, whole

CALLS = PoolCalls("e.1")
NUMBERS: list[Any] = [3, np.int32(3), True]
CONTEXT: dict[str, Any] = {"namespace": Namespace(), "extra_keys": ()}


def allocate(**fields: Any) -> None:
    CALLS.allocate([1], **{**CONTEXT, "request_id": None, "wait_s": 0.0, "reserve_tokens": 0, **fields})


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("reserve_tokens", "x", "a whole number from -2**63 to 2**63 - 1"),
        ("reserve_tokens", 2**63, "a whole number from -2**63 to 2**63 - 1"),
        ("max_cached_tokens", 1.5, "a whole number from -2**63 to 2**63 - 1"),
        ("group", 7, "text that UTF-8 can hold"),
        ("request_id", "\ud800", "text that UTF-8 can hold"),
        ("wait_s", "soon", "seconds from 0 to 2**31"),
    ],
)
def test_allocate_names_what_it_cannot_send(field: str, value: Any, limit: str) -> None:
    """Field, value, limit and remedy are in the metadata, and nothing of the other fields."""
    with pytest.raises(InvalidField) as error:
        allocate(**{field: value})
    assert (field, repr(value), limit) == tuple(error.value.metadata[key] for key in ("field", "value", "limit"))
    assert error.value.metadata["remedy"]


def test_the_other_calls_name_it_too() -> None:
    """Fork, warm-up, evict and the namespace of a prompt."""
    with pytest.raises(InvalidField, match=r"^child_count is 2\.0, must be a whole number"):
        CALLS.fork("e.1.2.3", 2.0, reserve_tokens=0, group="")  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=r"^ttl_s is '1h', must be seconds"):
        CALLS.warmup([1], **CONTEXT, ttl_s="1h", name="w")  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=r"^block_id is -1, must be a whole number from 0"):
        CALLS.evict_block(-1, 0)
    with pytest.raises(InvalidField, match=r"^salt is 'tenant', must be bytes: encode it"):
        allocate(namespace=Namespace(salt="tenant"))  # type: ignore[arg-type]


def test_a_whole_number_is_one_of_any_kind_but_no_float() -> None:
    """numpy's integers are whole numbers; 20.0 may be the result of a division that was not meant."""
    assert [whole("n", number) for number in NUMBERS] == [3, 3, 1]
    with pytest.raises(InvalidField, match=r"n is 20\.0, must be a whole number: pass an int"):
        whole("n", 20.0)  # type: ignore[arg-type]
