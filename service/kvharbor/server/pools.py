"""The pools of the service: made from one memory budget, found by tenant and name, named by id."""

import asyncio
import os
import re
import time
from collections.abc import Callable

import structlog

from kvharbor.gpumem import (
    ArenaTooSmall,
    InsufficientMemory,
    Layout,
    ReservationCancelled,
    block_count_for,
)
from kvharbor.pool import Pool
from kvharbor.pool.errors import InvalidField
from kvharbor.server.errors import (
    Draining,
    PoolInUse,
    PoolNotFound,
    PoolSizeMismatch,
    ResumeRequired,
    ServerError,
    SessionUnknown,
    StaleEpoch,
)
from kvharbor.server.event_log import EventLog
from kvharbor.server.keeper import Keeper
from kvharbor.server.kept_pools import drop_pool, keep_pool, kept_pools, pool_config
from kvharbor.server.life import Life
from kvharbor.server.owner import Crash, PoolOwner
from kvharbor.server.peer import Peer
from kvharbor.server.pool_memory import PoolMemory, pool_with_memory, recovered_pool
from kvharbor.server.served_pool import OpenedPool, PoolFacts, ServedPool
from kvharbor.server.session import Session
from kvharbor.server.sessions import Sessions
from kvharbor.server.settings import POOL_NAME_PATTERN, Settings
from kvharbor.server.turns import Turns

log = structlog.get_logger(__name__)

MAX_OPENED = 1024
"""Pools that a session may have open: their ids have to fit in one frame of its side socket, and in what is kept."""


class Pools:
    """All pools. Memory is booked before it is reserved: no two openings have the same bytes [S8]."""

    def __init__(
        self, settings: Settings, life: Life, keeper: Keeper, *, clock: Callable[[], float], crash: Crash
    ) -> None:
        self.memory_bytes = life.memory_bytes
        self.memory_available_bytes = life.memory_bytes
        self.epoch = life.epoch
        self._settings = settings
        self._life = life
        self._keeper = keeper
        self._clock = clock
        self._crash = crash
        self._by_id: dict[str, ServedPool] = {}
        self._by_name: dict[tuple[str, str], ServedPool] = {}
        self._making: dict[tuple[str, str], asyncio.Task[ServedPool]] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        self._closing = False

    async def open(self, session: Session, name: str, layout: Layout, size_bytes: int) -> tuple[ServedPool, bool]:
        """Opens a pool for a session, making it if need be; the flag tells whether this call made it."""
        _check_name(name)
        if size_bytes < 0:
            raise InvalidField(
                field="size_bytes", value=size_bytes, limit="0 or more", remedy="leave it 0 for what is left"
            )
        served, created = await self._found_or_made((session.peer.tenant, name), layout, size_bytes)
        served.descriptor.layout.require_equal(layout)
        if size_bytes not in (0, served.size_bytes):
            raise PoolSizeMismatch(size_bytes, current_size_bytes=served.size_bytes)
        if session.ended:
            raise SessionUnknown
        if served.pool_id not in session.opened:
            if len(session.opened) >= MAX_OPENED:
                raise InvalidField(
                    field="name",
                    value=f"the {MAX_OPENED + 1}th pool of the session",
                    limit=f"{MAX_OPENED} pools a session",
                    remedy="open another session",
                )
            served.pool.open_session(session.number, session.peer.tenant)
            self._open(session, served, resumed=True)
        return served, created

    async def recover(self, sessions: Sessions) -> None:
        """Takes up the pools that an earlier process has kept, and opens them for the sessions that had them open."""
        for facts, fds in kept_pools(self._keeper):
            had_it = [session for session in sessions.all() if facts.pool_id in session.kept_pool_ids]
            await self._recover(facts, fds, had_it)
            for fd in fds:
                os.close(fd)

    async def declare(self, tenant: str, name: str, layout: Layout, size_bytes: int) -> tuple[ServedPool, bool]:
        """Makes a pool that the configuration declares; the flag tells whether it was not there yet."""
        return await self._found_or_made((tenant, name), layout, size_bytes)

    def visible(self, peer: Peer, pool_id: str) -> ServedPool:
        """Returns a pool that the caller may see; raises PoolNotFound, for another tenant's too, or StaleEpoch."""
        served = self._by_id.get(pool_id)
        if served is None or not _may_see(peer, served):
            raise self.unknown(pool_id)
        return served

    def opened(self, session: Session, pool_id: str) -> OpenedPool:
        """Returns a pool that the session may work on; raises PoolNotFound, StaleEpoch, ResumeRequired."""
        opened = session.opened.get(pool_id)
        if opened is None:
            raise self.unknown(pool_id)
        if not opened.resumed:
            raise ResumeRequired(pool_id)
        return opened

    def unknown(self, pool_id: str) -> ServerError:
        """Returns the error for a pool_id that names nothing here."""
        epoch, _, number = pool_id.partition(".")
        if epoch != self.epoch and re.fullmatch(r"[0-9a-f]{12}", epoch) and re.fullmatch(r"[0-9]{1,18}", number):
            return StaleEpoch(epoch, current_epoch=self.epoch)
        return PoolNotFound(pool_id[:80])

    def all(self) -> list[ServedPool]:
        """Returns every pool."""
        return [*self._by_id.values()]

    def all_visible(self, peer: Peer) -> list[ServedPool]:
        """Returns the pools that the caller may see, in order of name."""
        seen = [served for served in self._by_id.values() if _may_see(peer, served)]
        return sorted(seen, key=lambda served: (served.name, served.tenant))

    async def drop(self, session: Session, pool_id: str) -> bool:
        """Removes a pool; False if there is none of that id. Raises PoolInUse."""
        served = self._by_id.get(pool_id)
        if served is None or not _may_see(session.peer, served):
            return False
        usage = served.pool.usage()
        others = len(served.sessions - {session})
        if others or usage.sequence_count or usage.pin_count:
            raise PoolInUse(session_count=others, sequence_count=usage.sequence_count, pin_count=usage.pin_count)
        del self._by_id[pool_id]
        del self._by_name[served.tenant, served.name]
        drop_pool(self._keeper, served)
        session.opened.pop(pool_id, None)
        # Whatever becomes of the call: what nobody finds any more must still give its memory back.
        dropping = asyncio.create_task(self._close_dropped(served))
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)
        await asyncio.shield(dropping)
        return True

    async def close(self, reason: ServerError) -> None:
        """Closes every pool; for shutdown, after the last session."""
        self._closing = True
        await asyncio.gather(*self._making.values(), *self._dropping, return_exceptions=True)
        for served in self._by_id.values():
            await served.close(reason)

    def end_watches(self, reason: ServerError) -> None:
        """Ends the watches and what waits in every pool with `reason`; no more pools are made."""
        self._closing = True
        for served in self._by_id.values():
            served.events.end_with(reason)
            served.admission.give_up_all(reason)
            served.warm.end_waits(reason)

    async def _close_dropped(self, served: ServedPool) -> None:
        await served.close(PoolNotFound(served.pool_id))
        await asyncio.to_thread(served.memory.forget)
        self.memory_available_bytes += served.descriptor.size_bytes
        log.info("pool dropped", pool=served.pool_id, name=served.name, tenant=served.tenant)

    async def _found_or_made(self, key: tuple[str, str], layout: Layout, size_bytes: int) -> tuple[ServedPool, bool]:
        while True:
            served = self._by_name.get(key)
            if served is not None:
                return served, False
            making = self._making.get(key)
            if making is None:
                making = asyncio.create_task(self._make(key, layout, size_bytes))
                self._making[key] = making
                making.add_done_callback(lambda task: self._made(key, task))
                return await asyncio.shield(making), True
            # Another caller is making it. Should that fail, this one's layout and size may still do.
            await asyncio.wait([making])

    def _made(self, key: tuple[str, str], making: "asyncio.Task[ServedPool]") -> None:
        del self._making[key]
        if not making.cancelled():
            making.exception()  # seen, even if the caller has left meanwhile

    async def _make(self, key: tuple[str, str], layout: Layout, size_bytes: int) -> ServedPool:
        tenant, name = key
        rules = self._settings.pool_rules(name)
        asked_bytes = size_bytes or rules.size or self.memory_available_bytes
        if asked_bytes > self.memory_available_bytes:
            raise self._insufficient(asked_bytes, "ask for less, drop a pool or raise memory")
        try:
            descriptor = layout.descriptor(block_count_for(asked_bytes, layout))
        except ArenaTooSmall as refused:
            if size_bytes or rules.size:
                raise _less_than_a_block(refused) from None
            raise self._insufficient(refused.needed_bytes, "drop a pool or raise memory") from None
        config = pool_config(self._settings, name, descriptor)
        self.memory_available_bytes -= descriptor.size_bytes
        try:
            pool, memory = await asyncio.to_thread(
                pool_with_memory, config, descriptor, f"kvharbor-{name}", lambda: self._closing
            )
        except BaseException as failure:
            self.memory_available_bytes += descriptor.size_bytes
            if isinstance(failure, ReservationCancelled):
                raise Draining from None
            raise
        pool_id = f"{self.epoch}.{self._life.next_pool_number(self._keeper)}"
        served = self._served(pool, memory, PoolFacts(pool_id, tenant, name, asked_bytes, descriptor))
        # Before anybody is told of it: who has it open finds it again, whatever becomes of this process [S15].
        keep_pool(self._keeper, served)
        log.info(
            "pool made",
            pool=served.pool_id,
            name=name,
            tenant=tenant,
            block_count=descriptor.block_count,
            scratch_block_count=layout.scratch_blocks,
            block_bytes=layout.block_bytes,
            size_bytes=descriptor.size_bytes,
            unused_bytes=asked_bytes - descriptor.size_bytes,
        )
        return served

    async def _recover(self, facts: PoolFacts, fds: tuple[int, int], sessions: list[Session]) -> None:
        began_at = time.monotonic()
        config = pool_config(self._settings, facts.name, facts.descriptor)
        tenants = {session.number: session.peer.tenant for session in sessions}
        pool, memory = await asyncio.to_thread(
            recovered_pool, config, facts.descriptor, fds, tenants, self._life.first_number
        )
        self.memory_available_bytes -= facts.descriptor.size_bytes
        served = self._served(pool, memory, facts)
        for session in sessions:
            self._open(session, served, resumed=False)
        served.owner.reschedule()
        stats = pool.stats()
        log.info(
            "pool recovered",
            pool=served.pool_id,
            name=served.name,
            tenant=served.tenant,
            session_count=len(sessions),
            total_block_count=stats.total_block_count,
            free_block_count=stats.free_block_count,
            took_s=round(time.monotonic() - began_at, 3),
        )

    def _served(self, pool: Pool, memory: PoolMemory, facts: PoolFacts) -> ServedPool:
        """Makes a pool one that can be found."""
        owner = PoolOwner(pool, EventLog(self._settings.watch_backlog), self._clock, self._crash)
        served = ServedPool.of(facts, memory, owner)
        self._by_id[served.pool_id] = self._by_name[served.tenant, served.name] = served
        return served

    def _open(self, session: Session, served: ServedPool, *, resumed: bool) -> None:
        served.sessions.add(session)
        prefix = f"{served.pool_id}.{session.number}."
        session.opened[served.pool_id] = OpenedPool(served, Turns(), prefix, resumed)

    def _insufficient(self, needed_bytes: int, remedy: str) -> InsufficientMemory:
        return InsufficientMemory(
            needed_bytes,
            available_bytes=self.memory_available_bytes,
            limited_by="the setting memory",
            remedy=remedy,
        )


def _less_than_a_block(refused: ArenaTooSmall) -> InvalidField:
    return InvalidField(
        field="size_bytes",
        value=f"{refused.size_bytes} bytes, less than one block beside {refused.scratch_blocks} scratch blocks",
        limit=f"at least {refused.needed_bytes} bytes",
        remedy="ask for more, or use smaller blocks",
    )


def _check_name(name: str) -> None:
    if not re.fullmatch(POOL_NAME_PATTERN, name):
        raise InvalidField(
            field="name",
            value=repr(name[:70]),
            limit="1 to 64 of letters, digits, '.', '_' and '-'",
            remedy="choose such a name",
        )


def _may_see(peer: Peer, served: ServedPool) -> bool:
    return peer.administrator or peer.tenant == served.tenant
