"""Tests that measure time have the machine to themselves, and nobody overtakes them."""

import fcntl
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from turns import arrange, turn
from waiting import DEADLINE_S, until


def item(file: str, *marks: str) -> Any:
    """What `arrange` looks at in a test."""
    return SimpleNamespace(path=Path(file), get_closest_marker=lambda mark: mark in marks or None)


def test_long_files_come_first_and_those_to_be_alone_last() -> None:
    """Otherwise in the order that they had, and each in one piece."""
    alone = [item("alone"), item("alone", "alone"), item("both", "alone", "timeout")]
    long = [item("long"), item("long", "timeout", "slow")]
    slow = item("slow", "slow")
    others = [item("b"), item("a")]
    tests = [others[0], alone[0], long[0], others[1], alone[1], slow, long[1], alone[2]]
    arrange(tests)
    assert tests == [*long, slow, *others, alone[2], *alone[:2]]


class Runner(threading.Thread):
    """Another worker's test: once it has its turn, it runs until it is told to end."""

    def __init__(self, folder: Path, *, alone: bool = False) -> None:
        super().__init__(daemon=True)
        self.folder, self.alone = folder, alone
        self.runs, self.ends = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with turn(alone=self.alone, folder=self.folder):
            self.runs.set()
            self.ends.wait()

    def end(self) -> None:
        self.ends.set()
        self.join()


def is_anybody_waiting(folder: Path) -> bool:
    """Whether the queue's head waits for others to end."""
    with (folder / "queue").open("w") as queue:
        try:
            fcntl.flock(queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_most_tests_run_beside_each_other(tmp_path: Path) -> None:
    """And none waits."""
    both = [Runner(tmp_path) for _ in range(2)]
    assert [each.runs.wait(DEADLINE_S) for each in both] == [True, True]
    for each in both:
        each.end()


def test_who_is_alone_waits_for_others_and_they_for_it(tmp_path: Path) -> None:
    """Who comes later too, though it could run with those that run now."""
    before = Runner(tmp_path)
    assert before.runs.wait(DEADLINE_S)
    alone = Runner(tmp_path, alone=True)
    assert until(lambda: is_anybody_waiting(tmp_path))
    later = Runner(tmp_path)
    assert not alone.runs.is_set()
    before.end()
    assert alone.runs.wait(DEADLINE_S)
    assert until(lambda: is_anybody_waiting(tmp_path))
    assert not later.runs.is_set()
    alone.end()
    assert later.runs.wait(DEADLINE_S)
    later.end()
