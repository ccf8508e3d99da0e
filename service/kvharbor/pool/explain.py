"""Finds out why a match ended where it did: one reason a request, for the first block that was not there. O(1).

What is told is the caller's own tenant's ([Y2]).
"""

from typing import Final, NamedTuple

from kvharbor.pool.digest import block_digest
from kvharbor.pool.evicted import ADMINISTRATOR
from kvharbor.pool.history import History
from kvharbor.pool.misses import Miss, MissKind
from kvharbor.pool.namespaces import Namespace, NamespaceKey
from kvharbor.pool.sequence import Sequence
from kvharbor.pool.state import State

_OTHER_NAMESPACES: Final = 32
"""So many namespaces of the tenant are looked into, those made last."""
_PARTS: Final = ("version", "adapter", "salt")


class Place(NamedTuple):
    """Where a match has ended: behind so many tokens in a namespace, at a node of the tree with this digest.

    `node` is None if the namespace is not in use, or if the node has left the tree meanwhile.
    """

    namespace: NamespaceKey
    node: int | None
    digest: bytes
    present_tokens: int


def end_of_match(
    state: State, history: History, sequence: Sequence, token_ids: bytes, matched: int, reusable_blocks: int
) -> Miss | None:
    """Tells why a new sequence has not reused more of its prompt, and counts it; `matched` blocks were there."""
    present_tokens = matched * state.block_tokens
    if matched > len(sequence.table):
        miss = unused(state, history, present_tokens)
    elif matched == reusable_blocks:
        return None
    else:
        node = sequence.chain_node
        place = Place(sequence.namespace.key, node, state.tree.digest_of(node), present_tokens)
        content = state.tree.content(token_ids, 4 * present_tokens, sequence.extras.get(matched))
        miss = absent(state, history, place, content)
    history.traffic.misses[miss.kind] += 1
    return miss


def absent(state: State, history: History, place: Place, content: bytes) -> Miss:
    """Tells why no block holds `content` behind a place."""
    key, present_tokens = place.namespace, place.present_tokens
    remembered_s = state.now - history.evicted.complete_since
    if place.node is not None and state.writers.is_computed(place.node, content):
        return Miss(MissKind.NOT_COMMITTED, present_tokens, remembered_s)
    eviction = history.evicted.of(block_digest(place.digest, content))
    if eviction is not None:
        is_told = eviction.session == ADMINISTRATOR or eviction.tenant == key[0]
        evicted_by = eviction.session if is_told else None
        return Miss(MissKind.EVICTED, present_tokens, remembered_s, state.now - eviction.at, evicted_by)
    if not present_tokens:
        other = _beginning_with(state, key, content)
        if other is not None:
            differ = tuple(
                [name for name, one, two in zip(_PARTS, key[1:4], other.key[1:4], strict=True) if one != two]
            )
            return Miss(MissKind.OTHER_NAMESPACE, 0, remembered_s, differ=differ)
    return Miss(MissKind.NEVER_SEEN, present_tokens, remembered_s)


def unused(state: State, history: History, present_tokens: int) -> Miss:
    """Tells that what is there is too short to be used."""
    return Miss(MissKind.BELOW_THRESHOLD, present_tokens, state.now - history.evicted.complete_since)


def _beginning_with(state: State, key: NamespaceKey, content: bytes) -> Namespace | None:
    """Returns another exact namespace of the tenant that begins with this block."""
    for other in state.namespaces.latest_of(key[0], _OTHER_NAMESPACES):
        if other.key != key and not other.is_opaque and state.tree.find(other.root, content) is not None:
            return other
    return None
