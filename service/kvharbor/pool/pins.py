"""Warm pins in the ledger: a pin's name, what was asked for, its place and size, its tail and the end of its time.

[L10] The tail of a pin is one word, stored after the words of the blocks up to it say COMMITTED and held; the cell is
freed before the first of them is let go. So whatever the cell names is there and held.
"""

import hashlib
import math
import struct
from typing import Final

from kvharbor.pool.cells import NO_CELL, CellKind, Entry
from kvharbor.pool.digest import encode_extra_key, join_fields, split_fields
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.results import Prompt
from kvharbor.pool.sequence import Pin, Sequence
from kvharbor.pool.state import State

# A tail is a block and its generation's low bits, which only guard against a scribbled ledger.
_AGE_BITS: Final = 33
_AGE_MASK: Final = (1 << _AGE_BITS) - 1
_TAIL, _DEADLINE = 0, 1


def fingerprint(prompt: Prompt) -> bytes:
    """Returns what tells a repeated Warmup from one that moves its pin, in a later process too."""
    keys = b"".join(encode_extra_key(key.token_offset, key.value) for key in prompt.extra_keys)
    names = (prompt.version.encode(), prompt.adapter.encode(), prompt.salt)
    return hashlib.sha256(join_fields(*names, keys) + prompt.token_ids).digest()


def record(state: State, pin: Pin) -> None:
    """Puts a pin into the ledger, if there is room."""
    _, version, adapter, salt, _ = pin.namespace.key
    fields = (pin.tenant.encode(), pin.name.encode(), version.encode(), adapter.encode(), salt, pin.fingerprint)
    value = pin.block_count.to_bytes(4, "little") + join_fields(*fields)
    pin.cell = state.ledger.cells.write(CellKind.PIN, value, (_tail(state, pin), _deadline(pin.expires_at)))


def record_tail(state: State, pin: Pin) -> None:
    """Tells the ledger that a pin holds more blocks."""
    if pin.cell != NO_CELL:
        state.ledger.cells.set_word(pin.cell, _TAIL, _tail(state, pin))


def record_deadline(state: State, pin: Pin) -> None:
    """Tells the ledger that a pin has been renewed."""
    if pin.cell != NO_CELL:
        state.ledger.cells.set_word(pin.cell, _DEADLINE, _deadline(pin.expires_at))


def erase(state: State, pin: Pin) -> None:
    """Takes a pin out of the ledger: its blocks are about to be let go."""
    if pin.cell != NO_CELL:
        state.ledger.cells.free(pin.cell)
        pin.cell = NO_CELL


def link(state: State, sequence: Sequence, name: str) -> None:
    """Lets a resumed sequence go on filling a pin, if it is the one that did and the budget has room."""
    pin = state.pins.get((sequence.namespace.tenant, name))
    if pin is None or pin.sequence is not None or pin.namespace is not sequence.namespace:
        return
    blocks, committed = state.blocks, sequence.committed_blocks
    chain = [blocks.canonical.get(block, block) for block in sequence.table[: min(committed, pin.block_count)]]
    behind = chain[len(pin.blocks) :]
    missing = pin.block_count - len(chain)
    needed = missing + sum(1 for block in behind if not blocks.pins[block])
    if (
        chain[: len(pin.blocks)] != pin.blocks
        or len(sequence.table) < pin.block_count
        or blocks.pinned_count + state.promised + needed > state.warm_budget
    ):
        return
    blocks.pin(behind)
    pin.blocks += behind
    record_tail(state, pin)
    pin.promised = missing
    state.promised += missing
    if missing:
        pin.sequence, sequence.pin = sequence, pin


def restore(state: State, entry: Entry) -> Pin | None:
    """Returns the pin of an entry, with the blocks that are still there, none of them pinned yet.

    It uses its namespace. None if another entry has the name: a pin was being moved, and either place is right. None
    if its version was being retired [V3].
    """
    tenant, name, version, adapter, salt, *asked = split_fields(entry.value[4:])
    key = (tenant.decode(), name.decode())
    if key in state.pins:
        return None
    namespace = state.namespaces.take_up(key[0], version.decode(), adapter.decode(), salt)
    if namespace.is_retired:
        state.namespaces.disuse(namespace)
        return None
    block_count = int.from_bytes(entry.value[:4], "little")
    chain = _chain(state, entry.words[_TAIL])
    is_here = chain and state.tree.parent[chain[0]] == namespace.root and len(chain) <= block_count
    deadline: float = struct.unpack("<d", entry.words[_DEADLINE].to_bytes(8, "little"))[0]
    return Pin(
        tenant=key[0],
        name=key[1],
        namespace=namespace,
        # An older version has not recorded it: there every Warmup moves the pin.
        fingerprint=asked[0] if asked else b"",
        block_count=block_count,
        blocks=chain if is_here else [],
        promised=0,
        expires_at=None if math.isinf(deadline) else deadline,
        cell=entry.cell,
    )


def _chain(state: State, tail: int) -> list[int]:
    """Returns the blocks from the root to a tail; none if the tail is not there."""
    block, age = tail >> _AGE_BITS, tail & _AGE_MASK
    tree, generation = state.tree, state.blocks.generation
    if not tail or not tree.contains(block) or generation[block] & _AGE_MASK != age:
        return []
    chain = []
    while block < FIRST_ROOT:
        chain.append(block)
        block = tree.parent[block]
    chain.reverse()
    return chain


def _tail(state: State, pin: Pin) -> int:
    if not pin.blocks:
        return 0
    return pin.blocks[-1] << _AGE_BITS | state.blocks.generation[pin.blocks[-1]] & _AGE_MASK


def _deadline(expires_at: float | None) -> int:
    return int.from_bytes(struct.pack("<d", math.inf if expires_at is None else expires_at), "little")
