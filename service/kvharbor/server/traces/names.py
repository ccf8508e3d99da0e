"""Names of blocks: from what each holds, behind what the ones before it hold."""

from array import array
from collections.abc import Hashable, Iterable

_NO_PARENT = -1


class Names:
    """Gives each distinct prefix of blocks a number, counting from 0."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, Hashable], int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def of(self, contents: Iterable[Hashable]) -> "array[int]":
        """Returns the names of a request's blocks.

        That a name depends on its parent makes no difference where contents are names of whole prefixes already; it
        makes one where a file is wrong about that, and keeps all that read the trace agreed on what is a hit.
        """
        names = self._names
        parent = _NO_PARENT
        found = array("I")
        for content in contents:
            parent = names.setdefault((parent, content), len(names))
            found.append(parent)
        return found
