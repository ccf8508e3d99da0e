"""The linker: SGLang's interface to an external KV store, with a kvharbor pool as the store.

SGLang names a page by a hash of everything up to its end, and asks for pages from the middle of a prompt on. So each
page is a chain of its own in the pool, under that key.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from kvharbor.client import Acquired, BlockRun, Chain, EpochEnded, Harbor, HarborError, Namespace, Pool, connect
from kvharbor.engines.naming import installed_version, running_engine
from kvharbor.engines.request_blocks import RequestBlocks
from kvharbor.engines.sglang_linker.errors import LinkerUnsupported
from kvharbor.engines.sglang_linker.pages import Copy, Pages, layout_of
from kvharbor.engines.sglang_linker.settings import LinkerSettings
from kvharbor.engines.spared_calls import SparedCalls
from kvharbor.engines.step_gate import StepGate

MOST_CHAINS = 4096
"""In one round trip: a call takes so many, and a prompt may have more pages."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Load:
    table: list[int]
    copies: list[Copy]


class HarborLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Copies pages between SGLang's device pool and a pool that other engines share. One thread uses it.

    Loads and offloads are carried out at once, in the calling thread. Raises LinkerUnsupported by name, and
    LayoutMismatch with every field in which the pool differs from what the engine needs.
    """

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any = None
    ) -> None:
        del server_args
        settings = LinkerSettings.of(extra_config)
        _require_supported(params, components)
        kv_cache = params.token_to_kv_pool_allocator.get_kvcache()
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: kv_cache}
        self._gate = StepGate()
        self._over = ""
        self._used = False
        self._harbor: Harbor = connect(
            settings.endpoint or None,
            client_name="sglang linker",
            engine=running_engine("sglang", installed_version("sglang"), settings.instance),
            timeout_s=settings.timeout_s,
            on_epoch=self._on_epoch,
        )
        try:
            layout = layout_of(kv_cache, settings.model, params.page_size)
            self._pool: Pool = self._harbor.open_pool(settings.pool, layout, settings.pool_bytes)
        except BaseException:
            self._harbor.close()
            raise
        self._calls = SparedCalls(self._pool.blocks)
        self._namespace = Namespace(scheme="sglang/sha256")
        self._held = RequestBlocks(self._calls, self._namespace)
        self._pool.blocks.on_recall = self._held.recall
        self._pages = Pages(self._pool, kv_cache)
        self._life = self._pool.id
        self._pending: dict[str, _Load] = {}
        self._offloaded: deque[bool] = deque()
        self.layer_done_counter = LayerWiseLoadCounter(self._pages.layer_count)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Returns every number of leading pages that is in the pool. Holds nothing: `load` asks again."""
        del rid
        transfer = _only_kv(transfers)
        if transfer is None or not self._ready():
            return []
        table = self._acquired(transfer.keys or [], uses=False)
        self._held.drop(table)
        return list(range(1, len(table) + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Holds pages for a request, to be copied by the next start_layer_wise_loading; False if one has gone."""
        transfer = _only_kv(transfers)
        if transfer is None or transfer.device_indices is None or not self._ready():
            return False
        keys = transfer.keys or []
        table = self._acquired(keys, uses=True)
        if len(table) < len(keys):
            self._held.drop(table)
            return False
        self.cancel_queued_load(rid)
        starts = self._pages.starts(transfer.device_indices)
        self._pending[rid] = _Load(table, list(zip(table, starts, strict=True)))
        return True

    def start_layer_wise_loading(self) -> int:
        """Copies what is queued, and returns the number under which `finish_layer_wise_loading` knows it."""
        if not self._pending:
            return -1
        loads, self._pending = [*self._pending.values()], {}
        index: int = self.layer_done_counter.update_producer()
        copies = [copy for load in loads for copy in load.copies]
        with self._gate.step():
            try:
                self._require_life()
                for layer in range(self._pages.layer_count):
                    self._pages.load(layer, copies)
                    self.layer_done_counter.complete(index, layer)
            except (HarborError, RuntimeError) as failure:
                _LOG.exception("pages could not be loaded")
                self.layer_done_counter.fail(index, failure)
        for load in loads:
            self._drop(load.table)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Returns whether all layers of a batch have been loaded."""
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        """Lets go of what a request was to load."""
        load = self._pending.pop(rid, None)
        if load is not None:
            self._drop(load.table)
        return load is not None

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Copies pages to the pool and publishes them, all or none; False if there is no room."""
        del session_id
        transfer = _only_kv(transfers)
        if transfer is None or transfer.device_indices is None or not self._ready():
            return False
        keys = transfer.keys or []
        try:
            table = self._held.take_some(len(keys))
        except EpochEnded:
            return False
        if len(table) < len(keys):
            self._drop(table)
            self._held.give_back_spare()
            return False
        for event in self.record_offload_ready() if transfer.device_indices.is_cuda else ():
            event.synchronize()
        self._offloaded.append(self._stored(table, keys, self._pages.starts(transfer.device_indices)))
        self._drop(table)
        self._held.give_back_spare()
        return True

    def num_completed_offloads(self) -> int:
        """Returns how many results wait."""
        return len(self._offloaded)

    def pop_completed_offload(self) -> bool:
        """Returns the oldest result."""
        return self._offloaded.popleft()

    def reset(self) -> None:
        """Forgets what is under way. SGLang does so for new weights too: nothing stored so far is found any more."""
        for rid in list(self._pending):
            self.cancel_queued_load(rid)
        self._offloaded.clear()
        self.layer_done_counter.reset()
        if self._used:
            self._namespace = dataclasses.replace(self._namespace, version=self._calls.leave_version())
            self._held.namespace = self._namespace
            self._used = False

    def close(self) -> None:
        """Ends the session."""
        for rid in list(self._pending):
            self.cancel_queued_load(rid)
        self._held.give_back_spare()
        del self._pages
        self._harbor.close()

    def _stored(self, table: Sequence[int], keys: Sequence[str], starts: Sequence[int]) -> bool:
        with self._gate.step():
            try:
                self._require_life()
                self._pages.store(list(zip(table, starts, strict=True)))
            except (HarborError, RuntimeError):
                _LOG.exception("pages could not be stored")
                return False
        for block_id, key in zip(table, keys, strict=True):
            self._held.publish([block_id], 0, 1, keys=bytes.fromhex(key))
        return not self._held.epoch_ended

    def _acquired(self, keys: Sequence[str], *, uses: bool) -> list[int]:
        """Holds the leading pages that are there; returns their blocks. `uses`: not only to ask."""
        found: list[int] = []
        for first in range(0, len(keys), MOST_CHAINS):
            part = keys[first : first + MOST_CHAINS]
            found += self._acquired_part(part, uses=uses)
            if len(found) < first + len(part):
                break
        return found

    def _acquired_part(self, keys: Sequence[str], *, uses: bool) -> list[int]:
        self._used = True
        chains = [Chain(keys=bytes.fromhex(key), namespace=self._namespace, uses=uses) for key in keys]
        try:
            results: list[Acquired] = self._calls.acquire(chains)
        except HarborError as away:
            _LOG.warning("what the pool has of a request is not known: %s", away)
            return []
        nothing = BlockRun.of(())
        tables = [self._held.adopt(result.held, nothing) for result in results]
        found = next((place for place, table in enumerate(tables) if not table), len(tables))
        for table in tables[found:]:
            self._held.drop(table)
        return [table[0] for table in tables[:found]]

    def _drop(self, table: list[int]) -> None:
        if self._life == self._pool.id and not self._held.epoch_ended:
            self._held.drop(table)

    def _ready(self) -> bool:
        """Forgets what was held when another epoch has begun; False in between."""
        if self._pool.id != self._life:
            self._life = self._pool.id
            self._pending.clear()
            self._held.forget()
        return self._pool.id != self._over and not self._held.epoch_ended

    def _require_life(self) -> None:
        if self._pool.id in (self._over, "") or self._pool.id != self._life:
            raise EpochEnded("the pages were held in an epoch that has ended")

    def _on_epoch(self, old_epoch: str, new_epoch: str) -> None:
        del old_epoch, new_epoch
        self._over = self._pool.id
        self._gate.wait_for_end()


def _only_kv(transfers: Sequence[PoolTransfer]) -> PoolTransfer | None:
    """Returns the transfer of the one pool that is linked; None where there are others."""
    return transfers[0] if len(transfers) == 1 and transfers[0].name == PoolName.KV else None


def _require_supported(params: Any, components: Any) -> None:
    names = sorted(getattr(each, "name", str(each)) for each in components)
    if names != ["FULL"]:
        raise LinkerUnsupported("caches of other components", names, "use a model of full attention only")
    for name in ("pp_size", "attn_cp_size"):
        if (size := getattr(params, name)) > 1:
            raise LinkerUnsupported(f"several ranks by {name}", size, "run one rank an engine")
    group = params.tp_cache_group
    if group is not None and group.size() > 1:
        raise LinkerUnsupported("tensor parallelism", group.size(), "run one rank an engine")
    if params.is_eagle:
        raise LinkerUnsupported("speculative decoding", "is_eagle", "leave it out")
