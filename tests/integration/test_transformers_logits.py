"""Logits of a model on a pool against those of the same model on a cache of its own.

Gathering must agree to the last bit where chunks and batch are equal; in place, where sums are taken in another
order, within rounding.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvharbor.client import Sequence as PoolSequence
from kvharbor.engines.transformers import PoolModel, Row, layout_for
from kvharbor.gpumem import BlockOrder, BlockViews
from pool_sessions import PoolSessions
from pool_sessions import sessions as sessions
from tiny_models import decoder

# The fixtures end the sessions, and with them the sequences, which the tests have no other use for then.
pytestmark = pytest.mark.filterwarnings("ignore:sequence .* was not released:ResourceWarning")
BLOCK_TOKENS = 16
PROMPT = torch.randint(0, 128, (100,), generator=torch.Generator().manual_seed(4)).tolist()
MAKERS: dict[str, Callable[[Any, BlockViews], PoolModel]] = {
    "gathering": PoolModel.gathering,
    "in place": PoolModel.in_place,
}


class Engine:
    """A model on a pool in a session of its own, driven chunk by chunk."""

    def __init__(self, sessions: PoolSessions, maker: str, order: BlockOrder) -> None:
        self.model = decoder("Llama")
        self.exact = maker == "gathering"
        self.pool = sessions.open(layout_for(self.model, BLOCK_TOKENS, order), 40)
        self.on_pool = MAKERS[maker](self.model, self.pool.views)
        self.written: dict[str, int] = {}

    def run(self, *work: tuple[PoolSequence, Sequence[int]]) -> Tensor:
        """Computes the next tokens of each sequence in one pass; returns the logits after each one's last."""
        rows = [
            Row(sequence.table, self.written.get(sequence.id, sequence.computed_tokens), tokens)
            for sequence, tokens in work
        ]
        for (sequence, _), row in zip(work, rows, strict=True):
            self.written[sequence.id] = row.end
        with self.on_pool.attending():
            return self.on_pool.logits(rows)

    def allocate(self, tokens: Sequence[int], reserve_tokens: int = 32) -> PoolSequence:
        """A sequence with room for its tokens and some more."""
        return self.pool.allocate(tokens, reserve_tokens=reserve_tokens)

    def agree(self, logits: Tensor, expected: Tensor) -> None:
        """Asserts equality, in bits or within rounding."""
        if self.exact:
            assert torch.equal(expected, logits)
        else:
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


class Private:
    """The same model with a DynamicCache and transformers' own attention."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)

    def run(self, batch: Sequence[Sequence[int]], **options: Any) -> Tensor:
        """Computes the next tokens of each row, equally many; returns the logits after the last."""
        with torch.inference_mode():
            made: Tensor = self.model(torch.tensor(batch), cache=self.cache, logits_to_keep=1, **options).logits
        return made[:, -1]

    def copy(self) -> "Private":
        """A second one with a copy of all K and V."""
        twin = Private(self.model)
        twin.cache = copy.deepcopy(self.cache)
        return twin


@pytest.fixture(params=BlockOrder, ids=lambda order: order.value)
def order(request: pytest.FixtureRequest) -> BlockOrder:
    """Both ways to lay blocks out."""
    return BlockOrder(request.param)


@pytest.fixture(params=MAKERS)
def engines(request: pytest.FixtureRequest, sessions: PoolSessions, order: BlockOrder) -> Callable[[], Engine]:
    """Starts engines of one kind on one pool, a session each."""
    return lambda: Engine(sessions, request.param, order)


def test_cold(engines: Callable[[], Engine]) -> None:
    """A prompt in uneven chunks and ten tokens after it: each step's logits are those of a private cache."""
    engine = engines()
    private = Private(engine.model)
    sequence = engine.allocate(PROMPT)
    for chunk in (PROMPT[:33], PROMPT[33:70], PROMPT[70:], *([token] for token in range(10))):
        engine.agree(engine.run((sequence, chunk)), private.run([chunk]))


def test_warm(engines: Callable[[], Engine]) -> None:
    """Another session's six blocks are reused, and what is computed on top of them is as if they were its own."""
    first, second = engines(), engines()
    computed = first.allocate(PROMPT)
    first.run((computed, PROMPT[:96]))
    computed.commit(96)
    private = Private(first.model)
    private.run([PROMPT[:96]])
    warm = second.allocate(PROMPT)
    assert warm.cached_tokens == 96
    for chunk in (PROMPT[96:], [7], [8], [9]):
        second.agree(second.run((warm, chunk)), private.run([chunk]))


def test_forked(engines: Callable[[], Engine]) -> None:
    """Children go on from one prompt in different ways and in one batch, none sees another's tokens."""
    engine = engines()
    parent = engine.allocate(PROMPT)
    engine.run((parent, PROMPT))
    parent.commit(len(PROMPT))
    first, second = parent.fork(2, reserve_tokens=32)
    private = Private(engine.model)
    private.run([PROMPT])
    branches = [private, private.copy(), private.copy()]
    for step in range(6):
        tokens = [[step], [step + 50], [step + 100]]
        logits = [
            engine.run((sequence, token)) for sequence, token in zip((parent, first, second), tokens, strict=True)
        ]
        for row, branch, token in zip(logits, branches, tokens, strict=True):
            engine.agree(row, branch.run([token]))
    assert len({sequence.table[-2] for sequence in (parent, first, second)}) == 3


def test_handed_over(engines: Callable[[], Engine]) -> None:
    """A prompt computed in one session is decoded in another, half-full last block included."""
    prefill, decode = engines(), engines()
    sequence = prefill.allocate(PROMPT)
    private = Private(prefill.model)
    prefill.agree(prefill.run((sequence, PROMPT)), private.run([PROMPT]))
    adopted = decode.pool.adopt(sequence.handoff(len(PROMPT)))
    assert adopted.computed_tokens == len(PROMPT)
    for token in range(10):
        decode.agree(decode.run((adopted, [token])), private.run([[token]]))


def test_evicted_and_recomputed(engines: Callable[[], Engine]) -> None:
    """After others took its blocks a prompt is computed again, in whatever blocks there are, to the same logits."""
    engine = engines()
    expected = Private(engine.model).run([PROMPT])
    with engine.allocate(PROMPT) as sequence:
        engine.agree(engine.run((sequence, PROMPT)), expected)
        sequence.commit(len(PROMPT))
    with engine.allocate([5] * 39 * BLOCK_TOKENS, reserve_tokens=0):
        assert engine.pool.lookup(PROMPT).present_tokens == 0
    again = engine.allocate(PROMPT)
    engine.agree(engine.run((again, PROMPT)), expected)


def test_batched_with_different_lengths(engines: Callable[[], Engine]) -> None:
    """Rows of 100, 37 and 1 tokens in one batch, then decoded together: as a left-padded batch, without its padding."""
    engine = engines()
    prompts = [PROMPT, PROMPT[50:87], PROMPT[20:21]]
    sequences = [engine.allocate(prompt) for prompt in prompts]
    private = Private(engine.model)
    width = max(len(prompt) for prompt in prompts)
    padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    engine.agree(
        engine.run(*zip(sequences, prompts, strict=True)),
        private.run(padded, attention_mask=mask, position_ids=positions),
    )
    for step in range(6):
        tokens = [[step], [step + 50], [step + 100]]
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        engine.agree(
            engine.run(*zip(sequences, tokens, strict=True)),
            private.run(tokens, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1),
        )


def test_mixed_steps(engines: Callable[[], Engine]) -> None:
    """A row in the middle of its prompt and a row that decodes share a pass, and each gets its own logits."""
    engine = engines()
    prompt, other = PROMPT[:60], PROMPT[60:]
    first, second = engine.allocate(prompt), engine.allocate(other)
    engine.run((first, prompt))
    logits = engine.run((first, [3]), (second, other[:20]))
    alone, beside = Private(engine.model), Private(engine.model)
    alone.run([prompt])
    expected = torch.cat([alone.run([[3]]), beside.run([other[:20]])])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
