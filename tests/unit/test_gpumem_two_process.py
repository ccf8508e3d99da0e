"""The two-process test on host memory: what it proves, and what it says of each way to fail."""

import mmap
import os
import sys
from pathlib import Path

import pytest

from contract.leaks import no_leaks as no_leaks
from kvharbor.gpumem import ArenaUnproven, Export, HostArena, two_process
from kvharbor.gpumem.arena import ArenaKind
from kvharbor.gpumem.stamps import STAMP_BYTES, answer_to, export_message, export_of, place_in
from kvharbor.gpumem.two_process import Verdict, check_arena, require_arena

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZE_BYTES = 3 * mmap.PAGESIZE

# The other process, as it should not be.
ANSWER_NOTHING = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(99)"
DIE_BY_SIGNAL = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
RAISE = "raise RuntimeError('no such luck')"
HANG = "import time; time.sleep(600)"
SAY = """
import json, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
_, fds, _, _ = socket.recv_fds(channel, 1 << 16, 253)
channel.send(json.dumps({answer}).encode())
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that runs, whatever it is told to run, the program in the file returned."""
    program = tmp_path / "program.py"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nfor last; do :; done\nexec {sys.executable} -S -E {program} "$last"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    return program


@pytest.mark.slow
def test_memory_of_the_host_arrives_in_another_process() -> None:
    """The real thing, there and back."""
    verdict = check_arena(ArenaKind.HOST)
    assert (verdict.works, verdict.cause, verdict.remedy) == (True, "", "")
    assert 0 < verdict.took_s < two_process.DEADLINE_S
    require_arena(ArenaKind.HOST)


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (ANSWER_NOTHING, "another process ended without an answer"),
        (DIE_BY_SIGNAL, "another process was ended by SIGSEGV"),
        (RAISE, "another process ended with status 1: Traceback"),
        (
            SAY.format(answer={"cause": "no seal", "remedy": "seal it"}),
            "another process cannot use the memory: no seal",
        ),
        (SAY.format(answer={"read": "00" * STAMP_BYTES}), "another process maps the memory, but reads something else"),
    ],
)
def test_each_way_to_fail_is_a_verdict_with_its_cause(other: Path, program: str, cause: str) -> None:
    """Nothing is raised, and there is always something to do."""
    other.write_text(program)
    verdict = check_arena(ArenaKind.HOST)
    assert (verdict.works, verdict.cause[: len(cause)]) == (False, cause)
    assert verdict.remedy


def test_the_last_words_of_the_other_process_are_told(other: Path) -> None:
    """What it did not foresee is in its traceback."""
    other.write_text(RAISE)
    assert check_arena(ArenaKind.HOST).cause.endswith("RuntimeError: no such luck")


@pytest.mark.slow
def test_a_process_that_hangs_is_given_up_and_ended(other: Path) -> None:
    """It hangs at what no stub can stand for, a driver; here it sleeps."""
    other.write_text(HANG)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    verdict = check_arena(ArenaKind.HOST, deadline_s=1)
    assert (verdict.works, verdict.cause) == (False, "another process gave no answer within 1 s")
    assert verdict.took_s >= 1
    assert children.read_text() == before


def test_an_answer_that_does_not_arrive_is_told(other: Path) -> None:
    """The other process may have private memory in the place of the arena: it reads right and writes elsewhere."""
    other.write_text(
        SAY.format(answer='{"read": os.pread(fds[0], 64, os.fstat(fds[0]).st_size - 64).hex()}').replace(
            "import json", "import os, json"
        )
    )
    assert check_arena(ArenaKind.HOST).cause == "what another process writes does not arrive here"


def test_the_typed_error_has_everything_that_the_verdict_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a service says when it does not start."""
    monkeypatch.setattr(two_process, "check_arena", lambda *_, **__: Verdict(False, 0.1, "the cause", "the remedy"))
    with pytest.raises(ArenaUnproven) as raised:
        require_arena(ArenaKind.CUDA_IPC, "GPU-1")
    assert raised.value.metadata() == {
        "arena": "cuda_ipc",
        "device": "GPU-1",
        "cause": "the cause",
        "remedy": "the remedy",
    }


def test_a_device_where_there_is_no_driver_is_a_verdict() -> None:
    """So it is on a machine without one; where there is one, no device has that UUID."""
    verdict = check_arena(ArenaKind.CUDA_VMM, "GPU-00000000-0000-0000-0000-000000000000")
    assert not verdict.works
    assert verdict.cause.startswith("the memory cannot be made and exported: ")
    assert verdict.remedy


def test_the_stamp_is_the_end_of_the_arena() -> None:
    """A mapping that is short would show at no other place."""
    with HostArena.create(SIZE_BYTES) as arena, arena.map() as mapping:
        place_in(mapping).write(b"s" * STAMP_BYTES)
        assert os.pread(arena.fd, SIZE_BYTES, 0) == bytes(SIZE_BYTES - STAMP_BYTES) + b"s" * STAMP_BYTES
        assert place_in(mapping).read() == b"s" * STAMP_BYTES


def test_an_answer_is_never_the_stamp() -> None:
    """Each bit is turned round, so that memory that is not shared cannot look as if it were."""
    stamp = bytes(range(STAMP_BYTES))
    assert answer_to(answer_to(stamp)) == stamp
    assert all(one != other for one, other in zip(answer_to(stamp), stamp, strict=True))


@pytest.mark.parametrize(
    "export",
    [
        Export(ArenaKind.HOST, 4096, fds=(7,)),
        Export(ArenaKind.CUDA_VMM, 5, fds=(7, 8), device="GPU-1", chunk_bytes=(2, 4)),
        Export(ArenaKind.CUDA_IPC, 5, device="GPU-1", offset_bytes=9, ipc_handle=bytes(range(64)), exporter_pid=3),
    ],
)
def test_an_export_arrives_as_it_was_sent(export: Export) -> None:
    """With the descriptors as the receiver has them."""
    received = export_of(export_message(export), [fd + 10 for fd in export.fds])
    assert received.fds == tuple(fd + 10 for fd in export.fds)
    assert export_message(received) == export_message(export)
    assert (received.ipc_handle, received.chunk_bytes) == (export.ipc_handle, export.chunk_bytes)
