"""The two-process test of each kind of arena: what counts in the end."""

from collections.abc import Iterator

from kvharbor.gpumem import GpumemError
from kvharbor.gpumem.arena import ArenaKind
from kvharbor.gpumem.two_process import check_arena
from kvharbor.server.doctor.check import Check, Outcome, fail, ok, skipped
from kvharbor.server.doctor.devices import chosen_devices
from kvharbor.server.doctor.surroundings import Surroundings


def checks(around: Surroundings) -> Iterator[Check]:
    """Yields the checks of this topic: the host's arena, and both of each device."""
    yield _check("arena.host", ArenaKind.HOST, "", around)
    try:
        devices = chosen_devices(around)
    except GpumemError:
        devices = ()
    for kind in (ArenaKind.CUDA_IPC, ArenaKind.CUDA_VMM):
        if not devices:
            yield Check(f"arena.{kind}", lambda: skipped("no device to try it on, see driver.api and devices.visible"))
        for device in devices:
            yield _check(f"arena.{kind}.{device.ordinal}", kind, device.uuid, around)


def _check(name: str, kind: ArenaKind, device: str, around: Surroundings) -> Check:
    return Check(name, lambda: _tried(kind, device, around.settings.cuda_runtime), frozenset({kind}))


def _tried(kind: ArenaKind, device: str, runtime: str) -> Outcome:
    verdict = check_arena(kind, device, runtime=runtime)
    if not verdict.works:
        return fail(verdict.cause, verdict.remedy)
    return ok(f"made here, read and answered by another process, in {verdict.took_s:.1f} s")
