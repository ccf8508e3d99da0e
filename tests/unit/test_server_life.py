"""What a life keeps comes back, also to a process of another version."""

from kvharbor.server.configuration.settings import Settings
from kvharbor.server.pools.life import KeptSetting, Life
from kvharbor.server.supervision.keeper import Unkept


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


def test_settings_that_a_life_keeps_are_compared_as_they_were_set() -> None:
    """One that another version has begun knows none of them, and what it does not know it does not tell."""
    before = Settings.model_validate({"memory": "1GiB", "devices": ["GPU-" + "0" * 36]})
    now = Settings.model_validate({"memory": "50%", "arena": "cuda_vmm", "devices": ["GPU-" + "1" * 36]})
    life = Life.begun(2**30)
    assert life.kept_settings(now.lasting) == ()
    life.settings = before.lasting
    assert life.kept_settings(before.lasting) == ()
    assert life.kept_settings(now.lasting) == (
        KeptSetting("memory", "1073741824 bytes (1.0 GiB)", "50%"),
        KeptSetting("arena", "cuda_ipc", "cuda_vmm"),
        KeptSetting("devices", "GPU-" + "0" * 36, "GPU-" + "1" * 36),
    )


def test_without_anything_kept_there_is_no_life() -> None:
    assert Life.kept(Unkept()) is None
