"""A PrefixTree on its own, over the records of a ledger in plain memory."""

from collections.abc import Sequence

from kvharbor.pool import Ledger, PoolConfig, ledger_bytes
from kvharbor.pool.namespaces import Namespace, Namespaces
from kvharbor.pool.tree import PrefixTree


def new_tree(id_count: int = 16, block_tokens: int = 1) -> tuple[PrefixTree, Namespaces, Ledger]:
    """Returns an empty tree, its namespaces, and the ledger whose records it reads."""
    config = PoolConfig(id_count, block_tokens)
    ledger = Ledger.create(config, bytearray(ledger_bytes(config)))
    namespaces = Namespaces(b"identity", ledger.cells)
    return PrefixTree(id_count, ledger.records, namespaces), namespaces, ledger


def publish(
    tree: PrefixTree, blocks: Sequence[int], parent: int, contents: Sequence[bytes], space: Namespace
) -> list[bytes]:
    """Publishes a chain as a commit does: into the tree, then into the records."""
    digests = tree.insert_chain(blocks, parent, contents, space)
    if digests:
        generation = [1] * len(tree.parent)
        tree._records.write(list(blocks), parent, contents, digests, generation, 1, is_opaque=space.is_opaque)
    return digests
