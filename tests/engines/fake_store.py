"""What a store of leased blocks is to an engine, on a FakeOwner."""

from typing import TYPE_CHECKING

from kvharbor.client import BlockRun, PoolExhausted

if TYPE_CHECKING:
    from engines.fake_block_calls import FakeBlockCalls


class FakeStore:
    """Leases in the background, which here means: before it is looked at next. Others get it back at once."""

    def __init__(self, calls: "FakeBlockCalls") -> None:
        self.target_block_count = 1
        self._calls = calls
        self._stock: list[tuple[int, int]] = []
        self._short = True

    def __len__(self) -> int:
        self._refill()
        return len(self._stock)

    def stock_up(self) -> None:
        self._short = True

    def take(self, block_count: int) -> BlockRun:
        missing = block_count - len(self)
        self._short = True
        if missing > 0:
            raise PoolExhausted(f"{missing} blocks more are needed than there are in stock")
        taken, self._stock = self._stock[:block_count], self._stock[block_count:]
        return BlockRun.of(taken)

    def rest(self) -> None:
        """Gives all of it back: nothing runs, or others need it."""
        self._short = False
        returned, self._stock = self._stock, []
        if returned:
            self._calls.release(BlockRun.of(returned))

    def _refill(self) -> None:
        short, self._short = self._short, False
        missing = self.target_block_count - len(self._stock)
        if short and missing > 0:
            self._stock += self._calls.lease_ahead(missing)
