"""The memory for pools, place by place: where parts go, what is left for them, and what is refused."""

import pytest

from kvharbor.gpumem import InsufficientMemory
from kvharbor.server.budget import HOST, Budget

MIB = 2**20


@pytest.mark.parametrize(
    ("left", "part_count", "places"),
    [
        ({"a": 10, "b": 10}, 2, "ab"),
        ({"a": 30, "b": 10}, 2, "aa"),
        ({"a": 30, "b": 10}, 4, "aaab"),
        ({"a": 1, "b": 9, "c": 5}, 3, "bcb"),
        ({HOST: 7}, 3, ["", "", ""]),
    ],
)
def test_parts_go_where_each_can_have_most(left: dict[str, int], part_count: int, places: str | list[str]) -> None:
    """The least of the shares is as large as it can be."""
    budget = Budget(left)
    assert budget.spread(part_count) == tuple(places)


def test_the_room_of_a_part_is_that_of_the_tightest_place() -> None:
    """All parts have one size."""
    budget = Budget({"a": 30, "b": 12, "c": 1})
    assert budget.room_bytes("aaab") == 10
    assert budget.room_bytes("abb") == 6


def test_a_place_that_cannot_have_its_parts_is_named() -> None:
    """With what it needs, what it has, and the remedy; the host's is the setting itself."""
    budget = Budget({"a": 30, "b": 12})
    budget.check("ab", 12, "-")
    with pytest.raises(InsufficientMemory) as refused:
        budget.check("abb", 7, "come again")
    assert str(refused.value) == "needs 14 bytes, the setting memory for device b leaves 12 bytes: come again"
    with pytest.raises(InsufficientMemory, match="needs 9 bytes, the setting memory leaves 8 bytes"):
        Budget({HOST: 8}).check([HOST, HOST, HOST], 3, "-")


def test_what_is_booked_is_gone_until_it_is_given_back() -> None:
    """Place by place, a part at a time."""
    budget = Budget({"a": 30, "b": 12})
    budget.book("aab", 5)
    assert ([budget.available_in(place) for place in budget.places], budget.available_bytes) == ([20, 7], 27)
    budget.give_back("aab", 5)
    assert (budget.available_bytes, budget.memory_bytes) == (42, 42)
