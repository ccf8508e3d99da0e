"""The service itself: values, and how they are read from replies."""

from dataclasses import dataclass

from kvharbor.client.durations import seconds
from kvharbor.v1 import pool_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that pools may lie on: its UUID, its model's name, and its memory for pools."""

    uuid: str
    name: str
    memory_bytes: int
    memory_available_bytes: int


@dataclass(frozen=True, slots=True)
class KeptSetting:
    """A setting that has changed and stays as the epoch began with it, until the service is stopped and started."""

    name: str
    in_force: str
    wanted: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The service: its versions, its life and its memory, of the host or of all its devices together.

    Its process is number restart_count + 1 of the epoch. Stalls are times that it did not run when it should have.
    """

    server_version: str
    api_versions: tuple[str, ...]
    epoch: str
    arena_kinds: tuple[str, ...]
    memory_bytes: int
    memory_available_bytes: int
    max_message_bytes: int
    uptime_s: float
    restart_count: int
    stall_count: int
    stall_time_s: float
    devices: tuple[DeviceInfo, ...] = ()
    kept_settings: tuple[KeptSetting, ...] = ()


def server_info(reply: pb.GetServerInfoResponse) -> ServerInfo:
    """Reads a GetServerInfoResponse."""
    return ServerInfo(
        server_version=reply.server_version,
        api_versions=tuple(reply.api_versions),
        epoch=reply.epoch,
        arena_kinds=tuple(reply.arena_kinds),
        memory_bytes=reply.memory_bytes,
        memory_available_bytes=reply.memory_available_bytes,
        max_message_bytes=reply.max_message_bytes,
        uptime_s=seconds(reply.uptime),
        restart_count=reply.restart_count,
        stall_count=reply.stall_count,
        stall_time_s=seconds(reply.stall_time),
        devices=tuple(
            DeviceInfo(device.uuid, device.name, device.memory_bytes, device.memory_available_bytes)
            for device in reply.devices
        ),
        kept_settings=tuple(KeptSetting(each.name, each.in_force, each.wanted) for each in reply.kept_settings),
    )
