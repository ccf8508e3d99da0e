"""Bounding the number of series: the largest are named, and a name is kept."""

from kvharbor.server.metrics.named_series import OTHER, NamedSeries


def test_the_largest_have_a_name() -> None:
    """As many as the limit allows, by size."""
    assert NamedSeries[str](2, OTHER).choose({"a": 1, "b": 3, "c": 2}) == {"b", "c"}


def test_a_name_is_kept_while_its_key_exists() -> None:
    """A counter that moved to "other" and back would look like a restart each time."""
    series = NamedSeries[str](2, OTHER)
    series.choose({"a": 1, "b": 3, "c": 2})
    assert series.choose({"a": 9, "b": 0, "c": 0}) == {"b", "c"}


def test_a_key_that_has_gone_makes_room() -> None:
    """For the largest of the others."""
    series = NamedSeries[str](2, OTHER)
    series.choose({"b": 3, "c": 2})
    assert series.choose({"a": 1, "c": 2, "d": 5}) == {"c", "d"}


def test_one_that_is_called_like_the_rest_is_told_with_it() -> None:
    """Two series of one name would be refused by the reader."""
    assert NamedSeries[str](2, OTHER).choose({OTHER: 7, "a": 1}) == {"a"}


def test_without_a_limit_above_zero_nobody_has_a_name() -> None:
    """0 turns labels off."""
    assert NamedSeries[str](0, OTHER).choose({"a": 1}) == frozenset()
