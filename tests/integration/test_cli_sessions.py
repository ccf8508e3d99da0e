"""`kvharbor sessions` and `kvharbor kill-session` against a real service."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvharbor.v1 import pool_service_pb2 as pools
from kvharbor.v1 import side_pb2, types_pb2
from raw_caller import RawCaller, greeted, hello, joining, refused
from service_process import ServiceProcess
from session_worker import SessionWorker
from waiting import until

pytestmark = pytest.mark.slow
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def path(service: ServiceProcess) -> str:
    """Where a fresh service is."""
    return str(service.socket)


@pytest.fixture
def run(path: str) -> Run:
    """Runs `kvharbor` with these arguments."""

    def run_command(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "kvharbor.server.cli", *arguments],
            capture_output=True,
            check=False,
            text=True,
            timeout=30,
            env={**os.environ, "KVHARBOR_SOCKET": path, "COLUMNS": "160"},
        )

    return run_command


@pytest.fixture
def worker(path: str) -> Iterator[SessionWorker]:
    """A worker that has reserved two blocks."""
    with SessionWorker(path) as process:
        process.run("pool_id = caller.open_pool('p', block_count=8)\ncaller.allocate(pool_id, *range(32))")
        yield process


def test_no_sessions_are_no_table(run: Run) -> None:
    """The command's own does not count."""
    assert run("sessions").stdout == "no sessions\n"
    assert json.loads(run("sessions", "--json").stdout) == []


def test_the_list_tells_who_holds_what(run: Run, worker: SessionWorker) -> None:
    """As a table for people and as JSON for programs."""
    (session,) = json.loads(run("sessions", "--json").stdout)
    assert 0 <= session.pop("age_s") < 60
    assert session == {
        "session_id": "1",
        "tenant": f"uid-{os.getuid()}",
        "client_name": "test",
        "client_version": "raw",
        "state": "live",
        "cause": "",
        "members": [{"rank": 0, "read_only": False, "pid": worker.pid, "connected": True, "exited": False}],
        "holdings": [{"pool_id": session["holdings"][0]["pool_id"], "sequence_count": 1, "private_block_count": 2}],
        "engine": {"name": "raw", "version": "", "instance": "test"},
    }
    row = next(line for line in run("sessions").stdout.splitlines() if f"pid {worker.pid}" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:4] == ["1", f"uid-{os.getuid()}", "test raw", "live"]
    assert cells[5:] == [f"pid {worker.pid}", "1", "2"]


def test_what_a_client_calls_itself_is_shown_as_it_is(path: str, run: Run) -> None:
    """No markup, no code for a picture, and nothing that a terminal would act on."""
    engine = types_pb2.Engine(name="[b]x", version=":cat:", instance="end\\")
    side, _ = greeted(path, hello("[red]\x1b[2J:cat:\r\n", engine=engine))
    output = run("sessions").stdout
    side.close()
    assert "[red]?[2J:cat:?? raw" in output
    assert "[b]x :cat: end\\ " in output


def test_a_lost_session_shows_what_its_proof_lacks(run: Run, worker: SessionWorker) -> None:
    """Its socket is closed, and it goes on."""
    worker.run("caller.side.close()")
    output = until(lambda: run("sessions").stdout, lambda text: "ending" in text)
    assert "ending: side socket ended" in output
    assert f"pid {worker.pid} (socket closed)" in output


def test_members_are_listed_by_rank(path: str, run: Run) -> None:
    """With what they may do."""
    with RawCaller(path) as leader:
        sides = [
            greeted(path, joining(leader.welcome.join_token, rank, mode))[0]
            for rank, mode in ((9, side_pb2.MEMBER_MODE_READ_ONLY), (2, side_pb2.MEMBER_MODE_READ_WRITE))
        ]
        output = run("sessions").stdout
        places = [output.index(text) for text in (f"pid {os.getpid()} ", "(rank 2)", "(rank 9, reads)")]
        assert places == sorted(places)
        for side in sides:
            side.close()


def test_a_session_is_killed(run: Run, worker: SessionWorker) -> None:
    """Stopped as it is; afterwards there is none of that number."""
    worker.signal(signal.SIGSTOP)
    done = run("kill-session", "1")
    assert (done.returncode, done.stdout) == (0, "session 1: killed 1 process\n")
    assert worker.process.wait(10) == -signal.SIGKILL
    until(lambda: json.loads(run("sessions", "--json").stdout), lambda sessions: sessions == [])
    done = run("kill-session", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no session '1'" in done.stderr


def test_the_session_of_the_command_itself_is_refused(run: Run) -> None:
    """On a fresh service it has the number that is tried: the command would end without a word."""
    done = run("kill-session", "1")
    told = "kvharbor: session 1 is this command's own: name one that `kvharbor sessions` lists\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told)


def test_lists_come_in_pages(path: str) -> None:
    """In order of number, whatever the size of a page."""
    with RawCaller(path) as first, RawCaller(path), RawCaller(path):
        listing, seen = pools.ListSessionsRequest(page_size=2), []
        while True:
            page = first.call(first.pools.ListSessions, listing)
            seen.append([each.session_id for each in page.sessions])
            listing.page_token = page.next_page_token
            if not page.next_page_token:
                break
        assert seen == [["1", "2"], ["3"]]
        for wrong in (pools.ListSessionsRequest(page_token="x"), pools.ListSessionsRequest(page_size=-1)):
            with refused() as found:
                first.call(first.pools.ListSessions, wrong)
            assert found[0].reason == "INVALID_FIELD"
