"""The worker: prompts in, answers out, and every prefix that the pool already holds left alone."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvharbor.client import Namespace, Pool, WarmTask
from kvharbor.client import Sequence as PoolSequence
from kvharbor.engines.transformers.batch import NO_NAMESPACE, Admission, Batch
from kvharbor.engines.transformers.errors import RequestInvalid
from kvharbor.engines.transformers.forward import PoolModel
from kvharbor.engines.transformers.layout import layout_for
from kvharbor.engines.transformers.sampling import Sampling, greedy, sampler
from kvharbor.engines.transformers.step import Row
from kvharbor.engines.transformers.stream import LeavingStream, Question, Stream
from kvharbor.gpumem import BlockViews

DEFAULT_ADMISSION = Admission()


@dataclass(frozen=True, slots=True)
class Generation:
    """The answers to one prompt, and what they cost.

    reused_tokens + computed_tokens = prompt_tokens. `time_to_first_token_s` runs from the prompt's Allocate
    to its first chosen token, so prompts that came before it in the same call do not count.
    """

    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    time_to_first_token_s: float
    answers: tuple[tuple[int, ...], ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first answer, its stop token included."""
        return self.answers[0]


@dataclass(frozen=True, slots=True)
class Handover:
    """A computed prompt and its first answer token, on their way to another worker.

    Valid once and for as long as the service keeps a hand-off (30 s by default).
    """

    handoff_token: str
    prompt: tuple[int, ...]
    first_token_id: int
    reused_tokens: int
    time_to_first_token_s: float


class Worker:
    """Generates with one model over one pool; the calling thread does the work, one call at a time.

    The model attends by kvharbor's functions during a call and by its own between calls. `chunk_tokens`
    bounds how much of a prompt goes into one step. Answers end with one of `stop_token_ids` (default: those
    of the model's generation settings). `computing` chooses how the model reads the blocks. The worker holds
    views of the pool: drop it before the pool's mapping closes.

    It goes on when the service's process is replaced, and in a new epoch when `on_epoch` is called by the `on_epoch`
    of the harbor's `connect` [E9].

    Raises LayoutMismatch when the pool was opened for another model, AttentionUnsupported when the model
    cannot run over views. Reads all weights once, to know that they are those of the pool.
    """

    def __init__(
        self,
        model: Any,
        pool: Pool,
        *,
        chunk_tokens: int = 512,
        stop_token_ids: Sequence[int] | None = None,
        computing: Callable[[Any, BlockViews], PoolModel] = PoolModel.in_place,
    ) -> None:
        if chunk_tokens < 1:
            raise RequestInvalid("chunk_tokens", chunk_tokens, "at least 1", "512 suits most models")
        layout = pool.descriptor.layout
        wanted = layout_for(model, layout.block_tokens, layout.order)
        layout.require_equal(replace(wanted, scratch_blocks=layout.scratch_blocks))
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._stop_token_ids = frozenset(_stop_tokens(model) if stop_token_ids is None else stop_token_ids)
        self._vocabulary_size = int(model.config.vocab_size)
        self._position_count = int(getattr(model.config, "max_position_embeddings", 2**31))
        self._model = computing(model, pool.views)
        self._at_work = threading.Lock()

    def on_epoch(self, old_epoch: str, new_epoch: str) -> None:
        """Returns when the worker touches the pool's memory no more; what is under way then begins again."""
        del old_epoch, new_epoch
        # A step checks, under this lock, that its sequences are still held, and by now they are not.
        with self._at_work:
            pass

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        answer_count: int = 1,
        admission: Admission = DEFAULT_ADMISSION,
    ) -> list[Generation]:
        """Answers prompts of token ids, each `answer_count` times; greedy unless `sampling` is given.

        Computes of each prompt only what the pool does not hold. Several answers to one prompt share its
        blocks by Fork. Blocks are published as they fill, and every sequence is released at the end, also on
        an error. Raises RequestInvalid before anything is allocated; what the pool refuses comes through.
        """
        if answer_count < 1:
            raise RequestInvalid("answer_count", answer_count, "at least 1", "ask for one answer or more")
        if isinstance(prompts, Mapping):
            raise _not_ids(prompts)
        checked = [self._checked(prompt, max_new_tokens) for prompt in prompts]
        groups = [
            [
                Stream(self._question(prompt, (place, answer), max_new_tokens, sampling))
                for answer in range(answer_count)
            ]
            for place, prompt in enumerate(checked)
        ]
        for first, *others in groups:
            first.forks = others
        self._run([streams[0] for streams in groups], admission)
        return [_generation(streams) for streams in groups]

    def hand_over(
        self, prompt: Sequence[int], *, sampling: Sampling | None = None, admission: Admission = DEFAULT_ADMISSION
    ) -> Handover:
        """Computes a prompt and its first answer token, and gives the sequence away for `take_over`."""
        checked = self._checked(prompt, 1)
        stream = LeavingStream(self._question(checked, (0, 0), 1, sampling))
        self._run([stream], admission)
        cost = _generation([stream])
        return Handover(
            stream.handoff_token,
            tuple(checked),
            stream.answer[0],
            cost.reused_tokens,
            cost.time_to_first_token_s,
        )

    def take_over(
        self,
        handover: Handover,
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        admission: Admission = DEFAULT_ADMISSION,
    ) -> Generation:
        """Goes on with what another worker computed; the answer is as if one worker had done it all.

        `max_new_tokens` counts the first token too. Raises HandoffNotFound when the token was used or is too
        old: compute the prompt again then.
        """
        checked = self._checked(handover.prompt, max_new_tokens)
        stream = Stream(self._question(checked, (0, 0), max_new_tokens, sampling))
        stream.token_ids.append(handover.first_token_id)
        stream.reused_tokens = handover.reused_tokens
        stream.time_to_first_token_s = handover.time_to_first_token_s
        stream.start(self._pool.adopt(handover.handoff_token))
        try:
            if not stream.finished:
                self._run([stream], admission)
        finally:
            stream.stop()
        return _generation([stream])

    def serve_warm_task(self, task: WarmTask[Pool, PoolSequence], *, served: Namespace = NO_NAMESPACE) -> int:
        """Computes and publishes what a claimed prefix lacks, releases it, and returns how many tokens that were.

        The model stands for the version and adapter of `served`; a task of others is released and refused with
        RequestInvalid, and so is one with extra keys, whose tokens this model would take for text.
        """
        with task.sequence as sequence, self._model.attending():
            self._check_task(task, served)
            token_ids = self._plain_tokens(task.tokens, 0)
            first = done = sequence.computed_tokens
            while done < len(token_ids):
                row = Row(sequence.table, done, token_ids[done : done + self._chunk_tokens])
                with self._at_work, self._pool.blocks.computing:
                    sequence.require_held()
                    self._model.logits([row])
                done = row.end
                sequence.commit(done)
                sequence.switch_shadows()
        return done - first

    def _check_task(self, task: WarmTask[Pool, PoolSequence], served: Namespace) -> None:
        asked = (task.namespace.version, task.namespace.adapter)
        if task.pool is not self._pool:
            raise RequestInvalid("the task's pool", task.pool.name, self._pool.name, "give it to that pool's worker")
        if asked != (served.version, served.adapter):
            limit = f"{(served.version, served.adapter)}, which this worker serves"
            raise RequestInvalid("the task's version and adapter", asked, limit, "give it to a worker of those")
        if task.extra_keys:
            raise RequestInvalid("the task's extra keys", len(task.extra_keys), "none", "this engine computes text")

    def _question(
        self, prompt: list[int], key: tuple[int, int], max_new_tokens: int, sampling: Sampling | None
    ) -> Question:
        choose = greedy if sampling is None else sampler(sampling, prompt_index=key[0], answer_index=key[1])
        return Question(prompt, key, max_new_tokens, self._stop_token_ids, choose)

    def _run(self, streams: Sequence[Stream], admission: Admission) -> None:
        batch = Batch(
            self._model, self._pool, admission=admission, chunk_tokens=self._chunk_tokens, at_work=self._at_work
        )
        with self._model.attending():
            batch.run(streams)

    def _checked(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        if max_new_tokens < 1:
            raise RequestInvalid("max_new_tokens", max_new_tokens, "at least 1", "ask for a token or more")
        return self._plain_tokens(prompt, max_new_tokens)

    def _plain_tokens(self, prompt: Any, max_new_tokens: int) -> list[int]:
        """The prompt as plain numbers, whatever kind of sequence, array or tensor it came as."""
        if isinstance(prompt, str | bytes | Mapping):
            raise _not_ids(prompt)
        token_ids = np.asarray(prompt)
        if token_ids.ndim == 0:
            raise RequestInvalid("a prompt", prompt, "a list of token ids", "pass [ids], one list a prompt")
        if token_ids.ndim != 1 or token_ids.size < 1:
            limit = "one row of at least 1 token"
            raise RequestInvalid("the prompt's shape", token_ids.shape, limit, "pass one list of ids a prompt")
        if token_ids.dtype.kind not in "iu":
            raise RequestInvalid("the prompt's type", token_ids.dtype, "whole numbers", "pass token ids")
        if (longest := token_ids.size + max_new_tokens) > self._position_count:
            limit = f"at most {self._position_count}, the model's positions"
            raise RequestInvalid("prompt and new tokens", longest, limit, "shorten the prompt or the answer")
        for extreme in (token_ids.min(), token_ids.max()):
            if not 0 <= extreme < self._vocabulary_size:
                limit = f"from 0 to {self._vocabulary_size - 1}"
                raise RequestInvalid("a token id", extreme, limit, "use this model's tokenizer")
        checked: list[int] = token_ids.tolist()
        return checked


def _not_ids(prompt: Any) -> RequestInvalid:
    """What comes before a tokenizer, or out of one but not yet unpacked."""
    given, remedy = (
        (f"a {type(prompt).__name__}", 'pass its "input_ids"')
        if isinstance(prompt, Mapping)
        else ("text", "pass tokenizer.encode(text)")
    )
    return RequestInvalid("a prompt", given, "a list of token ids", remedy)


def _stop_tokens(model: Any) -> Sequence[int]:
    settings = getattr(model, "generation_config", None)
    stop = getattr(settings, "eos_token_id", None)
    if stop is None:
        return ()
    return [stop] if isinstance(stop, int) else list(stop)


def _generation(streams: Sequence[Stream]) -> Generation:
    first = streams[0]
    prompt_tokens = len(first.question.prompt)
    reused_tokens = first.reused_tokens or 0
    return Generation(
        prompt_tokens=prompt_tokens,
        reused_tokens=reused_tokens,
        computed_tokens=prompt_tokens - reused_tokens,
        time_to_first_token_s=first.time_to_first_token_s or 0.0,
        answers=tuple(stream.answer for stream in streams),
    )
