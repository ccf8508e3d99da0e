"""A worker of transformers goes on when the service's process, or all of the service, is killed while it generates."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import StartService
from kvharbor.client import Pool, connect
from kvharbor.engines.transformers import PoolModel, Sampling, Worker, layout_for
from kvharbor.gpumem import BlockViews
from tiny_models import decoder

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 16
GENERATOR = torch.Generator().manual_seed(12)
SYSTEM, FIRST, SECOND = (torch.randint(0, 128, (length,), generator=GENERATOR).tolist() for length in (70, 30, 21))
PROMPTS = [SYSTEM + FIRST, SYSTEM + SECOND]
NEW_TOKENS = 40
SAMPLING = Sampling(temperature=0.8, seed=5)


class Interrupted:
    """Wraps a model so that something happens before chosen steps."""

    def __init__(self, model: PoolModel, events: dict[int, Callable[[], object]]) -> None:
        self._model = model
        self._events = events
        self.steps = 0

    def attending(self) -> contextlib.AbstractContextManager[None]:
        return self._model.attending()

    def logits(self, rows: Any) -> Tensor:
        self.steps += 1
        self._events.pop(self.steps, lambda: None)()
        return self._model.logits(rows)


def worker_on(pool: Pool, events: dict[int, Callable[[], object]]) -> Worker:
    def interrupted(model: Any, views: BlockViews) -> Any:
        return Interrupted(PoolModel.in_place(model, views), events)

    return Worker(decoder("Llama"), pool, chunk_tokens=33, computing=interrupted)


@pytest.fixture(scope="module")
def undisturbed(start_service: StartService) -> Callable[..., list[tuple[tuple[int, ...], ...]]]:
    """The answers of a worker that nothing happens to."""
    service = start_service()

    def answers(**options: Any) -> list[tuple[tuple[int, ...], ...]]:
        with connect(service.target) as harbor:
            pool = harbor.open_pool("plain", layout_for(decoder("Llama"), BLOCK_TOKENS), size="4MiB")
            return [made.answers for made in worker_on(pool, {}).generate(PROMPTS, NEW_TOKENS, **options)]

    return answers


@pytest.fixture
def harbor_options() -> dict[str, Any]:
    return {"client_name": "engine", "timeout_s": 20.0}


@pytest.mark.parametrize("options", [{}, {"sampling": SAMPLING, "answer_count": 2}], ids=["greedy", "forked"])
def test_an_answer_goes_on_through_deaths_of_the_process(
    options: dict[str, Any],
    start_fresh: StartService,
    undisturbed: Callable[..., Any],
    harbor_options: dict[str, Any],
) -> None:
    """E9: killed in the prompt, at the fork and while decoding; the answers are the same, token for token."""
    service = start_fresh()
    events: dict[int, Callable[[], object]] = {
        2: service.kill_child,
        5: service.restart_child,
        6: service.kill_child,
        30: service.kill_child,
        45: service.restart_child,
    }
    with connect(service.target, **harbor_options) as harbor:
        pool = harbor.open_pool("p", layout_for(decoder("Llama"), BLOCK_TOKENS), size="4MiB")
        worker = worker_on(pool, events)
        made = worker.generate(PROMPTS, NEW_TOKENS, **options)
        assert [each.answers for each in made] == undisturbed(**options)
        stats = pool.stats()
        assert (stats.sequence_count, stats.reserved_block_count, stats.active_block_count) == (0, 0, 0)
        again = worker.generate(PROMPTS, NEW_TOKENS, **options)
        assert [each.answers for each in again] == [each.answers for each in made]
        assert [each.reused_tokens for each in again] == [96, 80]


def test_an_answer_goes_on_in_a_new_epoch(
    start_fresh: StartService, tmp_path: Path, undisturbed: Callable[..., Any], harbor_options: dict[str, Any]
) -> None:
    """E9: everything in the pool is lost; prompts and answers are computed again in the new one, and say the same."""
    place = tmp_path / "kv.sock"
    services = [start_fresh(socket=place)]
    workers: list[Worker] = []

    def replace_service() -> None:
        services[-1].kill()
        services.append(start_fresh(socket=place))

    def on_epoch(old: str, new: str) -> None:
        for worker in workers:
            worker.on_epoch(old, new)

    with connect(services[0].target, on_epoch=on_epoch, **harbor_options) as harbor:
        pool = harbor.open_pool("p", layout_for(decoder("Llama"), BLOCK_TOKENS), size="4MiB")
        workers.append(worker_on(pool, {3: replace_service, 40: replace_service}))
        made = workers[0].generate(PROMPTS, NEW_TOKENS)
        assert [each.answers for each in made] == undisturbed()
        handover = workers[0].hand_over(PROMPTS[0])
        assert workers[0].take_over(handover, NEW_TOKENS).answers == made[0].answers
        assert pool.stats().sequence_count == 0


def test_a_hand_over_begins_again_in_a_new_epoch(
    start_fresh: StartService, tmp_path: Path, undisturbed: Callable[..., Any], harbor_options: dict[str, Any]
) -> None:
    """The prompt is computed again for the sequence that is handed over."""
    place = tmp_path / "kv.sock"
    service = start_fresh(socket=place)
    workers: list[Worker] = []

    def replace_service() -> None:
        service.kill()
        start_fresh(socket=place)

    def on_epoch(old: str, new: str) -> None:
        workers[0].on_epoch(old, new)

    with connect(service.target, on_epoch=on_epoch, **harbor_options) as harbor:
        pool = harbor.open_pool("p", layout_for(decoder("Llama"), BLOCK_TOKENS), size="4MiB")
        workers.append(worker_on(pool, {4: replace_service}))
        handover = workers[0].hand_over(PROMPTS[0])
        assert workers[0].take_over(handover, NEW_TOKENS).answers == undisturbed()[0]
