"""All the topics, one after the other."""

import queue
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Final

from kvharbor.server.doctor import (
    arenas,
    devices,
    driver,
    environment,
    kernel,
    limits,
    memory,
    packages,
    place,
    transport,
    worker,
)
from kvharbor.server.doctor.check import ANY_ARENA, ON_DEVICES, UNFORESEEN, Check, Finding, State, error_text
from kvharbor.server.doctor.surroundings import Surroundings

TOPICS = (packages, place, kernel, limits, memory, environment, transport, driver, devices, arenas, worker)
DEADLINE_S: Final = 90.0
"""For one check. The longest is the trial of an arena, which gives another process 60 s."""
_HANGS: Final = "if the driver hangs, the kernel's log (dmesg) says of what: reset the device, or use --arena host"


def examined(around: Surroundings) -> Iterator[Finding]:
    """Yields what each check finds, as it is found. A topic that cannot even tell its checks is a finding as well.

    A check that takes longer than DEADLINE_S ends its topic, with a finding; its thread stays behind.
    """
    for topic in TOPICS:
        yield from _Examination(topic, around).findings()


class _Examination:
    """One topic, looked at on a thread: a driver may never come back from a call."""

    def __init__(self, topic: ModuleType, around: Surroundings) -> None:
        self._name = topic.__name__.rpartition(".")[2]
        self._checks: Iterator[Check] = topic.checks(around)
        self._under_way: Check | None = None
        self._found: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def findings(self) -> Iterator[Finding]:
        threading.Thread(target=self._look, name=f"doctor-{self._name}", daemon=True).start()
        try:
            while (finding := self._found.get(timeout=DEADLINE_S)) is not None:
                yield finding
        except queue.Empty:
            yield self._overdue()

    def _look(self) -> None:
        try:
            for check in self._checks:
                self._under_way = check
                self._found.put(check.finding())
                self._under_way = None
        except Exception as failure:
            self._found.put(Finding(self._name, State.FAIL, error_text(failure), UNFORESEEN, ANY_ARENA))
        self._found.put(None)

    def _overdue(self) -> Finding:
        check, found = self._under_way, f"no answer within {DEADLINE_S:g} s"
        if check is None:
            # Between two checks it is the devices that are listed.
            return Finding(self._name, State.FAIL, found, _HANGS, ON_DEVICES)
        return Finding(check.name, State.FAIL, found, _HANGS, check.needed_by)
