"""The pools of the service: made from one memory budget, found by tenant and name, named by id."""

import asyncio
import re
from collections.abc import Callable

import structlog

from kvharbor.gpumem import Layout
from kvharbor.pool.errors import InvalidField
from kvharbor.server.configuration.settings import POOL_NAME_PATTERN, Settings
from kvharbor.server.errors import (
    PoolDevicesMismatch,
    PoolInUse,
    PoolNotFound,
    PoolSizeMismatch,
    ServerError,
    StaleEpoch,
)
from kvharbor.server.memory.arenas import Arenas
from kvharbor.server.memory.budget import Budget
from kvharbor.server.pools.kept import drop_pool, kept_pools
from kvharbor.server.pools.life import Life
from kvharbor.server.pools.making import PoolMaker
from kvharbor.server.pools.served_pool import OpenedPool, ServedPool
from kvharbor.server.pools.versions import retire_left
from kvharbor.server.scheduling.turns import Turns
from kvharbor.server.session_errors import ResumeRequired, SessionUnknown
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.session import Session
from kvharbor.server.sessions.sessions import Sessions
from kvharbor.server.supervision.crash import Crash
from kvharbor.server.supervision.keeper import Keeper

log = structlog.get_logger(__name__)

MAX_NAMED_PINS = 8
"""Of a pool that is in use, in the refusal to drop it."""
MAX_OPENED = 1024
"""Pools that a session may have open: their ids have to fit in one frame of its side socket, and in what is kept."""


class Pools:
    """All pools. One is made once, however many ask for it at a time."""

    def __init__(
        self,
        settings: Settings,
        life: Life,
        keeper: Keeper,
        arenas: Arenas,
        *,
        clock: Callable[[], float],
        crash: Crash,
    ) -> None:
        self.epoch = life.epoch
        self._keeper = keeper
        self._crash = crash
        self._maker = PoolMaker(settings, life, keeper, arenas, clock=clock, crash=crash)
        self._by_id: dict[str, ServedPool] = {}
        self._by_name: dict[tuple[str, str], ServedPool] = {}
        self._making: dict[tuple[str, str], asyncio.Task[ServedPool]] = {}
        self._dropping: set[asyncio.Task[None]] = set()

    @property
    def budget(self) -> Budget:
        """The memory for pools, to read from."""
        return self._maker.budget

    async def open(
        self, session: Session, name: str, layout: Layout, size_bytes: int, devices: tuple[str, ...] = ()
    ) -> tuple[ServedPool, bool]:
        """Opens a pool for a session, making it if need be; the flag tells whether this call made it.

        `size_bytes` is of each part, 0 for any; `devices` are those of the parts, by rank, or none for any.
        """
        _check_name(name)
        if size_bytes < 0:
            raise InvalidField(
                field="size_bytes", value=size_bytes, limit="0 or more", remedy="leave it 0 for what is left"
            )
        places = self._maker.places_of(devices, layout)
        served, created = await self._found_or_made((session.peer.tenant, name), layout, size_bytes, places)
        served.descriptor.layout.require_equal(layout)
        if size_bytes not in (0, served.size_bytes):
            raise PoolSizeMismatch(size_bytes, current_size_bytes=served.size_bytes)
        if places and places != served.places:
            raise PoolDevicesMismatch(places, current_devices=served.places)
        if session.ended:
            raise SessionUnknown(session.cause)
        if served.pool_id not in session.opened:
            if len(session.opened) >= MAX_OPENED:
                raise InvalidField(
                    field="name",
                    value=f"the {MAX_OPENED + 1}th pool of the session",
                    limit=f"{MAX_OPENED} pools a session",
                    remedy="open another session",
                )
            served.pool.open_session(session.number, session.peer.tenant, session.engine)
            self._open(session, served, resumed=True)
        return served, created

    async def recover(self, sessions: Sessions) -> None:
        """Takes up the pools that an earlier process has kept, and opens them for the sessions that had them open."""
        for kept in kept_pools(self._keeper):
            had_it = [session for session in sessions.all() if kept.facts.pool_id in session.kept_pool_ids]
            tenants = {session.number: session.peer.tenant for session in had_it}
            served = self._found(await self._maker.recover(kept, tenants))
            for session in had_it:
                served.pool.name_engine(session.number, session.engine)
                self._open(session, served, resumed=False)
            served.may_have_left_versions = True
            served.owner.spawn(retire_left(served))
            served.owner.reschedule()

    async def declare(self, tenant: str, name: str, layout: Layout, size_bytes: int) -> tuple[ServedPool, bool]:
        """Makes a pool that the configuration declares; the flag tells whether it was not there yet."""
        return await self._found_or_made((tenant, name), layout, size_bytes, ())

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
        opened = session.opened.get(pool_id)
        if opened is None:
            self._unlink(session, served)
        else:
            try:
                # In its turn: what its calls before this one come to keeps the pool.
                await opened.turns.take()
            except PoolNotFound:
                return False
            try:
                self._unlink(session, served)
                opened.turns.end(PoolNotFound(pool_id))
            finally:
                opened.turns.leave()
        # Whatever becomes of the call: what nobody finds any more must still give its memory back.
        dropping = asyncio.create_task(self._close_dropped(served))
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)
        await asyncio.shield(dropping)
        return True

    async def close(self, reason: ServerError) -> None:
        """Closes every pool; for shutdown, after the last session."""
        self._maker.closing = True
        await asyncio.gather(*self._making.values(), *self._dropping, return_exceptions=True)
        for served in self._by_id.values():
            await served.close(reason)

    def end_watches(self, reason: ServerError) -> None:
        """Ends the watches and what waits in every pool with `reason`; no more pools are made."""
        self._maker.closing = True
        for served in self._by_id.values():
            served.end_waits(reason)

    def _unlink(self, session: Session, served: ServedPool) -> None:
        """Makes a pool one that nobody finds, here and in the process after this. Raises PoolInUse."""
        usage, holding = served.pool.usage(), served.pool.holding(session.number)
        others = len(served.sessions - {session})
        held_count = holding.held_block_count + holding.leased_block_count
        if others or usage.sequence_count or usage.pin_count or held_count:
            raise PoolInUse(
                session_count=others,
                sequence_count=usage.sequence_count,
                pin_count=usage.pin_count,
                held_block_count=held_count,
                pin_names=[pin.name for pin in served.pins_for(session.peer, MAX_NAMED_PINS)],
            )
        del self._by_id[served.pool_id]
        del self._by_name[served.tenant, served.name]
        drop_pool(self._keeper, served)
        session.opened.pop(served.pool_id, None)

    async def _close_dropped(self, served: ServedPool) -> None:
        reason = PoolNotFound(served.pool_id)
        served.end_waits(reason)
        try:
            # In slices: to free at once what a full pool knows of a million blocks takes a third of a second [S14].
            await served.owner.run_unbound(served.pool.evict_unheld)
            await served.close(reason)
            await served.memory.give_back()
        except Exception as failure:
            # Memory that may still be mapped here must not be freed. It is nobody's for the next process, and so is
            # the booking.
            self._crash(failure)
            raise
        self.budget.give_back(served.places, served.descriptor.size_bytes)
        log.info("pool dropped", pool=served.pool_id, name=served.name, tenant=served.tenant)

    async def _found_or_made(
        self, key: tuple[str, str], layout: Layout, size_bytes: int, devices: tuple[str, ...]
    ) -> tuple[ServedPool, bool]:
        while True:
            served = self._by_name.get(key)
            if served is not None:
                return served, False
            making = self._making.get(key)
            if making is None:
                making = asyncio.create_task(self._make(key, layout, size_bytes, devices))
                self._making[key] = making
                making.add_done_callback(lambda task: self._made(key, task))
                return await asyncio.shield(making), True
            # Another caller is making it. Should that fail, this one's layout and size may still do.
            await asyncio.wait([making])

    def _made(self, key: tuple[str, str], making: "asyncio.Task[ServedPool]") -> None:
        del self._making[key]
        if not making.cancelled():
            making.exception()  # seen, even if the caller has left meanwhile

    async def _make(
        self, key: tuple[str, str], layout: Layout, size_bytes: int, devices: tuple[str, ...]
    ) -> ServedPool:
        return self._found(await self._maker.make(key, layout, size_bytes, devices))

    def _found(self, served: ServedPool) -> ServedPool:
        """Makes a pool one that can be found."""
        self._by_id[served.pool_id] = self._by_name[served.tenant, served.name] = served
        return served

    def _open(self, session: Session, served: ServedPool, *, resumed: bool) -> None:
        served.sessions.add(session)
        prefix = f"{served.pool_id}.{session.number}."
        session.opened[served.pool_id] = OpenedPool(served, Turns(), prefix, resumed)


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
