"""The harness's end of the canary and the observer."""

from collections.abc import Callable

from chaos.canary import sing
from chaos.channel import Message
from chaos.helper import Helper
from chaos.observer import observe
from chaos.reactor import Reactor
from chaos.times import Times

_PATIENCE_S = 40.0


class Witnesses:
    """Two processes that are never killed. What they find wrong is told to `wrong`, by kind and text."""

    def __init__(self, reactor: Reactor, target: str, times: Times, wrong: Callable[[str, str], None]) -> None:
        self._reactor = reactor
        self._times = times
        self._wrong = wrong
        self._answers: list[Message] = []
        self._canary = Helper(reactor, sing, (target,), heard=self._hear_canary, died=lambda: self._lost("canary"))
        self._observer = Helper(reactor, observe, (target,), heard=self._hear, died=lambda: self._lost("observer"))
        self._ending = False
        self.checked: Message = {}

    def ask(self, kind: str) -> Message:
        """Has the canary do something; returns its answer, empty if it has failed, which is a fault."""
        self._answers.clear()
        self._canary.channel.send(kind)
        if not self._reactor.run_until(lambda: bool(self._answers), _PATIENCE_S):
            self._wrong("failed", f"the canary has not answered {kind!r} in {_PATIENCE_S} s")
            return {}
        return self._answers.pop()

    def note_death(self) -> None:
        """Has the observer tell when the service's next process answers."""
        self._observer.channel.send("died")

    def end(self) -> None:
        """Ends the observer, and takes its counts."""
        self._ending = True
        self._observer.channel.send("end")
        self._reactor.run_until(lambda: bool(self.checked), _PATIENCE_S)
        self.kill()

    def kill(self) -> None:
        """Ends both."""
        self._ending = True
        self._canary.kill()
        self._observer.kill()

    def _hear_canary(self, message: Message) -> None:
        if message["kind"] != "answer":
            self._wrong(message["kind"], f"canary: {message['text']}")
            message = {}
        self._answers.append(message)

    def _hear(self, message: Message) -> None:
        if message["kind"] == "served":
            self._times.returned(message["at"], message["epoch"])
        elif message["kind"] == "gone":
            self._times.vanished(message["pids"], message["at"])
        elif message["kind"] == "checked":
            self.checked = message
        else:
            self._wrong(message["kind"], message["text"])

    def _lost(self, name: str) -> None:
        if not self._ending:
            self._wrong("failed", f"the {name} has died")
