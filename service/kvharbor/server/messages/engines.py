"""What computes in a session, as it is told and as it is shown."""

from typing import Final

from kvharbor.pool import Engine, EngineGroup, EngineStats
from kvharbor.pool.errors import InvalidField
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import side_pb2, types_pb2

_MOST_BYTES: Final = {"name": 64, "version": 64, "instance": 128}
_GROUPS: Final = {
    EngineGroup.NONE: cache.ENGINE_GROUP_UNSPECIFIED,
    EngineGroup.OTHERS: cache.ENGINE_GROUP_OTHERS,
    EngineGroup.EARLIER: cache.ENGINE_GROUP_EARLIER_PROCESS,
}


def check_engine(engine: types_pb2.Engine) -> None:
    """Raises InvalidField for what could not be shown to people."""
    for name, most in _MOST_BYTES.items():
        value = getattr(engine, name)
        length = len(value.encode())
        if length > most:
            raise InvalidField(
                field=f"engine.{name}", value=f"{length} bytes long", limit=f"at most {most} bytes", remedy="shorten it"
            )
        if not value.isprintable():
            raise InvalidField(
                field=f"engine.{name}", value=repr(value)[:80], limit="printable characters", remedy="leave others out"
            )


def engine_of(hello: side_pb2.Hello, pid: int) -> Engine:
    """Returns what computes in the session of a checked hello, by what else that says where it names none.

    `pid` is the leader's; 0: it is in another PID namespace.
    """
    told = hello.engine
    name, version = told.name, told.version
    if not name:
        name, _, version = _shown(hello.client_version, 64).partition("/")
    instance = told.instance or _shown(hello.client_name, _MOST_BYTES["instance"])
    return Engine(name, version, instance or (f"pid {pid}" if pid else "elsewhere"))


def engine_message(engine: Engine) -> types_pb2.Engine:
    """Returns an engine as a message."""
    return types_pb2.Engine(name=engine.name, version=engine.version, instance=engine.instance)


def engine_stats_message(stats: EngineStats) -> cache.EngineStats:
    """Returns one engine's part in a pool as a message."""
    return cache.EngineStats(
        engine=engine_message(stats.engine),
        group=_GROUPS[stats.group],
        session_count=stats.session_count,
        prompt_token_count=stats.prompt_token_count,
        reused_token_count=stats.reused_token_count,
        reuses=[cache.EngineReuse(engine_index=place, token_count=count) for place, count in stats.reuses],
        held_block_count=stats.held_block_count,
        committed_block_count=stats.committed_block_count,
    )


def _shown(text: str, most: int) -> str:
    """Returns what can be shown of a text that nobody has checked for it."""
    return "".join(sign for sign in text if sign.isprintable())[:most]
