"""What the pool should do with blocks that sessions hold by themselves, on top of the naive model."""

from dataclasses import dataclass, field

from naive import Content, DoesNotFit, NaivePool, Path


class HeldByOthers(Exception):
    """Somebody else holds what is to be invalidated."""


@dataclass(eq=False)
class NaiveOwn:
    """What a session holds by itself. `held`: whether it has named each committed block, or needs it for one behind."""

    leased: int = 0
    shadows: list[Path] = field(default_factory=list)
    held: dict[Path, bool] = field(default_factory=dict)

    def needs(self, path: Path) -> bool:
        """Whether a block is held for another."""
        return path in self.shadows or any(parent(other) == path for other in self.held)


def parent(path: Path) -> Path | None:
    namespace, chunks = path
    return (namespace, chunks[:-1]) if len(chunks) > 1 else None


class NaiveBlocks(NaivePool):
    """As NaivePool, with sessions that hold blocks by themselves."""

    def __init__(self, block_count: int, block_tokens: int, most_entries: int) -> None:
        super().__init__(block_count, block_tokens, most_entries)
        self.own: dict[int, NaiveOwn] = {}
        self.lost_sessions: set[int] = set()

    def counts(self) -> dict[str, int]:
        counts = super().counts()
        for session, own in self.own.items():
            private = own.leased + len(own.shadows)
            counts["free"] -= private
            if session in self.lost_sessions:
                counts["quarantined"] += private
            else:
                counts["reserved"] += own.leased
                counts["active"] += len(own.shadows)
        return counts

    def of(self, session: int) -> NaiveOwn:
        return self.own.setdefault(session, NaiveOwn())

    def acquire(self, session: int, namespace: str, tokens: list[int], table: int) -> tuple[int, int]:
        """Returns how many blocks were there, and how many were leased."""
        self.retired.discard(namespace)
        paths = self.paths(namespace, tokens)[: self.present(namespace, tokens)]
        fresh = max(table - len(paths), 0)
        self.take(fresh, paths)
        own = self.of(session)
        for path in paths:
            self.keep(own, path, named=True)
        own.leased += fresh
        return len(paths), fresh

    def lease(self, session: int, least: int, want: int) -> int:
        counts = self.counts()
        available = counts["free"] + counts["cached"]
        if least > available:
            raise DoesNotFit
        count = min(want, available)
        self.take(count, [])
        self.of(session).leased += count
        return count

    def commit_blocks(self, session: int, behind: Path | None, namespace: str, contents: list[Content]) -> list[int]:
        """Returns the positions that became shadows."""
        if not self.is_used(namespace):
            self.retired.discard(namespace)
        own, shadows = self.of(session), []
        chunks = () if behind is None else behind[1]
        for position, content in enumerate(contents):
            chunks += (content,)
            path = (namespace, chunks)
            own.leased -= 1
            if path in self.holders:
                self.hold(path)
                own.shadows.append(path)
                shadows.append(position)
                self.keep(own, path, named=False)
            else:
                self.keep(own, path, named=True)
        return shadows

    def release_leased(self, session: int) -> None:
        self.of(session).leased -= 1

    def release_shadow(self, session: int, path: Path) -> None:
        own = self.of(session)
        own.shadows.remove(path)
        self.unhold(path)
        self.drop_unnamed(own, path)

    def release_held(self, session: int, path: Path) -> None:
        own = self.of(session)
        own.held[path] = False
        self.drop_unnamed(own, path)

    def invalidate(self, session: int, path: Path) -> int:
        """Returns how many blocks are leased again."""
        own = self.of(session)
        below = [other for other in self.holders if other[0] == path[0] and other[1][: len(path[1])] == path[1]]
        pinned = self.pinned()
        for other in below:
            if other in pinned or self.holders[other] != (other in own.held) + own.shadows.count(other):
                raise HeldByOthers
        leased = [other for other in [*own.held, *own.shadows] if other in below]
        own.leased += len(leased)
        own.shadows = [other for other in own.shadows if other not in below]
        for other in below:
            own.held.pop(other, None)
            del self.holders[other]
            if other in self.release_order:
                self.release_order.remove(other)
        before = parent(path)
        if before is not None:
            self.drop_unnamed(own, before)
        return len(leased)

    def lose(self, session: int) -> None:
        super().lose(session)
        self.lost_sessions.add(session)

    def quiet(self, session: int) -> None:
        """The session's own blocks go back, those held first last."""
        own = self.own.pop(session, NaiveOwn())
        for path in own.shadows:
            self.unhold(path)
        for path in reversed(own.held):
            self.unhold(path)

    # Short forms

    def paths(self, namespace: str, tokens: list[int]) -> list[Path]:
        size = self.block_tokens
        chunks = [tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)]
        return [(namespace, tuple(chunks[:end])) for end in range(1, len(chunks) + 1)]

    def is_used(self, namespace: str) -> bool:
        users = [one.namespace for one in [*self.sequences, *self.lost]]
        users += [path[0] for paths in [self.holders, *self.pins.values()] for path in paths]
        return namespace in users

    def keep(self, own: NaiveOwn, path: Path, *, named: bool) -> None:
        if path not in own.held:
            self.hold(path)
            own.held[path] = named
        own.held[path] |= named

    def drop_unnamed(self, own: NaiveOwn, path: Path) -> None:
        """Lets go of a block that is held for nothing, and of those before it that are held only for it."""
        here: Path | None = path
        while here is not None and not own.held[here] and not own.needs(here):
            del own.held[here]
            self.unhold(here)
            here = parent(here)
