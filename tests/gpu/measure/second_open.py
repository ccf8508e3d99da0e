"""What a second opening of one handle in one process gives, and how many closings that needs."""

from gpu.measure.outcomes import Outcomes
from gpu.measure.question import Answer, Figures
from gpu.rig import Rig
from kvharbor.gpumem import driver
from kvharbor.gpumem.devices import current
from kvharbor.gpumem.ipc_runtime import RUNTIMES, runtime_of

SIZE_BYTES = 4 << 20


def ask(rig: Rig) -> Answer:
    """Opens twice and closes until it is refused, by each runtime."""
    names = RUNTIMES if rig.on_hardware else ("driver",)
    figures: Figures = {name: _twice(rig, name) for name in names}
    said = [
        f"{name}: the second opening {seen['second']}, "
        f"{'at the same address' if seen['same_address'] else 'at no or another address'}; after one closing reading "
        f"is {seen['read_after_one_close']}, the second closing {seen['second_close']}, a third {seen['third_close']}"
        for name, seen in figures.items()
    ]
    return Answer("; ".join(said), figures)


def _twice(rig: Rig, name: str) -> Figures:
    runtime, device, tried = runtime_of(name), rig.device, Outcomes()
    with rig.actor() as owner:
        handle = owner.create(rig.kind_name("cuda_ipc"), SIZE_BYTES).ipc_handle
        addresses: list[int] = []
        for which in ("first", "second"):
            tried.call(which, lambda: addresses.append(runtime.open(device, handle)))

        def read() -> bytes:
            with current(device):
                return driver.read_bytes(addresses[0], 8)

        tried.call("first_close", lambda: runtime.close(device, addresses[0]))
        tried.call("read_after_one_close", read)
        tried.call("second_close", lambda: runtime.close(device, addresses[-1]))
        tried.call("third_close", lambda: runtime.close(device, addresses[-1]))
    return {**tried.codes, "same_address": len(addresses) == 2 and addresses[0] == addresses[1]}
