"""What ends a start, and what of that is taken for a broken state."""

import errno
import socket
from typing import NoReturn, cast

import pytest

from kvharbor.server.configuration.sources import LoadedSettings
from kvharbor.server.errors import StartupError
from kvharbor.server.pools.life import Life
from kvharbor.server.process import service
from kvharbor.server.supervision.supervised import Supervised


def start_with(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts a service that fails so while it takes up what is kept."""

    def fail(*_: object) -> NoReturn:
        raise failure

    def crashed(why: BaseException) -> NoReturn:
        raise AssertionError("the process would end as broken") from why

    monkeypatch.setattr(Life, "kept", fail)
    monkeypatch.setattr(service, "crash", crashed)
    with socket.socket() as listener:
        service.serve(cast(LoadedSettings, None), cast(Supervised, None), listener)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_system_without_room_is_no_proof_of_a_broken_state(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """S13: after three broken ones all that is kept would be dropped."""
    with pytest.raises(StartupError, match="raise its limits"):
        start_with(OSError(number, "no room"), monkeypatch)


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "what is kept is gone"), KeyError("meta")])
def test_any_other_failure_is_one(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """S12."""
    with pytest.raises(AssertionError, match="broken"):
        start_with(failure, monkeypatch)
