"""What `connect` was asked for: one value for both clients."""

import contextlib
import numbers
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Self

from kvharbor.client.calls import request
from kvharbor.client.engines import Engine
from kvharbor.client.errors import InvalidField
from kvharbor.v1 import side_pb2, types_pb2

API_VERSION = "v1"
UNNAMED = Engine()


@dataclass(frozen=True, slots=True)
class Options:
    """How to open a session, or to join one, and what to do when the service is away."""

    client_name: str = ""
    engine: Engine = UNNAMED
    timeout_s: float = 10.0
    accepts_warm_tasks: bool = False
    away_wait_s: float | None = None
    on_epoch: Callable[[str, str], Any] | None = None
    on_moved: Callable[[Any], Any] | None = None
    join: str = ""
    rank: int = 0
    read_only: bool = False

    def checked(self) -> Self:
        """Returns itself, or raises InvalidField."""
        positive_timeout(self.timeout_s)
        if not isinstance(self.engine, Engine):
            raise InvalidField.of("engine", self.engine, limit="an Engine", remedy="pass Engine(name, version)")
        if self.away_wait_s is not None and (not isinstance(self.away_wait_s, numbers.Real) or self.away_wait_s < 0):
            raise InvalidField.of("away_wait_s", self.away_wait_s, limit="seconds from 0, or None", remedy="correct it")
        if self.join and self.rank == 0:
            raise InvalidField.of("rank", 0, limit="1 or more with join", remedy="rank 0 is the leader's")
        if self.rank and not self.join:
            raise InvalidField.of(
                "rank", self.rank, limit="0 without join", remedy="give the leader's join_token too, or no rank"
            )
        if self.join and self.on_epoch is not None:
            raise InvalidField.of(
                "on_epoch", self.on_epoch, limit="None with join", remedy="join the leader's session of the new epoch"
            )
        if self.join and self.on_moved is not None:
            raise InvalidField.of("on_moved", self.on_moved, limit="None with join", remedy="nothing moves in a member")
        if self.read_only and not self.join:
            raise InvalidField.of("read_only", True, limit="False for the leader", remedy="only a member reads only")
        return self

    def hello(self, resume: side_pb2.Resume | None = None) -> side_pb2.Hello:
        """Returns the first message on a side socket: a new session, a member's, or a resumed one."""
        hello = request(
            side_pb2.Hello,
            client_name=self.client_name,
            client_version=_client_version(),
            api_versions=[API_VERSION],
            accepts_warm_tasks=self.accepts_warm_tasks,
            engine=request(types_pb2.Engine, **asdict(self.engine)),
        )
        if resume is not None:
            hello.resume.CopyFrom(resume)
        elif self.join:
            mode = side_pb2.MEMBER_MODE_READ_ONLY if self.read_only else side_pb2.MEMBER_MODE_READ_WRITE
            hello.join.CopyFrom(request(side_pb2.Join, join_token=self.join, rank=self.rank, mode=mode))
        return hello


def positive_timeout(timeout_s: float) -> float:
    """Returns a timeout as it is, or raises InvalidField: no call is made without a deadline."""
    if not isinstance(timeout_s, numbers.Real) or not 0 < timeout_s < 2**31:
        raise InvalidField.of("timeout_s", timeout_s, limit="seconds above 0", remedy="give the calls some time")
    return timeout_s


def _client_version() -> str:
    version = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = f"/{metadata.version('kvharbor')}"
    return f"kvharbor-python{version}"
