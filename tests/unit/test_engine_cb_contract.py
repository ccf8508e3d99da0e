"""What is relied on of transformers' continuous batching, which is no public interface: another version fails here.

A changed digest means: read what has changed, adapt kvharbor.engines.transformers_cb, then write down the new one.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import cache, continuous_api, offloading_manager, requests, scheduler
from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from kvharbor.engines.transformers_cb import support
from kvharbor.engines.transformers_cb.allocator import PooledAllocator, PooledLedger, PooledSectors
from kvharbor.engines.transformers_cb.cache import PooledCache
from kvharbor.engines.transformers_cb.manager import PooledManager
from kvharbor.engines.transformers_cb.processor import PooledProcessor
from kvharbor.engines.transformers_cb.scheduler import GivingWay, PooledFIFOScheduler, PooledPrefillFirstScheduler


def digest(function: Callable[..., Any]) -> str:
    """Of the code as such: comments, docstrings and line breaks are no change."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


MANAGER, PROCESSOR = continuous_api.ContinuousBatchingManager, continuous_api.ContinuousBatchProcessor
PAGED, ALLOCATOR = cache.PagedAttentionCache, FullAttentionCacheAllocator
CODE = {
    # Written anew here, with other classes.
    MANAGER._create_batch_processor: "9ae83de0b89d",
    # Its one allocation, and what is replaced after it.
    PAGED.__init__: "a3529ce115b6",
    ALLOCATOR.register_cache_tensor: "8ab3a074748c",
    CachePool.__init__: "89c81b49f1e3",
    # When blocks are asked for, forked, published and given back.
    PAGED.can_store_request_tokens: "e768ea231b9d",
    PAGED.prepare_fork_request: "3128e78c2df4",
    PAGED.free_blocks: "5a1762c896a1",
    PAGED.count_new_complete_blocks: "ac5e43ab550f",
    ALLOCATOR.allocate_cache_to_request: "ab507538c907",
    ALLOCATOR.fork_blocks: "2c0fd9be0ea6",
    ALLOCATOR.free_all_requests: "c027d0ccc2c5",
    scheduler.Scheduler._infer_request_tokens: "369463cf765f",
    scheduler.Scheduler._process_candidates: "bcb06c0bc961",
    scheduler.Scheduler.finish_request: "155c4521d9e2",
    scheduler.Scheduler.clear_cancelled_requests: "f0bd1b2181a8",
    offloading_manager.OffloadingManager.offload_requests: "6d6c9c45c0c8",
    PROCESSOR.prepare_next_batch: "350ac609e3b4",
    PROCESSOR.update_batch: "530a51d13d7f",
    PROCESSOR.fail_all_requests: "9d64ad0e6315",
    PROCESSOR.reset: "f110c68593d2",
    MANAGER._generation_loop_body: "df7224c3a29a",
    MANAGER._run_generation_loop: "9662602d3fb7",
    requests.RequestState.create_equivalent_initial_request: "8952235c755e",
}
OVERRIDDEN = {
    PooledAllocator: ALLOCATOR,
    PooledCache: PAGED,
    PooledLedger: BlockLedger,
    PooledManager: MANAGER,
    PooledProcessor: PROCESSOR,
    PooledSectors: CachePool,
    GivingWay: scheduler.Scheduler,
}
ADDED = {
    PooledAllocator: {"__init__", "begin", "forget", "published_count"},
    PooledCache: {"__init__", "_put_in_place", "_require_in_pool", "forget", "give_back"},
    PooledLedger: {"__init__"},
    PooledManager: {"__init__", "on_epoch", "_pooled_processor"},
    PooledProcessor: {"begin_again", "_fail_refused", "_give_up"},
    PooledSectors: {"__init__"},
    GivingWay: {"begin_again", "begin_all_again"},
}


@pytest.mark.parametrize("function", CODE, ids=lambda function: function.__qualname__)
def test_the_code_is_what_it_was(function: Callable[..., Any]) -> None:
    """Each of these was read, and is relied on as it is."""
    assert digest(function) == CODE[function]


@pytest.mark.parametrize("ours", OVERRIDDEN, ids=lambda ours: ours.__name__)
def test_every_method_overrides_one_of_the_same_parameters(ours: type) -> None:
    """What is not among the added ones exists in the base class, with the same names in the same order."""
    own = {name: method for name, method in vars(ours).items() if inspect.isfunction(method)}
    assert ADDED[ours] <= own.keys()
    for name in own.keys() - ADDED[ours]:
        base = getattr(OVERRIDDEN[ours], name)
        assert [*inspect.signature(own[name]).parameters] == [*inspect.signature(base).parameters], name


def test_the_paged_cache_allocates_once() -> None:
    """By torch.zeros of bytes; the views over it are made of that tensor."""
    calls = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(PAGED.__init__))))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")
    ]
    assert [call for call in calls if "zeros" in call or "empty" in call] == [
        "torch.zeros(non_trash_bytes + trash_bytes, dtype=torch.uint8, device=self.device)"
    ]
    assert inspect.signature(CachePool).parameters["num_reserved_sectors"].default == 2


def test_every_scheduler_has_its_counterpart() -> None:
    """A new kind of scheduler would be refused, so it is to be looked at."""
    assert scheduler.SCHEDULER_MAPPING.keys() == {"fifo", "prefill_first"}
    assert issubclass(PooledFIFOScheduler, scheduler.SCHEDULER_MAPPING["fifo"])
    assert issubclass(PooledPrefillFirstScheduler, scheduler.SCHEDULER_MAPPING["prefill_first"])


def test_the_version_is_one_that_this_was_written_for() -> None:
    """The digests above are of this version."""
    support.require_version()
    assert torch.__version__.startswith("2.")
