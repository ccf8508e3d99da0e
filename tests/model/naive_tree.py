"""A prefix tree beside a dictionary of contents by parent, and what may happen to both."""

import random
from dataclasses import dataclass, field

from kvharbor.pool.namespaces import Namespace
from trees import new_tree, publish

ID_COUNT = 40
STEPS = 250


@dataclass
class Walk:
    """A tree and what has to be in it. Contents are of few kinds, so that many blocks differ in one thing alone."""

    chance: random.Random
    block_tokens: int
    by_content: dict[tuple[int, bytes], int] = field(default_factory=dict)
    space_of: dict[int, Namespace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree, self.namespaces, self.ledger = new_tree(ID_COUNT, self.block_tokens)
        schemes = "", "test/sha256", "test/other"
        self.spaces = [self.namespaces.use("t", "", "", b"", scheme) for scheme in schemes]

    def size(self, space: Namespace) -> int:
        return self.ledger.records.content_bytes(is_opaque=space.is_opaque)

    def tokens(self, space: Namespace, count: int) -> list[bytes]:
        return [bytes([self.chance.randrange(2)]) * self.size(space) for _ in range(count)]

    def extras(self, space: Namespace, count: int) -> dict[int, bytes]:
        if space.is_opaque or self.chance.random() < 0.5:
            return {}
        return {place: self.chance.choice([b"x", b"yy"]) for place in range(count) if self.chance.random() < 0.3}

    def node(self, space: Namespace) -> int:
        return self.chance.choice([space.root, *[block for block, own in self.space_of.items() if own is space]])

    def naive_match(self, node: int, contents: list[bytes]) -> list[int]:
        found: list[int] = []
        for content in contents:
            block = self.by_content.get((node, content))
            if block is None:
                break
            found.append(block)
            node = block
        return found

    def insert(self) -> None:
        """Publishes a chain, in consecutive blocks or not."""
        free = sorted(set(range(ID_COUNT)) - self.space_of.keys())
        count = min(self.chance.randint(1, 9), len(free))
        if not count:
            return
        space = self.chance.choice(self.spaces)
        parent = self.node(space)
        blocks = free[:count] if self.chance.random() < 0.5 else self.chance.sample(free, count)
        extras = self.extras(space, count)
        contents = [one + extras.get(place, b"") for place, one in enumerate(self.tokens(space, count))]
        digests = publish(self.tree, blocks, parent, contents, space)
        assert bool(digests) != ((parent, contents[0]) in self.by_content)
        assert [self.tree.digest_of(block) for block in blocks[: len(digests)]] == digests
        for block, content in zip(blocks[: len(digests)], contents, strict=False):
            self.by_content[parent, content] = block
            self.space_of[block] = space
            parent = block

    def remove(self) -> None:
        """Takes out a block and all below it, children first."""
        if not self.space_of:
            return
        block = self.chance.choice([*self.space_of])
        doomed = [block, *self.tree.descend(block)][::-1]
        expected = [self.tree.digest_of(one) for one in doomed]
        assert [digest for _, gone in self.tree.remove_all(doomed) for digest in gone] == expected
        for one in doomed:
            del self.space_of[one]
        self.by_content = {key: one for key, one in self.by_content.items() if one in self.space_of}
        self.ledger.records.erase(doomed)

    def look(self) -> None:
        """Asks for a chain, from anywhere in the middle of a prompt."""
        space = self.chance.choice(self.spaces)
        node, first, count = self.node(space), self.chance.randrange(3), self.chance.randrange(12)
        tokens, extras = self.tokens(space, first + count), self.extras(space, first + count)
        contents = [tokens[place] + extras.get(place, b"") for place in range(first, first + count)]
        found = self.tree.match(node, b"".join(tokens), extras, first, first + count)
        assert found == self.naive_match(node, contents), "[G1]"

    def check(self) -> None:
        """Everything is found, and nothing else is kept."""
        for (parent, content), block in self.by_content.items():
            assert (self.tree.find(parent, content), self.tree.content_of(block)) == (block, content)
            assert self.tree.parent[block] == parent
        children = [list(self.tree.children(node)) for node in {parent for parent, _ in self.by_content}]
        assert sorted([block for among in children for block in among]) == sorted(self.space_of)
        siblings = [block for among in children if len(among) > 1 for block in among]
        assert sorted(self.tree.siblings.values()) == sorted(siblings)
        assert self.tree.block_count == len(self.space_of)
        assert all(self.tree.contains(block) == (block in self.space_of) for block in range(ID_COUNT))

    def run(self) -> None:
        """Takes the walk, and checks everything after each step."""
        for _ in range(STEPS):
            self.chance.choice([self.insert, self.remove, self.look, self.look])()
            self.check()
