"""Warm pins: prefixes that a tenant keeps from eviction, by name.

A pin is for (tenant, name), not for a session, and counts each distinct block once against the budget; blocks
still to be computed count from the reply on and are pinned at their commit.
"""

import itertools

from kvharbor.pool import pins, tables, validate
from kvharbor.pool.allocation import claim_run, hold_match, refuse_too_large
from kvharbor.pool.errors import InvalidField, PinNotFound, RequestIdReused, WarmBudgetExceeded
from kvharbor.pool.release import announce_end, take_down
from kvharbor.pool.results import PinView, Prompt, Warmed
from kvharbor.pool.sequence import Pin, Sequence
from kvharbor.pool.state import State
from kvharbor.pool.stats import PinStats
from kvharbor.pool.steps import Steps
from kvharbor.pool.tree import extras_by_block


def warmup(
    state: State,
    tenant: str,
    session: int | None,
    prompt: Prompt,
    name: str,
    *,
    expires_at: float | None,
    present_only: bool,
    room_for_all: bool,
    request_id: str,
) -> Steps[Warmed]:
    """Pins what is there of the prompt's whole blocks; gives a session a sequence to fill the rest."""
    token_count = validate.prompt(prompt)
    validate.text("name", name)
    validate.text("request_id", request_id)
    block_tokens = state.block_tokens
    block_count = token_count // block_tokens
    if not name:
        raise InvalidField(field="name", value="empty", limit="1 to 128 bytes", remedy="name the pin")
    if not block_count:
        raise InvalidField(
            field="token_ids",
            value=f"{token_count} tokens",
            limit=f"at least one block of {block_tokens} tokens",
            remedy="whole blocks are pinned",
        )
    refuse_too_large(state, block_count)
    fingerprint = pins.fingerprint(prompt)
    old = state.pins.get((tenant, name))
    if old is not None and old.sequence is not None and old.fingerprint == fingerprint:
        old.expires_at = expires_at
        pins.record_deadline(state, old)
        mine = old.sequence if old.sequence.session == session else None
        return Warmed(
            len(old.blocks) * block_tokens,
            (block_count - len(old.blocks)) * block_tokens,
            None if mine is None else state.view(mine),
        )
    if session is not None and request_id and request_id in state.sessions[session].by_request:
        raise RequestIdReused(request_id=request_id, differs="name")

    tokens = prompt.token_ids[: 4 * block_tokens * block_count]
    extras = extras_by_block(prompt.extra_keys, block_tokens)
    namespace = state.namespaces.use(tenant, prompt.version, prompt.adapter, prompt.salt)
    sequence = Sequence(
        session=session or 0,
        number=0,
        namespace=namespace,
        chain_node=namespace.root,
        request_id=request_id,
        group="",
        fingerprint={},
        table=[],
        tail=bytearray(),
        token_count=block_count * block_tokens,
        cached_tokens=0,
        computed_tokens=0,
        committed_blocks=0,
        extras=extras,
    )
    state.in_flight.add(sequence)
    try:
        run = yield from hold_match(state, sequence, tokens, block_count)
        present = len(sequence.table) + len(run)
        missing = block_count - present
        promised = 0
        if session is not None and not present_only and missing:
            tables.refuse_if_full(state, state.sessions[session], block_count)
            promised = missing
        # Looked up again: between two slices the pin may have ended or been moved.
        old = state.pins.get((tenant, name))
        _check_budget(state, old, sequence.table + run, missing if room_for_all else promised)
        claim_run(state, sequence, run, promised)
    except BaseException:
        take_down(state, sequence)
        raise

    pin = Pin(tenant, name, namespace, fingerprint, present + promised, list(sequence.table), promised, expires_at)
    state.blocks.pin(pin.blocks)
    state.promised += promised
    if pin.block_count:
        namespace.user_count += 1
        pins.record(state, pin)
    if old is not None:
        _detach_pin(state, old)
    if pin.block_count:
        state.pins[tenant, name] = pin
        if namespace.is_retired:
            state.namespaces.reinstate(namespace)  # retired while it was matched: this is a later use [V2]
    pinned_tokens = present * block_tokens
    missing_tokens = missing * block_tokens
    view = None
    if promised:
        sequence.pin, pin.sequence = pin, sequence
        sequence.drop_published_extras()
        sequence.tail = bytearray(tokens[4 * pinned_tokens :])
        sequence.cached_tokens = sequence.computed_tokens = pinned_tokens
        state.writers.place(sequence, state.now)
        yield from state.fill(sequence.table, promised, sequence.session, tenant)
        owner = state.sessions[sequence.session]
        sequence.number = owner.take_number()
        owner.add(sequence)
        state.in_flight.discard(sequence)
        state.tenant(tenant).sequence_count += 1
        view = state.view(sequence)
    else:
        take_down(state, sequence)
    if old is not None:
        yield from _unpin(state, old)
        if pin.block_count:
            state.namespaces.disuse(old.namespace)
        else:
            announce_end(state, old, expired=False)  # moved to where nothing is
    return Warmed(pinned_tokens, missing_tokens, view)


def pin_view(state: State, tenant: str, name: str) -> PinView | None:
    """Tells how far a pin is; None if there is none."""
    pin = state.pins.get((tenant, name))
    if pin is None:
        return None
    missing = pin.block_count - len(pin.blocks)
    return PinView(len(pin.blocks) * state.block_tokens, missing * state.block_tokens, pin.sequence is not None)


def pin_stats(state: State, tenant: str | None, most: int) -> tuple[PinStats, ...]:
    """Tells of a tenant's pins, or with None of all: the oldest first, at most so many."""
    of_it = (pin for pin in state.pins.values() if tenant in (None, pin.tenant))
    return tuple(
        PinStats(
            tenant=pin.tenant,
            name=pin.name,
            pinned_tokens=len(pin.blocks) * state.block_tokens,
            missing_tokens=(pin.block_count - len(pin.blocks)) * state.block_tokens,
            filling=pin.sequence is not None,
            expires_at=pin.expires_at,
        )
        for pin in itertools.islice(of_it, most)
    )


def unwarm(state: State, tenant: str, name: str) -> Steps[None]:
    """Ends a pin; a sequence that was filling it goes on as any other."""
    pin = state.pins.get((tenant, name))
    if pin is None:
        raise PinNotFound(name=name)
    yield from end_pin(state, pin, expired=False)


def end_pin(state: State, pin: Pin, *, expired: bool) -> Steps[None]:
    """Ends a pin whatever it holds and whoever fills it."""
    _detach_pin(state, pin)
    yield from _unpin(state, pin)
    announce_end(state, pin, expired=expired)


def expire(state: State, now: float) -> Steps[None]:
    """Ends the pins whose time is over."""
    due = [pin for pin in state.pins.values() if pin.expires_at is not None and pin.expires_at <= now]
    for pin in due:
        still_due = pin.expires_at is not None and pin.expires_at <= now
        if state.pins.get((pin.tenant, pin.name)) is not pin or not still_due:
            continue  # moved, ended or renewed while an earlier one was let go
        yield from end_pin(state, pin, expired=True)


def _check_budget(state: State, old: Pin | None, present: list[int], missing: int) -> None:
    pins = state.blocks.pins
    taken = state.blocks.pinned_count + state.promised
    needed = missing + sum(1 for block in present if not pins[block])
    if old is not None:
        # Moving a pin frees what only the old place had.
        kept = set(present)
        taken -= old.promised + sum(1 for block in old.blocks if pins[block] == 1 and block not in kept)
    elif len(state.pins) >= state.warm_budget:
        # A name costs memory too, and any number may have the same blocks: each counts as one block at least.
        taken, needed = len(state.pins), 1
    if taken + needed > state.warm_budget:
        raise WarmBudgetExceeded(
            needed_block_count=needed, warm_block_count=taken, budget_block_count=state.warm_budget
        )


def _detach_pin(state: State, pin: Pin) -> None:
    """Frees the pin's name and cuts it from its sequence; its blocks are still pinned."""
    state.pins.pop((pin.tenant, pin.name), None)
    pins.erase(state, pin)
    state.ending_pins.add(pin)
    state.promised -= pin.promised
    pin.promised = 0
    if pin.sequence is not None:
        pin.sequence.pin = None
        pin.sequence = None


def _unpin(state: State, pin: Pin) -> Steps[None]:
    while pin.blocks:
        part = pin.blocks[-state.slice_blocks :]
        del pin.blocks[-state.slice_blocks :]
        part.reverse()
        state.blocks.unpin(part)
        if pin.namespace.is_retired:
            state.free_retired(part)
        state.revision += 1
        if pin.blocks:
            yield
    state.ending_pins.discard(pin)
