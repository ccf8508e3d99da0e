"""Why the service refuses, beside what the pool and the memory say. Sorted by what the caller should do:

ServerError
├── SessionRequired*, SessionUnknown*, AdminRequired*   the caller is not known, or not allowed
├── PoolNotFound, SessionNotFound*, WarmTaskNotFound    unknown, another tenant's, or somebody else's by now
├── StaleEpoch, PoolSizeMismatch, PoolDevicesMismatch,
│   PoolInUse, MpsClientRefused*, ResumeRequired*,
│   PeerUnproven*, RankTaken*, UpgradeFailed            state says no: do not retry unchanged
├── RevisionCompacted, WatcherTooSlow                   gone: watch again from a snapshot
├── TooManyWarmTasks, DescriptorsExhausted              full: let engines work some off; let sessions end
└── Starting, Draining                                  not now: retry

Those with a * are about sessions and their processes, and in session_errors.py.

StartupError and CommandError are for the operator: they end a command with one line on stderr.
"""

from collections.abc import Sequence
from typing import ClassVar

from kvharbor.server.sizes import exact_size

_MOST_NAMES_CHARS = 200
"""Of names in one message, which has 512 characters in all."""


class StartupError(Exception):
    """The service cannot start as it is configured. The message is one line and names the remedy."""


class CommandError(Exception):
    """A command cannot do what it was asked. The message is one line, `status` that of the process."""

    def __init__(self, message: str, *, status: int = 1) -> None:
        self.status = status
        super().__init__(message)


class ServerError(Exception):
    """A refusal of the service itself. `reason` is stable; `metadata()` has every value of the message."""

    reason: ClassVar[str]

    def metadata(self) -> dict[str, str]:
        """Returns the values of the message under the keys that errors.proto lists with the reason."""
        return {}


class PoolNotFound(ServerError):
    """The caller's tenant has no such pool, or the session has not opened it."""

    reason = "POOL_NOT_FOUND"

    def __init__(self, pool_id: str) -> None:
        self.pool_id = pool_id
        super().__init__(f"no pool {pool_id!r} here: open it in this session first")

    def metadata(self) -> dict[str, str]:
        return {"poolId": self.pool_id}


class WarmTaskNotFound(ServerError):
    """No warm task waits in the pool."""

    reason = "WARM_TASK_NOT_FOUND"

    def __init__(self, pool_id: str) -> None:
        self.pool_id = pool_id
        super().__init__(f"no warm task of pool {pool_id!r} waits to be claimed: wait for the next notice")

    def metadata(self) -> dict[str, str]:
        return {"poolId": self.pool_id}


class TooManyWarmTasks(ServerError):
    """The pool keeps no more warm tasks."""

    reason = "TOO_MANY_WARM_TASKS"

    def __init__(self, task_count: int, *, limit: int) -> None:
        self.task_count = task_count
        self.limit = limit
        super().__init__(
            f"{task_count} warm tasks of the pool are unfinished, {limit} are allowed: "
            f"let engines that accept them finish some, or unwarm some"
        )

    def metadata(self) -> dict[str, str]:
        return {"taskCount": str(self.task_count), "limit": str(self.limit)}


class StaleEpoch(ServerError):
    """The handle is of an earlier life of the service."""

    reason = "STALE_EPOCH"

    def __init__(
        self, epoch: str, *, current_epoch: str, what: str = "the handle", remedy: str = "open the pool again"
    ) -> None:
        self.epoch = epoch
        self.current_epoch = current_epoch
        self.remedy = remedy
        super().__init__(f"{what} is of epoch {epoch}, the service is in {current_epoch}: {remedy}")

    def metadata(self) -> dict[str, str]:
        return {"epoch": self.epoch, "currentEpoch": self.current_epoch, "remedy": self.remedy}


class PoolSizeMismatch(ServerError):
    """The pool exists with another size."""

    reason = "POOL_SIZE_MISMATCH"

    def __init__(self, size_bytes: int, *, current_size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.current_size_bytes = current_size_bytes
        super().__init__(
            f"the pool was made with {exact_size(current_size_bytes)}, not {exact_size(size_bytes)}: "
            f"ask for that size or for none, or drop the pool first"
        )

    def metadata(self) -> dict[str, str]:
        return {"sizeBytes": str(self.size_bytes), "currentSizeBytes": str(self.current_size_bytes)}


class PoolDevicesMismatch(ServerError):
    """The pool exists on other devices."""

    reason = "POOL_DEVICES_MISMATCH"

    def __init__(self, devices: Sequence[str], *, current_devices: Sequence[str]) -> None:
        self.devices = ", ".join(devices)
        self.current_devices = ", ".join(current_devices)
        super().__init__(
            f"the pool lies on {self.current_devices}, not on {self.devices}: "
            f"ask for those devices or for none, or drop the pool first"
        )

    def metadata(self) -> dict[str, str]:
        return {"devices": self.devices, "currentDevices": self.current_devices}


class PoolInUse(ServerError):
    """Somebody holds the pool. `pin_names`: those that the caller may see, or some of them."""

    reason = "POOL_IN_USE"

    def __init__(
        self,
        *,
        session_count: int,
        sequence_count: int,
        pin_count: int,
        held_block_count: int,
        pin_names: Sequence[str] = (),
    ) -> None:
        self.session_count = session_count
        self.sequence_count = sequence_count
        self.pin_count = pin_count
        self.held_block_count = held_block_count
        self.pin_names = _some_of(pin_names, pin_count)
        pins = _counted(pin_count, "warm pin") + (f" ({self.pin_names})" if self.pin_names else "")
        itself = f", and the session itself holds {_counted(held_block_count, 'block')}" if held_block_count else ""
        super().__init__(
            f"the pool is in use by {_counted(session_count, 'other session')}, "
            f"{_counted(sequence_count, 'sequence')} and {pins}{itself}: "
            f"end them first{', pins with `kvharbor unwarm`' if pin_count else ''}"
        )

    def metadata(self) -> dict[str, str]:
        return {
            "sessionCount": str(self.session_count),
            "sequenceCount": str(self.sequence_count),
            "pinCount": str(self.pin_count),
            "blockCount": str(self.held_block_count),
            **({"pinNames": self.pin_names} if self.pin_names else {}),
        }


class UpgradeFailed(ServerError):
    """The process that was to take over does not start."""

    reason = "UPGRADE_FAILED"

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(f"the new process does not start, the old one goes on: {cause}")

    def metadata(self) -> dict[str, str]:
        return {"cause": self.cause}


class RevisionCompacted(ServerError):
    """The events after that revision are not all kept any more."""

    reason = "REVISION_COMPACTED"

    def __init__(self, start_revision: int, *, compact_revision: int) -> None:
        self.start_revision = start_revision
        self.compact_revision = compact_revision
        super().__init__(
            f"events after revision {start_revision} are gone, those after {compact_revision} are kept: "
            f"watch again from 0"
        )

    def metadata(self) -> dict[str, str]:
        return {"startRevision": str(self.start_revision), "compactRevision": str(self.compact_revision)}


class WatcherTooSlow(ServerError):
    """The watcher fell behind by more than the service keeps."""

    reason = "WATCHER_TOO_SLOW"

    def __init__(
        self, pending_event_count: int, *, limit: str, what: str = "events", remedy: str = "watch again from 0"
    ) -> None:
        self.pending_event_count = pending_event_count
        self.limit = limit
        super().__init__(f"{pending_event_count} {what} were not read in time, {limit} are kept: {remedy}")

    def metadata(self) -> dict[str, str]:
        return {"pendingEventCount": str(self.pending_event_count), "limit": self.limit}


class DescriptorsExhausted(ServerError):
    """The call needs a file descriptor, and the service can have no more."""

    reason = "DESCRIPTORS_EXHAUSTED"

    def __init__(self, *, limit: str, remedy: str) -> None:
        self.limit = limit
        self.remedy = remedy
        super().__init__(f"the service has no file descriptor left for this, the limit is {limit}: {remedy}")

    def metadata(self) -> dict[str, str]:
        return {"limit": self.limit, "remedy": self.remedy}


class Starting(ServerError):
    """The service is not ready yet."""

    reason = "STARTING"

    def __init__(self) -> None:
        super().__init__("the service is starting: retry")


class Draining(ServerError):
    """The service is shutting down."""

    reason = "DRAINING"

    def __init__(self) -> None:
        super().__init__("the service is shutting down: retry when it is back")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _some_of(names: Sequence[str], count: int) -> str:
    """Returns the first of these names for people, as many as a message has room for, and how many more there are."""
    shown: list[str] = []
    for name in map(repr, names):
        if sum(map(len, shown)) + len(name) > _MOST_NAMES_CHARS:
            break
        shown.append(name)
    more = f" and {count - len(shown)} more" if len(shown) < count else ""
    return ", ".join(shown) + more if shown else ""
