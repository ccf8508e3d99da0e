"""The demonstration's side of an engine: its process, what it is asked, and what it has answered."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvharbor.demo.processes import DemoFailed
from kvharbor.demo.vllm.outcome import Answered

ANSWER_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
LOG_END = 2_000
# Nothing is looked for or reported outside of this host.
SWITCHES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
Prompts = Mapping[str, Sequence[int]]


class EngineProcess:
    """One vLLM engine, which may still be starting. What vLLM itself says is in `folder`.

    `told` is what it has said when it was idle last. `module` is what to run, with the arguments of `engine`.
    """

    def __init__(
        self, name: str, folder: Path, arguments: Mapping[str, Any], *, module: str = "kvharbor.demo.vllm.engine"
    ) -> None:
        self.name = name
        self.told: dict[str, Any] = {}
        self.kv_ranges: list[tuple[int, int]] = []
        self.answered: dict[str, Answered] = {}
        self._log = folder / f"{name}.log"
        self._prompts: dict[str, Sequence[int]] = {}
        self._firsts: dict[str, dict[str, Any]] = {}
        read_end, write_end = os.pipe()
        with self._log.open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(write_end), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                env={**os.environ, **SWITCHES},
                pass_fds=[write_end],
            )
        os.close(write_end)
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, args=(read_end,), daemon=True).start()

    @property
    def pid(self) -> int:
        """The engine's process: with scheduler and worker in one."""
        return self._process.pid

    def wait_ready(self) -> float:
        """Returns when it takes requests, and since when."""
        ready = self._next("ready")
        self.kv_ranges = [(first, end) for first, end in ready["kv_ranges"]]
        return float(ready["at_s"])

    def begin(self, prompts: Prompts, most_tokens: int) -> None:
        """Asks it to answer prompts, as one batch."""
        assert self._process.stdin is not None
        self._prompts |= prompts
        request = {"prompts": {name: [*ids] for name, ids in prompts.items()}, "most_tokens": most_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def wait_first(self) -> float:
        """Returns when it has begun to answer one more prompt, and since when."""
        return float(self._next("first")["at_s"])

    def finish(self) -> list[Answered]:
        """Returns all answers of the batch, in the order in which they ended."""
        before = len(self.answered)
        self.told = self._next("idle")
        return [*self.answered.values()][before:]

    def answer(self, prompts: Prompts, most_tokens: int) -> list[Answered]:
        """Has prompts answered, as one batch."""
        self.begin(prompts, most_tokens)
        return self.finish()

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Has it end, by force after a while."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _next(self, kind: str) -> dict[str, Any]:
        """Takes in messages up to one of a kind."""
        while True:
            try:
                message = self._messages.get(timeout=ANSWER_TIMEOUT_S)
            except queue.Empty:
                raise DemoFailed(f"{self.name} has said nothing for {ANSWER_TIMEOUT_S:.0f} s\n{self._said()}") from None
            if message is None:
                raise DemoFailed(f"{self.name} ended with exit code {self._process.wait()}\n{self._said()}")
            if "first" in message:
                self._firsts[message["first"]] = message
            if "done" in message:
                self._take(message)
            if kind in message:
                return message

    def _take(self, done: dict[str, Any]) -> None:
        name, first = done["done"], self._firsts[done["done"]]
        self.answered[name] = Answered(
            engine=self.name,
            question=name,
            prompt_ids=tuple(self._prompts[name]),
            answer_ids=tuple(done["answer_ids"]),
            answer=done["answer"],
            reused_tokens=first["reused_tokens"],
            asked_s=first["asked_s"],
            first_s=first["at_s"],
            done_s=done["at_s"],
        )

    def _said(self) -> str:
        return self._log.read_text()[-LOG_END:]

    def _read(self, read_end: int) -> None:
        with os.fdopen(read_end) as replies:
            for line in replies:
                self._messages.put(json.loads(line))
        self._messages.put(None)
