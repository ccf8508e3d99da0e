"""Engines of continuous batching through ends: of another engine, of the service's process, of the epoch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batching_here import BLOCK_TOKENS, PROMPTS, alone, answers, finished, greedy
from kvharbor.client import connect
from kvharbor.engines.transformers import ModelMissing, load_smollm2
from kvharbor.engines.transformers_cb import PooledManager, continuous_batching, layout_for
from service_process import ServiceProcess
from tiny_models import decoder

StartService = Callable[..., ServiceProcess]
pytestmark = pytest.mark.slow

WORKER = Path(__file__).parents[1] / "cb_worker.py"
NEW_TOKENS = 40


class Worker:
    """cb_worker.py with these prompts."""

    def __init__(self, target: str, block_count: int, model: str, new_tokens: int, prompts: list[list[int]]) -> None:
        arguments = [target, "p", str(block_count), model, str(new_tokens)]
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        json.dump(prompts, self.process.stdin)
        self.process.stdin.close()

    def line(self) -> dict[str, Any]:
        """The next thing that it says."""
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        return line

    def end(self, *, kill: bool = False) -> None:
        """Waits for its end."""
        if kill:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_killed_engine_leaves_what_it_has_published(start_fresh: StartService) -> None:
    """[G6] kill -9 in the middle of a batch, in a pool for little more: the other engine goes on, with its blocks."""
    service = start_fresh()
    model = decoder("Llama")
    layout = layout_for(model, BLOCK_TOKENS)
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", layout, 30 * layout.block_bytes)
        killed = Worker(service.target, 30, "Llama", 400, PROMPTS)
        assert killed.line() == {"running": True}
        while pool.stats().counters.committed_block_count < 12:
            assert killed.process.poll() is None
        killed.end(kill=True)
        with continuous_batching(model, pool, greedy()) as engine:
            assert answers(engine, PROMPTS) == [alone(model, prompt, 20) for prompt in PROMPTS]
            assert engine.reuse.reused_tokens >= 96
        pool.blocks.flush()
        stats = pool.stats()
        assert (stats.reserved_block_count, stats.active_block_count, stats.quarantined_block_count) == (0, 0, 0)
        del pool, engine


@pytest.mark.parametrize("block_count", [60, 14])
def test_answers_go_on_through_deaths_of_the_process(block_count: int, start_fresh: StartService) -> None:
    """[G7] the service's process is killed again and again: the answers are the same, and nothing is left."""
    service = start_fresh()
    model = decoder("Llama")
    layout = layout_for(model, BLOCK_TOKENS)
    expected = [alone(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    with connect(service.target, timeout_s=20.0) as harbor:
        pool = harbor.open_pool("p", layout, block_count * layout.block_bytes)
        with continuous_batching(model, pool, greedy()) as engine:
            request_ids = engine.add_requests(PROMPTS * 3, max_new_tokens=NEW_TOKENS)
            for _ in range(2):
                service.restart_child()
            outcomes = finished(engine, request_ids)
            assert [(outcome.error, outcome.generated_tokens) for outcome in outcomes] == [
                (None, answer) for answer in expected * 3
            ]
        pool.blocks.flush()
        stats = pool.stats()
        assert (stats.reserved_block_count, stats.active_block_count, stats.quarantined_block_count) == (0, 0, 0)
        del pool, engine


def test_answers_begin_again_in_a_new_epoch(start_fresh: StartService, tmp_path: Path) -> None:
    """Everything in the pool is lost, in the middle of a batch: requests begin again, and say the same."""
    place = tmp_path / "kv.sock"
    service = start_fresh(socket=place)
    model = decoder("Llama")
    layout = layout_for(model, BLOCK_TOKENS)
    expected = [alone(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    engines: list[PooledManager] = []
    epochs: list[str] = []

    def on_epoch(old: str, new: str) -> None:
        epochs.append(new)
        for engine in engines:
            engine.on_epoch(old, new)

    with connect(service.target, timeout_s=20.0, on_epoch=on_epoch) as harbor:
        pool = harbor.open_pool("p", layout, 60 * layout.block_bytes)
        with continuous_batching(model, pool, greedy()) as engine:
            engines.append(engine)
            request_ids = engine.add_requests(PROMPTS, max_new_tokens=NEW_TOKENS)
            while not len(pool.own_blocks):
                assert engine.is_running()
            service.kill()
            start_fresh(socket=place)
            outcomes = finished(engine, request_ids)
            assert [(outcome.error, outcome.generated_tokens) for outcome in outcomes] == [
                (None, answer) for answer in expected
            ]
            assert len(epochs) == 1
            assert answers(engine, PROMPTS[:1], NEW_TOKENS) == expected[:1]
        engines.clear()
        pool.blocks.flush()
        del pool, engine


@pytest.mark.model
@pytest.mark.timeout(300)
def test_two_processes_share_a_real_models_prefix(start_fresh: StartService) -> None:
    """SmolLM2 in two processes: the second computes 52 of 372 tokens, and says what model.generate says."""
    try:
        model, tokenizer = load_smollm2()
    except ModelMissing as missing:
        pytest.skip(str(missing))
    text = "Town 7 has 3 wells and 4 mills. " * 60
    prompt = tokenizer.encode(text)[:372]
    layout = layout_for(model, 64)
    service = start_fresh(memory="256MiB")
    with torch.inference_mode():
        made = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    expected = made[0, len(prompt) :].tolist()
    said = []
    with connect(service.target) as harbor:
        pool = harbor.open_pool("p", layout, 30 * layout.block_bytes)
        for _ in range(2):
            worker = Worker(service.target, 30, "smollm2", 12, [prompt])
            assert worker.line() == {"running": True}
            said.append(worker.line())
            worker.end()
        assert [(line["answer"], line["reused"]) for line in said] == [(expected, 0), (expected, 320)]
        del pool
