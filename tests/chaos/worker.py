"""A worker process: it works until it is told to leave, and is made to be killed at any instant."""

import os
import random
import signal
import socket
import time
import traceback
from functools import partial
from types import FrameType

from chaos.board import Board, Count
from chaos.channel import Channel
from chaos.held import Fence, WrongBytes
from chaos.load import Given, Load
from chaos.stamps import LAYOUT
from chaos.universe import POOL, POOL_BYTES
from kvharbor.client import Harbor, SessionGone, Unavailable, connect

_CALL_TIMEOUT_S = 10.0
_PAUSE_S = 0.02
# Engines compute between their calls, and not on the cores that the service needs.
_MOST_THOUGHT_S = 0.01


class Worker:
    """One process's life over all its sessions. It tells the harness: given, paused, lost, wrong, failed."""

    def __init__(self, channel: Channel, board: Board, slot: int, seed: int) -> None:
        self._channel = channel
        self._chance = random.Random(seed)
        self._tally = partial(board.add, slot)
        self._name = f"chaos-{slot}-{os.getpid()}"
        self._told_to_leave = False
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
                self._work(Load(pool, fence, self._chance, self._tally, self._channel.send))
        except SessionGone as gone:
            self._tally(Count.LOST_SESSIONS)
            self._channel.send("lost", text=str(gone))
        except Unavailable:
            self._tally(Count.CALLS_WITHOUT_OWNER)

    def _work(self, load: Load) -> None:
        while not self._told_to_leave:
            try:
                self._listen(load, self._chance.uniform(0.0, _MOST_THOUGHT_S))
                load.act()
            except Unavailable:
                self._tally(Count.CALLS_WITHOUT_OWNER)
                time.sleep(_PAUSE_S)
        load.release_all()

    def _listen(self, load: Load | None, timeout_s: float) -> None:
        """Obeys what the harness has said; waits so long for it."""
        while not self._told_to_leave and (message := self._channel.receive(timeout_s)) is not None:
            if message["kind"] == "leave":
                self._told_to_leave = True
            if message["kind"] == "adopt" and load is not None:
                load.adopt(Given(message["handoff_token"], message["tokens"], message["computed_tokens"]))
            if message["kind"] == "pause":
                self._channel.send("paused")
                # Until "go", whatever that is: nothing else is sent to who is paused.
                self._channel.receive(None)
                if load is not None:
                    load.verify_all()

    def _begin_epoch(self, fence: Fence, _old: str, _new: str) -> None:
        """Returns once no byte of the old memory is touched any more, nor will be."""
        fence.move()
        self._tally(Count.NEW_EPOCHS)

    def _leave_soon(self, _number: int, _frame: FrameType | None) -> None:
        self._told_to_leave = True


def work(end: socket.socket, board_path: str, slot: int, seed: int, target: str) -> None:
    """Runs a worker in this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(end)
    try:
        Worker(channel, Board(board_path), slot, seed).live(target)
    except EOFError:
        pass  # the harness is gone
    except WrongBytes as wrong:
        channel.send("wrong", text=str(wrong))
    except Exception:
        channel.send("failed", text=traceback.format_exc())
