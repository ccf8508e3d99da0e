"""Engines that die, a service that does, and engines that may not come in."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.conftest import BLOCK_BYTES, BLOCK_COUNT, StartEngine
from engines.engine_process import EngineFailed
from engines.pool_here import LIBRARY, opened, settled, wait_until
from kvharbor.client import LayoutMismatch, connect
from kvharbor.engines.vllm import engine_args
from kvharbor.engines.vllm.session import Attachment
from kvharbor.engines.vllm.settings import Settings
from kvharbor.gpumem import DataType, Layout
from service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]


def test_the_service_is_killed_while_an_engine_answers(
    engines: tuple[Any, Any, Any], engine_service: ServiceProcess
) -> None:
    """It goes on, in the same session, and says what it would have said."""
    first, second, plain = engines
    questions = [f"{number}. {LIBRARY}Where do visitors wait?" for number in range(3)]
    with opened(engine_service) as pool:
        first.send("generate", prompts=questions, max_tokens=60)
        wait_until(lambda stats: stats.reserved_block_count >= 3, pool)
        engine_service.kill_child()
        answers = first.reply()["answers"]
        alone = plain.answers(questions, max_tokens=60)
        assert [each["token_ids"] for each in answers] == [each["token_ids"] for each in alone]
        assert first.ask("standing")["held"] == 0
        assert settled(pool).reserved_block_count == 0
    assert second.answer(questions[0], max_tokens=4)["cached_tokens"] > 0


def test_an_engine_of_several_processes_is_killed(
    engines: tuple[Any, Any, Any], start_engine: StartEngine, engine_service: ServiceProcess
) -> None:
    """Its worker is a member of its scheduler's session. What it has published is there, what it held comes back."""
    first, _, plain = engines
    question = LIBRARY * 2 + "Who may board?"
    cached = first.answer(question, max_tokens=4)
    victim = start_engine(multiprocessing=True).wait_ready()
    warm = victim.answer(question, max_tokens=8)
    assert warm["cached_tokens"] == (cached["prompt_tokens"] - 1) // 64 * 64
    assert warm["token_ids"] == plain.answer(question, max_tokens=8)["token_ids"]
    assert len(engine_service.entries("member joined")) == 1
    assert [entry["cause"] for entry in engine_service.entries("session ended")][-1] == "closed by the client"
    other = "Before you answer, read this. " + LIBRARY
    with opened(engine_service) as pool:
        settled(pool)
        victim.send("generate", prompts=[other], max_tokens=600)
        wait_until(lambda stats: stats.reserved_block_count > 0 and stats.active_block_count > 0, pool)
        victim.kill()
        stats = settled(pool)
        assert (stats.reserved_block_count, stats.active_block_count, stats.quarantined_block_count) == (0, 0, 0)
    after = first.answer(other, max_tokens=12)
    assert after["cached_tokens"] > 0
    assert after["token_ids"] == plain.answer(other, max_tokens=12)["token_ids"]


@pytest.mark.parametrize("multiprocessing", [False, True], ids=["one process", "several processes"])
def test_an_engine_ends_in_a_new_epoch_and_says_so(
    multiprocessing: bool,
    engines: tuple[Any, Any, Any],
    start_engine: StartEngine,
    start_fresh: Callable[..., ServiceProcess],
    tmp_path: Path,
) -> None:
    """It answers none of what is under way, as the memory of its KV is not the pool's; started again it serves."""
    socket = tmp_path / "kv.sock"
    service = start_fresh(memory="512MiB", socket=socket)
    arguments = engine_args(str(socket), "engines", size=BLOCK_COUNT * BLOCK_BYTES)
    ends = start_engine(None, multiprocessing=multiprocessing, **arguments).wait_ready()
    with opened(service) as pool:
        ends.send("generate", prompts=[LIBRARY], max_tokens=800)
        wait_until(lambda stats: stats.reserved_block_count > 0, pool)
    service.kill()
    service = start_fresh(memory="512MiB", socket=socket)
    with pytest.raises(EngineFailed, match=r"PoolLost: .*start the engine again"):
        ends.reply()
    with pytest.raises(EngineFailed):
        ends.answer(LIBRARY, max_tokens=4)
    ends.leave()
    again = start_engine(None, multiprocessing=multiprocessing, **arguments).wait_ready()
    *_, plain = engines
    assert again.answer(LIBRARY, max_tokens=8)["token_ids"] == plain.answer(LIBRARY, max_tokens=8)["token_ids"]
    with opened(service) as pool:
        assert settled(pool).counters.committed_block_count > 0


def test_engines_that_differ_are_refused_by_what_differs(
    engines: tuple[Any, Any, Any], start_engine: StartEngine
) -> None:
    """Another type of KV, engines with half of the plugin only, and one whose longest request does not fit."""
    started = {
        "planes.kv.data_type": start_engine(dtype="bfloat16"),
        "the scheduler of this engine is vLLM's own": start_engine(scheduler_cls=None),
        "the worker of this engine is vllm.v1.worker": start_engine(worker_cls="auto"),
        "requests larger than the pool (here max_model_len=2048": start_engine(max_model_len=2048),
    }
    for reason, engine in started.items():
        with pytest.raises(EngineFailed) as refused:
            engine.wait_ready()
        assert reason in str(refused.value)


def other_layouts(layout: Layout) -> dict[str, Layout]:
    """Layouts of other models, versions of vLLM and attention backends, by the field that says so."""
    (plane,) = layout.planes
    differ = dataclasses.replace
    return {
        "model": differ(layout, model="llama-another"),
        "planes.kv.interior": differ(
            layout, planes=(differ(plane, interior=plane.interior.replace("vllm-", "vllm-0.")),)
        ),
        "planes.kv.data_type": differ(layout, planes=(differ(plane, data_type=DataType.FLOAT16),)),
        "planes.kv.layer_count": differ(layout, planes=(differ(plane, layer_count=plane.layer_count + 1),)),
        "block_tokens": differ(layout, block_tokens=2 * layout.block_tokens),
        "scratch_blocks": differ(layout, scratch_blocks=2),
    }


def test_other_models_and_versions_are_refused_by_name(
    engines: tuple[Any, Any, Any], engine_service: ServiceProcess
) -> None:
    """As an engine opens the pool."""
    with connect(str(engine_service.socket)) as harbor:
        (info,) = [each for each in harbor.list_pools() if each.name == "engines"]
    assert info.layout is not None
    assert info.layout.block_bytes == BLOCK_BYTES
    for field, layout in other_layouts(info.layout).items():
        settings = Settings(endpoint=str(engine_service.socket), pool="engines")
        with pytest.raises(LayoutMismatch) as refused:
            Attachment.open(settings, layout, role="test")
        assert field in refused.value.metadata, refused.value.metadata
