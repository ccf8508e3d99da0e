"""The devices that pools would lie on: what they are, and what they allow."""

import importlib
from collections.abc import Callable, Iterator

from kvharbor.gpumem import CudaUnavailable, GpumemError, driver
from kvharbor.gpumem.arena import ArenaKind
from kvharbor.gpumem.devices import Device, device_of, memory_of, mps_client, visible_devices
from kvharbor.server.doctor.check import ON_DEVICES, Check, Outcome, fail, ok, skipped, warn
from kvharbor.server.doctor.surroundings import Surroundings
from kvharbor.server.sizes import Share, format_size

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def chosen_devices(around: Surroundings) -> tuple[Device, ...]:
    """Returns the devices of the setting `devices`, all visible ones without it.

    Raises CudaUnavailable, DeviceNotVisible, DeviceFailed.
    """
    chosen = around.settings.devices
    return tuple(device_of(uuid) for uuid in chosen) if chosen else visible_devices()


def checks(around: Surroundings) -> Iterator[Check]:
    """Yields the checks of this topic: one of the devices together, some of each."""
    yield Check("devices.visible", lambda: _visible(around), ON_DEVICES)
    try:
        devices = chosen_devices(around)
    except GpumemError:
        # That check has it as its finding.
        return
    for device in devices:
        yield from _checks_of(device, around)


def _checks_of(device: Device, around: Surroundings) -> Iterator[Check]:
    def named(subject: str, look: Callable[[Device], Outcome], needed_by: frozenset[ArenaKind]) -> Check:
        return Check(f"devices.{device.ordinal}.{subject}", lambda: look(device), needed_by)

    yield named("model", _model, ON_DEVICES)
    yield named("memory", lambda device: _memory(device, around), ON_DEVICES)
    yield named("compute_mode", _compute_mode, ON_DEVICES)
    yield named("cuda_ipc", _cuda_ipc, frozenset({ArenaKind.CUDA_IPC}))
    yield named("cuda_vmm", _cuda_vmm, frozenset({ArenaKind.CUDA_VMM}))
    yield named("mps", _mps_allowed if around.settings.allow_mps else _mps_refused, ON_DEVICES)
    yield named("mig", _mig, ON_DEVICES)


def _visible(around: Surroundings) -> Outcome:
    try:
        devices = visible_devices()
        chosen_devices(around)
    except CudaUnavailable:
        return skipped("no driver to ask, see driver.api")
    if not devices:
        return fail("the driver works, but no device is visible", "see CUDA_VISIBLE_DEVICES in environment.devices")
    return ok("; ".join(f"{device.ordinal}: {device.uuid}" for device in devices))


def _model(device: Device) -> Outcome:
    capability = [driver.device_attribute(f"COMPUTE_CAPABILITY_{part}", device.ordinal) for part in ("MAJOR", "MINOR")]
    return ok(f"{device.name}, {device.uuid}, compute capability {capability[0]}.{capability[1]}")


def _memory(device: Device, around: Surroundings) -> Outcome:
    memory = memory_of(device)
    found = f"{format_size(memory.free_bytes)} of {format_size(memory.total_bytes)} free"
    wanted = around.settings.memory
    if around.arena in ON_DEVICES and not isinstance(wanted, Share) and wanted > memory.free_bytes:
        return fail(
            f"{found}, the setting memory asks for {format_size(wanted)}",
            "set less, or end what else is on the device: `nvidia-smi` shows it",
        )
    return ok(found)


def _compute_mode(device: Device) -> Outcome:
    mode = driver.device_attribute("COMPUTE_MODE", device.ordinal)
    name = _COMPUTE_MODES.get(mode, str(mode))
    if mode == 0:
        return ok(name)
    return fail(
        f"{name}: two processes cannot use the device at a time", f"nvidia-smi -i {device.uuid} -c DEFAULT, as root"
    )


def _cuda_ipc(device: Device) -> Outcome:
    if not driver.device_attribute("UNIFIED_ADDRESSING", device.ordinal):
        return fail("the device has no unified addressing, without which there is no CUDA IPC", "use --arena host")
    if not driver.device_attribute("IPC_EVENT_SUPPORTED", device.ordinal):
        return warn("the driver says that it has no CUDA IPC events", "if arena.cuda_ipc fails, use --arena cuda_vmm")
    return ok("the driver says that it can")


def _cuda_vmm(device: Device) -> Outcome:
    lacking = [
        name
        for name in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
        if not driver.device_attribute(name, device.ordinal)
    ]
    if lacking:
        return fail(f"the driver says no to {', '.join(lacking)}", "use --arena cuda_ipc, or host")
    return ok("the driver says that it can")


def _mps_refused(device: Device) -> Outcome:
    if not mps_client(device):
        return ok("not a client of MPS")
    return fail(
        "this process uses the device through MPS, where one client's fault may end all, and a client's death "
        "does not prove that its kernels have stopped",
        "run service and workers without MPS (their own CUDA_MPS_PIPE_DIRECTORY, an empty folder), or set allow_mps",
    )


def _mps_allowed(device: Device) -> Outcome:
    if not mps_client(device):
        return ok("not a client of MPS")
    return warn("a client of MPS, as allow_mps permits", "one client's fault may end all: run without it where you can")


def _mig(device: Device) -> Outcome:
    if device.uuid.startswith("MIG-"):
        return warn(
            "an instance of a device in MIG mode: memory is shared within it, not with other instances",
            f"let every worker of a pool see this one: CUDA_VISIBLE_DEVICES={device.uuid}",
        )
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return skipped("nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return skipped("the library NVML is not here")
    try:
        now, next_time = nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByUUID(device.uuid))
    except nvml.NVMLError_NotSupported:
        return ok("the device has no MIG mode")
    finally:
        nvml.nvmlShutdown()
    if now != next_time:
        return warn(f"MIG mode is {_on(now)} and will be {_on(next_time)}", "reset the device while nobody uses it")
    return ok(f"MIG mode is {_on(now)}")


def _on(mode: int) -> str:
    return "on" if mode else "off"
