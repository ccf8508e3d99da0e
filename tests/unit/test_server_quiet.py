"""The proof that a process is gone, and the grace of its device after it [S24]."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Coroutine
from typing import Any

from kvharbor.server.sessions.members import Member, Mode
from kvharbor.server.sessions.peer import Peer
from kvharbor.server.sessions.quiet import QuietWatch, until_end, until_gone
from kvharbor.server.sessions.session import Session

PEER = Peer(0, 0, "t", administrator=False)


def member(pidfd: int = -1) -> Member:
    """A member with a socket of its own; its client's end is closed by `leave`."""
    return Member(0, Mode.READ_WRITE, PEER, "secret", pidfd)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Runs a scenario with a deadline."""

    async def limited() -> None:
        await asyncio.wait_for(scenario, 10)

    asyncio.run(limited())


def test_a_device_has_its_grace_from_the_proof_on() -> None:
    """Whoever asks later waits for the rest of it only; what a session asserts needs none."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        proved, asserted = member(), member()
        proved.gone_at = loop.time() - 60
        proved.gone.set()
        asserted.gone.set()
        await until_gone([asserted], grace_s=60)
        await until_gone([proved, asserted], grace_s=60)
        longer_s = loop.time() - proved.gone_at + 0.2
        await until_gone([proved, asserted], grace_s=longer_s)
        assert loop.time() >= proved.gone_at + longer_s

    run(scenario())


def test_gone_means_every_member() -> None:
    """The last one decides."""

    async def scenario() -> None:
        one, two = member(), member()
        one.gone.set()
        waiting = asyncio.create_task(until_gone([one, two], 0))
        await asyncio.sleep(0)
        assert not waiting.done()
        two.gone.set()
        await waiting

    run(scenario())


def test_both_halves_of_the_proof_in_either_order() -> None:
    """Each loses the session; the second one proves the member gone."""

    async def scenario(socket_first: bool) -> None:
        causes: list[str] = []
        watch = QuietWatch(lambda _, cause: causes.append(cause))
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        its = member(os.pidfd_open(process.pid))
        its.sockets.append(ours)
        session = Session(1, "secret", PEER, "", "", members=[its])
        watch.begin(session, its)

        async def end_socket() -> None:
            theirs.close()
            await until_end(ours)
            watch.socket_ended(session, its, ours)

        async def end_process() -> None:
            process.kill()
            while not its.exited:
                await asyncio.sleep(0.001)

        steps = [end_socket, end_process] if socket_first else [end_process, end_socket]
        await steps[0]()
        assert (len(causes), its.gone.is_set()) == (1, False)
        await steps[1]()
        assert (len(causes), its.gone.is_set()) == (2, True)
        assert its.gone_at <= asyncio.get_running_loop().time()
        ours.close()
        os.close(its.pidfd)
        process.communicate()

    for socket_first in (True, False):
        run(scenario(socket_first))


def test_a_socket_that_was_reset_has_ended() -> None:
    """Its other end was closed with something unread."""

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ours.send(b"unread")
        theirs.close()
        await until_end(ours)
        ours.close()

    run(scenario())
