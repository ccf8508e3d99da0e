"""Every setting of the service, once, with its meaning and default. `sources.py` says where values come from."""

import grp
import os
import re
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvharbor.server.configuration.layout_settings import LayoutSettings
from kvharbor.server.sizes import Share, exact_size, parse_size, parse_size_or_share

DEFAULT_SOCKET = "/run/kvharbor/kvharbor.sock"
POOL_NAME_PATTERN = r"[A-Za-z0-9._-]{1,64}"


def _size(value: object) -> int:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} has no unit; write a string, e.g. "2GiB"')
    return parse_size(value)


def _size_or_share(value: object) -> object:
    if isinstance(value, Share):
        return value
    if not isinstance(value, str):
        raise ValueError(f'{value!r} has no unit; write a string, e.g. "2GiB" or "80%"')
    return parse_size_or_share(value)


def _mode(value: object) -> int:
    try:
        mode = int(value.removeprefix("0o"), 8) if isinstance(value, str) else value
    except ValueError:
        mode = None
    if not isinstance(mode, int) or not 0 <= mode <= 0o777:
        raise ValueError(f'{value!r} is no file mode; write octal digits, e.g. "0660"')
    return mode


def _group(value: object) -> object:
    # A container knows the groups of its pod by number only.
    if isinstance(value, str) and not value.isdecimal():
        try:
            grp.getgrnam(value)
        except KeyError:
            raise ValueError(f"there is no group {value!r} on this system; create it or name another") from None
    return value


def _address(value: object) -> object:
    if value is None:
        return None
    form = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:/]+):([0-9]+)", str(value))
    if form is None:
        raise ValueError(f'{value!r} is no address; write HOST:PORT, e.g. "127.0.0.1:50051" or "[::1]:0"')
    if len(form[2]) > 5 or int(form[2]) > 65535:
        raise ValueError(f"{value!r} has no port; write one of 0 to 65535")
    return value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _uids(value: object) -> object:
    if not isinstance(value, list | tuple | set | frozenset):
        raise ValueError(f"{value!r} is no list; write one of user ids, e.g. [1000]")
    return value


def _devices(value: object) -> object:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{value!r} is no list of devices; write UUIDs, e.g. "GPU-7f3c…,GPU-09ab…"')
    spelled = [name.strip() for name in names]
    # As the driver's own are written, so that one device has one name from here on.
    devices = tuple(name[:4].upper() + name[4:].lower() for name in spelled)
    are_uuids = all(re.fullmatch(r"(GPU|MIG)-[0-9a-f-]{36}", name) for name in devices)
    if not are_uuids or len({name[4:] for name in devices}) < len(devices):
        raise ValueError(
            f"{', '.join(spelled)!r} are no devices; write each once, by its UUID as `nvidia-smi -L` has it: numbers "
            "mean other devices to other processes"
        )
    return devices


Size = Annotated[int, BeforeValidator(_size)]
AnyCase = BeforeValidator(_lower)
"""For words: as units of sizes may be, in capitals too."""
EvictionPolicy = Literal["auto", "lru"]
"""As `kvharbor.pool.POLICIES` has them; the supervisor reads settings too, and has no use for the pool."""
Uid = Annotated[int, Field(ge=0, strict=True)]
"""A user's number; strict, as a `true` would be that of a user too."""
Tenant = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[ -~]+$")]


class PoolSettings(BaseModel):
    """Rules of the pools of one name; what is not set follows the setting of the same name beside it.

    With a `layout` the pool of that name is made at the start, for one tenant.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Size | None = Field(
        default=None, description="Memory of each part of the pool where OpenPool leaves it open."
    )
    eviction_policy: Annotated[EvictionPolicy | None, AnyCase] = Field(
        default=None, description="As the setting outside."
    )
    warm_budget_ratio: float | None = Field(default=None, ge=0, le=1, description="As the setting outside.")
    min_reuse_tokens: int | None = Field(default=None, ge=0, description="As the setting outside.")
    guarantee_ratio: float | None = Field(default=None, ge=0, le=1, description="As the setting outside.")
    layout: LayoutSettings | None = Field(default=None, description="Makes the pool at the start; needs `size`.")
    tenant: Tenant | None = Field(default=None, description="Whose pool that is. Unset: of the service's own user.")

    @property
    def part_count(self) -> int:
        """Parts of the pool, each of `size`, as far as that is known here."""
        return 1 if self.layout is None else self.layout.tp_size

    @model_validator(mode="after")
    def _declares_all_or_nothing(self) -> Self:
        if self.layout is None:
            if self.tenant is not None:
                raise ValueError("tenant is for a pool that is made at the start: give its layout, or leave tenant out")
            return self
        if self.size is None:
            raise ValueError("a pool with a layout is made at the start: give its size")
        from kvharbor.gpumem import GpumemError, block_count_for

        try:
            block_count_for(self.size, self.layout.layout())
        except GpumemError as refused:
            raise ValueError(str(refused)) from None
        return self


class Settings(BaseModel):
    """The settings of `kvharbor serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    socket: str = Field(
        default=DEFAULT_SOCKET,
        min_length=1,
        description="Path of the Unix socket for gRPC. Beside it lie the side socket, the lock and the port file.",
    )
    socket_mode: Annotated[int, BeforeValidator(_mode)] = Field(
        default=0o600, description="File mode of both sockets, octal. Whoever may write may use the service."
    )
    socket_group: Annotated[str | None, BeforeValidator(_group)] = Field(
        default=None, description="Group of both sockets. Unset: that of the process."
    )
    listen: Annotated[str | None, BeforeValidator(_address)] = Field(
        default=None,
        description="HOST:PORT for gRPC over TCP, in clear text and beside the socket. Port 0: any free one.",
    )
    metrics_listen: Annotated[str | None, BeforeValidator(_address)] = Field(
        default=None,
        description="HOST:PORT for Prometheus and probes: /metrics, /healthz, /readyz over HTTP. Port 0: any free one.",
    )
    metrics_max_tenants: int = Field(
        default=100,
        ge=0,
        le=10_000,
        description="Tenants, pools, engines and pairs of engines with metrics of their own; the rest are summed under "
        '"other".',
    )
    memory: Annotated[int | Share, BeforeValidator(_size_or_share)] = Field(
        default=parse_size_or_share("80%"),
        description="Memory for all pools: an amount, or a share of the room on the machine and in its cgroups. On "
        "devices: of each of them, a share of all that it has.",
    )
    arena: Annotated[Literal["host", "cuda_ipc", "cuda_vmm"] | None, AnyCase] = Field(
        default=None, description="Where pools lie, and how they are shared. Unset: cuda_ipc with `devices`, else host."
    )
    devices: Annotated[tuple[str, ...], BeforeValidator(_devices)] = Field(
        default=(), description="UUIDs of the devices for pools, with a comma between. Unset: all that are visible."
    )
    device_grace_s: float = Field(
        default=1.0,
        ge=0,
        le=3600,
        description="How long after a worker's death its blocks on a device wait for what the device still does.",
    )
    allow_mps: bool = Field(
        default=False,
        description="Lets processes use devices through CUDA MPS: their death does not prove that their kernels stop.",
    )
    cuda_runtime: Annotated[Literal["cupy", "driver"], AnyCase] = Field(
        default="cupy", description="By what the arena cuda_ipc calls CUDA: CuPy, or cuda.bindings."
    )
    eviction_policy: Annotated[EvictionPolicy, AnyCase] = Field(
        default="auto",
        description="Which cached blocks go first: what is worth least by the traffic (auto), or the oldest (lru).",
    )
    warm_budget_ratio: float = Field(default=0.25, ge=0, le=1, description="Part of a pool that warm pins may hold.")
    min_reuse_tokens: int = Field(default=0, ge=0, description="Matches shorter than this are not reused.")
    guarantee_ratio: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Part of a pool of which its sessions have equal shares; one with less goes before who has more.",
    )
    pools: dict[Annotated[str, Field(pattern=f"^{POOL_NAME_PATTERN}$")], PoolSettings] = Field(
        default_factory=dict, description="Tables [pools.NAME] with rules for the pools of that name."
    )
    tenants: dict[int, Tenant] = Field(
        default_factory=dict, description='Names of tenants by user id. Others are called "uid-<uid>".'
    )
    anonymous_tenant: Tenant | None = Field(
        default=None,
        description="Tenant of callers without a session, for Lookup, Watch and Stats. Unset: Stats tells of no pool, "
        "and the others are refused.",
    )
    admin_uids: Annotated[frozenset[Uid], BeforeValidator(_uids)] = Field(
        default=frozenset(), description="Administrators, beside uid 0 and the user of the service."
    )
    handoff_ttl_s: float = Field(
        default=30.0, gt=0, le=86400, description="How long a hand-off token waits for its Adopt."
    )
    hello_timeout_s: float = Field(
        default=5.0, gt=0, le=3600, description="How long a side socket may stay without Hello."
    )
    watch_backlog: Size = Field(
        default=4 * 2**20, description='Events kept a pool for watchers that are behind or resume, e.g. "4MiB".'
    )
    watch_progress_s: float = Field(
        default=5.0, gt=0, le=3600, description="Pause after which an idle watch gets progress."
    )
    max_message_bytes: int = Field(
        default=16 * 2**20, ge=2**20, le=2**30, description="Largest gRPC message; 2^20 tokens need 4 MiB."
    )
    max_sessions: int = Field(default=1024, ge=1, le=100_000, description="Processes with a session at a time.")
    grace_s: float = Field(default=5.0, ge=0, le=3600, description="How long calls in flight may take at shutdown.")
    watchdog_s: float = Field(
        default=20.0,
        ge=0,
        le=3600,
        description="After so long without a turn of its event loop the service's process is replaced; 0: never.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], AnyCase] = Field(
        default="info", description="Least level that is logged."
    )
    log_format: Annotated[Literal["json", "console"], AnyCase] = Field(
        default="json", description="One JSON object a line, or text for people."
    )

    @field_validator("devices", mode="after")
    @classmethod
    def _are_for_devices_only(cls, devices: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if devices and info.data.get("arena") == "host":
            raise ValueError("the arena host lies on no device; set cuda_ipc or cuda_vmm, or leave devices out")
        return devices

    @property
    def arena_kind(self) -> Literal["host", "cuda_ipc", "cuda_vmm"]:
        """The arena as it is set, or as it follows from the devices."""
        return self.arena or ("cuda_ipc" if self.devices else "host")

    @property
    def lasting(self) -> dict[str, str]:
        """The settings that a life of the service's state keeps as it began with them, for people."""
        return {
            "memory": str(self.memory) if isinstance(self.memory, Share) else exact_size(self.memory),
            "arena": self.arena_kind,
            "devices": ", ".join(self.devices) or ("none" if self.arena_kind == "host" else "all that are visible"),
            "listen": self.listen or "none",
        }

    def pool_rules(self, name: str) -> PoolSettings:
        """Returns the rules of pools called `name`; what has a setting of the same name outside is set."""
        own = self.pools.get(name, PoolSettings())
        general = ("eviction_policy", "warm_budget_ratio", "min_reuse_tokens", "guarantee_ratio")
        return own.model_copy(update={rule: getattr(self, rule) for rule in general if getattr(own, rule) is None})

    def tenant_of(self, uid: int) -> str:
        """Returns the tenant that processes of user `uid` belong to."""
        return self.tenants.get(uid, f"uid-{uid}")

    def administrates(self, uid: int) -> bool:
        """Tells whether processes of user `uid` are administrators."""
        return uid in (0, os.geteuid()) or uid in self.admin_uids
