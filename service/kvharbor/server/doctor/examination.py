"""All the topics, one after the other."""

from collections.abc import Iterator

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
from kvharbor.server.doctor.check import ANY_ARENA, UNFORESEEN, Finding, State, error_text
from kvharbor.server.doctor.surroundings import Surroundings

TOPICS = (packages, place, kernel, limits, memory, environment, transport, driver, devices, arenas, worker)


def examined(around: Surroundings) -> Iterator[Finding]:
    """Yields what each check finds, as it is found. A topic that cannot even tell its checks is a finding as well."""
    for topic in TOPICS:
        checks = topic.checks(around)
        try:
            for check in checks:
                yield check.finding()
        except Exception as failure:
            name = topic.__name__.rpartition(".")[2]
            yield Finding(name, State.FAIL, error_text(failure), UNFORESEEN, ANY_ARENA)
