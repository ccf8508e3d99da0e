"""What a worker does, against a service that runs: whether memory crosses into this container is seen nowhere else."""

import os
from collections.abc import Iterator
from typing import Final

from kvharbor.client import HarborError, InsufficientMemory, ServiceUnreachable, connect
from kvharbor.gpumem import DataType, Layout, Mapped
from kvharbor.gpumem.stamps import STAMP_BYTES, place_in
from kvharbor.server.doctor.check import ANY_ARENA, UNFORESEEN, Check, Outcome, cannot_be_told, fail, ok, skipped
from kvharbor.server.doctor.surroundings import Surroundings
from kvharbor.server.sizes import format_size

_LAYOUT: Final = Layout.attention("kvharbor-doctor", layers=1, kv_heads=1, head_dim=64, data_type=DataType.UINT8)
_SIZE_BYTES: Final = 4 * 2**20


def checks(around: Surroundings) -> Iterator[Check]:
    """Yields the one check of this topic where it was asked for: it takes memory of the service for a moment."""
    if around.attach:
        yield Check("worker.attach", lambda: _attach(around.socket or around.settings.socket), ANY_ARENA)


def _attach(socket: str) -> Outcome:
    name = f"kvharbor-doctor-{os.getpid()}"
    try:
        with connect(socket, client_name="kvharbor-doctor") as harbor:
            try:
                return _used(harbor.open_pool(name, _LAYOUT, _SIZE_BYTES).memory.mapping)
            finally:
                # Also where only the mapping failed: by then the service has made the pool.
                harbor.drop_pool(name)
    except InsufficientMemory as full:
        return skipped(f"the service has no {format_size(_SIZE_BYTES)} left to try with: {full}")
    except ServiceUnreachable as absent:
        found = str(absent).removesuffix(f": {absent.metadata.get('remedy')}")
        return cannot_be_told(found, "start the service, or name its socket with --socket")
    except HarborError as refused:
        return fail(str(refused), refused.metadata.get("remedy", "do what the error says"))


def _used(mapping: Mapped) -> Outcome:
    place, stamp = place_in(mapping), os.urandom(STAMP_BYTES)
    place.write(stamp)
    if place.read() != stamp:
        return fail(f"{mapping.kind} memory of the service is mapped, but does not keep what is written", UNFORESEEN)
    return ok(f"{mapping.kind} memory of the service is mapped, written and read here")
