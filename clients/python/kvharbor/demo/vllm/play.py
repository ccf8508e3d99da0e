"""The scenes of the run, one after the other."""

import time

from kvharbor.demo.vllm.memory import ProcessMemory, allocated_bytes, process_memory
from kvharbor.demo.vllm.outcome import Answered, Memory, Moments, Run
from kvharbor.demo.vllm.screen import Teller
from kvharbor.demo.vllm.script import (
    ALONE,
    COLD,
    CUT_OFF,
    FIRST,
    FOLLOW_UP,
    MEANWHILE,
    OPENINGS,
    SECOND,
    TOGETHER,
    WARM,
    Prompts,
)
from kvharbor.demo.vllm.stage import BLOCK_TOKENS, Stage

# What is to be cut off has to be a long answer.
CUT_OFF_TOKENS = 400


class Play:
    """Has the engines answer, kills what is to be killed, and keeps what was seen."""

    def __init__(self, stage: Stage, prompts: Prompts, tell: Teller, most_tokens: int) -> None:
        self._stage = stage
        self._prompts = prompts
        self._tell = tell
        self._most_tokens = most_tokens
        self._answered: list[Answered] = []

    def run(self) -> Run:
        """Plays all scenes."""
        plain, plain_memory = self._plain()
        begun_s = time.monotonic()
        self._tell.scene("Two engines on one pool")
        self._answer(FIRST, COLD)
        self._answer(SECOND, WARM)
        killed_s, service_killed_s, service_back_s, went_on = self._kill_both()
        back_s = self._come_back()
        self._tell.scene("Both at once")
        for name, question in TOGETHER.items():
            self._begin(name, question)
        for name in TOGETHER:
            self._finish(name)
        return Run(
            block_tokens=BLOCK_TOKENS,
            answered=tuple(self._answered),
            plain=tuple(plain),
            moments=Moments(begun_s, killed_s, back_s, service_killed_s, service_back_s),
            memory=self._memory(plain_memory),
            restart_count=self._stage.harbor.server_info().restart_count,
            sessions_went_on=went_on,
        )

    def _plain(self) -> tuple[list[Answered], ProcessMemory]:
        """Has the plain engine answer everything, to compare with, and end."""
        self._tell.scene("Plain vLLM, without a prefix cache: what the answers shall be")
        plain = self._stage.plain
        for engine in (plain, *self._stage.engines.values()):
            engine.wait_ready()
        memory = process_memory(plain.pid, plain.kv_ranges)
        answers = [*self._one_by_one({question: self._prompts.opening(question) for question in OPENINGS})]
        cold = plain.answered[COLD]
        answers += self._one_by_one({FOLLOW_UP: self._follow_up(cold)})
        plain.stop()
        return answers, memory

    def _one_by_one(self, prompts: dict[str, list[int]]) -> list[Answered]:
        answers = []
        for question, prompt_ids in prompts.items():
            answers += self._stage.plain.answer({question: prompt_ids}, self._most_tokens)
            self._tell.answered(answers[-1])
        return answers

    def _kill_both(self) -> tuple[float, float, float, bool]:
        """Kills the first engine and the service's process while both engines answer."""
        self._tell.scene("The first engine is killed in the middle of an answer, and the service's process with it")
        first, second, harbor = *self._stage.engines.values(), self._stage.harbor
        self._begin(FIRST, CUT_OFF, CUT_OFF_TOKENS)
        self._begin(SECOND, MEANWHILE)
        first.wait_first()
        second.wait_first()
        before = self._stage.session_ids()
        first.kill()
        killed_s = time.monotonic()
        self._stage.kill_service()
        service_killed_s = time.monotonic()
        # The call waits for the next process.
        harbor.server_info()
        service_back_s = time.monotonic()
        self._finish(SECOND)
        after = self._stage.session_ids()
        return killed_s, service_killed_s, service_back_s, len(before) == 3 and len(after) == 2 and after < before

    def _come_back(self) -> float:
        """Starts the first engine again; the second goes on meanwhile."""
        again = self._stage.restart(FIRST)
        self._answer(SECOND, ALONE)
        self._tell.scene("The first engine comes back")
        back_s = again.wait_ready()
        self._answer(FIRST, FOLLOW_UP)
        self._answer(FIRST, CUT_OFF)
        return back_s

    def _answer(self, name: str, question: str) -> None:
        self._begin(name, question)
        self._finish(name)

    def _begin(self, name: str, question: str, most_tokens: int = 0) -> None:
        prompt_ids = self._prompt(question)
        self._stage.engines[name].begin({question: prompt_ids}, most_tokens or self._most_tokens)

    def _finish(self, name: str) -> None:
        for one in self._stage.engines[name].finish():
            self._answered.append(one)
            self._tell.answered(one)

    def _prompt(self, question: str) -> list[int]:
        if question != FOLLOW_UP:
            return self._prompts.opening(question)
        return self._follow_up(next(one for one in self._answered if one.question == COLD))

    def _follow_up(self, before: Answered) -> list[int]:
        return self._prompts.following(before.prompt_ids, before.answer_ids, FOLLOW_UP)

    def _memory(self, plain: ProcessMemory) -> Memory:
        engines = tuple(process_memory(engine.pid, engine.kv_ranges) for engine in self._stage.engines.values())
        files = sorted({file for engine in engines for file in engine.kv_files})
        pids = self._stage.service_pids
        return Memory(engines, plain, sum(allocated_bytes(file, pids) for file in files))
