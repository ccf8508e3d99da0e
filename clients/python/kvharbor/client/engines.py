"""What computes in a session, and how it is told of in statistics."""

from dataclasses import dataclass
from typing import Literal

from kvharbor.v1 import cache_service_pb2, types_pb2

EngineGroup = Literal["", "others", "earlier process"]

_GROUPS: dict[int, EngineGroup] = {
    cache_service_pb2.ENGINE_GROUP_UNSPECIFIED: "",
    cache_service_pb2.ENGINE_GROUP_OTHERS: "others",
    cache_service_pb2.ENGINE_GROUP_EARLIER_PROCESS: "earlier process",
}


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine is called, for people. Of printable characters; 64 bytes at most, the instance 128.

    `instance` tells it from others of its name and version, and should stay the same when it starts again: the service
    tells both as one then. What is left empty the service fills: name and version by the client's library, instance by
    `client_name`, else by the pid.
    """

    name: str = ""
    version: str = ""
    instance: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.name, self.version, self.instance) if part)


@dataclass(frozen=True, slots=True)
class EngineReuse:
    """Tokens that an engine has reused of the one at this place of the pool's `engines`."""

    engine_index: int
    token_count: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine's part in a pool, since the service's process began.

    `group` is empty, or the engines that this row is of: "others", which there is no room to tell apart, and "earlier
    process", those of before the service's process was replaced. An engine without an instance is all of its name and
    version. `reuses` are the reused tokens by who has published them, itself included. Of the blocks, those are held
    that are in its sequences or held by its sessions themselves, and those committed that it has published and that are
    in the index.
    """

    engine: Engine
    group: EngineGroup
    session_count: int
    prompt_token_count: int
    reused_token_count: int
    reuses: tuple[EngineReuse, ...]
    held_block_count: int
    committed_block_count: int


def engine(message: types_pb2.Engine) -> Engine:
    """Reads what an engine is called."""
    return Engine(message.name, message.version, message.instance)


def engine_stats(message: cache_service_pb2.EngineStats) -> EngineStats:
    """Reads one engine's part in a pool."""
    return EngineStats(
        engine=engine(message.engine),
        # A newer service may tell finer groups.
        group=_GROUPS.get(message.group, "others"),
        session_count=message.session_count,
        prompt_token_count=message.prompt_token_count,
        reused_token_count=message.reused_token_count,
        reuses=tuple(EngineReuse(each.engine_index, each.token_count) for each in message.reuses),
        held_block_count=message.held_block_count,
        committed_block_count=message.committed_block_count,
    )
