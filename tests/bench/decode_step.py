"""A decode step of many running sequences in an engine's process: a token each, and blocks for those that are full."""

import os
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, quantiles

import numpy as np

from bench.calls import open_pool
from bench.figures import Figure
from kvharbor.client import connect
from kvharbor.client.credits import Credits
from kvharbor.client.decoding import DecodeBatch

SEQUENCES = 256
BLOCK_TOKENS = 64
# And up to a block more, so that the same number of sequences fills one in every step.
FIRST_TOKENS = 512
# Each sequence fills three blocks.
STEPS = 3 * BLOCK_TOKENS
BLOCK_COUNT = 8_192
# As the documents say: enough for all of them to go on to their next block at once.
CREDITS = 2 * SEQUENCES
# As long as a model takes for a step; credits that went back meanwhile are asked for again by the step.
REFILL_S = 0.02
# For a model: some milliseconds of work on three megabytes, after which the processor's caches have nothing of ours.
WEIGHTS = np.ones((512, 512), np.float32)


def measure(socket_path: Path) -> list[Figure]:
    """Measures `step_us_256_sequences`: the mean over whole blocks, so that commits and growth are in it."""
    with connect(str(socket_path)) as harbor:
        pool = open_pool(harbor, "decode-step", BLOCK_TOKENS, BLOCK_COUNT)
        credits = Credits(pool, CREDITS)
        batch = DecodeBatch(pool, credits)
        for number in range(SEQUENCES):
            token_count = FIRST_TOKENS + number % BLOCK_TOKENS
            first = number * 4 * FIRST_TOKENS
            sequence = pool.allocate(array("I", range(first, first + token_count)).tobytes())
            sequence.commit(token_count)
            batch.join(sequence)

        def until_refilled() -> None:
            deadline = time.perf_counter() + REFILL_S
            while len(credits) < CREDITS // 2 and time.perf_counter() < deadline:
                os.sched_yield()

        in_a_row = _steps(batch, until_refilled)
        after_work = _steps(batch, lambda: WEIGHTS.dot(WEIGHTS))
        batch.sync()
        # A batch never counts the KV of its last step's tokens as computed.
        whole = int(((batch.token_counts - 1) // BLOCK_TOKENS).sum())
        committed = pool.stats().active_block_count
        batch.release(batch.sequences)
    if committed != whole:
        raise RuntimeError(f"{committed} blocks are committed instead of {whole}")
    return [
        Figure("step_us_256_sequences", fmean(in_a_row) * 1e6, "us", 100.0),
        Figure("step_p99_us_256_sequences", quantiles(in_a_row, n=100)[-1] * 1e6, "us", None),
        Figure("step_us_256_sequences_after_work", fmean(after_work) * 1e6, "us", None),
    ]


def _steps(batch: DecodeBatch, between: Callable[[], object]) -> list[float]:
    """Returns the seconds of each step; the client's own thread gets its turn between two."""
    sampled = np.zeros(len(batch), "<u4")
    taken = []
    for _ in range(STEPS):
        between()
        start = time.perf_counter()
        refused = batch.step(sampled).refused
        taken.append(time.perf_counter() - start)
        if refused:
            raise RuntimeError(f"{len(refused)} sequences got no place")
    return taken
