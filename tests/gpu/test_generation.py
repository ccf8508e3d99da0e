"""A model that generates on a GPU from blocks that another process has computed there."""

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from conftest import StartService
from gpu.conftest import DRY_RUN
from integration.client_worker import WorkerProcess
from service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PROMPT = np.random.default_rng(4).integers(0, 128, 100).tolist()
TOKEN_COUNT = 12
CLOSE = {"float32": 1e-4, "float16": 2e-2}
"""Of the largest logit. Without a cache all tokens go through the model in one pass, in which sums have another order:
some hundred roundings of 6e-8 (float32; TF32 is off) or 5e-4 (float16) each, most of which cancel."""

PLACES = [
    *([pytest.param(("host", "cpu"), id="host")] if DRY_RUN else []),
    pytest.param(("cuda_ipc", "cuda"), id="cuda_ipc", marks=pytest.mark.gpu),
    pytest.param(("cuda_vmm", "cuda"), id="cuda_vmm", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=PLACES)
def where(request: pytest.FixtureRequest, start_service: StartService) -> tuple[ServiceProcess, str]:
    """A service with pools of a kind, and the device for the models."""
    arena, device = request.param
    return start_service(arena=arena, memory="64MiB"), device


@pytest.fixture(params=CLOSE)
def data_type(request: pytest.FixtureRequest) -> str:
    """Of weights, K and V."""
    return str(request.param)


@pytest.fixture
def workers(where: tuple[ServiceProcess, str], data_type: str) -> Iterator[list[WorkerProcess]]:
    """Two processes with the same model."""
    from gpu.generating_worker import GeneratingWorker

    service, device = where
    make = functools.partial(GeneratingWorker, device=device, data_type=data_type)
    made = [WorkerProcess(service.target, f"model-{data_type}", 20, make) for _ in range(2)]
    yield made
    for worker in made:
        worker.end()


def test_generating_from_another_processs_blocks_changes_no_logit(workers: list[WorkerProcess], data_type: str) -> None:
    """G1: bit for bit what a cache of its own gives in the same passes; and what no cache gives, within rounding."""
    first, second = workers
    computed = first.on_pool(PROMPT, TOKEN_COUNT)
    reused = second.on_pool(PROMPT, TOKEN_COUNT)
    assert (computed.cached_tokens, reused.cached_tokens) == (0, 96)
    for worker, found in ((first, computed), (second, reused)):
        own = worker.with_own_cache(PROMPT, found.cached_tokens, found.tokens)
        assert np.array_equal(found.logits, own)
        plain = worker.without_cache(PROMPT, found.tokens)
        assert np.abs(found.logits - plain).max() <= CLOSE[data_type] * np.abs(plain).max()
    if data_type == "float32":
        assert reused.tokens == computed.tokens
    assert len(set(reused.tokens)) > 2
