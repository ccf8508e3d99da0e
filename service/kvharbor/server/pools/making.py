"""Makes pools from the memory budget, and takes up those that an earlier process has made."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from kvharbor.gpumem import ArenaTooSmall, ArenaUnfit, Descriptor, Layout, ReservationCancelled, block_count_for
from kvharbor.gpumem.devices import same_device
from kvharbor.pool import Pool
from kvharbor.pool.errors import InvalidField
from kvharbor.pool.ledger import LedgerUnfit
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.errors import Draining
from kvharbor.server.memory.arenas import Arenas
from kvharbor.server.memory.budget import HOST, Budget
from kvharbor.server.memory.pool_memory import PoolMemory, pool_with_ledger, recovered_pool
from kvharbor.server.memory.status_page import StatusPage
from kvharbor.server.pools.kept import KeptPool, keep_pool, pool_config
from kvharbor.server.pools.life import Life
from kvharbor.server.pools.served_pool import PoolFacts, ServedPool
from kvharbor.server.scheduling.event_log import EventLog
from kvharbor.server.scheduling.owner import PoolOwner
from kvharbor.server.sizes import exact_size
from kvharbor.server.supervision.crash import Crash, end_cold
from kvharbor.server.supervision.keeper import Keeper

log = structlog.get_logger(__name__)


class PoolMaker:
    """Makes pools, and books their memory. A pool that it returns is kept, and still to be found by anybody."""

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
        self.budget = Budget(life.memory, life.piece_bytes)
        self.closing = False
        self._settings = settings
        self._life = life
        self._keeper = keeper
        self._arenas = arenas
        self._clock = clock
        self._crash = crash

    def places_of(self, devices: Sequence[str], layout: Layout) -> tuple[str, ...]:
        """Returns the places of these devices, however their UUIDs are spelled; none of none.

        Raises InvalidField for devices that are not the service's, or not one a rank.
        """
        known = self.budget.places
        places = tuple(place for device in devices for place in known if same_device(place, device))
        if not devices:
            return ()
        if known == (HOST,):
            limit, remedy = "none, as the pools of this service lie in host memory", "leave it empty"
        elif len(devices) != layout.tp_size:
            limit, remedy = f"{layout.tp_size} devices, one a rank", "name one for each rank, or none"
        elif len(places) < len(devices):
            limit, remedy = f"of the service's devices: {', '.join(known)}", "name some of these"
        else:
            return places
        raise InvalidField(field="devices", value=", ".join(devices)[:200], limit=limit, remedy=remedy)

    async def make(self, key: tuple[str, str], layout: Layout, size_bytes: int, devices: tuple[str, ...]) -> ServedPool:
        """Makes the pool of (tenant, name) with parts of `size_bytes`, or 0 for what is set or left.

        They lie on `devices`, by rank, or, if none are named, where there is most room.
        """
        tenant, name = key
        places = devices or self.budget.spread(layout.tp_size)
        asked_bytes = size_bytes or self._settings.pool_rules(name).size or self.budget.room_bytes(places)
        descriptor = self._descriptor(name, layout, size_bytes, asked_bytes, places)
        self.budget.book(places, descriptor.size_bytes)
        try:
            pool, memory = await self._with_memory(name, descriptor, places)
        except BaseException as failure:
            self.budget.give_back(places, descriptor.size_bytes)
            if isinstance(failure, ReservationCancelled):
                raise Draining from None
            raise
        pool_id = f"{self._life.epoch}.{self._life.next_pool_number(self._keeper)}"
        served = self._served(pool, memory, PoolFacts(pool_id, tenant, name, asked_bytes, descriptor, places))
        # Before anybody is told of it: who has it open finds it again, whatever becomes of this process [S15].
        keep_pool(self._keeper, served)
        log.info(
            "pool made",
            pool=served.pool_id,
            name=name,
            tenant=tenant,
            arena=self._arenas.kind,
            places=[place or "host" for place in places],
            block_count=descriptor.block_count,
            scratch_block_count=layout.scratch_blocks,
            block_bytes=layout.block_bytes,
            size_bytes=descriptor.size_bytes,
            unused_bytes=asked_bytes - descriptor.size_bytes,
        )
        return served

    async def recover(self, kept: KeptPool, tenants: Mapping[int, str]) -> ServedPool:
        """Takes up a pool that an earlier process has kept; `tenants` are those of the sessions that had it open."""
        began_at = time.monotonic()
        facts = kept.facts
        config = pool_config(self._settings, facts.name, facts.descriptor)
        first_number = self._life.first_number
        try:
            pool, ledger = await asyncio.to_thread(recovered_pool, config, kept.ledger_fd, tenants, first_number)
        except (ArenaUnfit, LedgerUnfit) as unfit:
            # It is an earlier version's, whole as it may be: no start of this one could take it up.
            end_cold(self._keeper, f"the ledger of pool {facts.name} cannot be read: {unfit}")
        parts = tuple(self._arenas.take_up(part.export, part.allocation) for part in kept.parts)
        self.budget.book(facts.places, facts.descriptor.size_bytes)
        page = None if kept.page_fd is None else StatusPage.kept(kept.page_fd, self._life.epoch)
        served = self._served(pool, PoolMemory(parts, ledger), facts, page)
        if page is None:
            keep_pool(self._keeper, served)
        stats = pool.stats()
        log.info(
            "pool recovered",
            pool=served.pool_id,
            name=served.name,
            tenant=served.tenant,
            session_count=len(tenants),
            total_block_count=stats.total_block_count,
            free_block_count=stats.free_block_count,
            took_s=round(time.monotonic() - began_at, 3),
        )
        return served

    async def _with_memory(self, name: str, descriptor: Descriptor, places: tuple[str, ...]) -> tuple[Pool, PoolMemory]:
        config = pool_config(self._settings, name, descriptor)
        pool, ledger = await asyncio.to_thread(pool_with_ledger, config, f"kvharbor-{name}", self._is_closing)
        try:
            parts = await self._arenas.make(places, descriptor.size_bytes, f"kvharbor-{name}", self._is_closing)
        except BaseException:
            ledger.close()
            await asyncio.to_thread(ledger.forget)
            raise
        return pool, PoolMemory(parts, ledger)

    def _descriptor(
        self, name: str, layout: Layout, size_bytes: int, asked_bytes: int, places: tuple[str, ...]
    ) -> Descriptor:
        self.budget.check(places, asked_bytes, "ask for less, drop a pool or raise memory")
        try:
            return layout.descriptor(block_count_for(asked_bytes, layout))
        except ArenaTooSmall as refused:
            if size_bytes or self._settings.pool_rules(name).size:
                raise _less_than_a_block(refused) from None
            # Nobody has named a size, so none was wrong: it is what is left that holds no block.
            self.budget.check(places, refused.needed_bytes, "drop a pool or raise memory")
            raise

    def _is_closing(self) -> bool:
        return self.closing

    def _served(self, pool: Pool, memory: PoolMemory, facts: PoolFacts, page: StatusPage | None = None) -> ServedPool:
        owner = PoolOwner(pool, EventLog(self._settings.watch_backlog), self._clock, self._crash)
        guarantee_ratio = self._settings.pool_rules(facts.name).guarantee_ratio or 0.0
        return ServedPool.of(
            facts, memory, owner, grace_s=self._arenas.grace_s, page=page, guarantee_ratio=guarantee_ratio
        )


def _less_than_a_block(refused: ArenaTooSmall) -> InvalidField:
    return InvalidField(
        field="size_bytes",
        value=f"{exact_size(refused.size_bytes)}, less than one block beside {refused.scratch_blocks} scratch blocks",
        limit=f"at least {exact_size(refused.needed_bytes)}",
        remedy="ask for more, or use smaller blocks",
    )
