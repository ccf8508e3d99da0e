"""A worker process: it works until it is told to leave, and is made to be killed at any instant."""

import os
import random
import signal
import socket
import threading
import time
import traceback
from functools import partial
from types import FrameType

from chaos.board import Board, Count
from chaos.channel import Channel, Message
from chaos.engine import Engine
from chaos.held import Fence, WrongBytes
from chaos.load import Given, Load
from chaos.stamps import LAYOUT
from chaos.universe import POOL, POOL_BYTES
from kvharbor.client import EpochEnded, Harbor, SessionGone, Unavailable, connect

_CALL_TIMEOUT_S = 10.0
_PAUSE_S = 0.02
# Engines compute between their calls, and not on the cores that the service needs.
_MOST_THOUGHT_S = 0.01
# When it is to strike itself it is busy until then.
_MOST_BUSY_S = 0.02
_BUSY_ACTS = 40
KINDS: dict[str, type[Load] | type[Engine]] = {"sequences": Load, "engine": Engine}


class Worker:
    """One process's life over all its sessions. It tells the harness: given, paused, lost, wrong, failed."""

    def __init__(self, channel: Channel, board: Board, slot: int, seed: int, kind: type[Load] | type[Engine]) -> None:
        self._channel = channel
        self._kind = kind
        self._chance = random.Random(seed)
        self._tally = partial(board.add, slot)
        self._name = f"chaos-{slot}-{os.getpid()}"
        self._told_to_leave = False
        self._busy_acts = 0
        signal.signal(signal.SIGTERM, self._leave_soon)

    def live(self, target: str) -> None:
        """Works through every life of the service until it is told to leave."""
        while not self._told_to_leave:
            fence = Fence()
            try:
                harbor = connect(
                    target,
                    client_name=self._name,
                    timeout_s=_CALL_TIMEOUT_S,
                    on_epoch=partial(self._begin_epoch, fence),
                )
            except (SessionGone, Unavailable):
                self._tally(Count.CALLS_WITHOUT_OWNER)
            else:
                self._live_in(harbor, fence)
            self._listen(None, _PAUSE_S)

    def _live_in(self, harbor: Harbor, fence: Fence) -> None:
        try:
            with harbor:
                pool = harbor.open_pool(POOL, LAYOUT, POOL_BYTES)
                self._work(self._kind(pool, fence, self._chance, self._tally, self._channel.send))
        except SessionGone as gone:
            self._tally(Count.LOST_SESSIONS)
            self._channel.send("lost", text=str(gone))
        except (Unavailable, EpochEnded):  # the latter while the pool was being opened
            self._tally(Count.CALLS_WITHOUT_OWNER)

    def _work(self, load: Load | Engine) -> None:
        while not self._told_to_leave:
            try:
                self._listen(load, 0.0 if self._busy_acts else self._chance.uniform(0.0, _MOST_THOUGHT_S))
                self._busy_acts = max(0, self._busy_acts - 1)
                load.act()
            except Unavailable:
                self._tally(Count.CALLS_WITHOUT_OWNER)
                time.sleep(_PAUSE_S)
        load.release_all()

    def _listen(self, load: Load | Engine | None, timeout_s: float) -> None:
        """Obeys what the harness has said; waits so long for it."""
        while not self._told_to_leave and (message := self._channel.receive(timeout_s)) is not None:
            if message["kind"] == "leave":
                self._told_to_leave = True
            if message["kind"] == "adopt" and load is not None:
                load.adopt(Given(message["handoff_token"], message["tokens"], message["computed_tokens"]))
            if message["kind"] == "strike":
                self._strike_itself(message)
            if message["kind"] in ("pause", "let_go"):
                self._pause(load, lets_go=message["kind"] == "let_go")

    def _pause(self, load: Load | Engine | None, *, lets_go: bool) -> None:
        """Begins nothing until the harness says so, and holds nothing meanwhile if it `lets_go`."""
        if load is not None:
            load.settle()
            if lets_go:
                load.release_all()
        self._channel.send("paused")
        message = self._channel.receive(None)
        self._told_to_leave |= message is not None and message["kind"] == "leave"
        if load is not None:
            load.verify_all()

    def _strike_itself(self, message: Message) -> None:
        """Sends itself a signal in the midst of its calls."""
        self._channel.send("striking", **message["strike"])
        self._busy_acts = _BUSY_ACTS
        delay_s = self._chance.uniform(0.0, _MOST_BUSY_S)
        threading.Timer(delay_s, os.kill, (os.getpid(), message["strike"]["number"])).start()

    def _begin_epoch(self, fence: Fence, _old: str, _new: str) -> None:
        """Returns once no byte of the old memory is touched any more, nor will be."""
        fence.move()
        self._tally(Count.NEW_EPOCHS)

    def _leave_soon(self, _number: int, _frame: FrameType | None) -> None:
        self._told_to_leave = True


def work(end: socket.socket, board_path: str, slot: int, seed: int, target: str, kind: str) -> None:
    """Runs a worker of one of the `KINDS` in this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(end)
    try:
        Worker(channel, Board(board_path), slot, seed, KINDS[kind]).live(target)
    except EOFError:
        pass  # the harness is gone
    except WrongBytes as wrong:
        channel.send("wrong", text=str(wrong))
    except Exception:
        channel.send("failed", text=traceback.format_exc())
