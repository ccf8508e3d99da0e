"""What a session holds by itself: blocks whose tables its engine keeps. Rules [B1] and [B2].

Holding is membership: to hold twice is to hold once. Who holds a committed block holds all before it, so for each it
is counted how much right behind it is held. A block that is let go while something is *lingers* until that has left.
"""

from collections.abc import Iterator, Sequence

from kvharbor.pool.namespaces import FIRST_ROOT


class Holdings:
    """The set, by kind. It says whom to hold and whom not; the caller changes the blocks. O(1) a block, amortised."""

    __slots__ = ("behind", "fresh", "leased", "lingering", "shadows")

    def __init__(self) -> None:
        # What an operation under way has leased so far.
        self.fresh: list[int] = []
        self.leased: set[int] = set()
        self.shadows: set[int] = set()
        # The committed ones, each with how many of these it is the parent of, and of the shadows the canonical block.
        # Parents stand before their children.
        self.behind: dict[int, int] = {}
        # Those of them that are only held for what is behind them.
        self.lingering: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.leased or self.shadows or self.behind or self.fresh)

    def private(self) -> Iterator[int]:
        """Yields the blocks that are not committed."""
        yield from self.leased
        yield from self.shadows
        yield from self.fresh

    def private_count(self) -> int:
        """Returns how many blocks are not committed."""
        return len(self.leased) + len(self.shadows) + len(self.fresh)

    def holds(self, block: int) -> bool:
        """Whether a committed block is held for its own sake."""
        return block in self.behind and block not in self.lingering

    def add(self, chain: Sequence[int], node: int) -> Sequence[int]:
        """Takes in committed blocks, each behind the one before, the first behind `node`, a root or one of these.

        Returns those that are new: the last ones, each with one holder more by that.
        """
        behind = self.behind
        if self.lingering:
            self.lingering.difference_update(chain)
        new = chain
        if chain and chain[0] in behind:
            # Who has a block has all before it.
            new = [block for block in chain if block not in behind]
            node = chain[len(chain) - len(new) - 1]
        if new:
            if node < FIRST_ROOT:
                behind[node] += 1
            behind.update(dict.fromkeys(new, 1))
            behind[new[-1]] = 0
        return new

    def add_shadow(self, block: int, canonical: int, node: int) -> bool:
        """Takes in a shadow, and its canonical block, behind `node`, with it; whether that one is new."""
        is_new = canonical not in self.behind
        if is_new:
            self.add((canonical,), node)
            self.lingering.add(canonical)
        self.behind[canonical] += 1
        self.shadows.add(block)
        return is_new

    def let_go(self, block: int, parents: Sequence[int], most: int) -> tuple[list[int], int | None]:
        """Ends the hold of a committed block, unless it has to linger, and of those that linger for it alone.

        Returns those that leave, deepest first, and after `most` of them the one to go on with, if there is one.
        """
        gone: list[int] = []
        if self.behind[block]:
            self.lingering.add(block)
            return gone, None
        following: int | None = block
        while following is not None and len(gone) < most:
            del self.behind[following]
            gone.append(following)
            following = self._one_less_behind(parents[following])
        return gone, following

    def let_go_shadow(self, block: int, canonical: int) -> int | None:
        """Ends a shadow; returns its canonical block if that is to go with it."""
        self.shadows.remove(block)
        return self._one_less_behind(canonical)

    def cut(self, blocks: Sequence[int], parent: int) -> int | None:
        """Takes out all committed blocks from one behind `parent` on; returns the parent if that is to go with them."""
        self.lingering.difference_update(blocks)
        for block in blocks:
            del self.behind[block]
        return self._one_less_behind(parent)

    def _one_less_behind(self, node: int) -> int | None:
        """Counts down; returns the block if it has lingered for this one."""
        if node >= FIRST_ROOT:
            return None
        self.behind[node] -= 1
        if self.behind[node] or node not in self.lingering:
            return None
        self.lingering.remove(node)
        return node
