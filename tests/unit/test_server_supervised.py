"""The child's side of the control socket: what it says arrives, and what it is told has its effect."""

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvharbor.server.errors import UpgradeFailed
from kvharbor.server.supervision.control import Channel
from kvharbor.server.supervision.keeper import Store
from kvharbor.server.supervision.supervised import Supervised

pytestmark = pytest.mark.usefixtures("no_leaks")


class Crowded(socket.socket):
    """A socket as the kernel has it while too many descriptors are under way: it takes the third message."""

    refusals = 2

    def sendmsg(self, *arguments: Any) -> int:
        """Fails twice."""
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return super().sendmsg(*arguments)


def test_descriptors_that_are_under_way_are_waited_for() -> None:
    """S15: it is no sign of the supervisor's death, and nothing of what is to be kept is lost."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervised = Supervised(Channel(Crowded(fileno=theirs.detach())), Store(), "")
    supervised.keep("a", {"x": 1})
    supervisor = Channel(ours)
    assert supervisor.receive() == ({"keep": "a", "meta": {"x": 1}}, ())
    supervisor.close()
    supervised._channel.close()


def conversation(talk: Callable[[Supervised, Channel, list[bool]], Awaitable[None]]) -> None:
    """Runs `talk` with both ends, and a list that grows when the child is told to leave."""

    async def run() -> None:
        ours, theirs = Channel.pair()
        supervised, left = Supervised(theirs, Store(), ""), list[bool]()
        supervised.listen(lambda: left.append(True))
        await talk(supervised, ours, left)
        asyncio.get_running_loop().remove_reader(theirs.fileno())
        ours.close()
        theirs.close()

    asyncio.run(run())


def test_an_upgrade_that_fails_is_told_to_all_who_have_asked() -> None:
    """With its cause; the process goes on, and the next one asks anew."""

    async def talk(supervised: Supervised, supervisor: Channel, left: list[bool]) -> None:
        for cause in ("no room", "no sense"):
            asking = [asyncio.create_task(supervised.upgrade()) for _ in range(2)]
            await asyncio.sleep(0)
            assert supervisor.receive() == ({"upgrade": True}, ())
            supervisor.send({"upgrade_given_up": cause})
            failures = await asyncio.gather(*asking, return_exceptions=True)
            assert [(type(failure), str(failure).endswith(cause)) for failure in failures] == [
                (UpgradeFailed, True)
            ] * 2
        assert left == []

    conversation(talk)


def test_an_upgrade_that_succeeds_is_the_call_to_leave() -> None:
    """Who has given up waiting changes nothing for the others."""

    async def talk(supervised: Supervised, supervisor: Channel, left: list[bool]) -> None:
        impatient, patient = (asyncio.create_task(supervised.upgrade()) for _ in range(2))
        await asyncio.sleep(0)
        impatient.cancel()
        supervisor.send({"leave": True})
        await patient
        assert left == [True]

    conversation(talk)


def test_what_it_does_not_know_is_nothing_to_it() -> None:
    """A supervisor may be of a later version, after an upgrade was undone."""

    async def talk(supervised: Supervised, supervisor: Channel, left: list[bool]) -> None:
        supervisor.send({"invented_later": True})
        supervisor.send({"upgrade_given_up": "asked for by a signal"})
        supervisor.send({"leave": True})
        while not left:
            await asyncio.sleep(0)
        assert left == [True]

    conversation(talk)
