"""The memory for pools, place by place: where parts go, what is left for them, and what is refused."""

import pytest

from kvharbor.gpumem import InsufficientMemory
from kvharbor.server.memory.budget import HOST, Budget


def counting(left: dict[str, int], piece_bytes: int = 1) -> Budget:
    """Returns a budget of places that all give pieces of one size."""
    return Budget(left, dict.fromkeys(left, piece_bytes))


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
    budget = counting(left)
    assert budget.spread(part_count) == tuple(places)


def test_the_room_of_a_part_is_that_of_the_tightest_place() -> None:
    """All parts have one size."""
    budget = counting({"a": 30, "b": 12, "c": 1})
    assert budget.room_bytes("aaab") == 10
    assert budget.room_bytes("abb") == 6


def test_a_place_that_cannot_have_its_parts_is_named() -> None:
    """With what it needs, what it has, and the remedy; the host's is the setting itself."""
    budget = counting({"a": 30, "b": 12})
    budget.check("ab", 12, "-")
    with pytest.raises(InsufficientMemory) as refused:
        budget.check("abb", 7, "come again")
    assert str(refused.value) == "needs 14 bytes, the setting memory for device b leaves 12 bytes: come again"
    with pytest.raises(InsufficientMemory, match="needs 9 bytes, the setting memory leaves 8 bytes"):
        counting({HOST: 8}).check([HOST, HOST, HOST], 3, "-")


def test_what_is_booked_is_gone_until_it_is_given_back() -> None:
    """Place by place, a part at a time."""
    budget = counting({"a": 30, "b": 12})
    budget.book("aab", 5)
    assert ([budget.available_in(place) for place in budget.places], budget.available_bytes) == ([20, 7], 27)
    budget.give_back("aab", 5)
    assert (budget.available_bytes, budget.memory_bytes) == (42, 42)


def test_a_part_takes_whole_pieces_however_little_it_needs() -> None:
    """S8: what is booked is what is taken, and one place's pieces may be larger than another's."""
    budget = Budget({"a": 30, "b": 30}, {"a": 8, "b": 10})
    budget.book("ab", 1)
    assert [budget.available_in(place) for place in "ab"] == [22, 20]
    budget.check("aa", 8, "-")
    with pytest.raises(InsufficientMemory, match="needs 32 bytes, the setting memory for device a leaves 22 bytes"):
        budget.check("aa", 9, "-")
    budget.give_back("ab", 1)
    assert budget.available_bytes == 60


def test_the_room_of_a_part_can_be_booked() -> None:
    """What is left is given away in pieces too: of a rest that holds none nothing can be had."""
    budget = Budget({"a": 30}, {"a": 8})
    assert [budget.room_bytes("a" * count) for count in (1, 2, 3, 4)] == [24, 8, 8, 0]
    budget.check("aaa", budget.room_bytes("aaa"), "-")
