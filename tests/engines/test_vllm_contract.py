"""What kvharbor.engines.vllm relies on in vLLM, name by name: a version in which one of these differs fails here first.

Read from the sources, so that vLLM for GPUs can be looked at without one.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from kvharbor.engines.vllm.versions import vllm_version

pytestmark = pytest.mark.timeout(300)

POOL = "vllm.v1.core.block_pool:BlockPool"
UTILS = "vllm.v1.core.kv_cache_utils"
QUEUE = f"{UTILS}:FreeKVCacheBlockQueue"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
WORKER = "vllm.v1.worker.gpu_worker:Worker"

# What is overridden, or called, with the parameters behind self.
PARAMETERS = {
    f"{POOL}.get_cached_block": "block_hash kv_cache_group_ids",
    f"{POOL}.touch": "blocks",
    f"{POOL}.get_new_blocks": "num_blocks",
    f"{POOL}.get_num_free_blocks": "",
    f"{POOL}.cache_full_blocks": "request blocks num_cached_blocks num_full_blocks block_size kv_cache_group_id "
    "block_mask",
    f"{POOL}.free_blocks": "ordered_blocks",
    f"{POOL}.evict_blocks": "block_ids",
    f"{POOL}.reset_prefix_cache": "",
    f"{POOL}.get_usage": "",
    f"{POOL}._insert_block_hash": "block_hash_with_group_id block num_tokens",
    f"{POOL}._maybe_evict_cached_block": "block",
    f"{QUEUE}.__init__": "blocks",
    f"{QUEUE}.append_n": "blocks",
    f"{QUEUE}.prepend_n": "blocks",
    f"{QUEUE}.remove": "block",
    f"{UTILS}:make_block_hash_with_group_id": "block_hash group_id",
    f"{UTILS}:resolve_none_hash_seed": "hash_fn",
    f"{SCHEDULER}.__init__": "vllm_config kv_cache_config structured_output_manager block_size hash_block_size "
    "mm_registry include_finished_set log_stats",
    f"{SCHEDULER}.schedule": "throttle_prefills",
    f"{SCHEDULER}.update_from_output": "scheduler_output model_runner_output",
    f"{SCHEDULER}.finish_requests": "request_ids finished_status",
    f"{SCHEDULER}.set_pause_state": "pause_state",
    f"{SCHEDULER}.shutdown": "",
    f"{SCHEDULER}._handle_blocked_waiting_request": "request",
    f"{SCHEDULER}._request_blocks_can_be_freed": "request",
    f"{SCHEDULER}._free_request_blocks": "request",
    f"{SCHEDULER}._drain_deferred_frees": "",
    f"{MANAGER}.reset_prefix_cache": "",
    f"{WORKER}._maybe_get_memory_pool_context": "tag",
    f"{WORKER}.determine_available_memory": "",
    f"{WORKER}.initialize_from_config": "kv_cache_config",
    f"{WORKER}.execute_model": "scheduler_output",
    f"{WORKER}.get_kv_cache_spec": "",
    f"{WORKER}.shutdown": "",
    "vllm.v1.worker.cpu_worker:CPUWorker._should_warm_up_model": "",
    "vllm.v1.worker.utils:allocate_kv_cache": "kv_cache_config device layout kernel_block_sizes",
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": "dtype block_size head_size kv_cache_dtype",
    "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls": "",
}

# Every method of BlockPool: a new one may hand out or take blocks behind our back.
POOL_METHODS = {
    "__init__",
    "_build_block_stored_event",
    "_emit_block_removed_events",
    "_get_partial_block_hash",
    "_get_partial_block_parent_hash_and_start",
    "_insert_block_hash",
    "_maybe_evict_cached_block",
    "_notify_reuse",
    "_remove_cached_block_hashes",
    "cache_full_blocks",
    "cache_partial_block",
    "emit_cached_block_events",
    "evict_blocks",
    "free_blocks",
    "get_cached_block",
    "get_new_blocks",
    "get_num_free_blocks",
    "get_usage",
    "is_block_writable",
    "move_block_hashes",
    "reset_prefix_cache",
    "take_events",
    "touch",
    "unpin_blocks",
}
NEW_POOL_METHODS = {"0.33": {"_generate_event_extra_keys", "_lookahead_token_ids"}}

SCHEDULER_ATTRIBUTES = (
    "_inflight_prefills",
    "defer_block_free",
    "deferred_frees",
    "kv_cache_manager",
    "kv_holding_waiting",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "num_waiting_for_streaming_input",
    "processed_step_seq",
    "requests",
    "running",
    "sched_step_seq",
    "waiting",
)


@cache
def tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text())


def found(name: str) -> ast.AST:
    """Returns the class or function of "module:Class.method"."""
    module, _, path = name.partition(":")
    node: ast.AST = tree(module)
    for part in path.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        inner = [each for each in getattr(node, "body", ()) if isinstance(each, kinds) and each.name == part]
        assert inner, f"vLLM {vllm_version()} has no {name}"
        node = inner[-1]
    return node


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_a_function_has_the_parameters_that_are_known(name: str, parameters: str) -> None:
    """In this order, and no more."""
    node = found(name)
    assert isinstance(node, ast.FunctionDef)
    arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    assert [each for each in arguments if each != "self"] == parameters.split()


def test_block_pool_has_no_method_that_is_not_known() -> None:
    """Of each version, those that were looked at."""
    node = found(POOL)
    assert isinstance(node, ast.ClassDef)
    methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    assert methods == POOL_METHODS | NEW_POOL_METHODS.get(vllm_version().rpartition(".")[0], set())


def test_the_kv_cache_is_one_allocation() -> None:
    """A single `torch.zeros(size, dtype=torch.int8, ...)`, which the worker answers."""
    calls = [
        node
        for node in ast.walk(found("vllm.v1.worker.utils:allocate_kv_cache"))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")
    ]
    assert [ast.unparse(call) for call in calls] == ["torch.zeros(buf_size, dtype=torch.int8, device=device)"]


def test_the_worker_chooses_where_the_kv_cache_is_allocated() -> None:
    """By the context of the tag "kv_cache"."""
    text = ast.unparse(found(f"{WORKER}.initialize_from_config"))
    assert "self._maybe_get_memory_pool_context(tag='kv_cache')" in text
    assert "kv_cache_allocation_context=mem_pool_context" in text


@pytest.mark.parametrize("attribute", SCHEDULER_ATTRIBUTES)
def test_the_scheduler_has_the_attributes_that_are_known(attribute: str) -> None:
    """Set where it is made."""
    text = ast.unparse(found(f"{SCHEDULER}.__init__"))
    assert f"self.{attribute} = " in text or f"self.{attribute}: " in text


def test_frees_are_fenced_by_steps() -> None:
    """With defer_block_free a step counts when it is scheduled, and when its output is taken in."""
    assert "if self.defer_block_free and total_num_scheduled_tokens > 0" in ast.unparse(found(f"{SCHEDULER}.schedule"))
    taken_in = ast.unparse(found(f"{SCHEDULER}.update_from_output"))
    assert "self.processed_step_seq += 1\n        self._drain_deferred_frees()" in taken_in
    assert "last_sched_seq = self.sched_step_seq" in ast.unparse(found(f"{SCHEDULER}._update_after_schedule"))


def test_a_step_is_an_object_that_can_carry_a_stamp() -> None:
    """SchedulerOutput has no slots."""
    node = found("vllm.v1.core.sched.output:SchedulerOutput")
    assert isinstance(node, ast.ClassDef)
    assert [ast.unparse(each) for each in node.decorator_list] == ["dataclass"]
