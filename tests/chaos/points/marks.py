"""The marked points: a function, before or after it, or a column of memory, between two stores.

The n-th pass of a mark lies in the middle of a loop.
"""

from dataclasses import dataclass
from enum import Enum


class When(Enum):
    """Where in a call the process dies."""

    BEFORE = "before"
    AFTER = "after"
    STORES = "stores"  # the function is a constructor; before, in the middle of and after a store into its columns


@dataclass(frozen=True, slots=True)
class Mark:
    """One place. `columns` are attributes of the object; `at_return`: only a process that takes over comes there."""

    module: str
    function: str
    when: When
    columns: tuple[str, ...] = ()
    at_return: bool = False


_POOL = "kvharbor.pool"


def _at_return(module: str, function: str, when: When, columns: tuple[str, ...] = ()) -> Mark:
    return Mark(f"{_POOL}.{module}", function, when, columns, at_return=True)


MARKS = {
    "commit: in the tree, not yet in its state": Mark(f"{_POOL}.tree", "PrefixTree.insert_chain", When.AFTER),
    "commit: published": Mark(f"{_POOL}.blocks", "Blocks.commit", When.AFTER),
    "commit: before a shadow": Mark(f"{_POOL}.blocks", "Blocks.shadow", When.BEFORE),
    "commit: after a shadow": Mark(f"{_POOL}.blocks", "Blocks.shadow", When.AFTER),
    "eviction: out of the order, still in the tree": Mark(f"{_POOL}.state", "State.forget", When.BEFORE),
    "eviction: out of the tree, not yet free": Mark(f"{_POOL}.tree", "PrefixTree.remove_all", When.AFTER),
    "eviction: done, its room not yet taken": Mark(f"{_POOL}.state", "State.forget", When.AFTER),
    "ledger: a state word": Mark(f"{_POOL}.ledger", "Ledger.__init__", When.STORES, ("words",)),
    "ledger: a stamp": Mark(f"{_POOL}.ledger", "Ledger.__init__", When.STORES, ("stamps",)),
    "ledger: a record": Mark(
        f"{_POOL}.records",
        "Records.__init__",
        When.STORES,
        ("ages", "parents", "parent_ages", "_digests", "_contents", "_overflows"),
    ),
    "ledger: a cell": Mark(f"{_POOL}.cells", "Cells.__init__", When.STORES, ("_bytes", "_halves", "_words")),
    "fork: reserved, nothing copied": Mark("kvharbor.gpumem.copies", "copy_blocks", When.BEFORE),
    "fork: in the middle of the copy": Mark("kvharbor.gpumem.copies", "_pages", When.BEFORE),
    "fork: copied, not yet published": Mark("kvharbor.gpumem.copies", "copy_blocks", When.AFTER),
    "fork: published, not yet answered": Mark(f"{_POOL}.fork", "finish_fork", When.AFTER),
    "allocation: blocks taken": Mark(f"{_POOL}.blocks", "Blocks.reserve", When.AFTER),
    "hand-off: given or taken": Mark(f"{_POOL}.handoff", "_end", When.AFTER),
    "release: before blocks are free": Mark(f"{_POOL}.blocks", "Blocks.release_private", When.BEFORE),
    "release: holds given back": Mark(f"{_POOL}.blocks", "Blocks.unhold", When.AFTER),
    "commit of own blocks: published, not yet the session's": Mark(
        f"{_POOL}.block_publication", "_take_over", When.BEFORE
    ),
    "release of own blocks: before it": Mark(f"{_POOL}.block_release", "give_back", When.BEFORE),
    "release of own blocks: after it": Mark(f"{_POOL}.block_release", "give_back", When.AFTER),
    "invalidation: before blocks are the session's again": Mark(f"{_POOL}.blocks", "Blocks.withdraw", When.BEFORE),
    "invalidation: withdrawn, still in the tree": Mark(f"{_POOL}.blocks", "Blocks.withdraw", When.AFTER),
    "retirement: noted, nothing freed": Mark(f"{_POOL}.namespaces", "Namespaces.retire", When.AFTER),
    "retirement: before a slice": Mark(f"{_POOL}.state", "State.free_retired", When.BEFORE),
    "recovery: namespaces restored": _at_return("recovery", "_restore_namespaces", When.AFTER),
    "recovery: committed blocks restored": _at_return("recovery", "_restore_committed", When.AFTER),
    "recovery: a pin": _at_return("recovery", "_restore_pin", When.AFTER),
    "recovery: done, nobody resumed": _at_return("recovery", "recover", When.AFTER),
    "recovery: a state word": _at_return("ledger", "Ledger.__init__", When.STORES, ("words",)),
    "recovery: a cell": _at_return("cells", "Cells.__init__", When.STORES, ("_bytes", "_halves", "_words")),
    "resume: a sequence, checked": _at_return("resume", "_check_fields", When.AFTER),
    "resume: a sequence, before its own blocks": _at_return("resume", "_own_reserved", When.BEFORE),
    "resume: a sequence, with its own blocks": _at_return("resume", "_own_reserved", When.AFTER),
    "resume: a block of its own, taken up": _at_return("block_resume", "_take_up", When.AFTER),
    "resume: a committed block, held": _at_return("block_resume", "_hold", When.AFTER),
    "resume: all sequences named": _at_return("resume", "finish_resume", When.BEFORE),
    "resume: a session settled": _at_return("lifecycle", "settle", When.BEFORE),
}
"""By name, in a fixed order."""
