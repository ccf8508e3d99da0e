"""Who reuses what from whom, by brute force: walks of chance over a pool, with a diary of who has published what.

A path is (tenant, salt, the contents of all blocks up to this one). An engine is an object here, and one that is told
as another gives that one all that is its own.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from block_calls import part
from calls import encode

from kvharbor.pool import (
    Chain,
    Commit,
    Engine,
    EngineGroup,
    EngineStats,
    Ledger,
    Pool,
    PoolConfig,
    Prompt,
    SequenceView,
    engines,
    ledger_bytes,
)
from kvharbor.pool.errors import PoolExhausted, RequestTooLarge
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.steps import finish
from kvharbor.server.metrics import engine_families

BLOCK_TOKENS = 4
NAMES = [
    Engine(name, version, instance)
    for name, version in (("v", "1"), ("v", "2"), ("t", "1"))
    for instance in ("", "a", "b", "c")
]
Path = tuple[str, bytes, tuple[bytes, ...]]


def kind_of(engine: Engine) -> Engine:
    """What all of one name and version are told as."""
    return Engine(engine.name, engine.version)


def software_of(engine: Engine) -> Engine:
    """What all of one name are told as."""
    return Engine(engine.name)


@dataclass(eq=False)
class One:
    """An engine, or a group. `began` orders them."""

    engine: Engine = field(default_factory=Engine)
    group: EngineGroup = EngineGroup.NONE
    began: int = 0
    prompt_tokens: int = 0
    reused: "Counter[One]" = field(default_factory=Counter)


@dataclass(eq=False)
class Live:
    """A sequence that its session holds."""

    view: SequenceView
    tokens: bytes
    computed: int


class NaiveEngines:
    """A pool, and what is known of it by looking at it after every call."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.buffer = bytearray(ledger_bytes(config))
        self.pool = Pool(config, Ledger.create(config, self.buffer))
        self.process = 0
        self.last_session = 0
        self.clock = 0
        self.told_together = 0
        self.stood_back = 0
        self.reuses: Counter[str] = Counter()
        self.sessions: dict[int, tuple[str, One]] = {}
        self.names: dict[int, Engine] = {}
        self.live: list[Live] = []
        self._forget()

    def _forget(self) -> None:
        """A process begins: nothing is counted yet, and nobody knows who has published what is there."""
        self.others, self.earlier = One(group=EngineGroup.OTHERS), One(group=EngineGroup.EARLIER)
        self.known: list[One] = []
        self.series: dict[str | tuple[str, str], float] = {}
        self.author = dict.fromkeys(self.present(), self.earlier)

    # What there is

    def present(self) -> set[Path]:
        tree, blocks = self.pool._state.tree, self.pool._state.blocks.state
        return {self.path_of(block) for block in range(len(blocks)) if tree.contains(block)}

    def path_of(self, block: int) -> Path:
        tree, contents, node = self.pool._state.tree, list[bytes](), block
        while node < FIRST_ROOT:
            contents.append(tree.content_of(node))
            node = tree.parent[node]
        tenant, _, _, salt, _ = tree.namespace_of(block).key
        return tenant, salt, tuple(reversed(contents))

    def path(self, session: int, salt: bytes, tokens: bytes, block_count: int) -> Path:
        size = 4 * BLOCK_TOKENS
        contents = [tokens[at * size : (at + 1) * size] for at in range(block_count)]
        return self.sessions[session][0], salt, tuple(contents)

    # What happens

    def open(self, tenant: str, name: Engine) -> None:
        self.last_session += 1
        self.pool.open_session(self.last_session, tenant, name)
        self.sessions[self.last_session] = tenant, self.begin(name)
        self.names[self.last_session] = name
        self.after()

    def end(self, session: int) -> None:
        finish(self.pool.session_quiet(session))
        del self.sessions[session], self.names[session]
        self.live = [one for one in self.live if one.view.session != session]
        self.after()

    def restart(self) -> None:
        """Kills the process. The next one knows the sessions, and none of them has kept anything."""
        self.process += 1
        tenants = {session: tenant for session, (tenant, _) in self.sessions.items()}
        first = self.process << 40
        ledger = Ledger.open(self.config, self.buffer)
        self.pool = Pool.recovered(self.config, ledger, tenants, first_number=first | 1, first_revision=first)
        self._forget()
        self.live = []
        for session, tenant in tenants.items():
            self.pool.name_engine(session, self.names[session])
            self.sessions[session] = tenant, self.begin(self.names[session])
        for session in tenants:
            finish(self.pool.finish_resume(session))
        self.after()

    def allocate(self, session: int, salt: bytes, tokens: bytes) -> None:
        try:
            view = finish(self.pool.allocate(session, Prompt(tokens, salt=salt)))
        except (PoolExhausted, RequestTooLarge):
            self.after(session)
            return
        self.count(session, salt, tokens, len(tokens) // 4, view.cached_tokens // BLOCK_TOKENS)
        self.live.append(Live(view, tokens, view.cached_tokens))
        self.after(session)

    def commit(self, one: Live, computed: int) -> None:
        one.computed = max(one.computed, computed)
        finish(self.pool.commit(one.view.session, one.view.number, Commit(one.computed)))
        self.after(one.view.session)

    def release(self, one: Live) -> None:
        self.live.remove(one)
        finish(self.pool.release(one.view.session, one.view.number))
        self.after()

    def serve_blocks(self, session: int, tokens: bytes, asked: dict[str, Any]) -> None:
        """An engine with tables of its own acquires, computes and commits the rest if there is room, and lets go."""
        tokens = tokens[: len(tokens) // (4 * BLOCK_TOKENS) * 4 * BLOCK_TOKENS]
        block_count = len(tokens) // (4 * BLOCK_TOKENS)
        chain = Chain(token_ids=tokens)
        try:
            acquired = finish(self.pool.acquire(session, chain, **asked))
        except (PoolExhausted, RequestTooLarge):
            self.after(session)
            return
        held, leased = acquired.held, acquired.leased
        if "unless_pending" in asked and not len(held) and not len(leased):
            assert acquired.pending is not None
            self.stood_back += 1
            self.after(session)
            return
        if asked:
            self.count(session, b"", tokens, block_count * BLOCK_TOKENS, len(held))
        rest = tokens[4 * BLOCK_TOKENS * len(held) :]
        if asked.get("computes") and rest:
            try:
                count = block_count - len(held)
                own = leased if len(leased) else finish(self.pool.lease(session, count, count))
            except PoolExhausted:
                own = None
            if own is not None:
                self.after(session)  # what had to make room has gone, perhaps a part of this that was too short to hold
                parent = part(held, max(len(held) - 1, 0))
                finish(self.pool.commit_blocks(session, parent, own, Chain(token_ids=rest)))
                self.after(session)
                finish(self.pool.release_blocks(session, own))
        finish(self.pool.release_blocks(session, held))
        self.after(session)

    def evict_unheld(self) -> None:
        finish(self.pool.evict_unheld())
        self.after()

    # What should be told

    def begin(self, name: Engine) -> One:
        """A session of an engine begins."""
        self.clock += 1
        found = self.called(name) or self.made(name) or self.together(name) or self.others
        if found.engine == name and found is not self.others:
            found.began = self.clock
        return found

    def called(self, name: Engine) -> One | None:
        return next((one for one in self.known if one.engine == name), None)

    def together(self, name: Engine) -> One | None:
        return self.called(kind_of(name)) or self.called(software_of(name))

    def made(self, name: Engine) -> One | None:
        if len(self.known) == engines.MOST and not self.made_room(name):
            return None
        if (found := self.called(name)) is not None:
            return found
        self.known.append(One(name, began=self.clock))
        return self.known[-1]

    def made_room(self, name: Engine) -> bool:
        working = [one for _, one in self.sessions.values()]
        idle = sorted((one for one in self.known if one not in working), key=lambda one: one.began)
        newcomer = One(name)
        for group_of in (kind_of, software_of):
            before: list[One] = []
            for one in [*idle, newcomer]:
                group = group_of(one.engine)
                other = self.called(group) or next((each for each in before if group_of(each.engine) == group), one)
                before.append(one)
                if other is one:
                    continue
                if other.engine != group:
                    self.clock += 1
                    other.engine, other.began = group, self.clock
                self.told_together += 1
                if one is not newcomer:
                    self.told_as(one, other)
                return one is not newcomer
        return False

    def told_as(self, one: One, other: One) -> None:
        self.known.remove(one)
        other.prompt_tokens += one.prompt_tokens
        other.reused.update(one.reused)
        for each in [*self.known, self.others]:
            each.reused[other] += each.reused.pop(one, 0)
        self.author = {path: other if author is one else author for path, author in self.author.items()}

    def count(self, session: int, salt: bytes, tokens: bytes, prompt_tokens: int, reused: int) -> None:
        """A request is granted that reuses so many blocks."""
        _, one = self.sessions[session]
        one.prompt_tokens += prompt_tokens
        for end in range(1, reused + 1):
            author = self.author[self.path(session, salt, tokens, end)]
            one.reused[author] += BLOCK_TOKENS
            self.reuses["own" if author is one else "earlier" if author is self.earlier else "other"] += 1

    def after(self, session: int = 0) -> None:
        """Looks at what is new, which this session has published, and at what is told."""
        there = self.present()
        self.author = {path: author for path, author in self.author.items() if path in there}
        for path in there - self.author.keys():
            self.author[path] = self.sessions[session][1]
        self.pool.check_invariants()
        self.compare()

    def compare(self) -> None:
        committed = Counter(self.author.values())
        session_counts = Counter(one for _, one in self.sessions.values())
        named = [*self.known, self.others, self.earlier]
        reused = {author for one in named for author, count in one.reused.items() if count}
        expected = {
            (one.engine, one.group): (
                session_counts[one],
                one.prompt_tokens,
                committed[one],
                {(author.engine, author.group): count for author, count in one.reused.items() if count},
            )
            for one in named
            if one.prompt_tokens or committed[one] or session_counts[one] or one in reused
        }
        told = self.pool.stats().engines
        actual = {
            (one.engine, one.group): (
                one.session_count,
                one.prompt_token_count,
                one.committed_block_count,
                {(told[place].engine, told[place].group): count for place, count in one.reuses},
            )
            for one in told
        }
        assert expected == actual
        assert all(one.reused_token_count == sum(count for _, count in one.reuses) for one in told)
        self.compare_series(told)

    def compare_series(self, told: tuple[EngineStats, ...]) -> None:
        """A counter by the name of a software never falls while the process lives, nor does one of two of them."""
        figures: engine_families.Figures = {}
        reuses: engine_families.Reuses = {}
        engine_families.add(told, figures, reuses)
        series: dict[str | tuple[str, str], float] = {name: row[-1] for name, row in figures.items()}
        series |= {names: count for names, (count,) in reuses.items()}
        assert {key: value for key, value in self.series.items() if series.get(key, 0) < value} == {}
        self.series = series


def walk(seed: int, steps: int) -> NaiveEngines:
    """Makes so many calls of chance on a small pool; returns what came of it."""
    chance = random.Random(seed)
    world = NaiveEngines(
        PoolConfig(
            block_count=chance.choice((6, 12)),
            block_tokens=BLOCK_TOKENS,
            min_reuse_tokens=chance.choice((0, 0, 8)),
            slice_blocks=chance.choice((2, 512)),
            policy=chance.choice(("lru", "auto")),
        )
    )
    for _ in range(steps):
        _step(world, chance)
    return world


def _step(world: NaiveEngines, chance: random.Random) -> None:
    letters = [chance.randint(1, 2) for _ in range(4)]
    tokens = encode(letters[at // BLOCK_TOKENS] for at in range(chance.choice((4, 8, 12, 13))))
    sessions = [*world.sessions]
    deed = chance.choice(
        (*("open", "end") * 6, "evict", "restart", *("allocate", "commit", "release", "blocks", "stand back") * 5)
    )
    match deed:
        case "open" if len(sessions) < 6:
            world.open(chance.choice("tu"), chance.choice(NAMES))
        case "end" if sessions:
            world.end(chance.choice(sessions))
        case "allocate" if sessions:
            world.allocate(chance.choice(sessions), chance.choice((b"", b"s")), tokens)
        case "commit" if world.live:
            one = chance.choice(world.live)
            world.commit(one, chance.randint(0, len(one.tokens) // 4))
        case "release" if world.live:
            world.release(chance.choice(world.live))
        case "blocks" if sessions:
            asked = chance.choice(({}, {"uses": True}, {"computes": True}))
            world.serve_blocks(chance.choice(sessions), tokens, asked)
        case "stand back" if world.live:
            # Mostly another session is computing it.
            tokens = chance.choice(world.live).tokens
            table = len(tokens) // (4 * BLOCK_TOKENS)
            stands_back = {"computes": True, "table_block_count": table, "unless_pending": True}
            world.serve_blocks(chance.choice(sessions), tokens, stands_back)
        case "evict" if not chance.randrange(4):
            world.evict_unheld()
        case "restart" if not chance.randrange(3):
            world.restart()
