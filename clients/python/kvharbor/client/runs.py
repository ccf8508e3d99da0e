"""Blocks that a session holds by itself: runs of (block, generation), and the set of all that it holds in a pool."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from kvharbor.client.errors import InvalidField
from kvharbor.v1 import types_pb2


@dataclass(frozen=True, slots=True, eq=False)
class BlockRun:
    """Blocks in order: entry i of both arrays, uint32 and uint64, is one block. Slicing gives the run of a part."""

    block_ids: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint64]

    def __post_init__(self) -> None:
        if self.block_ids.shape != self.generations.shape or self.block_ids.ndim != 1:
            raise InvalidField.of(
                "blocks",
                (self.block_ids.shape, self.generations.shape),
                limit="two flat arrays of one length",
                remedy="name each block with its generation",
            )

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Self:
        """Returns the run of these (block, generation)."""
        listed = [*pairs]
        return cls(
            np.array([block for block, _ in listed], np.uint32),
            np.array([generation for _, generation in listed], np.uint64),
        )

    @staticmethod
    def join(runs: Iterable["BlockRun"]) -> "BlockRun":
        """Returns one run of several, in their order."""
        listed = [*runs]
        if not listed:
            return NO_BLOCKS
        return BlockRun(
            np.concatenate([run.block_ids for run in listed]), np.concatenate([run.generations for run in listed])
        )

    def __len__(self) -> int:
        return len(self.block_ids)

    def __getitem__(self, part: slice | npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> "BlockRun":
        return BlockRun(self.block_ids[part], self.generations[part])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields (block, generation)."""
        return zip(self.block_ids.tolist(), self.generations.tolist(), strict=True)

    def among(self, others: "BlockRun") -> npt.NDArray[np.bool_]:
        """Tells of each block whether it is one of the others."""
        if not len(self) or not len(others):
            return np.zeros(len(self), np.bool_)
        known = dict(others)
        return np.array([known.get(block) == generation for block, generation in self], np.bool_)


NO_BLOCKS = BlockRun(np.empty(0, np.uint32), np.empty(0, np.uint64))


def table_of(run: BlockRun) -> types_pb2.BlockTable:
    """Returns a run as a message."""
    return types_pb2.BlockTable(
        block_ids=run.block_ids.astype("<u4", copy=False).tobytes(),
        generations=run.generations.astype("<u8", copy=False).tobytes(),
    )


def run_of(table: types_pb2.BlockTable) -> BlockRun:
    """Reads a message."""
    if not table.block_ids and not table.generations:
        return NO_BLOCKS
    return BlockRun(
        np.frombuffer(table.block_ids, "<u4").astype(np.uint32, copy=False),
        np.frombuffer(table.generations, "<u8").astype(np.uint64, copy=False),
    )


class OwnBlocks:
    """What a session holds by itself in one pool, as of the last answer that was taken in [C17].

    Columns by block, so that a run of any length is taken in at once and nothing is left to the garbage collector.
    """

    def __init__(self, block_count: int) -> None:
        # Of zeros, so that what is never held takes no memory.
        self._held = np.zeros(block_count, np.bool_)
        self._generations = np.zeros(block_count, np.uint64)
        self._released_by = np.zeros(block_count, np.int64)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._held))

    def add(self, run: BlockRun) -> BlockRun:
        """Takes in what is held now; returns those that were not before."""
        if not len(run):
            return run
        fresh, places = run[~self.has(run)], _places(run)
        self._held[places] = True
        self._generations[places] = run.generations
        return fresh

    def discard(self, run: BlockRun) -> None:
        """Takes in what is not held any more; others are none of its business."""
        self._held[_places(run)[self.has(run)]] = False

    def releasing(self, run: BlockRun, number: int) -> None:
        """Remembers that request `number` releases these."""
        self._released_by[_places(run)] = number

    def released_since(self, run: BlockRun, number: int) -> npt.NDArray[np.bool_]:
        """Tells of each block whether it was released after request `number`, whatever has become of it then."""
        later: npt.NDArray[np.bool_] = self._released_by[_places(run)] > number
        return later

    def has(self, run: BlockRun) -> npt.NDArray[np.bool_]:
        """Tells of each block whether it is held."""
        places = _places(run)
        held: npt.NDArray[np.bool_] = self._held[places]
        held &= self._generations[places] == run.generations
        return held

    def all(self) -> BlockRun:
        """Returns everything that is held."""
        block_ids = np.flatnonzero(self._held)
        return BlockRun(block_ids.astype(np.uint32), self._generations[block_ids])

    def clear(self) -> None:
        """Nothing is held any more."""
        self._held[:] = False

    def give(self, run: BlockRun) -> None:
        """Takes in that blocks which are held are a sequence's from now on."""
        self._held[_places(run)] = False

    def require_known(self, run: BlockRun) -> None:
        """Raises InvalidField for a block that the pool has not."""
        if len(run) and (largest := int(run.block_ids.max())) >= len(self._held):
            raise InvalidField.of(
                "block_ids", largest, limit=f"below {len(self._held)}", remedy="name blocks of this pool"
            )


def _places(run: BlockRun) -> npt.NDArray[np.intp]:
    """Returns a run's blocks as indices of numpy's own type.

    Those of another take several times as long, and let another thread have the interpreter, in the middle of a step.
    """
    return run.block_ids.astype(np.intp)
