"""The kinds of engines that are compared, two of each: plain ones, on one pool, and with the connector to a pool."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.engines.seen import BLOCK_TOKENS, COUNT, KV_BYTES, Seen, together
from bench.engines.traffic import alone, chats
from kvharbor.demo.vllm.engine_process import EngineProcess
from kvharbor.engines.transformers import smollm2_folder
from kvharbor.engines.vllm import engine_args
from kvharbor.engines.vllm_connector import connector_args

TURNS = 3
WAVES = 4
"""Of prompts that share nothing, one after the other. Before the first an engine has done nothing for a while."""
SHARED_ANSWER_TOKENS = 16
ALONE_ANSWER_TOKENS = 24
COMMON = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True}


def arguments(kind: str, socket_path: Path) -> dict[str, Any]:
    """Returns how an engine of this kind is made."""
    plain = {"block_size": BLOCK_TOKENS, "enable_prefix_caching": True, "kv_cache_memory_bytes": KV_BYTES}
    copying = connector_args(str(socket_path), "copy", size=KV_BYTES, block_tokens=BLOCK_TOKENS)
    return {
        "plain": plain,
        "pool": engine_args(str(socket_path), "pool", size=KV_BYTES, block_tokens=BLOCK_TOKENS),
        "copy": {**copying, "kv_cache_memory_bytes": KV_BYTES},
    }[kind]


class Pair:
    """Two engines of one kind."""

    def __init__(self, kind: str, folder: Path, socket_path: Path, stack: ExitStack) -> None:
        made = {"model": str(smollm2_folder()), **COMMON, **arguments(kind, socket_path)}
        self._engines = []
        for number in range(COUNT):
            engine = EngineProcess(f"{kind}-{number}", folder, made, module="bench.engines.engine")
            stack.callback(engine.stop)
            self._engines.append(engine)

    def wait_ready(self) -> None:
        """Returns when both take requests."""
        for engine in self._engines:
            engine.wait_ready()

    def shared(self, round_number: int) -> Seen:
        """Has chats go on for some turns, each with the other engine than before."""
        going, seen = [*chats(round_number)], []
        for turn in range(TURNS):
            going = [chat.turn(turn) for chat in going]
            asked: list[dict[str, list[int]]] = [{} for _ in range(COUNT)]
            for place, chat in enumerate(going):
                asked[(place + turn) % COUNT][f"{chat.name}-{turn}"] = [*chat.said]
            seen.append(self._answer(asked, SHARED_ANSWER_TOKENS))
            answers = {one.question: one.answer_ids for one in seen[-1].answered}
            going = [chat.answered(answers[f"{chat.name}-{turn}"]) for chat in going]
        return together(seen)

    def alone(self, round_number: int) -> list[Seen]:
        """Has prompts answered that share nothing; what each wave of them has shown."""
        return [
            self._answer([alone(round_number, wave, each) for each in range(COUNT)], ALONE_ANSWER_TOKENS)
            for wave in range(WAVES)
        ]

    def _answer(self, asked: Sequence[Mapping[str, list[int]]], most_tokens: int) -> Seen:
        for engine, prompts in zip(self._engines, asked, strict=True):
            engine.begin(prompts, most_tokens)
        answered = [one for engine in self._engines for one in engine.finish()]
        return Seen(tuple(answered), self._told("admission_us"), self._told("decode_us"))

    def _told(self, name: str) -> tuple[float, ...]:
        return tuple(time for engine in self._engines for time in engine.told[name])
