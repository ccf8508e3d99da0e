"""Why a prompt should miss, by brute force: walks of chance over a pool, with a diary of all that was ever evicted.

A path is (tenant, version, salt, the contents of all blocks up to this one).
"""

import random
from array import array
from dataclasses import dataclass, field

from calls import encode

from kvharbor.pool import Commit, Miss, MissKind, Pool, PoolConfig, Prompt, SequenceView
from kvharbor.pool.errors import PoolExhausted, RequestTooLarge
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.steps import finish

TENANTS = {1: "t", 2: "t", 3: "u"}
BLOCK_TOKENS = 2
ADMINISTRATOR = 0
Path = tuple[str, str, bytes, tuple[tuple[int, ...], ...]]


@dataclass(eq=False)
class Live:
    """A sequence that its session holds, with all its tokens."""

    view: SequenceView
    prompt: Prompt
    tokens: list[int]
    computed: int

    @property
    def committed(self) -> int:
        return self.computed // BLOCK_TOKENS


@dataclass
class NaiveMisses:
    """A pool, and what is known of it by looking at it after every call. The clock is the number of calls."""

    pool: Pool
    now: float = 1.0
    live: list[Live] = field(default_factory=list)
    evicted: dict[Path, tuple[float, int]] = field(default_factory=dict)
    given: dict[MissKind, int] = field(default_factory=lambda: dict.fromkeys(MissKind, 0))
    recomputed: int = 0
    seen: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        for session, tenant in TENANTS.items():
            self.pool.open_session(session, tenant)
        self.there = self.present()

    # What there is

    def present(self) -> set[Path]:
        tree, blocks = self.pool._state.tree, self.pool._state.blocks.state
        return {self.path_of(block) for block in range(len(blocks)) if tree.contains(block)}

    def path_of(self, block: int) -> Path:
        tree, chunks, node = self.pool._state.tree, [], block
        while node < FIRST_ROOT:
            chunks.append(tuple(array("I", tree.content_of(node))))
            node = tree.parent[node]
        tenant, version, _, salt, _ = tree.namespace_of(block).key
        return tenant, version, salt, tuple(reversed(chunks))

    def path(self, tenant: str, prompt: Prompt, tokens: list[int], block_count: int) -> Path:
        chunks = [tuple(tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]) for at in range(block_count)]
        return tenant, prompt.version, prompt.salt, tuple(chunks)

    # What happens

    def tick(self) -> None:
        self.now += 1.0
        self.pool.tell_time(self.now)

    def after(self, evicts: int, *, retires: bool = False) -> None:
        """Looks at what is gone: whoever has just called has evicted it, or it was retired."""
        there = self.present()
        for path in self.there - there:
            self.evicted[path] = self.now, evicts
            if retires:
                self.seen.discard(path)
        for path in there - self.there:
            self.recomputed += path in self.seen
            self.seen.add(path)
        self.there = there
        self.pool.check_invariants()

    def allocate(self, session: int, prompt: Prompt, tokens: list[int], most: int) -> None:
        self.tick()
        before = self.there
        writing = self.writing()
        try:
            view = finish(self.pool.allocate(session, prompt, max_cached_tokens=most))
        except (PoolExhausted, RequestTooLarge):
            self.after(session)
            return
        reusable = most // BLOCK_TOKENS
        self.check(view.miss, TENANTS[session], prompt, tokens, reusable, before, writing, used=view.cached_tokens)
        if view.miss is not None:
            self.given[view.miss.kind] += 1
        self.live.append(Live(view, prompt, tokens, view.cached_tokens))
        self.after(session)

    def commit(self, one: Live, computed: int) -> None:
        self.tick()
        one.computed = max(computed, one.computed)
        finish(self.pool.commit(one.view.session, one.view.number, Commit(one.computed)))
        self.after(one.view.session)

    def release(self, one: Live) -> None:
        self.tick()
        self.live.remove(one)
        finish(self.pool.release(one.view.session, one.view.number))
        self.after(ADMINISTRATOR, retires=True)

    def retire(self, tenant: str, version: str) -> None:
        self.tick()
        finish(self.pool.retire_version(tenant, version))
        self.after(ADMINISTRATOR, retires=True)

    def evict_unheld(self) -> None:
        self.tick()
        finish(self.pool.evict_unheld())
        self.after(ADMINISTRATOR)

    def lookup(self, tenant: str, prompt: Prompt, tokens: list[int]) -> None:
        self.tick()
        presence = finish(self.pool.lookup(tenant, prompt, len(tokens)))
        block_count = len(tokens) // BLOCK_TOKENS
        used = presence.cached_tokens
        self.check(presence.miss, tenant, prompt, tokens, block_count, self.there, self.writing(), used=used)

    # What should be told

    def writing(self) -> set[Path]:
        """The next block of each sequence, if all its tokens are known."""
        return {
            self.path(TENANTS[one.view.session], one.prompt, one.tokens, one.committed + 1)
            for one in self.live
            if (one.committed + 1) * BLOCK_TOKENS <= len(one.tokens)
        }

    def check(
        self,
        miss: Miss | None,
        tenant: str,
        prompt: Prompt,
        tokens: list[int],
        block_count: int,
        there: set[Path],
        writing: set[Path],
        *,
        used: int,
    ) -> None:
        """Compares what was told with what is in the diary."""
        matched = 0
        while matched < block_count and self.path(tenant, prompt, tokens, matched + 1) in there:
            matched += 1
        least = self.pool.config.min_reuse_tokens
        if used < matched * BLOCK_TOKENS:
            assert matched * BLOCK_TOKENS < least
            assert miss is not None
            assert (miss.kind, miss.present_tokens) == (MissKind.BELOW_THRESHOLD, matched * BLOCK_TOKENS)
            return
        if matched == block_count:
            assert miss is None
            return
        assert miss is not None
        assert miss.present_tokens == matched * BLOCK_TOKENS
        missing = self.path(tenant, prompt, tokens, matched + 1)
        at, by = self.evicted.get(missing, (-1.0, -1))
        is_remembered = at > self.now - miss.remembered_s
        if missing in writing:
            assert miss.kind is MissKind.NOT_COMMITTED
        elif is_remembered or (miss.kind is MissKind.EVICTED and at >= 0):
            told = by if by == ADMINISTRATOR or TENANTS[by] == tenant else None
            assert (miss.kind, miss.evicted_s, miss.evicted_by) == (MissKind.EVICTED, self.now - at, told)
        else:
            others = self.others(missing, there) if not matched else set()
            assert miss.kind is (MissKind.OTHER_NAMESPACE if others else MissKind.NEVER_SEEN)
            assert miss.differ in others or not others

    def others(self, missing: Path, there: set[Path]) -> set[tuple[str, ...]]:
        """How the tenant's namespaces that have this first block differ from the one asked for."""
        tenant, version, salt, chunks = missing
        found = set()
        for other, other_version, other_salt, others in there:
            if other == tenant and others == chunks and (other_version, other_salt) != (version, salt):
                parts = (("version", other_version != version), ("salt", other_salt != salt))
                found.add(tuple(name for name, differs in parts if differs))
        return found


def walk(seed: int, steps: int, policy: str = "lru") -> NaiveMisses:
    """Makes so many calls of chance on a small pool; returns what came of it."""
    chance = random.Random(seed)
    config = PoolConfig(
        block_count=chance.choice((6, 12)),
        block_tokens=BLOCK_TOKENS,
        min_reuse_tokens=chance.choice((0, 0, 4)),
        slice_blocks=chance.choice((2, 512)),
        policy=policy,
        history=True,
    )
    pool = Pool(config)
    pool.tell_time(1.0)
    world = NaiveMisses(pool)
    for _ in range(steps):
        _step(world, chance)
    assert pool.stats().traffic.misses == world.given
    assert pool.stats().traffic.recomputed_block_count == world.recomputed
    return world


def _step(world: NaiveMisses, chance: random.Random) -> None:
    tokens = [chance.randint(1, 2) for _ in range(chance.choice((2, 4, 6, 7)))]
    prompt = Prompt(encode(tokens), version=chance.choice(("", "v")), salt=chance.choice((b"", b"s")))
    match chance.choice(
        ("allocate",) * 5 + ("commit",) * 5 + ("release",) * 4 + ("lookup", "lookup", "evict", "retire")
    ):
        case "allocate":
            world.allocate(chance.choice((1, 2, 3)), prompt, tokens, chance.choice((len(tokens), len(tokens) - 1)))
        case "commit" if world.live:
            one = chance.choice(world.live)
            world.commit(one, chance.randint(0, len(one.tokens)))
        case "release" if world.live:
            world.release(chance.choice(world.live))
        case "lookup":
            world.lookup(chance.choice(("t", "u")), prompt, tokens)
        case "evict" if not chance.randrange(6):
            world.evict_unheld()
        case "retire" if not chance.randrange(3):
            world.retire(chance.choice(("t", "u")), prompt.version)
