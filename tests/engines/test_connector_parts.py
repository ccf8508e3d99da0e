"""The connector's parts: pages and their copies, the checkpoint's name, reports, refusals."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvharbor.engines.vllm.errors import ContractBroken, FeatureUnsupported, SettingInvalid
from kvharbor.engines.vllm_connector import HarborConnector, connector_args
from kvharbor.engines.vllm_connector.identity import checkpoint_identity
from kvharbor.engines.vllm_connector.messages import Plan, Report
from kvharbor.engines.vllm_connector.pages import Pages, runs
from kvharbor.engines.vllm_connector.support import require_supported
from kvharbor.gpumem import BlockOrder, BlockViews, DataType, HostArena, Layout, Plane

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 8, 2, 16, 8
PAGE_BYTES = HEADS * TOKENS * WIDTH * 4


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20))
def test_runs_are_the_same_copies(copies: list[tuple[int, int]]) -> None:
    """Every copy once, in order, and neighbours to neighbours in one."""
    joined = runs(copies)
    assert [(first + n, to + n) for first, to, count in joined for n in range(count)] == copies
    assert all((a[0] + a[2], a[1] + a[2]) != b[:2] for a, b in itertools.pairwise(joined))


@pytest.mark.parametrize("order", BlockOrder, ids=lambda order: order.value)
def test_blocks_go_out_and_come_back(order: BlockOrder) -> None:
    """Whole pages, whatever the order of the pool and of vLLM's cache; no other page changes."""
    plane = Plane("kv", LAYERS, DataType.FLOAT32, PAGE_BYTES, interior="vllm-x")
    layout = Layout("m", TOKENS, (plane,), order)
    descriptor = layout.descriptor(BLOCKS)
    memory = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
    caches = {f"layer.{number}": memory[number] for number in range(LAYERS)}
    kept = memory.clone()
    with HostArena.create(descriptor.size_bytes) as arena, arena.map() as mapping:
        views = BlockViews(mapping, descriptor)
        pool: Any = SimpleNamespace(descriptor=descriptor, views=views)
        pages = Pages(pool, caches, list(caches))
        pages.store([(1, 4), (2, 5), (7, 2)])
        memory.zero_()
        pages.load([(4, 1), (5, 2), (2, 7)])
        for block in range(BLOCKS):
            assert torch.equal(memory[:, block], kept[:, block] * (block in {1, 2, 7}))
        assert all(not views.page("kv", layer, 3).any() for layer in range(LAYERS))
        del pages
        views.close()


@pytest.mark.parametrize("cache", [torch.zeros(8, 2, 16, 16)[..., ::2], torch.zeros(8, 2, 16, 4)], ids=["gaps", "size"])
def test_pages_in_pieces_are_refused(cache: torch.Tensor) -> None:
    """A page that is not in one piece, or not the pool's size, would be copied wrong."""
    plane = Plane("kv", 1, DataType.FLOAT32, PAGE_BYTES, interior="vllm-x")
    descriptor = Layout("m", TOKENS, (plane,)).descriptor(BLOCKS)
    with HostArena.create(descriptor.size_bytes) as arena, arena.map() as mapping:
        views = BlockViews(mapping, descriptor)
        with pytest.raises(ContractBroken, match="one page"):
            Pages(SimpleNamespace(descriptor=descriptor, views=views), {"l": cache}, ["l"])  # type: ignore[arg-type]
        views.close()


def model_config(**values: Any) -> Any:
    """As much of vLLM's as names a checkpoint."""
    hf_config = SimpleNamespace(model_type="llama", to_json_string=lambda: "{}")
    return SimpleNamespace(**{"hf_config": hf_config, "dtype": "f32", "quantization": None, "revision": None, **values})


def test_a_checkpoint_is_named_by_its_files(tmp_path: Path) -> None:
    """One byte, another type or another quantization is another name; the folder's own name says nothing."""
    names = set()
    for number, values in enumerate(({}, {"dtype": "bf16"}, {"quantization": "fp8"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        names.add(checkpoint_identity(model_config(model=str(folder), **values), ""))
    assert len(names) == 3
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"weightz")
    assert checkpoint_identity(model_config(model=str(other)), "") not in names
    assert checkpoint_identity(model_config(model=str(other)), "given") == "given"


def test_a_checkpoint_that_nobody_knows_is_refused() -> None:
    """A repository's name without a commit may be other weights tomorrow."""
    with pytest.raises(SettingInvalid, match="no local folder"):
        checkpoint_identity(model_config(model="org/name", revision="main"), "")
    named = checkpoint_identity(model_config(model="org/name", revision="a" * 40), "")
    assert named != checkpoint_identity(model_config(model="org/name", revision="b" * 40), "")


def test_reports_are_joined_by_what_all_have_stored() -> None:
    """Of several ranks, and of several steps."""
    joined = Report({1: True, 2: True}).aggregate(Report({2: False, 3: True}))
    assert joined.stored == {1: True, 2: False, 3: True}
    assert Plan(1, "life").loads == []


@pytest.mark.parametrize(
    ("changed", "feature"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, "hashes"),
        ({"speculative_config": object()}, "speculative"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changed: dict[str, Any], feature: str) -> None:
    """Before anything is opened."""
    ranks = ("tensor_parallel", "pipeline_parallel", "decode_context_parallel", "prefill_context_parallel")
    values = {
        **{f"{name}_size": 1 for name in ranks},
        "prefix_caching_hash_algo": "sha256",
        "speculative_config": None,
        **changed,
    }
    part = SimpleNamespace(**values)
    config = SimpleNamespace(cache_config=part, parallel_config=part, speculative_config=values["speculative_config"])
    with pytest.raises(FeatureUnsupported, match=feature):
        require_supported(config)


def test_every_method_is_one_of_the_interface() -> None:
    """A method that vLLM does not call would do nothing, in silence."""
    known = {name for base in HarborConnector.__mro__[1:] for name in vars(base)}
    own = {name for name in vars(HarborConnector) if not name.startswith("_")}
    assert own <= known
    assert not getattr(HarborConnector, "__abstractmethods__", None)
    assert issubclass(HarborConnector, KVConnectorBase_V1)


def test_the_arguments_are_what_vllm_takes() -> None:
    """The settings come back as they were given, and a failed load is computed."""
    transfer = connector_args("/s", "p", size="1GiB", model="m")["kv_transfer_config"]
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == {"endpoint": "/s", "pool": "p", "size": "1GiB", "model": "m"}
