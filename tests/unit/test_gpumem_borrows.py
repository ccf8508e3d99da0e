"""Uses of a mapping, counted by objects that live as long."""

from kvharbor.gpumem.borrows import Borrows


def test_a_borrow_counts_as_long_as_anybody_has_it() -> None:
    """[M8]: no call gives it back, so that no view can forget to."""
    borrows = Borrows()
    first, second = borrows.lend(borrows), borrows.lend(borrows)
    also_first = first
    assert borrows.count == 2
    del first
    assert borrows.count == 2
    del also_first, second
    assert borrows.count == 0
