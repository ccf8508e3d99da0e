"""The figures of chaos, from times that are known."""

from chaos.times import Outage, Times, quantile


def times() -> Times:
    """Two deaths before one return, then a cold start."""
    noted = Times(owner_deaths=[1.0, 1.25, 5.0], owner_stops=[(8.0, 9.0)])
    for at, epoch in ((0.5, "a"), (2.0, "a"), (6.0, "b")):
        noted.returned(at, epoch)
    return noted


def test_an_outage_had_a_standby_that_was_made_and_not_killed_before_it() -> None:
    """One that has died is made again after the next return."""
    first, cold = times().outages()
    assert (times().had_standby(cold, 2.5), times().had_standby(first, 2.5)) == (True, False)
    killed = times()
    killed.standby_deaths = [1.0, 4.0]
    assert (killed.had_standby(cold, 2.5), killed.had_standby(first, 0.1)) == (False, False)
    killed.standby_deaths = [1.0, 7.0]
    assert killed.had_standby(cold, 2.5)


def test_an_outage_lasts_from_the_first_death_to_the_first_answer() -> None:
    """A death before the answer belongs to the same outage; a new epoch is a cold start."""
    assert times().outages() == [
        Outage(0.5, 1.0, 1.25, 2.0, cold=False),
        Outage(3.0, 5.0, 5.0, 6.0, cold=True),
    ]
    assert times().serves()
    assert not Times(owner_deaths=[1.0], returns=[0.5], epochs=["a"]).serves()


def test_a_reclaim_counts_as_undisturbed_only_with_a_service_all_the_while() -> None:
    """Not while it is away, and not while it is stopped; the end of a pid's earlier owner is not taken for its own."""
    noted = times()
    for pid, at in ((7, 2.5), (7, 3.5), (8, 2.5), (9, 8.5)):
        noted.vanished([pid], at)
    undisturbed, disturbed = noted.reclaims([(7, 3.0), (8, 1.5), (9, 8.25), (10, 3.0)])
    assert undisturbed == [0.5]
    assert disturbed == [1.0, 0.25]


def test_a_quantile_is_one_of_the_values() -> None:
    """The 99th of a hundred is the last but one; nothing has none."""
    assert quantile(range(100), 0.99) == 98
    assert quantile([3.0], 0.5) == 3.0
    assert quantile([], 0.5) is None
