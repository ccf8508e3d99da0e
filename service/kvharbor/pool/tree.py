"""The prefix tree: which committed block holds which tokens behind which prefix.

Exact: a block is found by its parent node and its whole content, so two contents can never be taken for each other,
whatever their digests ([G1]). A content is tokens and extra keys, or a key in an opaque namespace. It is in the
ledger's records, and not here again. Most nodes have one child: that is compared with what is asked for, many in a row
at once. Only children that have siblings are in an index, keyed by parent node and content.

A node is a block id or a namespace's root; a block leaves only after its children, so an id names one node as long as
anything hangs below it. Columns are indexed by block and hold no object that the garbage collector tracks. They are
lists, as reading an element of an array makes an integer: a tenth of the pool's time, for half of the columns' memory.
"""

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Final

from kvharbor.pool import validate
from kvharbor.pool.digest import ExtraKey, encode_extra_key
from kvharbor.pool.namespaces import FIRST_ROOT, NO_BLOCK, Namespace, Namespaces
from kvharbor.pool.records import Records

# A key is the parent node as eight bytes, then the content.
_PARENT = Struct("<Q")
PARENT_BYTES = _PARENT.size
_STRETCH: Final = 64
"""So many blocks are compared at once: more would be for nothing where the first of them differs."""


class PrefixTree:
    """Committed blocks by parent and content. Every operation is O(blocks touched)."""

    def __init__(self, id_count: int, records: Records, namespaces: Namespaces) -> None:
        self.block_count = 0
        self._block_bytes = records.block_bytes
        self._records = records
        self._namespaces = namespaces
        # Exactly the blocks that have siblings, by their keys.
        self.siblings: dict[bytes, int] = {}
        # Of blocks that have some. The records' own may be missing, as the heap that they are in may be full [L8].
        self._extras: dict[int, bytes] = {}
        self.parent = [NO_BLOCK] * id_count
        self.first_child = [NO_BLOCK] * id_count
        self.next_sibling = [NO_BLOCK] * id_count
        self._previous_sibling = [NO_BLOCK] * id_count
        self._namespace: list[Namespace | None] = [None] * id_count

    def content(self, token_ids: bytes | bytearray, offset_bytes: int, extra: bytes | None) -> bytes:
        """Returns the content, in an exact namespace, of the block whose tokens begin at `offset_bytes`."""
        tokens = bytes(token_ids[offset_bytes : offset_bytes + self._block_bytes])
        return tokens + extra if extra else tokens

    def match(
        self, node: int, contents: bytes, extras: Mapping[int, bytes], first_block: int, end_block: int
    ) -> list[int]:
        """Returns the longest run of blocks below `node` that hold blocks [first_block, end_block) of a prompt.

        `contents` are the prompt's token ids or, below a node of an opaque namespace, its keys. Nothing is below a root
        that is forgotten.
        """
        matched: list[int] = []
        namespace = self._namespaces.at(node) if node >= FIRST_ROOT else self._namespace[node]
        if namespace is None:
            return matched
        is_opaque = namespace.is_opaque
        size = self._records.content_bytes(is_opaque=is_opaque)
        place = first_block
        while place < end_block:
            run = self._only_children(node, min(end_block - place, _STRETCH))
            if run:
                asked = contents[place * size : (place + len(run)) * size]
                count = self._records.common_count(run, asked, is_opaque=is_opaque)
                if extras or self._extras:
                    count = self._common_extras(run[:count], extras, place)
                if count < len(run):
                    matched += run[:count]
                    break
            else:
                asked = contents[place * size : (place + 1) * size]
                block = self.siblings.get(_PARENT.pack(node) + asked + extras.get(place, b""))
                if block is None:
                    break
                run = [block]
            matched += run
            place += len(run)
            node = run[-1]
        return matched

    def contains(self, block: int) -> bool:
        """Whether a block id names a block in the tree."""
        return 0 <= block < len(self._namespace) and self._namespace[block] is not None

    def find(self, parent: int, content: bytes) -> int | None:
        """Returns the block that holds this content below this parent."""
        child = self._first_child_of(parent)
        if child == NO_BLOCK:
            return None
        if self.next_sibling[child] != NO_BLOCK:
            return self.siblings.get(_PARENT.pack(parent) + content)
        return child if self.content_of(child) == content else None

    def insert_chain(
        self, blocks: Sequence[int], parent: int, contents: Sequence[bytes], namespace: Namespace
    ) -> list[bytes]:
        """Publishes blocks, each below the one before, or none if the first content is there already.

        Returns their digests. Before anything looks for them their records are to be written.
        """
        if not self._link(blocks[0], parent, contents[0], namespace):
            return []
        parents, namespaces, first_child = self.parent, self._namespace, self.first_child
        node, digest, is_opaque = parent, self.digest_of(parent), namespace.is_opaque
        size = self._records.content_bytes(is_opaque=is_opaque)
        sha256 = hashlib.sha256  # `block_digest` without a call a block
        published: list[bytes] = []
        for block, content in zip(blocks, contents, strict=True):
            parents[block] = node
            namespaces[block] = namespace
            digest = content if is_opaque else sha256(digest + content).digest()
            if published:
                first_child[node] = block  # of a node that is itself new: there are no siblings
            published.append(digest)
            node = block
        if max(map(len, contents)) > size:
            with_extras = [pair for pair in zip(blocks, contents, strict=True) if len(pair[1]) > size]
            self._extras |= {block: content[size:] for block, content in with_extras}
        namespace.block_count += len(published)
        self.block_count += len(published)
        return published

    def remove_all(self, blocks: Sequence[int]) -> list[tuple[Namespace, list[bytes]]]:
        """Takes blocks out, children before parents; returns the digests that are gone, by namespace in runs."""
        namespaces, parents, first_child = self._namespace, self.parent, self.first_child
        following, preceding = self.next_sibling, self._previous_sibling
        digests = self._records.digests(blocks)
        removed: list[tuple[Namespace, list[bytes]]] = []
        namespace: Namespace = None  # type: ignore[assignment]
        first = 0
        for place, block in enumerate(blocks):
            if namespaces[block] is not namespace:
                if place:
                    removed.append((namespace, digests[first:place]))
                    first = place
                namespace = namespaces[block]  # type: ignore[assignment]
            parent = parents[block]
            if following[block] != NO_BLOCK or preceding[block] != NO_BLOCK:
                self._unlink(block, parent, namespace)
            elif parent < FIRST_ROOT:
                first_child[parent] = NO_BLOCK
            else:
                namespace.first_child = NO_BLOCK
            parents[block] = NO_BLOCK
            namespaces[block] = None
            if self._extras:
                self._extras.pop(block, None)
        if blocks:
            removed.append((namespace, digests[first:]))
        for emptied, gone in removed:
            emptied.block_count -= len(gone)
            self._namespaces.forget_if_empty(emptied)
        self.block_count -= len(blocks)
        return removed

    def _link(self, block: int, parent: int, content: bytes, namespace: Namespace) -> bool:
        """Puts a block in front of its parent's children, unless one of these has its content."""
        sibling = namespace.first_child if parent >= FIRST_ROOT else self.first_child[parent]
        if sibling != NO_BLOCK:
            key_of = _PARENT.pack(parent)
            if self.next_sibling[sibling] == NO_BLOCK:
                other = self.content_of(sibling)
                if other == content:
                    return False
                self.siblings[key_of + other] = sibling
            if self.siblings.setdefault(key_of + content, block) != block:
                return False
            self.next_sibling[block] = sibling
            self._previous_sibling[sibling] = block
        if parent >= FIRST_ROOT:
            namespace.first_child = block
        else:
            self.first_child[parent] = block
        return True

    def _unlink(self, block: int, parent: int, namespace: Namespace) -> None:
        """Takes a block from among its siblings."""
        following, preceding = self.next_sibling[block], self._previous_sibling[block]
        known = self.siblings.pop(self._key(block))
        assert known == block  # its record is what it was
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
        left = self._first_child_of(parent)
        if self.next_sibling[left] == NO_BLOCK:
            del self.siblings[self._key(left)]

    def digest_of(self, node: int) -> bytes:
        """Returns the digest of a block in the tree, or of a namespace by its root."""
        return self._namespaces.of_root(node).digest if node >= FIRST_ROOT else self._records.digest(node)

    def namespace_of(self, block: int) -> Namespace:
        """Returns the namespace of a block in the tree."""
        namespace = self._namespace[block]
        assert namespace is not None
        return namespace

    def content_of(self, block: int) -> bytes:
        """Returns the content that a block in the tree was committed for."""
        content = self._records.content(block, is_opaque=self.namespace_of(block).is_opaque)
        return content + self._extras[block] if block in self._extras else content

    def keys(self, blocks: Iterable[int]) -> list[bytes]:
        """Returns what tells blocks in the tree from all others: the parent node as eight bytes, then the content."""
        return [self._key(block) for block in blocks]

    def children(self, node: int) -> Iterator[int]:
        """Yields the blocks right below a block or a namespace's root, the latest first."""
        child = self._first_child_of(node)
        while child != NO_BLOCK:
            yield child
            child = self.next_sibling[child]

    def child_but(self, block: int, others: Container[int]) -> int:
        """Returns a child of a block that is none of `others`, or NO_BLOCK."""
        return self._but(self.first_child[block], others)

    def sibling_but(self, block: int, others: Container[int]) -> int:
        """Returns one of the blocks that `children` yields after this one that is none of `others`, or NO_BLOCK."""
        return self._but(self.next_sibling[block], others)

    def copied_columns(self) -> tuple[list[int], list[int], bytes]:
        """Returns each block's first child and next sibling, and all digests, to be read while the tree changes."""
        return self.first_child[:], self.next_sibling[:], self._records.all_digests()

    def descend(self, node: int) -> Iterator[int]:
        """Yields every block below a node, parents before children. O(1) a block; nothing may change meanwhile."""
        pending = list(self.children(node))
        while pending:
            block = pending.pop()
            yield block
            pending.extend(self.children(block))

    def _key(self, block: int) -> bytes:
        return _PARENT.pack(self.parent[block]) + self.content_of(block)

    def _first_child_of(self, node: int) -> int:
        if node < FIRST_ROOT:
            return self.first_child[node]
        namespace = self._namespaces.at(node)
        return NO_BLOCK if namespace is None else namespace.first_child

    def _only_children(self, node: int, most: int) -> list[int]:
        """Returns the blocks below a node, each the only child of the one before: up to `most` of them."""
        first_child, next_sibling = self.first_child, self.next_sibling
        child = self._first_child_of(node)
        run: list[int] = []
        for _ in range(most):
            if child == NO_BLOCK or next_sibling[child] != NO_BLOCK:
                break
            run.append(child)
            child = first_child[child]
        return run

    def _common_extras(self, run: list[int], extras: Mapping[int, bytes], first: int) -> int:
        """Returns how many leading blocks of a run have these extra keys; the first of them is at `first`."""
        for place, block in enumerate(run):
            if extras.get(first + place, b"") != self._extras.get(block, b""):
                return place
        return len(run)

    def _but(self, child: int, others: Container[int]) -> int:
        while child != NO_BLOCK and child in others:
            child = self.next_sibling[child]
        return child


def extras_by_block(keys: Iterable[ExtraKey], block_tokens: int) -> dict[int, bytes]:
    """Encodes extra keys, in order of offset, as each block's part of its content."""
    parts: dict[int, list[bytes]] = {}
    for key in keys:
        block, offset = divmod(key.token_offset, block_tokens)
        parts.setdefault(block, []).append(encode_extra_key(offset, key.value))
    return {block: validate.block_extra(b"".join(encoded), block_tokens) for block, encoded in parts.items()}
