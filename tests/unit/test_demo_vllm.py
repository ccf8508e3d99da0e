"""What the demonstration with vLLM claims follows from what was seen."""

import dataclasses
import mmap
import os
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest

from kvharbor.demo.vllm.claims import claims
from kvharbor.demo.vllm.memory import ProcessMemory, allocated_bytes, process_memory
from kvharbor.demo.vllm.outcome import PLAIN, Answered, Memory, Moments, Run
from kvharbor.demo.vllm.picture import picture
from kvharbor.demo.vllm.script import COLD, CUT_OFF, FIRST, FOLLOW_UP, MEANWHILE, SECOND, WARM

MIB = 2**20
BLOCK_TOKENS = 4
SYSTEM = (1, 2, 3, 4, 5, 6, 7, 8)


def answered(engine: str, question: str, prompt: tuple[int, ...], reused: int, at_s: float) -> Answered:
    """An answer of three tokens that takes two seconds."""
    return Answered(engine, question, prompt, (20, 21, 22), "!", reused, at_s, at_s + 0.5, at_s + 2)


def good_run() -> Run:
    """A run in which all went well."""
    follow_up = (*SYSTEM, 9, 10, 20, 21, 22, 13)
    run = [
        answered(FIRST, COLD, (*SYSTEM, 9, 10), 0, 1.0),
        answered(SECOND, WARM, (*SYSTEM, 11), 8, 4.0),
        answered(SECOND, MEANWHILE, (*SYSTEM, 12), 8, 7.0),
        # Of the dead engine's 10 + 2 computed tokens, 3 whole blocks are there.
        answered(FIRST, FOLLOW_UP, follow_up, 12, 30.0),
        answered(FIRST, CUT_OFF, (*SYSTEM, 14), 8, 33.0),
    ]
    plain = [dataclasses.replace(one, engine=PLAIN, reused_tokens=0) for one in run]
    engine = ProcessMemory(("00:01 7 /memfd:kvharbor",), 64 * MIB, 20 * MIB, 12 * MIB, 100 * MIB)
    return Run(
        block_tokens=BLOCK_TOKENS,
        answered=tuple(run),
        plain=tuple(plain),
        moments=Moments(0.0, 8.0, 29.0, 8.1, 8.2),
        memory=Memory((engine, engine), ProcessMemory((), 64 * MIB, 64 * MIB, 64 * MIB, 160 * MIB), 64 * MIB),
        restart_count=1,
        sessions_went_on=True,
    )


def changed_answer(place: int, **fields: object) -> Callable[[Run], Run]:
    """Returns what changes one answer of a run."""

    def change(run: Run) -> Run:
        listed = [*run.answered]
        listed[place] = dataclasses.replace(listed[place], **fields)  # type: ignore[arg-type]
        return dataclasses.replace(run, answered=tuple(listed))

    return change


def changed_memory(**fields: object) -> Callable[[Run], Run]:
    """Returns what changes the second engine's memory."""

    def change(run: Run) -> Run:
        first, second = run.memory.engines
        engines = (first, dataclasses.replace(second, **fields))  # type: ignore[arg-type]
        return dataclasses.replace(run, memory=dataclasses.replace(run.memory, engines=engines))

    return change


def test_all_claims_hold_of_a_good_run() -> None:
    """Each with what was seen."""
    judged = claims(good_run())
    assert len(judged) == 6
    assert [claim for claim in judged if not claim.held or not claim.seen] == []


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (0, changed_answer(4, answer_ids=(20, 21, 23))),
        (1, changed_answer(0, reused_tokens=4)),
        (1, changed_answer(1, reused_tokens=4)),
        (2, changed_answer(3, reused_tokens=8)),
        (3, lambda run: dataclasses.replace(run, restart_count=0)),
        (3, lambda run: dataclasses.replace(run, sessions_went_on=False)),
        (3, changed_answer(2, done_s=8.0)),
        (4, changed_memory(kv_files=("00:01 8 /memfd:kvharbor",))),
        (4, changed_memory(kv_files=())),
        (4, changed_memory(kv_bytes=32 * MIB)),
        (4, changed_memory(kv_share_bytes=60 * MIB)),
        (5, changed_memory(private_bytes=160 * MIB)),
    ],
)
def test_a_claim_fails_by_itself(place: int, change: Callable[[Run], Run]) -> None:
    """Whatever is not so fails the claim that says so, and no other."""
    judged = claims(change(good_run()))
    assert [number for number, claim in enumerate(judged) if not claim.held] == [place]


def test_the_picture_shows_every_answer() -> None:
    """It is a document of its own, with the number of computed tokens under each."""
    run = good_run()
    texts = [text.text for text in ElementTree.fromstring(picture(run)).iter("{http://www.w3.org/2000/svg}text")]
    for one in run.answered:
        assert f"{len(one.prompt_ids) - one.reused_tokens}" in texts


def addresses(mapping: mmap.mmap) -> tuple[int, int]:
    """Returns the first address of a mapping and its end."""
    first = np.frombuffer(mapping, np.uint8).ctypes.data
    return first, first + len(mapping)


def test_memory_is_told_by_where_it_is_mapped_from() -> None:
    """A file that is shared by its name, and nothing for memory of one's own."""
    fd = os.memfd_create("kvharbor-test")
    try:
        os.posix_fallocate(fd, 0, MIB)
        with mmap.mmap(fd, MIB) as mapping:
            mapping[:8192] = b"x" * 8192
            shared = process_memory(os.getpid(), [addresses(mapping)])
        size_bytes = 64 * MIB
        # A mapping of its own, as an array may come to lie in what is free of the heap.
        with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE) as own:
            np.frombuffer(own, np.uint8).fill(1)
            private = process_memory(os.getpid(), [addresses(own)])
        inode = os.fstat(fd).st_ino
        (file,) = shared.kv_files
        assert file.split()[1:] == [str(inode), "/memfd:kvharbor-test"]
        assert allocated_bytes(file, [os.getpid()]) == MIB
    finally:
        os.close(fd)
    assert (shared.kv_bytes, shared.kv_resident_bytes) == (MIB, 8192)
    assert private.kv_files == ()
    assert private.kv_resident_bytes >= size_bytes
    assert 0.9 * size_bytes < private.private_bytes - shared.private_bytes < 1.1 * size_bytes
