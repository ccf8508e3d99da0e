"""The worker as its user sees it: the same answers with and without the pool, and only the missing part computed."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from kvharbor.client import HandoffNotFound, Namespace, Pool, PoolExhausted, PoolStats, RequestTooLarge
from kvharbor.engines.transformers import Admission, Generation, PoolModel, RequestInvalid, Sampling, Worker, layout_for
from kvharbor.gpumem import BlockOrder, LayoutMismatch
from pool_sessions import PoolSessions
from pool_sessions import sessions as sessions
from tiny_models import DECODERS, decoder

BLOCK_TOKENS = 16
NO_REUSE = Admission(max_cached_tokens=0)
GENERATOR = torch.Generator().manual_seed(11)
SYSTEM, QUESTION, OTHER = (torch.randint(0, 128, (length,), generator=GENERATOR).tolist() for length in (70, 30, 21))
PROMPT = SYSTEM + QUESTION


@pytest.fixture
def model() -> Any:
    """A small random Llama."""
    return decoder("Llama")


@pytest.fixture
def open_pool(sessions: PoolSessions, model: Any) -> Callable[..., Pool]:
    """Opens the model's pool in a session of its own."""
    return lambda block_count=100: sessions.open(layout_for(model, BLOCK_TOKENS), block_count)


@pytest.fixture
def pool(open_pool: Callable[..., Pool]) -> Pool:
    """A pool with room for everything."""
    return open_pool()


def without_cache(model: Any, prompt: list[int], max_new_tokens: int) -> tuple[int, ...]:
    """The greedy answer, every token from a pass over everything before it."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def costs(generation: Generation) -> tuple[int, int, int]:
    """Tokens of the prompt: all, reused, computed."""
    return generation.prompt_tokens, generation.reused_tokens, generation.computed_tokens


def assert_nothing_held(stats: PoolStats) -> None:
    """Every sequence was released: blocks are free or cached."""
    held = (stats.sequence_count, stats.reserved_block_count, stats.active_block_count, stats.warm_block_count)
    assert held == (0, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("order", BlockOrder, ids=lambda order: order.value)
@pytest.mark.parametrize("kind", DECODERS)
def test_every_kind_of_decoder_answers_as_without_cache(kind: str, order: BlockOrder, sessions: PoolSessions) -> None:
    """Cold and warm, in place, over both orders: token for token the answer of the model alone."""
    model = decoder(kind)
    pool = sessions.open(layout_for(model, BLOCK_TOKENS, order), 20)
    worker = Worker(model, pool, chunk_tokens=33)
    expected = without_cache(model, PROMPT, 20)
    cold, warm = worker.generate([PROMPT], 20)[0], worker.generate([PROMPT], 20)[0]
    assert [costs(cold), costs(warm)] == [(100, 0, 100), (100, 96, 4)]
    assert [cold.token_ids, warm.token_ids] == [expected, expected]


def test_a_prefix_is_computed_once_for_all_workers(open_pool: Callable[..., Pool], model: Any) -> None:
    """What one worker computed another reuses, up to the last whole block that they share."""
    first, second = Worker(model, open_pool()), Worker(model, open_pool())
    assert costs(first.generate([PROMPT], 8)[0]) == (100, 0, 100)
    other = second.generate([SYSTEM + OTHER], 8)[0]
    assert costs(other) == (91, 64, 27)
    assert other.token_ids == without_cache(model, SYSTEM + OTHER, 8)
    assert_nothing_held(first._pool.stats())


def test_an_answer_is_reused_by_the_next_turn(pool: Pool, model: Any) -> None:
    """Blocks are published as they fill while decoding, so that a conversation goes on from its own answer."""
    worker = Worker(model, pool)
    answer = worker.generate([PROMPT], 40)[0].token_ids
    turn = worker.generate([[*PROMPT, *answer, *OTHER]], 5)[0]
    assert costs(turn) == (161, 128, 33)
    assert turn.token_ids == without_cache(model, [*PROMPT, *answer, *OTHER], 5)


def test_prompts_that_arrive_together_share_their_beginning(pool: Pool, model: Any) -> None:
    """In one cold call the common prefix is computed by the first prompt and reused by the others."""
    prompts = [SYSTEM + OTHER, PROMPT, OTHER]
    answers = Worker(model, pool).generate(prompts, 12)
    assert [answer.reused_tokens for answer in answers] == [0, 64, 0]
    assert [answer.token_ids for answer in answers] == [without_cache(model, prompt, 12) for prompt in prompts]
    assert_nothing_held(pool.stats())


@pytest.mark.slow
def test_sampled_answers_do_not_depend_on_the_cache(pool: Pool, model: Any) -> None:
    """[E7] with a seed, the same tokens are drawn cold, warm, and without any reuse."""
    worker = Worker(model, pool)
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=5)
    runs = [
        worker.generate([PROMPT, OTHER], 30, sampling=sampling, admission=admission)
        for admission in (Admission(), Admission(), NO_REUSE)
    ]
    assert [run[0].reused_tokens for run in runs] == [0, 96, 0]
    assert len({tuple(answer.token_ids for answer in run) for run in runs}) == 1
    assert runs[0][0].token_ids != without_cache(model, PROMPT, 30)


@pytest.mark.parametrize("prompt_tokens", [100, 96, 7])
def test_several_answers_share_one_prompt_by_fork(prompt_tokens: int, pool: Pool, model: Any) -> None:
    """The prompt is computed once, its partial tail copied once a child, and each answer is drawn on its own."""
    worker = Worker(model, pool)
    prompt = PROMPT[:prompt_tokens]
    sampling = Sampling(seed=9)
    (forked,) = worker.generate([prompt], 20, sampling=sampling, answer_count=4)
    counters = pool.stats().counters
    assert (counters.allocate_count, counters.copied_block_count) == (1, 3 if prompt_tokens % 16 else 0)
    assert len(set(forked.answers)) == 4
    (again,) = worker.generate([prompt], 20, sampling=sampling, answer_count=4, admission=NO_REUSE)
    assert again.answers == forked.answers
    assert_nothing_held(pool.stats())


def test_decoding_calls_the_service_by_block_and_not_by_token(pool: Pool, model: Any) -> None:
    """[E5] 100 prompt and 60 new tokens: one Allocate, and an Extend and a Commit for each block that fills."""
    calls: Counter[str] = Counter()
    run = pool.link.run

    def counted(call: Any, *rest: Any, **options: Any) -> Any:
        calls[call.method] += 1
        return run(call, *rest, **options)

    worker = Worker(model, pool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool.link, "run", counted)
        worker.generate([PROMPT], 60)
    # K and V of 159 tokens are computed: blocks end at 112, 128 and 144, and the prompt's six at 96.
    assert calls == {"Allocate": 1, "Commit": 4, "Extend": 3, "Release": 1}


def test_one_worker_prefills_and_another_decodes(open_pool: Callable[..., Pool], model: Any) -> None:
    """A sequence changes hands with nothing copied or computed again, greedy and sampled alike."""
    prefill, decode = Worker(model, open_pool()), Worker(model, open_pool())
    for sampling in (None, Sampling(seed=3)):
        (whole,) = prefill.generate([PROMPT], 20, sampling=sampling)
        handover = prefill.hand_over(PROMPT, sampling=sampling)
        taken = decode.take_over(handover, 20, sampling=sampling)
        assert taken.answers == whole.answers
        assert costs(taken) == (100, 96, 4)
        with pytest.raises(HandoffNotFound):
            decode.take_over(handover, 20, sampling=sampling)
    assert_nothing_held(decode._pool.stats())


def test_two_workers_that_compute_the_same_at_once_end_on_one_copy(open_pool: Callable[..., Pool]) -> None:
    """[P7] the later one's blocks become shadows; it switches to the published ones and answers the same."""
    models = decoder("Llama"), decoder("Llama")
    early, late = (Worker(model, open_pool()) for model in models)
    inside: list[Generation] = []

    def run_the_other(*_: Any) -> None:
        if not inside:
            inside.extend(late.generate([PROMPT], 30))

    models[0].register_forward_hook(run_the_other)
    (outside,) = early.generate([PROMPT], 30)
    assert [outside.reused_tokens, inside[0].reused_tokens] == [0, 0]
    assert outside.token_ids == inside[0].token_ids
    stats = early._pool.stats()
    assert stats.counters.shadow_block_count == 8
    assert stats.cached_block_count == 8
    assert_nothing_held(stats)


def test_namespaces_do_not_share(pool: Pool, model: Any) -> None:
    """[G8] a prompt under another salt is computed anew."""
    worker = Worker(model, pool)
    salted = Admission(namespace=Namespace(salt=b"tenant"))
    worker.generate([PROMPT], 1)
    assert worker.generate([PROMPT], 1, admission=salted)[0].reused_tokens == 0
    assert worker.generate([PROMPT], 1, admission=salted)[0].reused_tokens == 96


@pytest.mark.slow
def test_a_full_pool_delays_answers_and_changes_none(open_pool: Callable[..., Pool], model: Any) -> None:
    """[E7] four answers that do not fit together: the newest gives way, returns, and says what it would have said."""
    pool = open_pool(15)
    prompts = [SYSTEM + OTHER, PROMPT, OTHER, QUESTION]
    answers = Worker(model, pool).generate(prompts, 50)
    assert [answer.token_ids for answer in answers] == [without_cache(model, prompt, 50) for prompt in prompts]
    stats = pool.stats()
    assert stats.counters.refused_count > 0
    assert_nothing_held(stats)


@pytest.mark.slow
def test_forks_that_do_not_fit_are_answered_one_after_another(open_pool: Callable[..., Pool], model: Any) -> None:
    """With no room to copy the tail for each, the answers come from the shared prompt, later."""
    pool = open_pool(11)
    sampling = Sampling(seed=9)
    (crowded,) = Worker(model, pool).generate([PROMPT], 30, sampling=sampling, answer_count=5)
    assert pool.stats().counters.refused_count > 0
    roomy = Worker(model, pool).generate([PROMPT], 30, sampling=sampling, admission=NO_REUSE)
    assert crowded.answers[0] == roomy[0].token_ids
    assert len(set(crowded.answers)) == 5
    assert_nothing_held(pool.stats())


def test_a_pool_that_others_fill_says_so(open_pool: Callable[..., Pool], model: Any) -> None:
    """With nothing of its own to give up, the worker reports the pool's refusal and leaves nothing behind."""
    mine, theirs = open_pool(15), open_pool(15)
    held = theirs.allocate(OTHER, reserve_tokens=150)
    worker = Worker(model, mine)
    with pytest.raises(PoolExhausted):
        worker.generate([PROMPT], 5)
    with pytest.raises(RequestTooLarge):
        worker.generate([PROMPT * 3], 5)
    held.release()
    assert worker.generate([PROMPT], 5)[0].token_ids == without_cache(model, PROMPT, 5)
    assert_nothing_held(mine.stats())


def test_an_error_in_the_model_releases_everything(pool: Pool, model: Any) -> None:
    """[E6] a step that fails in the middle of three answers gives all blocks back, and the next call works."""
    worker = Worker(model, pool)
    steps = iter(range(10))

    def fail(*_: Any) -> None:
        assert pool.blocks.computing.is_under_way, "[E17]"
        if next(steps, None) is None:
            raise FloatingPointError("a fault in the model")

    hook = model.register_forward_hook(fail)
    with pytest.raises(FloatingPointError):
        worker.generate([PROMPT, OTHER], 30, answer_count=2)
    assert not pool.blocks.computing.is_under_way
    hook.remove()
    assert_nothing_held(pool.stats())
    assert model.config._attn_implementation == "sdpa"
    assert worker.generate([PROMPT], 5)[0].token_ids == without_cache(model, PROMPT, 5)


def test_an_answer_ends_with_its_stop_token(pool: Pool, model: Any) -> None:
    """The stop token is the last of the answer, wherever it comes."""
    free = Worker(model, pool).generate([PROMPT], 20)[0].token_ids
    stop = next(token for token in free if free.index(token) >= 4)
    ended = Worker(model, pool, stop_token_ids=[stop]).generate([PROMPT], 20)[0].token_ids
    assert ended == free[: free.index(stop) + 1]


def test_the_gathering_worker_gives_the_same_answers(pool: Pool, model: Any) -> None:
    """The way for tests runs under the same loop, batch of different lengths included."""
    prompts = [SYSTEM + OTHER, PROMPT, OTHER]
    gathered = Worker(model, pool, computing=PoolModel.gathering).generate(prompts, 12)
    in_place = Worker(model, pool).generate(prompts, 12)
    assert [answer.answers for answer in gathered] == [answer.answers for answer in in_place]


def test_another_models_pool_is_refused(pool: Pool) -> None:
    """[E4] equal shapes are not enough: other weights would read this model's blocks as their own."""
    other = decoder("Llama")
    other.model.layers[0].mlp.up_proj.weight.data *= 1.01
    with pytest.raises(LayoutMismatch, match="model"):
        Worker(other, pool)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("Hello", r"text, must be a list of token ids: pass tokenizer\.encode\(text\)"),
        (["Hello"], r"text, must be a list of token ids: pass tokenizer\.encode\(text\)"),
        ([1, 2, 3], r"1, must be a list of token ids: pass \[ids\], one list a prompt"),
        (torch.tensor([1, 2]), r"pass \[ids\], one list a prompt"),
        (BatchEncoding({"input_ids": [[1]]}), 'a BatchEncoding, must be a list of token ids: pass its "input_ids"'),
        ([BatchEncoding({"input_ids": [1]})], 'a BatchEncoding, must be a list of token ids: pass its "input_ids"'),
    ],
)
def test_what_is_no_list_of_ids_is_named_as_what_it_is(prompts: Any, message: str, pool: Pool, model: Any) -> None:
    """Text, one prompt for several and a tokenizer's whole result are what people pass first."""
    with pytest.raises(RequestInvalid, match=message):
        Worker(model, pool).generate(prompts, 5)


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "answer_count"),
    [
        ([], 5, 1),
        ([1], 0, 1),
        ([1], 5, 0),
        ([128], 5, 1),
        ([-1], 5, 1),
        ([0.5], 5, 1),
        ([[1]], 5, 1),
        ([1] * 500, 50, 1),
    ],
)
def test_a_request_that_the_model_cannot_answer_allocates_nothing(
    prompt: Any, max_new_tokens: int, answer_count: int, pool: Pool, model: Any
) -> None:
    """Empty, too long, unknown tokens, nothing asked for: named before the first call to the service."""
    with pytest.raises(RequestInvalid):
        Worker(model, pool).generate([PROMPT, prompt], max_new_tokens, answer_count=answer_count)
    assert pool.stats().counters.allocate_count == 0
