"""One life of the owner's state: its name, its clock and its counters, which go on over the processes that serve it."""

import dataclasses
import mmap
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, TypedDict

from kvharbor.server.memory.budget import HOST
from kvharbor.server.supervision.keeper import Keeper

_NAME = "epoch"


class DeviceShare(TypedDict):
    """What of a device is for pools, and the pieces that it comes in; its name is for people."""

    name: str
    memory_bytes: int
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class KeptSetting:
    """A setting that stays as a life began with it, though another value is wanted by now."""

    name: str
    in_force: str
    wanted: str


@dataclass(slots=True)
class Life:
    """What is kept under the name "epoch". A number is kept before it is used, so none is used twice [S15].

    `clock_offset_s` makes the service's clock out of the event loop's: a time taken from elsewhere shows at once, it
    is days off. `listen` is the TCP address as it was bound; `restarts` counts the processes before by what ended
    them. `arena` is the kind that its pools are of; `devices` are those that they may lie on, by UUID, none for the
    host. `was_tried_out` tells that such memory has been shared with another process, which is done once in a life.
    `settings` are those that stay for its length, as they were set; without them another version has begun it.
    """

    epoch: str
    clock_offset_s: float
    memory_bytes: int
    listen: str | None = None
    restarts: dict[str, int] = field(default_factory=dict)
    stall_count: int = 0
    stalled_s: float = 0.0
    pool_count: int = 0
    arena: str = "host"
    devices: dict[str, DeviceShare] = field(default_factory=dict)
    was_tried_out: bool = False
    settings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begun(cls, memory_bytes: int) -> Self:
        """Returns a new life with pools in host memory."""
        return cls(secrets.token_hex(6), 1e6 + secrets.randbelow(10**6), memory_bytes)

    @classmethod
    def begun_on(cls, devices: Mapping[str, DeviceShare], arena: str) -> Self:
        """Returns a new life with pools on devices."""
        life = cls.begun(sum(share["memory_bytes"] for share in devices.values()))
        life.arena, life.devices = arena, dict(devices)
        return life

    @property
    def memory(self) -> dict[str, int]:
        """Memory for pools, by place."""
        return {uuid: share["memory_bytes"] for uuid, share in self.devices.items()} or {HOST: self.memory_bytes}

    @property
    def piece_bytes(self) -> dict[str, int]:
        """Bytes that memory comes in, by place."""
        return {uuid: share["piece_bytes"] for uuid, share in self.devices.items()} or {HOST: mmap.PAGESIZE}

    @classmethod
    def kept(cls, keeper: Keeper) -> Self | None:
        """Returns the life that a process before this one has served, if there is one."""
        kept = keeper.kept.get(_NAME)
        if kept is None:
            return None
        # By a process of another version, perhaps: what that one did not know begins now, what this one does not ends.
        known = {each.name for each in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in kept.meta.items() if name in known})

    @property
    def restart_count(self) -> int:
        """Processes that have served this life before."""
        return sum(self.restarts.values())

    @property
    def first_number(self) -> int:
        """Where this process begins to count what is not kept, above whatever the ones before it came to."""
        return self.restart_count << 40 | 1

    def kept_settings(self, wanted: Mapping[str, str]) -> tuple[KeptSetting, ...]:
        """Returns those of its settings that would be others in a new life."""
        return tuple(
            KeptSetting(name, in_force, wanted[name])
            for name, in_force in self.settings.items()
            if wanted.get(name, in_force) != in_force
        )

    def next_pool_number(self, keeper: Keeper) -> int:
        """Returns a number that no pool has had."""
        self.pool_count += 1
        self.keep(keeper)
        return self.pool_count

    def keep(self, keeper: Keeper) -> None:
        """Keeps it as it stands."""
        keeper.keep(_NAME, dataclasses.asdict(self))
