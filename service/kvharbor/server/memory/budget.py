"""The memory that pools may have, place by place: the host, or each of several devices."""

from collections.abc import Mapping, Sequence
from typing import Final

from kvharbor.gpumem import InsufficientMemory

HOST: Final = ""
"""The one place of a service of host memory; every other place is a device, by its UUID."""


class Budget:
    """Counts what is left in each place. Memory is booked before it is taken: no two pools have the same bytes [S8].

    The places of a pool are those of its parts, by rank; several parts may share one. A place gives memory in whole
    pieces of `piece_bytes`, and it is pieces that are counted: each part takes its own, however little it needs.
    """

    def __init__(self, memory_bytes: Mapping[str, int], piece_bytes: Mapping[str, int]) -> None:
        self._memory_bytes = dict(memory_bytes)
        self._left_bytes = dict(memory_bytes)
        self._piece_bytes = dict(piece_bytes)

    @property
    def places(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self._memory_bytes)

    @property
    def memory_bytes(self) -> int:
        """Memory for pools, in all."""
        return sum(self._memory_bytes.values())

    @property
    def available_bytes(self) -> int:
        """Of that, what is not booked."""
        return sum(self._left_bytes.values())

    def available_in(self, place: str) -> int:
        """What is not booked in one place."""
        return self._left_bytes[place]

    def spread(self, part_count: int) -> tuple[str, ...]:
        """Returns the places for so many parts at which each of them can have most."""
        shares = dict.fromkeys(self._left_bytes, 0)
        places = []
        for _ in range(part_count):
            place = max(shares, key=lambda each: self._left_bytes[each] // (shares[each] + 1))
            shares[place] += 1
            places.append(place)
        return tuple(places)

    def room_bytes(self, places: Sequence[str]) -> int:
        """Returns how much every part can have in these places."""
        return min(self._whole_pieces(place, self._left_bytes[place] // places.count(place)) for place in set(places))

    def check(self, places: Sequence[str], size_bytes: int, remedy: str) -> None:
        """Raises InsufficientMemory, which names the remedy, unless every part can have so much."""
        for place in dict.fromkeys(places):
            needed_bytes = places.count(place) * self._taken_bytes(place, size_bytes)
            if needed_bytes > self._left_bytes[place]:
                limit = "the setting memory" if place == HOST else f"the setting memory for device {place}"
                raise InsufficientMemory(
                    needed_bytes,
                    available_bytes=self._left_bytes[place],
                    limited_by=limit,
                    remedy=remedy,
                )

    def book(self, places: Sequence[str], size_bytes: int) -> None:
        """Takes so much for every part, whatever is left: what is there already has to be counted."""
        for place in places:
            self._left_bytes[place] -= self._taken_bytes(place, size_bytes)

    def give_back(self, places: Sequence[str], size_bytes: int) -> None:
        """Gives back what was booked."""
        for place in places:
            self._left_bytes[place] += self._taken_bytes(place, size_bytes)

    def _whole_pieces(self, place: str, size_bytes: int) -> int:
        return size_bytes // self._piece_bytes[place] * self._piece_bytes[place]

    def _taken_bytes(self, place: str, size_bytes: int) -> int:
        return -self._whole_pieces(place, -size_bytes)
