"""Retirement: what the namespaces of a version have cached is freed, now or when it is released.

[V1] A retired namespace has no cached block: whoever lets go of a block there frees it, children first
     (`State.free_retired`). A retirement that is under way has freed what lies behind its cursor; a block that is let
     go with a cached one behind it lies before the cursor, as does that one, and waits for it.
[V2] A retired namespace is an ordinary one again once somebody uses it anew, by the parts of its name. Whoever is in it
     already, or comes back to it after a restart, goes on in it and changes nothing.
[V3] The pins of a version end with it.
[V4] That a namespace is retired is in the ledger before the first block is freed for it, and outlives the process.
[V5] What is freed so is no eviction: it is not counted as one, nor taken for a sign of too little room. Who misses it
     later is told that an administrator has evicted it ([Y3]).
"""

from kvharbor.pool.namespaces import NO_BLOCK, Namespace
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps
from kvharbor.pool.tree import PrefixTree
from kvharbor.pool.warm import end_pin


def retire_version(state: State, tenant: str, version: str) -> Steps[None]:
    """Retires the namespaces that a version has now, whatever their adapter, salt and scheme."""
    doomed = state.namespaces.of_version(tenant, version)
    for count, namespace in enumerate(doomed, start=1):
        state.namespaces.retire(namespace)
        namespace.sweep_count += 1
        if not count % state.slice_blocks:
            yield
    for pin in [pin for pin in state.pins.values() if pin.namespace.is_retired]:
        # One may have ended or been moved while an earlier one was let go.
        if pin.namespace.is_retired and state.pins.get((pin.tenant, pin.name)) is pin:
            yield from end_pin(state, pin, expired=False)
            yield
    yield from _sweep(state, doomed)


def _sweep(state: State, doomed: list[Namespace]) -> Steps[None]:
    """Frees what nobody holds in these namespaces, a slice of visited blocks at a time, as long as they are retired."""
    seen: list[int] = []
    count = 0
    for namespace in doomed:
        cursor = _Cursor(state.tree, state.blocks.generation, namespace)
        while namespace.is_retired and cursor.advance(seen):
            count += 1
            if count >= state.slice_blocks:
                state.free_retired(seen)
                seen.clear()
                count = 0
                yield
                cursor.look()
        namespace.sweep_count -= 1
        count += 1
    state.free_retired(seen)


class _Cursor:
    """A place in a namespace's tree, on the way through all of it, children before parents, one block a step.

    What it points at is still to come, so whoever moves it may take out what it has passed. Blocks that are published
    meanwhile come before their siblings: it does not see those of a parent that it has gone below.
    """

    def __init__(self, tree: PrefixTree, generation: list[int], namespace: Namespace) -> None:
        self._tree, self._generation, self._namespace = tree, generation, namespace
        self._block, self._age, self._goes_down = NO_BLOCK, 0, True
        self._begin()

    def look(self) -> None:
        """Begins anew if the block at the cursor has gone meanwhile, with all behind it."""
        if self._block != NO_BLOCK and self._generation[self._block] != self._age:
            self._begin()

    def advance(self, seen: list[int]) -> bool:
        """Goes one step on, down or past a block, which is appended to `seen`; False at the end."""
        block, tree = self._block, self._tree
        if block == NO_BLOCK:
            return False
        if self._goes_down and (child := tree.child_but(block, ())) != NO_BLOCK:
            self._point_at(child)
            return True
        seen.append(block)
        sibling = tree.sibling_but(block, ())
        if sibling != NO_BLOCK:
            self._point_at(sibling)
            self._goes_down = True
        elif (parent := tree.parent[block]) == self._namespace.root:
            self._block = NO_BLOCK
        else:
            self._point_at(parent)
            self._goes_down = False
        return True

    def _begin(self) -> None:
        self._point_at(self._namespace.first_child)
        self._goes_down = True

    def _point_at(self, block: int) -> None:
        self._block = block
        if block != NO_BLOCK:
            self._age = self._generation[block]
