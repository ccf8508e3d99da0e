"""The sessions of one engine: its scheduler speaks for all of its processes, its workers are members.

vLLM starts workers first. So a worker opens the pool in a session of its own, to map it; the scheduler takes that
session over where it runs in the same process, and opens one otherwise. Each step then carries the scheduler's
`Stamp`, and a worker runs none before it is a member of that session [E24]: the blocks of a step stay out of others'
reach until every process that may write to them is proved gone.
"""

import os
import threading
from dataclasses import dataclass
from typing import Any

from kvharbor.client import Harbor, Pool, PoolInfo, PoolNotFound, connect
from kvharbor.client.pool_names import pool_named
from kvharbor.engines.naming import running_engine
from kvharbor.engines.vllm.errors import ContractBroken, PluginIncomplete
from kvharbor.engines.vllm.settings import Settings
from kvharbor.engines.vllm.versions import vllm_version
from kvharbor.gpumem import Layout

STAMP = "kvharbor_stamp"
"""The attribute of vLLM's SchedulerOutput that carries the stamp."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Whose step this is: what a worker needs to join the scheduler's session, a secret, and which pool it means."""

    join_token: str
    pool_id: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """A session with the pool that it has opened."""

    harbor: Harbor
    pool: Pool

    @classmethod
    def open(cls, settings: Settings, layout: Layout, *, role: str, part: int = 0) -> "Attachment":
        """Connects and opens the pool, which has to have this layout.

        Raises what the client does: LayoutMismatch names every field that differs.
        """
        harbor = connected(settings, role)
        try:
            return cls(harbor, harbor.open_pool(settings.pool, layout, settings.pool_bytes or None, part=part))
        except BaseException:
            harbor.close()
            raise

    @property
    def stamp(self) -> Stamp:
        """The stamp of steps in this session."""
        return Stamp(self.harbor.join_token, self.pool.id)

    def close(self) -> None:
        """Ends the session."""
        self.harbor.close()


def connected(settings: Settings, role: str) -> Harbor:
    """Opens a session that shows as "vllm/<version> <role>".

    Its calls do not wait while the service is away: the requests that run go on meanwhile.
    """
    version = vllm_version()
    return connect(
        settings.endpoint or None,
        client_name=f"vllm/{version} {role}",
        engine=running_engine("vllm", version, settings.instance),
        timeout_s=settings.timeout_s,
        away_wait_s=0.0,
    )


def pool_info(harbor: Harbor, name: str) -> PoolInfo | None:
    """Returns what is to be known of a pool without opening it; None if there is none of that name."""
    try:
        return pool_named(name, harbor.list_pools(), tenant=harbor.tenant, own_tenant=harbor.tenant)
    except PoolNotFound:
        return None


class Membership:
    """A worker's way into the scheduler's session, at the first step that it gets."""

    def __init__(self, settings: Settings, attachment: Attachment, rank: int) -> None:
        self._settings = settings
        self._attachment = attachment
        self._rank = rank
        self._joined: Harbor | None = None
        self._stamp: Stamp | None = None

    def require(self, scheduler_output: Any) -> None:
        """Returns when this process is a member of the session that has made the step.

        Raises PluginIncomplete where the scheduler is not kvharbor's, ContractBroken where it has another pool.
        """
        stamp = getattr(scheduler_output, STAMP, None)
        if stamp is None or stamp != self._stamp:
            self._enter(stamp)
            self._stamp = stamp

    def _enter(self, stamp: Stamp | None) -> None:
        if stamp is None:
            raise PluginIncomplete("the scheduler", "one that does not stamp its steps")
        own = self._attachment.stamp
        if stamp.pool_id != own.pool_id:
            raise ContractBroken(f"the scheduler has pool {stamp.pool_id}, this worker {own.pool_id}")
        if self._stamp is not None:
            raise ContractBroken("the scheduler's session has become another one: restart the engine")
        if stamp.join_token != own.join_token:
            self._joined = connect(
                self._settings.endpoint or None,
                client_name=f"vllm/{vllm_version()} worker",
                timeout_s=self._settings.timeout_s,
                join=stamp.join_token,
                rank=self._rank + 1,
            )
            if self._attachment.pool.memory.device is None:
                # That session was for the mapping alone, and this stays under vLLM's tensors.
                self._attachment.close()

    def close(self) -> None:
        """Leaves the session, which ends it."""
        if self._joined is not None:
            self._joined.close()


class _Handover:
    """Attachments that workers of this process have opened, for a scheduler in the same process to take over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offered: dict[tuple[int, str], Attachment] = {}

    def offer(self, engine: str, attachment: Attachment) -> None:
        """Leaves the attachment of an engine, named by vLLM's instance_id."""
        with self._lock:
            self._offered[os.getpid(), engine] = attachment

    def take(self, engine: str) -> Attachment | None:
        """Returns it, once; None if no worker of this engine runs in this process."""
        with self._lock:
            return self._offered.pop((os.getpid(), engine), None)


handover = _Handover()
