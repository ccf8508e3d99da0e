"""Memory of a device is let go before the service is told that it is [C16].

DropPool and CloseSession assert it of this process: the service frees what a pool had, and CUDA leaves undefined what
becomes of an allocation that is freed while another process has it open.
"""

from collections.abc import Iterable

from kvharbor.client.errors import PoolInUse, StateRefused
from kvharbor.client.holdings import HeldPool
from kvharbor.client.side import SideSocket


def let_go(pool: HeldPool) -> None:
    """Lets go of a pool's memory, before DropPool. With `take_back` it is there again.

    Raises PoolInUse while sequences of this process live or its session holds blocks, and StateRefused, MAPPING_IN_USE,
    while arrays or tensors over memory that `moves` do: with nothing changed but, in the latter case,
    `pool.memory.views`.
    """
    if count := len(pool.sequences.live()):
        raise PoolInUse(
            f"{count} sequences of this process hold blocks of pool {pool.name}: release them first",
            metadata={"sessionCount": "0", "sequenceCount": str(count), "pinCount": "0"},
        )
    if count := len(pool.own_blocks):
        raise PoolInUse(
            f"this process holds {count} blocks of pool {pool.name}: release them first",
            metadata={"sessionCount": "0", "sequenceCount": "0", "pinCount": "0", "blockCount": str(count)},
        )
    try:
        pool.memory.vacate()
    except StateRefused:
        pool.memory = pool.memory.with_new_views()
        raise


def take_back(pool: HeldPool, side: SideSocket) -> None:
    """Maps a pool's memory again, as DropPool was refused."""
    pool.memory = pool.memory.replaced(side, pool.id)


def let_go_for_good(pools: Iterable[HeldPool]) -> None:
    """Lets go of what lies on devices, before CloseSession.

    Raises StateRefused, MAPPING_IN_USE, while arrays or tensors over memory that `moves` live. Over other memory they
    may: it stays mapped, as on the host [C6].
    """
    for pool in pools:
        if pool.memory.moves:
            pool.memory.vacate()
        elif pool.memory.device is not None:
            pool.memory.close()
