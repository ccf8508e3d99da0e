"""What a life keeps comes back, also to a process of another version."""

from kvharbor.server.keeper import Unkept
from kvharbor.server.life import Life


def test_a_life_goes_on_as_it_was_kept() -> None:
    keeper, life = Unkept(), Life.begun(2**30)
    first = life.next_pool_number(keeper)
    life.restarts["killed"] = 2
    life.keep(keeper)
    again = Life.kept(keeper)
    assert again == life
    assert again is not None
    assert (first, again.restart_count) == (1, 2)
    assert again.next_pool_number(keeper) == 2


def test_what_another_version_has_kept_is_no_obstacle() -> None:
    """An upgrade or its undoing may meet facts that it does not know, or miss some that it does."""
    keeper, life = Unkept(), Life.begun(2**30)
    life.keep(keeper)
    meta = keeper.kept["epoch"].meta
    del meta["stall_count"]
    keeper.keep("epoch", {**meta, "invented_later": 1})
    assert Life.kept(keeper) == life


def test_without_anything_kept_there_is_no_life() -> None:
    assert Life.kept(Unkept()) is None
