"""The worker processes: each that ends is replaced, and what one hands off goes to another.

About half of them hold sequences, in the others are engines with block tables of their own. A slot keeps its kind, so
that the service always has as many sessions of each.
"""

import random
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path

from chaos.channel import Message
from chaos.helper import Helper
from chaos.reactor import Reactor
from chaos.worker import work

_PATIENCE_S = 30.0
_LOOK_S = 0.02


class Crowd:
    """So many slots, a worker in each. `wrong` is told of whatever must not be."""

    def __init__(
        self,
        reactor: Reactor,
        board_path: Path,
        target: str,
        *,
        seed: int,
        size: int,
        wrong: Callable[[str, str], None],
    ) -> None:
        self._reactor = reactor
        self._board_path = str(board_path)
        self._target = target
        self._seed = seed
        self._size = size
        self._wrong = wrong
        self._chance = random.Random(f"crowd {seed}")
        self._engines = {*random.Random(f"engines {seed}").sample(range(size), size // 2)}
        self._workers: dict[int, Helper] = {}
        self._started = 0
        self._struck: set[int] = set()
        self._paused: set[int] = set()
        self._pausing = self._leaving = False
        self._given: deque[Message] = deque(maxlen=64)
        self.deaths: list[tuple[int, float]] = []
        self.kills = 0

    def start(self) -> None:
        """Fills all slots."""
        for slot in range(self._size):
            self._start(slot)

    def strike(self, slot: int, number: int) -> None:
        """Sends a signal to whoever has the slot; SIGKILL and SIGTERM are its end."""
        worker = self._workers.get(slot)
        if worker is None:
            return
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._struck.add(worker.pid)
        worker.signal(number)

    def have_strike_itself(self, slot: int, number: int, *, stop_s: float = 0.0, then: int = 0) -> None:
        """Has whoever has the slot send itself a signal in the midst of its calls.

        After SIGSTOP it gets `then`, so much later.
        """
        worker = self._workers.get(slot)
        strike = {"number": int(number), "stop_s": stop_s, "then": int(then)}
        if worker is not None and worker.channel.send("strike", strike=strike) and number == signal.SIGKILL:
            self._struck.add(worker.pid)

    def pause(self, *, letting_go: bool = False) -> None:
        """Waits until every worker has ended what it was at, and begins nothing; it holds nothing if it lets go."""
        self._pausing = True
        for slot in self._workers:
            self._workers[slot].channel.send("let_go" if letting_go else "pause")
        if not self._reactor.run_until(lambda: self._paused >= self._workers.keys(), _PATIENCE_S):
            self._wrong("failed", f"workers {self._workers.keys() - self._paused} did not pause in {_PATIENCE_S} s")

    def go_on(self) -> None:
        """Ends a pause."""
        self._pausing = False
        self._paused.clear()
        for worker in self._workers.values():
            worker.channel.send("go")
        while self._given:
            self._pass_on(self._given.popleft())

    def leave(self) -> None:
        """Lets all end in good order."""
        self._leaving = True
        for worker in self._workers.values():
            worker.signal(signal.SIGCONT)
            worker.channel.send("leave")
        if not self._reactor.run_until(lambda: not self._workers, _PATIENCE_S):
            self._wrong("failed", f"workers {sorted(self._workers)} did not leave in {_PATIENCE_S} s")
            self.kill()

    def kill(self) -> None:
        """Ends whoever is left."""
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()

    def _start(self, slot: int) -> None:
        self._started += 1
        kind = "engine" if slot in self._engines else "sequences"
        worker = Helper(
            self._reactor,
            work,
            (self._board_path, slot, self._seed * 1_000_003 + self._started, self._target, kind),
            heard=lambda message: self._hear(slot, worker, message),
            died=lambda: self._bury(slot, worker),
        )
        self._workers[slot] = worker
        if self._pausing:
            worker.channel.send("pause")

    def _hear(self, slot: int, worker: Helper, message: Message) -> None:
        if message["kind"] == "paused":
            self._paused.add(slot)
        elif message["kind"] == "striking":
            if message["number"] == signal.SIGSTOP:
                self._reactor.after(message["stop_s"], lambda: self._follow(worker, message["then"]))
        elif message["kind"] == "given":
            if self._pausing:
                self._given.append(message)
            else:
                self._pass_on(message)
        else:
            self._wrong(message["kind"], f"worker {slot}: {message['text']}")

    def _pass_on(self, given: Message) -> None:
        takers = sorted(self._workers.keys() - self._engines)
        if takers and not self._leaving:
            self._workers[self._chance.choice(takers)].channel.send("adopt", **_fields(given))

    def _follow(self, worker: Helper, number: int) -> None:
        """Sends a signal to a worker that is about to stop itself, once it has."""
        if worker.died_at is None and not worker.is_stopped():
            self._reactor.after(_LOOK_S, lambda: self._follow(worker, number))
            return
        if number == signal.SIGKILL:
            self._struck.add(worker.pid)
        worker.signal(number)

    def _bury(self, slot: int, worker: Helper) -> None:
        assert worker.died_at is not None
        self.deaths.append((worker.pid, worker.died_at))
        self.kills += worker.pid in self._struck
        if worker.pid not in self._struck and not self._leaving:
            self._wrong("failed", f"worker {slot} (pid {worker.pid}) ended and nobody had killed it")
        self._struck.discard(worker.pid)
        self._paused.discard(slot)
        del self._workers[slot]
        if not self._leaving:
            self._start(slot)


def _fields(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "kind"}
