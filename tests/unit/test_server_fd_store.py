"""systemd's descriptor store: whole, or not there at all."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvharbor.server.supervision.control import Channel
from kvharbor.server.supervision.fd_store import SystemdStore, store_limit
from kvharbor.server.supervision.notify import Notifier

pytestmark = pytest.mark.usefixtures("no_leaks")


class Manager:
    """systemd's side. It listens when it is asked what it has: its socket takes some ten messages until then."""

    def __init__(self, folder: Path) -> None:
        self.notifier = Notifier({"NOTIFY_SOCKET": str(folder / "notify")})
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.socket.setblocking(False)
        self._kept: dict[str, int] = {}

    @property
    def kept(self) -> dict[str, int]:
        """What it has now."""
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(self.socket, 4096, maxfds=1)
                lines = dict(line.partition("=")[::2] for line in data.decode().splitlines())
                if "FDSTORE" in lines:
                    self._kept[lines["FDNAME"]] = fds[0]
                elif lines["FDNAME"] in self._kept:
                    os.close(self._kept.pop(lines["FDNAME"]))
        except BlockingIOError:
            return self._kept

    def close(self) -> None:
        """Closes what it has, and its socket."""
        for fd in self._kept.values():
            os.close(fd)
        self._kept.clear()
        self.socket.close()

    def hand_over(self) -> dict[str, int]:
        """Gives what it has to the next supervisor."""
        return {name: os.dup(fd) for name, fd in self.kept.items()}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A fresh one."""
    made = Manager(tmp_path)
    yield made
    made.close()


def pipe_ends() -> tuple[int, int]:
    """Returns two descriptors, the caller's to close."""
    return os.pipe()


def next_store(manager: Manager) -> SystemdStore:
    """Returns the store of the supervisor that comes after."""
    store = SystemdStore(manager.notifier, 100)
    store.take_up(manager.hand_over())
    return store


def test_the_next_supervisor_finds_all_of_it(manager: Manager) -> None:
    """S20: facts and descriptors, and what the last child had still to say."""
    store = SystemdStore(manager.notifier, 7)
    ours, theirs = Channel.pair()
    store.follow(ours)
    store.take("epoch", {"x": 1}, ())
    store.take("pool/1", {"y": 2}, pipe_ends())
    store.take("session/1", {}, ())
    assert sorted(manager.kept) == ["control", "epoch#meta", "pool/1#0", "pool/1#1", "pool/1#meta", "session/1#meta"]
    theirs.send({"drop": "session/1"})
    theirs.close()
    found = next_store(manager)
    assert {name: (kept.meta, len(kept.fds)) for name, kept in found.kept.items()} == {
        "epoch": ({"x": 1}, 0),
        "pool/1": ({"y": 2}, 2),
    }
    found.close()
    store.close()
    ours.close()


def test_what_is_dropped_or_replaced_makes_room(manager: Manager) -> None:
    """The limit is of what is there at a time; the control socket's place is kept free for it."""
    store = SystemdStore(manager.notifier, 4)
    with capture_logs() as logs:
        for _ in range(5):
            store.take("pool/1", {}, pipe_ends())
            store.take("pool/1", {}, pipe_ends())
            assert sorted(manager.kept) == ["pool/1#0", "pool/1#1", "pool/1#meta"]
            store.drop("pool/1")
            store.take("epoch", {}, ())
            store.take("epoch", {"x": 1}, ())
            store.drop("epoch")
            assert manager.kept == {}
        store.take("pool/1", {}, pipe_ends())
    assert sorted(manager.kept) == ["pool/1#0", "pool/1#1", "pool/1#meta"]
    assert logs == []
    store.close()


def test_a_store_that_is_full_is_given_up_whole(manager: Manager) -> None:
    """systemd would drop the rest without a word, and half of it must not be taken for the whole [G3]."""
    store = SystemdStore(manager.notifier, 6)
    store.take("epoch", {}, ())
    store.take("pool/1", {}, pipe_ends())
    ours, theirs = Channel.pair()
    with capture_logs() as logs:
        store.take("pool/2", {"x": 1}, pipe_ends())
        store.follow(ours)
        store.take("session/1", {}, ())
        store.drop("pool/1")
    assert manager.kept == {}
    (told,) = logs
    assert (told["log_level"], told["limit"]) == ("error", 6)
    assert "full" in told["event"]
    assert "FileDescriptorStoreMax=" in told["remedy"]
    assert {name: (kept.meta, len(kept.fds)) for name, kept in store.kept.items()} == {
        "epoch": ({}, 0),
        "pool/2": ({"x": 1}, 2),
        "session/1": ({}, 0),
    }
    store.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("change", ["take", "drop"])
def test_a_manager_that_does_not_listen_has_nothing_valid(manager: Manager, change: str) -> None:
    """It still has what it was given: its facts are void, and nothing of it is taken up, nor what a child has said."""
    store = SystemdStore(manager.notifier, 100)
    ours, theirs = Channel.pair()
    store.follow(ours)
    store.take("epoch", {}, ())
    store.take("session/1", {}, ())
    theirs.send({"keep": "epoch", "meta": {"x": 1}})
    left = manager.hand_over()
    manager.close()
    with capture_logs() as logs:
        if change == "take":
            store.take("session/2", {}, ())
        else:
            store.drop("session/1")
        store.take("session/3", {}, ())
    (told,) = logs
    assert "systemd does not listen" in told["event"]
    found = SystemdStore(manager.notifier, 100)
    with capture_logs():
        found.take_up(left)
    assert found.kept == {}
    found.close()
    store.close()
    ours.close()
    theirs.close()


def test_a_store_without_a_limit_or_a_manager_is_none() -> None:
    """systemd names the limit since version 254."""
    assert store_limit({"FDSTORE": "512", "NOTIFY_SOCKET": "/n"}) == 512
    assert store_limit({"NOTIFY_SOCKET": "/n"}) == 0
    assert store_limit({"FDSTORE": "512"}) == 0
