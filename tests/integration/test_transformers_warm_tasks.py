"""The transformers worker fills prefixes that an operator wants warm."""

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvharbor.client import ExtraKey, Harbor, Namespace, Pool, connect
from kvharbor.engines.transformers import Admission, RequestInvalid, Worker, layout_for
from tiny_models import decoder

BLOCK_TOKENS = 16
GENERATOR = torch.Generator().manual_seed(11)
PREFIX = torch.randint(0, 128, (80,), generator=GENERATOR).tolist()
QUESTION = [3, 1, 4, 1, 5]


@pytest.fixture
def model() -> Any:
    """A small random Llama."""
    return decoder("Llama")


@pytest.fixture
def engine(harbor: str) -> Iterator[Harbor]:
    """A session that accepts warm tasks."""
    with connect(harbor, accepts_warm_tasks=True) as session:
        yield session


@pytest.fixture
def pool(engine: Harbor, model: Any, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """The model's pool; whoever holds views of it has let go by the end."""
    layout = layout_for(model, BLOCK_TOKENS)
    name = f"warm-{zlib.crc32(request.node.nodeid.encode()):x}"
    pool = engine.open_pool(name, layout, 40 * layout.block_bytes)
    yield pool
    engine.drop_pool(pool.name)


def test_what_it_computed_for_a_task_is_what_it_would_have_computed_for_a_prompt(
    engine: Harbor, pool: Pool, model: Any
) -> None:
    """In chunks and from where others stopped; the answer behind it is that of a cold worker."""
    worker = Worker(model, pool, chunk_tokens=33)
    (cold,) = worker.generate([PREFIX + QUESTION], 12, admission=Admission(namespace=Namespace(salt=b"other")))
    worker.generate([PREFIX[:20]], 1)
    pool.warmup_by_engine(PREFIX, "w")
    task = engine.next_warm_task(10)
    assert task is not None
    assert worker.serve_warm_task(task) == 64
    stats = pool.stats()
    assert (stats.warm_block_count, stats.sequence_count, stats.reserved_block_count) == (5, 0, 0)
    (warm,) = worker.generate([PREFIX + QUESTION], 12)
    assert (warm.reused_tokens, warm.token_ids) == (80, cold.token_ids)
    pool.unwarm("w")


@pytest.mark.parametrize(
    ("tokens", "options", "told"),
    [
        (PREFIX, {"namespace": Namespace(version="v2")}, "version and adapter"),
        (PREFIX, {"namespace": Namespace(adapter="lora")}, "version and adapter"),
        (PREFIX, {"extra_keys": [ExtraKey(1, b"image")]}, "extra keys"),
        ([*PREFIX[:15], 128], {}, "token id"),
    ],
)
def test_what_this_model_cannot_stand_for_is_refused_and_given_back(
    engine: Harbor, pool: Pool, model: Any, tokens: list[int], options: dict[str, Any], told: str
) -> None:
    """E3: other weights, an adapter, an image or a token that it does not know; another worker may take it."""
    pool.warmup_by_engine(tokens, "w", **options)
    task = engine.next_warm_task(10)
    assert task is not None
    with pytest.raises(RequestInvalid, match=told):
        Worker(model, pool).serve_warm_task(task)
    assert pool.stats().sequence_count == 0
    again = engine.next_warm_task(10)
    assert again is not None
    again.sequence.release()
    pool.unwarm("w")


def test_a_worker_serves_the_version_that_it_is_told_to(engine: Harbor, pool: Pool, model: Any) -> None:
    """The salt is the users' affair: any will do."""
    asked, served = Namespace("v2", "", b"user"), Namespace("v2")
    pool.warmup_by_engine(PREFIX[:16], "w", namespace=asked)
    task = engine.next_warm_task(10)
    assert task is not None
    assert Worker(model, pool).serve_warm_task(task, served=served) == 16
    assert pool.lookup(PREFIX[:16], namespace=asked).present_tokens == 16
    pool.unwarm("w")
