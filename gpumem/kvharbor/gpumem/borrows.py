"""Who still uses a mapping of device memory, by objects that live as long as the use."""

import weakref


class Borrow:
    """One use of a mapping. Whoever keeps the object keeps the mapping open; dropping it is giving back."""

    __slots__ = ("__weakref__", "mapping")

    def __init__(self, mapping: object) -> None:
        self.mapping = mapping


class Borrows:
    """The living borrows of one mapping."""

    def __init__(self) -> None:
        self._living: weakref.WeakSet[Borrow] = weakref.WeakSet()

    def lend(self, mapping: object) -> Borrow:
        """Returns a new borrow of `mapping`, counted until the last reference to it is gone."""
        borrow = Borrow(mapping)
        self._living.add(borrow)
        return borrow

    @property
    def count(self) -> int:
        """How many live now."""
        return len(self._living)
