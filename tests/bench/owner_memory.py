"""What the owner needs beside the arena, a block."""

from array import array
from pathlib import Path

from bench.calls import commit_prompt, layout
from bench.figures import Figure
from kvharbor.client import connect
from kvharbor.pool import PoolConfig, ledger_bytes

BLOCK_COUNT = 50_000
PROMPT_BLOCKS = 250


def measure(socket_path: Path, supervisor_pid: int) -> list[Figure]:
    """Measures `owner_bytes_per_block`: growth of the owner's memory as a pool is made and filled, with its ledger."""
    pid = _service_pid(supervisor_pid)
    shape = layout("owner-memory")
    before = _private_bytes(pid)
    with connect(str(socket_path)) as harbor:
        pool = harbor.open_pool("owner-memory", shape, size=shape.block_bytes * (BLOCK_COUNT + shape.scratch_blocks))
        prompt_tokens = PROMPT_BLOCKS * shape.block_tokens
        for first in range(0, BLOCK_COUNT * shape.block_tokens, prompt_tokens):
            commit_prompt(pool, array("I", range(first, first + prompt_tokens)).tobytes())
        filled = pool.stats().cached_block_count
        after = _private_bytes(pid)
    if filled != BLOCK_COUNT:
        raise RuntimeError(f"{filled} of {BLOCK_COUNT} blocks are filled: the figure would be wrong")
    # The ledger is shared memory, like the arena; its whole size is used once every block was.
    ledger = ledger_bytes(PoolConfig(BLOCK_COUNT, shape.block_tokens)) / BLOCK_COUNT
    private = (after - before) / BLOCK_COUNT
    return [
        Figure("owner_bytes_per_block", private + ledger, "bytes", 900.0),
        Figure("owner_private_bytes_per_block", private, "bytes", None),
    ]


def _service_pid(supervisor_pid: int) -> int:
    """Returns the child that serves: the oldest; a younger one waits to be the next."""
    return int(Path(f"/proc/{supervisor_pid}/task/{supervisor_pid}/children").read_text().split()[0])


def _private_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no RssAnon")
