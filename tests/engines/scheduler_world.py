"""vLLM's real schedulers on one pool, with a worker that writes down what it would have computed.

Each token's KV is the number of everything up to it, so that an attention over a wrong block, over one that is not
written yet, or over one that another engine has got meanwhile, is seen at once.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engines.scheduler_configs import BLOCK_TOKENS
from kvharbor.engines.vllm import scheduler as scheduler_module
from kvharbor.engines.vllm.scheduler import HarborAsyncScheduler, HarborScheduler
from kvharbor.engines.vllm.session import Stamp

VOCABULARY = 400
HASH = get_hash_fn_by_name("sha256")


Mutation = Callable[[Any], None]
"""Breaks a scheduler, before it is used."""


class ContentWrong(AssertionError):
    """A step reads what is not its request's."""


class HandedBackTooEarly(AssertionError):
    """A block went back while a step that has not run yet writes to it or reads it."""


@dataclass(eq=False)
class Row:
    """One request's part in a step: tokens [first, end) are computed, and one is sampled if it is `complete`.

    `content` is the KV of its tokens since it has begun, or begun again: a step of before goes on with what was then.
    """

    request_id: str
    first: int
    end: int
    table: list[int]
    complete: bool
    weights: int
    content: list[int]


@dataclass(eq=False)
class Step:
    output: Any
    rows: list[Row]
    has_run: bool = False

    def touches(self, block: int) -> bool:
        return any(block in row.table[: -(-row.end // BLOCK_TOKENS)] for row in self.rows)


@dataclass(eq=False)
class World:
    """The memory of the pool: block to slots, what lies in each."""

    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    salts: dict[str, str] = field(default_factory=dict)

    def content(self, salt: str, tokens: list[int], weights: int) -> list[int]:
        """What the KV of each token is, by one version of the weights."""
        found: list[int] = []
        self.go_on(found, salt, tokens, weights)
        return found

    def go_on(self, content: list[int], salt: str, tokens: list[int], weights: int) -> None:
        """Adds the KV of the tokens that have none yet."""
        before = content[-1] if content else hash(salt)
        for token in tokens[len(content) :]:
            before = hash((before, token, weights))
            content.append(before)


class Engine:
    """One engine: a scheduler on `calls` of its session, with at most `depth` steps under way."""

    def __init__(
        self,
        name: str,
        world: World,
        calls: Any,
        config: VllmConfig,
        block_count: int,
        mutate: "Mutation | None" = None,
        make_store: Callable[[], Any] = lambda: None,
    ) -> None:
        init_none_hash(HASH)
        scheduler_module.IDLE_S = 0.0
        self.name = name
        self.world = world
        self.calls = calls
        self.depth = 2 if config.scheduler_config.async_scheduling else 1
        base = HarborAsyncScheduler if config.scheduler_config.async_scheduling else HarborScheduler
        own = {
            "_open": lambda *_: (Stamp("token", "pool"), None, calls),
            "_make_store": lambda *_: make_store(),
        }
        kind = type("TestedScheduler", (base,), own)
        config.cache_config.num_gpu_blocks = block_count
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float32)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=block_count,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer.0", "layer.1"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        if mutate is not None:
            mutate(self.scheduler)
        self.under_way: deque[Step] = deque()
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.content: dict[str, list[int]] = {}
        self.weights = 0
        self.answers: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.preempted_count = 0
        self.step_count = 0

    # Events

    def add(self, request_id: str, prompt: list[int], answer_count: int, *, salt: str = "", **more: Any) -> None:
        """A request comes; `more` is as vLLM's Request has it."""
        self.world.salts[request_id] = salt
        self.tokens[request_id] = [*prompt]
        self.answers[request_id] = []
        self.scheduler.add_request(_request(request_id, prompt, answer_count, cache_salt=salt or None, **more))

    def go_on(self, request_id: str, more: list[int], answer_count: int) -> None:
        """More input comes for a request that is resumable and has been answered so far."""
        self.scheduler.add_request(_request(request_id, more, answer_count, resumable=True))
        request = self.scheduler.requests[request_id]
        self.tokens[request_id] = [*request.all_token_ids]
        del self.content[request_id][request.num_computed_tokens :]
        self.answers[request_id] = []

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def take_weights(self, weights: int, *, preempt: bool) -> None:
        """Goes on with other weights, as an engine that is trained meanwhile."""
        assert self.scheduler.reset_prefix_cache(reset_running_requests=preempt)
        self.weights = weights

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.requests) or bool(self.under_way) or self.scheduler.has_requests()

    @property
    def may_schedule(self) -> bool:
        return len(self.under_way) < self.depth and self.scheduler.has_requests()

    def schedule(self) -> Step:
        assert not self.scheduler._pool.released, "what went is told where it went"
        output = self.scheduler.schedule()
        self.step_count += 1
        step = Step(output, [self._row(request_id) for request_id in self._mirror(output)])
        self.under_way.append(step)
        return step

    def run(self) -> None:
        """The oldest step that has not run does."""
        for step in self.under_way:
            if not step.has_run:
                step.has_run = True
                for row in step.rows:
                    self._compute(row)
                return

    def update(self) -> None:
        """The oldest step's results come in, after it has run."""
        step = self.under_way[0]
        if not step.has_run:
            self.run()
        self.under_way.popleft()
        names = [row.request_id for row in step.rows]
        sampled = [self.tokens[row.request_id][row.end : row.end + 1] if row.complete else [] for row in step.rows]
        outputs = self.scheduler.update_from_output(
            step.output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        for output in outputs.values():
            for each in output.outputs:
                self.answers[each.request_id].extend(each.new_token_ids)

    def step(self) -> None:
        """Schedules, runs and takes in, as far as there is something."""
        if self.may_schedule:
            self.schedule()
        if self.under_way:
            self.update()

    # The worker

    def _mirror(self, output: Any) -> list[str]:
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [*new.block_ids[0]]
            self.content[new.req_id] = []
            self.cached.setdefault(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = []
                self.content[request_id] = []
            if blocks is not None:
                self.tables[request_id].extend(blocks[0])
        self.preempted_count += len(output.preempted_req_ids or ())
        self._count = output.num_scheduled_tokens
        return [*output.num_scheduled_tokens]

    def _row(self, request_id: str) -> Row:
        request = self.scheduler.requests[request_id]
        end = request.num_computed_tokens
        table = [*self.tables[request_id]]
        first = end - self._count[request_id]
        content = self.content[request_id]
        return Row(request_id, first, end, table, not request.is_prefill_chunk, self.weights, content)

    def _compute(self, row: Row) -> None:
        tokens, salt, content = self.tokens[row.request_id], self.world.salts[row.request_id], row.content
        # What it has found when it began is as if it had been computed by the weights of now.
        self.world.go_on(content, salt, tokens[: row.end], row.weights)
        assert len(content) == row.end, (row, len(tokens))
        for position in range(row.first):
            found = self.world.slots.get((row.table[position // BLOCK_TOKENS], position % BLOCK_TOKENS))
            if found != content[position]:
                raise ContentWrong(f"{self.name} {row.request_id} position {position} of {row.first}")
        for position in range(row.first, row.end):
            self.world.slots[row.table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = content[position]
        if row.complete and len(tokens) == row.end:
            tokens.append(expected_token(content[-1]))

    def watch_returns(self, owner: Any) -> None:
        """Has the owner say so when a block goes back that a step which has not run yet needs."""

        def returned(session: Any, block: int) -> None:
            if session is self.calls and any(not step.has_run and step.touches(block) for step in self.under_way):
                raise HandedBackTooEarly(f"{self.name}: block {block}")

        owner.watchers.append(returned)


def _request(request_id: str, prompt: list[int], answer_count: int, **more: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[*prompt],
        sampling_params=SamplingParams(max_tokens=answer_count, ignore_eos=True, temperature=0.0),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, HASH),
        **more,
    )


def expected_token(content: int) -> int:
    """The token that follows."""
    return content % VOCABULARY


def expected_answer(world: World, salt: str, prompt: list[int], count: int, weights: int = 0) -> list[int]:
    """What an engine without any cache says."""
    tokens = [*prompt]
    for _ in range(count):
        tokens.append(expected_token(world.content(salt, tokens, weights)[-1]))
    return tokens[len(prompt) :]


def prompt(dice: random.Random, family_count: int = 4) -> list[int]:
    """Returns a prompt of 1 to 9 blocks, which begins as others of its family do."""
    family = random.Random(dice.randrange(family_count))
    shared = [family.randrange(VOCABULARY) for _ in range(BLOCK_TOKENS * 6)]
    own = [dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, BLOCK_TOKENS * 3))]
    return shared[: dice.randrange(0, len(shared))] + own
