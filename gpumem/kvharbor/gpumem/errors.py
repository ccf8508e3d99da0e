"""What can go wrong with arena memory, sorted by what the caller should do.

    GpumemError
      caller's mistake   LayoutInvalid, ArenaTooSmall, PlaneUnknown, OutOfBounds, CopyConflict,
                         ViewUnavailable, CudaRuntimeUnknown
      state says no      LayoutMismatch, ArenaUnfit, MappingInUse, DeviceNotVisible, IpcRefused, CudaUnavailable,
                         ArenaUnproven
      full               InsufficientMemory
      gone               ArenaClosed, ReservationCancelled
      device broken      DeviceFailed: its state is not known any more, end the process

Each class has a constant `reason`; its values are attributes, and the message and `metadata()` are built
from them.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvharbor.gpumem.amounts import exact_size


class GpumemError(Exception):
    """The root of everything that `kvharbor.gpumem` raises on purpose."""

    reason: ClassVar[str] = "GPUMEM_ERROR"

    def metadata(self) -> dict[str, str]:
        """Returns every value of the message as text, under lowerCamel keys."""
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {_lower_camel(name): str(value) for name, value in shown.items()}


class LayoutInvalid(GpumemError):
    """A field of a layout, or a size asked for it, is outside what kvharbor can lay out."""

    reason = "LAYOUT_INVALID"

    def __init__(self, field: str, value: object, limit: str, remedy: str) -> None:
        self.field = field
        self.value = _shortened(value)
        self.limit = limit
        self.remedy = remedy
        super().__init__(f"{field} is {self.value}, must be {limit}: {remedy}")


class ArenaTooSmall(GpumemError):
    """The size holds less than one usable block beside the scratch blocks."""

    reason = "ARENA_TOO_SMALL"

    def __init__(self, size_bytes: int, *, needed_bytes: int, scratch_blocks: int) -> None:
        self.size_bytes = size_bytes
        self.needed_bytes = needed_bytes
        self.scratch_blocks = scratch_blocks
        super().__init__(
            f"{exact_size(size_bytes)} hold less than one block of this layout beside its {scratch_blocks} scratch "
            f"blocks: ask for at least {exact_size(needed_bytes)}, or use smaller blocks"
        )


class PlaneUnknown(GpumemError):
    """The layout has no plane of that name."""

    reason = "PLANE_UNKNOWN"

    def __init__(self, plane: str, *, known_planes: str) -> None:
        self.plane = _shortened(plane)
        self.known_planes = known_planes
        super().__init__(f"no plane {self.plane} in this layout: it has {known_planes}, name one of these")


class OutOfBounds(GpumemError):
    """A layer, a block or a run of blocks reaches beyond the descriptor."""

    reason = "OUT_OF_BOUNDS"

    def __init__(self, kind: str, value: int, *, limit: int, remedy: str, least: int = 0) -> None:
        self.kind = kind
        self.value = value
        self.limit = limit
        self.least = least
        self.remedy = remedy
        super().__init__(f"{kind} {value} is outside [{least}, {limit}): {remedy}")


class CopyConflict(GpumemError):
    """A block is written twice, or both read and written, by one copy."""

    reason = "COPY_CONFLICT"

    def __init__(self, block: int) -> None:
        self.block = block
        super().__init__(
            f"block {block} is a destination twice, or source and destination, of one copy: "
            f"name each destination once and split chained copies into several calls"
        )


class ViewUnavailable(GpumemError):
    """This view of a plane cannot exist; `cause` says why and what to use in its place."""

    reason = "VIEW_UNAVAILABLE"

    def __init__(self, view: str, plane: str, cause: str) -> None:
        self.view = view
        self.plane = plane
        self.cause = cause
        super().__init__(f"no {view} view of plane {plane!r}: {cause}")


class CudaRuntimeUnknown(GpumemError):
    """There is no CUDA runtime of that name to choose; `variable` is where it may have come from."""

    reason = "CUDA_RUNTIME_UNKNOWN"

    def __init__(self, runtime: str, *, known_runtimes: str, variable: str) -> None:
        self.runtime = _shortened(runtime)
        self.known_runtimes = known_runtimes
        self.variable = variable
        super().__init__(f"no CUDA runtime {self.runtime}: set one of {known_runtimes} (in the environment {variable})")


class LayoutMismatch(GpumemError):
    """Two layouts that had to be equal differ; `differences` names every field with both values."""

    reason = "LAYOUT_MISMATCH"

    def __init__(self, differences: Mapping[str, tuple[str, str]]) -> None:
        self.differences = dict(differences)
        super().__init__(
            f"the layout differs from the pool's: {self._described()}; open another, or drop this one first"
        )

    def metadata(self) -> dict[str, str]:
        return {"differences": self._described()}

    def _described(self) -> str:
        return "; ".join(
            f"{field} is {theirs}, the pool has {ours}" for field, (ours, theirs) in self.differences.items()
        )


class ArenaUnfit(GpumemError):
    """An export, or the file descriptor of one, is not an arena that can be mapped safely."""

    reason = "ARENA_UNFIT"

    def __init__(self, cause: str, *, size_bytes: int) -> None:
        self.cause = cause
        self.size_bytes = size_bytes
        super().__init__(f"cannot map {size_bytes} bytes of this arena: {cause}")


class MappingInUse(GpumemError):
    """The mapping cannot be closed: arrays, tensors or memoryviews over it are alive."""

    reason = "MAPPING_IN_USE"

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        super().__init__(
            f"the mapping of {size_bytes} bytes still has live views: close its BlockViews and drop every "
            f"array, tensor and memoryview over it, then try again"
        )


class DeviceNotVisible(GpumemError):
    """The memory lies on a device that this process does not see."""

    reason = "DEVICE_NOT_VISIBLE"

    def __init__(self, device: str, visible_devices: Sequence[str]) -> None:
        self.device = device
        self.visible_devices = ", ".join(visible_devices) or "none"
        self.remedy = (
            "let the process see the device (CUDA_VISIBLE_DEVICES, or the container's devices), or run it on the "
            "device that it sees"
        )
        super().__init__(f"device {device} is not visible here, visible: {self.visible_devices}: {self.remedy}")


class IpcRefused(GpumemError):
    """CUDA IPC does not work from the exporting process to this one; `cause` says why."""

    reason = "IPC_REFUSED"

    def __init__(self, cause: str, *, device: str, exporter_pid: int, own_pid: int, remedy: str) -> None:
        self.cause = cause
        self.device = device
        self.exporter_pid = exporter_pid
        self.own_pid = own_pid
        self.remedy = remedy
        super().__init__(
            f"process {own_pid} cannot open memory of device {device} that process {exporter_pid} has exported: "
            f"{cause}: {remedy}"
        )


class CudaUnavailable(GpumemError):
    """There is no CUDA in this process: no package, no driver library, or no device."""

    reason = "CUDA_UNAVAILABLE"

    def __init__(self, cause: str, remedy: str) -> None:
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"CUDA is not available: {cause}: {remedy}")


class DeviceFailed(GpumemError):
    """A call of CUDA failed. `code` is the driver's name for the result, `detail` its text, if it has one."""

    reason = "DEVICE_FAILED"

    def __init__(self, call: str, code: str, detail: str) -> None:
        self.call = call
        self.code = code
        self.detail = detail
        super().__init__(f"{call} failed with {code}" + (f" ({detail})" if detail else ""))

    @property
    def out_of_memory(self) -> bool:
        """Whether the device had no room, which breaks nothing."""
        return self.code in ("CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation")


class ArenaUnproven(GpumemError):
    """Memory of that kind, made here, could not be used by another process. `device` is a UUID, or "" for the host."""

    reason = "ARENA_UNPROVEN"

    def __init__(self, arena: str, *, device: str, cause: str, remedy: str) -> None:
        self.arena = str(arena)
        self.device = device
        self.cause = cause
        self.remedy = remedy
        where = f" on device {device}" if device else ""
        super().__init__(f"the arena {arena}{where} does not work between two processes: {cause}: {remedy}")


class InsufficientMemory(GpumemError):
    """There is no room for the memory asked for; nothing was taken for the refused part."""

    reason = "INSUFFICIENT_MEMORY"
    held_bytes: int
    held_by: str

    def __init__(
        self,
        needed_bytes: int,
        *,
        available_bytes: int,
        limited_by: str,
        remedy: str = "ask for less, raise the limit, or free memory",
    ) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.limited_by = limited_by
        self._remedy = remedy
        left = f"{limited_by} leaves {exact_size(available_bytes)}"
        super().__init__(f"needs {exact_size(needed_bytes)}, {left}: {remedy}")

    def beside(self, held_bytes: int, held_by: str) -> "InsufficientMemory":
        """Returns the error that names the processes too that still map so many bytes of an earlier epoch."""
        remedy = (
            f"processes still map {exact_size(held_bytes)} of an earlier epoch ({held_by}); come again when they have "
            f"let go, or end them; otherwise {self._remedy}"
        )
        refusal = InsufficientMemory(
            self.needed_bytes, available_bytes=self.available_bytes, limited_by=self.limited_by, remedy=remedy
        )
        refusal.held_bytes, refusal.held_by = held_bytes, held_by
        return refusal


class ArenaClosed(GpumemError):
    """The arena, mapping or views were closed by their owner."""

    reason = "ARENA_CLOSED"

    def __init__(self, closed: str) -> None:
        self.closed = closed
        super().__init__(f"this {closed} is closed")


class ReservationCancelled(GpumemError):
    """The caller's cancel check stopped a reservation on its way."""

    reason = "RESERVATION_CANCELLED"

    def __init__(self, reserved_bytes: int, *, size_bytes: int) -> None:
        self.reserved_bytes = reserved_bytes
        self.size_bytes = size_bytes
        super().__init__(f"cancelled after {reserved_bytes} of {size_bytes} bytes: close the arena to free them")


def _lower_camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def _shortened(value: object) -> str:
    # Values come from the wire: an error must not carry a megabyte of somebody's field.
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
