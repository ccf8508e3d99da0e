"""The prefix tree: which committed block holds which tokens behind which prefix.

Keyed by (parent node, the block's content): exact, so two contents can never be taken for each other, whatever
their digests ([G1]). A content is tokens and extra keys, or a key in an opaque namespace. A node is a block id or a
namespace's root; a block leaves only after its children, so an id names one node as long as anything hangs below it.
Columns are indexed by block and hold no object that the garbage collector tracks. They are lists, as reading an
element of an array makes an integer: a tenth of the pool's time, for half of the columns' memory.
"""

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from struct import Struct

from kvharbor.pool.digest import ExtraKey, encode_extra_key
from kvharbor.pool.namespaces import FIRST_ROOT, NO_BLOCK, Namespace, Namespaces

# A key is the parent node as eight bytes, then the content.
_PARENT = Struct("<Q")
PARENT_BYTES = _PARENT.size


class PrefixTree:
    """Committed blocks by parent and content. Every operation is O(blocks touched)."""

    def __init__(self, id_count: int, block_tokens: int, namespaces: Namespaces) -> None:
        self.block_count = 0
        self._block_bytes = 4 * block_tokens
        self._contents = Struct(f"{self._block_bytes}s")
        self._namespaces = namespaces
        self._block_by_key: dict[bytes, int] = {}
        self.parent = [NO_BLOCK] * id_count
        self.first_child = [NO_BLOCK] * id_count
        self.next_sibling = [NO_BLOCK] * id_count
        self._previous_sibling = [NO_BLOCK] * id_count
        self._key: list[bytes | None] = [None] * id_count
        self._digest: list[bytes | None] = [None] * id_count
        self._namespace: list[Namespace | None] = [None] * id_count

    def content(self, token_ids: bytes | bytearray, offset_bytes: int, extra: bytes | None) -> bytes:
        """Returns the content, in an exact namespace, of the block whose tokens begin at `offset_bytes`."""
        tokens = bytes(token_ids[offset_bytes : offset_bytes + self._block_bytes])
        return tokens + extra if extra else tokens

    def match(
        self, node: int, token_ids: bytes, extras: Mapping[int, bytes], first_block: int, end_block: int
    ) -> list[int]:
        """Returns the longest run of blocks below `node` that hold blocks [first_block, end_block) of a prompt."""
        size = self._block_bytes
        if extras:
            blocks = range(first_block, end_block)
            return self.match_contents(node, (self.content(token_ids, one * size, extras.get(one)) for one in blocks))
        find, key_of = self._block_by_key.get, _PARENT.pack
        matched: list[int] = []
        # Cut in C: two thirds of the time that a slice and `to_bytes` take for each block.
        for (content,) in self._contents.iter_unpack(memoryview(token_ids)[first_block * size : end_block * size]):
            block = find(key_of(node) + content)
            if block is None:
                break
            matched.append(block)
            node = block
        return matched

    def match_contents(self, node: int, contents: Iterable[bytes]) -> list[int]:
        """Returns the longest run of blocks below `node` that hold these contents, each below the one before."""
        find = self._block_by_key.get
        matched: list[int] = []
        for content in contents:
            block = find(_PARENT.pack(node) + content)
            if block is None:
                break
            matched.append(block)
            node = block
        return matched

    def contains(self, block: int) -> bool:
        """Whether a block id names a block in the tree."""
        return 0 <= block < len(self._key) and self._key[block] is not None

    def find(self, parent: int, content: bytes) -> int | None:
        """Returns the block that holds this content below this parent."""
        return self._block_by_key.get(_PARENT.pack(parent) + content)

    def insert_chain(
        self, blocks: Sequence[int], parent: int, contents: Sequence[bytes], namespace: Namespace
    ) -> list[bytes]:
        """Publishes blocks, each below the one before; stops at a content that is there already.

        Returns the digests of those that were published.
        """
        place = self._block_by_key.setdefault
        parents, keys, digests, namespaces = self.parent, self._key, self._digest, self._namespace
        first_child = self.first_child
        node, digest, is_opaque = parent, self.digest_of(parent), namespace.is_opaque
        sha256 = hashlib.sha256  # `block_digest` without a call a block
        published: list[bytes] = []
        for block, content in zip(blocks, contents, strict=True):
            key = _PARENT.pack(node) + content
            if place(key, block) != block:
                break
            keys[block] = key
            parents[block] = node
            namespaces[block] = namespace
            digest = digests[block] = content if is_opaque else sha256(digest + content).digest()
            if published:
                first_child[node] = block  # of a node that is itself new: there are no siblings
            else:
                self._link(block, parent, namespace)
            published.append(digest)
            node = block
        namespace.block_count += len(published)
        self.block_count += len(published)
        return published

    def remove_all(self, blocks: Sequence[int]) -> list[tuple[Namespace, list[bytes]]]:
        """Takes blocks out, children before parents; returns the digests that are gone, by namespace in runs."""
        index, keys, digests, namespaces = self._block_by_key, self._key, self._digest, self._namespace
        parents, following, preceding = self.parent, self.next_sibling, self._previous_sibling
        removed: list[tuple[Namespace, list[bytes]]] = []
        namespace: Namespace = None  # type: ignore[assignment]
        gone: list[bytes] = []
        first_child = self.first_child
        for block in blocks:
            if namespaces[block] is not namespace:
                if gone:
                    self._count_removed(namespace, len(gone))
                namespace = namespaces[block]  # type: ignore[assignment]
                gone = []
                removed.append((namespace, gone))
            gone.append(digests[block])  # type: ignore[arg-type]
            del index[keys[block]]  # type: ignore[arg-type]
            keys[block] = digests[block] = namespaces[block] = None
            parent = parents[block]
            parents[block] = NO_BLOCK
            if following[block] != NO_BLOCK or preceding[block] != NO_BLOCK:
                self._unlink(block, parent, namespace)
            elif parent < FIRST_ROOT:
                first_child[parent] = NO_BLOCK
            else:
                namespace.first_child = NO_BLOCK
        if gone:
            self._count_removed(namespace, len(gone))
        self.block_count -= len(blocks)
        return removed

    def _count_removed(self, namespace: Namespace, block_count: int) -> None:
        namespace.block_count -= block_count
        self._namespaces.forget_if_empty(namespace)

    def _link(self, block: int, parent: int, namespace: Namespace) -> None:
        """Puts a block in front of its parent's children."""
        if parent >= FIRST_ROOT:
            sibling, namespace.first_child = namespace.first_child, block
        else:
            sibling, self.first_child[parent] = self.first_child[parent], block
        if sibling != NO_BLOCK:
            self.next_sibling[block] = sibling
            self._previous_sibling[sibling] = block

    def _unlink(self, block: int, parent: int, namespace: Namespace) -> None:
        """Takes a block from among its siblings."""
        following, preceding = self.next_sibling[block], self._previous_sibling[block]
        if following != NO_BLOCK:
            self._previous_sibling[following] = preceding
            self.next_sibling[block] = NO_BLOCK
        if preceding != NO_BLOCK:
            self.next_sibling[preceding] = following
            self._previous_sibling[block] = NO_BLOCK
        elif parent >= FIRST_ROOT:
            namespace.first_child = following
        else:
            self.first_child[parent] = following

    def digest_of(self, node: int) -> bytes:
        """Returns the digest of a block in the tree, or of a namespace by its root."""
        if node >= FIRST_ROOT:
            return self._namespaces.of_root(node).digest
        digest = self._digest[node]
        assert digest is not None
        return digest

    def namespace_of(self, block: int) -> Namespace:
        """Returns the namespace of a block in the tree."""
        namespace = self._namespace[block]
        assert namespace is not None
        return namespace

    def content_of(self, block: int) -> bytes:
        """Returns the content that a block in the tree was committed for."""
        key = self._key[block]
        assert key is not None
        return key[PARENT_BYTES:]

    def keys(self, blocks: Iterable[int]) -> list[bytes]:
        """Returns what blocks in the tree are keyed by: the parent node as eight bytes, then the content."""
        keys = self._key
        return [keys[block] for block in blocks]  # type: ignore[misc]

    def children(self, node: int) -> Iterator[int]:
        """Yields the blocks right below a block or a namespace's root, the latest first."""
        is_root = node >= FIRST_ROOT
        child = self._namespaces.of_root(node).first_child if is_root else self.first_child[node]
        while child != NO_BLOCK:
            yield child
            child = self.next_sibling[child]

    def child_but(self, block: int, others: Container[int]) -> int:
        """Returns a child of a block that is none of `others`, or NO_BLOCK."""
        return self._but(self.first_child[block], others)

    def sibling_but(self, block: int, others: Container[int]) -> int:
        """Returns one of the blocks that `children` yields after this one that is none of `others`, or NO_BLOCK."""
        return self._but(self.next_sibling[block], others)

    def _but(self, child: int, others: Container[int]) -> int:
        while child != NO_BLOCK and child in others:
            child = self.next_sibling[child]
        return child

    def copied_columns(self) -> tuple[list[int], list[int], list[bytes | None]]:
        """Returns each block's first child, next sibling and digest, to be read while the tree changes."""
        return self.first_child[:], self.next_sibling[:], self._digest[:]

    def descend(self, node: int) -> Iterator[int]:
        """Yields every block below a node, parents before children. O(1) a block; nothing may change meanwhile."""
        pending = list(self.children(node))
        while pending:
            block = pending.pop()
            yield block
            pending.extend(self.children(block))


def extras_by_block(keys: Iterable[ExtraKey], block_tokens: int) -> dict[int, bytes]:
    """Encodes extra keys, in order of offset, as each block's part of its content."""
    parts: dict[int, list[bytes]] = {}
    for key in keys:
        block, offset = divmod(key.token_offset, block_tokens)
        parts.setdefault(block, []).append(encode_extra_key(offset, key.value))
    return {block: b"".join(encoded) for block, encoded in parts.items()}
