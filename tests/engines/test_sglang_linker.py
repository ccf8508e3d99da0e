"""SGLang's own radix cache, allocator and device pool on a CPU, linked to a pool: what runs of it without a GPU.

The scheduler, the model and its forward are played here: K and V of a token are made of the tokens up to it.
"""

import array
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from kvharbor.client import InsufficientMemory, LayoutMismatch, ServiceAway
from kvharbor.engines.sglang_linker import LinkerSettings, server_arguments

pytest.importorskip("sglang", reason="needs sglang 0.5.23", exc_type=ImportError)

PAGE, LAYERS, HEADS, DIM, SLOTS = 16, 3, 2, 8, 256
PROMPT = [(7 * number + number // 5) % 101 for number in range(100)]


class Everything(types.ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Stubs(importlib.abc.Loader):
    """Stands for torchvision, which is imported for images only and has to be of torch's own build."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Finds it."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Makes a module that has everything."""
        return Everything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """It is made already."""


@pytest.fixture(scope="module", autouse=True)
def _torchvision() -> Iterator[None]:
    stubs: Any = Stubs()
    sys.meta_path.insert(0, stubs)
    yield
    sys.meta_path.remove(stubs)


class Engine:
    """One SGLang engine's cache."""

    def __init__(self, target: str, *, dtype: torch.dtype = torch.float32, size: str = "1MiB") -> None:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.kv = MHATokenToKVPool(SLOTS, PAGE, dtype, HEADS, DIM, LAYERS, "cpu", enable_memory_saver=False)
        self.allocator = PagedTokenToKVPoolAllocator(SLOTS, PAGE, dtype, "cpu", self.kv, need_sort=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, SLOTS, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        self.cache = UnifiedRadixCache(params)
        config = {
            "linker": "HarborLinker",
            "linker_module_path": "kvharbor.engines.sglang_linker",
            "linker_extra_config": {"model": "toy", "endpoint": target, "size": size},
        }
        self.linker = create_unified_cache_linker(
            SimpleNamespace(), params, backend="dynamic", config=config, components={ComponentType.FULL}
        )
        self.cache.init_cache_linker(self.linker)

    def answer(self, tokens: Sequence[int]) -> tuple[int, int, int]:
        """Runs one request; returns how many tokens came from its own cache, from the pool, and by computing."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        whole = len(tokens) // PAGE * PAGE
        key = RadixKey(array.array("q", tokens[:whole]), None)
        request = SimpleNamespace(
            rid=f"r{next(NUMBERS)}",
            session=None,
            extra_key=None,
            kv=None,
            swa_branching_seqlen=None,
        )
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        request.last_node, request.prefix_len = found.last_device_node, found.device_prefix_len
        slots = self.cache.prefix_device_indices(request).to(torch.int64)
        loaded = 0
        if found.host_hit_length:
            loaded, _ = self.cache.init_load_back(
                InitLoadBackParams(found.last_host_node, found.host_hit_length, req=request)
            )
            if loaded:
                slots = torch.cat([slots, self.cache.linker.private_load_indices[request.rid]])
                self.cache.linker.start_layer_wise_loading()
                assert self.cache.linker.finish_loads() == []
        done = len(slots)
        fresh = self.allocator.alloc(whole - done) if whole > done else torch.empty(0, dtype=torch.int64)
        assert fresh is not None
        slots = torch.cat([slots, fresh.to(torch.int64)])
        for place in range(done, whole):
            self.write(int(slots[place]), tokens[: place + 1])
        for place in range(whole):
            assert torch.equal(self.read(int(slots[place])), states(tokens[: place + 1])), place
        self.cache.insert(InsertParams(key=key, value=slots.to(torch.int64), prev_prefix_len=done - loaded))
        self.cache.check_hicache_events()
        with contextlib.suppress(InsufficientMemory):  # what a session may have ended with
            self.linker._pool.blocks.flush()
        return done - loaded, loaded, whole - done

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        """The forward pass of one token."""
        made = states(tokens)
        for layer in range(LAYERS):
            self.kv.k_buffer[layer][slot] = made[layer, 0]
            self.kv.v_buffer[layer][slot] = made[layer, 1]

    def read(self, slot: int) -> torch.Tensor:
        """K and V of a slot, by layer."""
        return torch.stack(
            [torch.stack([self.kv.k_buffer[layer][slot], self.kv.v_buffer[layer][slot]]) for layer in range(LAYERS)]
        ).float()


NUMBERS = itertools.count()


def states(tokens: Sequence[int]) -> torch.Tensor:
    """K and V of the last token: numbers that no other beginning has."""
    seed = int.from_bytes(hashlib.sha256(repr([*tokens]).encode()).digest()[:6], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, HEADS, DIM, generator=generator)


@pytest.fixture
def engine(harbor: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes engines on the shared service."""
    from sglang.srt.mem_cache import unified_radix_cache

    # Its server publishes this.
    monkeypatch.setattr(unified_radix_cache, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(harbor, **options))
        return made[-1]

    yield make
    for each in made:
        each.cache.linker.close()
    from kvharbor.client import connect

    with connect(harbor) as session:
        session.drop_pool("sglang")


def test_what_one_engine_has_computed_another_loads(engine: Callable[..., Engine]) -> None:
    """Through SGLang's match, load-back, insert and write-through; every token's K and V are the right ones."""
    first, second = engine(), engine()
    assert first.answer(PROMPT) == (0, 0, 96)
    assert first.answer(PROMPT) == (96, 0, 0)
    assert second.answer(PROMPT) == (0, 96, 0)
    assert second.answer([*PROMPT[:64], *PROMPT]) == (64, 0, 96)
    assert first.answer([*PROMPT[:64], *PROMPT]) == (64, 96, 0)


@pytest.mark.parametrize("most", [1, 4, 5, 6])
def test_a_prompt_may_have_more_pages_than_a_call_takes(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """What is there of it is found to the end, and no further than the first page that is not there."""
    from kvharbor.engines.sglang_linker import linker

    monkeypatch.setattr(linker, "MOST_CHAINS", most)
    first, second = engine(), engine()
    first.answer(PROMPT)
    assert second.answer(PROMPT) == (0, 96, 0)
    assert engine().answer([*PROMPT[:80], *range(500, 532)]) == (0, 80, 32)


def test_a_full_pool_stores_what_fits(engine: Callable[..., Engine]) -> None:
    """Room for seven pages: the last prompt is there, of the others what is left of them; the rest is computed."""
    first, second = engine(size="48KiB"), engine(size="48KiB")
    prompts = [[number, *PROMPT[:63]] for number in range(4)]
    for prompt in prompts:
        assert first.answer(prompt)[2] == 64
    costs = [second.answer(prompt) for prompt in reversed(prompts)]
    assert costs[0] == (0, 64, 0)
    assert sum(loaded for _, loaded, _ in costs) <= 7 * PAGE
    assert costs[-1][2] > 0


def test_a_reset_finds_nothing_of_before(engine: Callable[..., Engine]) -> None:
    """SGLang resets its cache for new weights, of which the pool knows nothing."""
    first = engine()
    first.answer(PROMPT)
    first.cache.reset()
    assert first.answer(PROMPT) == (0, 0, 96)


def test_a_reset_while_the_service_is_out_of_reach_finds_nothing_of_before(engine: Callable[..., Engine]) -> None:
    """It learns of the version later, and the engine names it in every call."""
    first = engine()
    first.answer(PROMPT)
    calls, bump = first.linker._pool.blocks, first.linker._pool.blocks.bump_namespace

    def unreachable() -> str:
        raise ServiceAway("away")

    calls.bump_namespace = unreachable
    first.cache.reset()
    calls.bump_namespace = bump
    assert first.answer(PROMPT) == (0, 0, 96)


def test_an_engine_whose_session_has_ended_computes(engine: Callable[..., Engine]) -> None:
    """[E16] As when the pool could not be opened anew in a new epoch."""
    first = engine()
    first.answer(PROMPT)
    first.linker._harbor._link.standing.end(InsufficientMemory("no room for the pool"))
    assert first.answer([7, *PROMPT[1:]]) == (0, 0, 96)
    assert first.answer([7, *PROMPT[1:]]) == (96, 0, 0)
    first.cache.reset()


def test_other_pages_are_refused_by_name(engine: Callable[..., Engine]) -> None:
    """Another type is another layout."""
    engine()
    with pytest.raises(LayoutMismatch, match="data_type"):
        engine(dtype=torch.bfloat16)


def test_the_options_are_what_sglang_takes() -> None:
    """They are read back by its own class."""
    import json
    import shlex

    from sglang.srt.mem_cache.unified_cache.linker_config import UnifiedCacheLinkerConfig

    words = shlex.split(server_arguments(LinkerSettings("toy", "/s", size="1GiB")))
    read = UnifiedCacheLinkerConfig.from_dict(json.loads(words[-1]))
    assert LinkerSettings(**read.linker_extra_config).pool_bytes == 1 << 30
