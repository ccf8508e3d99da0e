"""Each rule of why a miss was one broken in turn: the diary of `tests/model/naive_misses.py` has to notice."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import pytest
from naive_misses import walk

from kvharbor.pool import explain
from kvharbor.pool.evicted import EvictedContents, Eviction
from kvharbor.pool.misses import Miss, MissKind
from kvharbor.pool.namespaces import Namespace, Namespaces
from kvharbor.pool.traffic import Traffic
from kvharbor.pool.writers import Writers

_remember = EvictedContents.remember
_absent = explain.absent


def other_tenants_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """[Y2] An eviction for another tenant's session names it."""

    def remember(self: EvictedContents, digests: Iterable[bytes], eviction: Eviction) -> None:
        _remember(self, digests, eviction._replace(tenant="t"))

    monkeypatch.setattr(EvictedContents, "remember", remember)


def namespaces_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """[Y2] Namespaces of other tenants are looked into."""

    def latest_of(self: Namespaces, _: str, most: int) -> Iterator[Namespace]:
        return islice(iter(self), most)

    monkeypatch.setattr(Namespaces, "latest_of", latest_of)


def forgotten_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """[Y3] Only the younger half is looked into."""
    monkeypatch.setattr(EvictedContents, "of", lambda self, digest: self._younger.get(digest))


def reach_overstated(monkeypatch: pytest.MonkeyPatch) -> None:
    """[Y3] The memory claims to reach back to the beginning."""

    def remember(self: EvictedContents, digests: Iterable[bytes], eviction: Eviction) -> None:
        since = self.complete_since
        _remember(self, digests, eviction)
        self.complete_since = since

    monkeypatch.setattr(EvictedContents, "remember", remember)


def first_eviction_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """[Y3] Of a content that was evicted twice the first time is told."""

    def remember(self: EvictedContents, digests: Iterable[bytes], eviction: Eviction) -> None:
        _remember(self, [digest for digest in digests if self.of(digest) is None], eviction)

    monkeypatch.setattr(EvictedContents, "remember", remember)


def wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """[Y1] What is being computed again is told as evicted."""
    monkeypatch.setattr(Writers, "is_computed", lambda *_: False)


def place_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """[Y1] The reason is told of the prompt's beginning."""

    def absent(*arguments: object) -> Miss:
        return _absent(*arguments)._replace(present_tokens=0)  # type: ignore[arg-type]

    monkeypatch.setattr(explain, "absent", absent)


def threshold_unmentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """[Y1] What is there and not used is told as never seen."""
    monkeypatch.setattr(explain, "unused", lambda *given: Miss(MissKind.NEVER_SEEN, given[-1], 0.0))


def matches_taken_for_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for again and still there counts as computed twice."""
    monkeypatch.setattr(Traffic, "matched", lambda self, *_: setattr(self, "recomputed_block_count", 10_000))


@pytest.mark.slow
@pytest.mark.parametrize(
    "break_rule",
    [
        other_tenants_named,
        namespaces_of_all,
        forgotten_too_soon,
        reach_overstated,
        first_eviction_kept,
        wrong_order,
        place_not_told,
        threshold_unmentioned,
        matches_taken_for_recomputed,
    ],
)
def test_a_broken_rule_is_noticed(
    break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is."""
    break_rule(monkeypatch)
    with pytest.raises(AssertionError):
        _walk_all()


def _walk_all() -> None:
    for seed in range(20):
        walk(seed, 200)
