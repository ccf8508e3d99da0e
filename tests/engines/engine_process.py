"""The test's side of engine_main.py."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

MAIN = Path(__file__).with_name("engine_main.py")
DEADLINE_S = 400.0


class EngineFailed(Exception):
    """The engine has answered with an error, or has ended."""


class EngineProcess:
    """One engine, in a session (process group) of its own. `log` has what it has written."""

    def __init__(self, log: Path, arguments: dict[str, Any], *, multiprocessing: bool = False) -> None:
        read_end, write_end = os.pipe()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVHARBOR_")}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)),
        }
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(MAIN), str(write_end), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                pass_fds=[write_end],
                start_new_session=True,
            )
        os.close(write_end)
        self._replies: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(read_end,), daemon=True)
        self._reader.start()

    def wait_ready(self) -> "EngineProcess":
        """Returns when it takes requests; raises EngineFailed with what it has said instead."""
        self.reply()
        return self

    def send(self, do: str, **arguments: Any) -> None:
        """Asks for something, whose answer is the next `reply`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def reply(self) -> dict[str, Any]:
        """Returns the next answer."""
        message = self._replies.get(timeout=DEADLINE_S)
        if message is None:
            raise EngineFailed(f"it has ended:\n{self.log.read_text()[-4000:]}")
        if "failed" in message:
            raise EngineFailed(f"{message['failed']}\n{message['trace']}\n{self.log.read_text()[-4000:]}")
        return message

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Asks for something and returns the answer."""
        self.send(do, **arguments)
        return self.reply()

    def answers(self, prompts: list[str], **arguments: Any) -> list[dict[str, Any]]:
        """Has prompts answered, as one batch."""
        answers: list[dict[str, Any]] = self.ask("generate", prompts=prompts, **arguments)["answers"]
        return answers

    def answer(self, prompt: str, **arguments: Any) -> dict[str, Any]:
        """Has one prompt answered."""
        return self.answers([prompt], **arguments)[0]

    def kill(self) -> None:
        """Kills all of its processes, with SIGKILL."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def leave(self) -> None:
        """Tells it to end; repeating it does nothing."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        """Waits for its end, and ends what is left of it after a while."""
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def _read(self, read_end: int) -> None:
        with os.fdopen(read_end) as replies:
            for line in replies:
                self._replies.put(json.loads(line))
        self._replies.put(None)
