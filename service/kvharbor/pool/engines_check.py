"""The rules of who reuses what from whom [U1] to [U3], as far as what is there tells them."""

from collections import Counter
from typing import NoReturn

from kvharbor.pool import engines as rules
from kvharbor.pool.blocks import COMMITTED
from kvharbor.pool.engines import EARLIER, OTHERS
from kvharbor.pool.errors import InvariantViolation
from kvharbor.pool.namespaces import FIRST_ROOT
from kvharbor.pool.state import State


def check_engines(state: State) -> None:
    """Raises InvariantViolation for the first thing found wrong."""
    engines, blocks, counters = state.engines, state.blocks, state.counters
    numbers = [*engines.numbers.values()]
    if (
        len(numbers) > rules.MOST
        or {EARLIER, OTHERS, *numbers} != engines.rows.keys()
        or len(numbers) + 2 != len(engines.rows)
    ):
        _fail("U3", f"{len(numbers)} engines with numbers, {len(engines.rows)} rows")
    for owner in state.sessions.values():
        if owner.engine not in engines.rows:
            _fail("U3", f"session {owner.session} is of engine {owner.engine}, which is none")
    published = Counter(engines.author[block] for block, kind in enumerate(blocks.state) if kind == COMMITTED)
    counted = engines.committed(blocks.state)
    if {number: count for number, count in counted.items() if count} != published:
        _fail("U1", f"engines count {counted} published blocks, the index has {dict(published)}")
    prompts = sum(row.prompt_token_count for row in engines.rows.values())
    reused = sum(sum(row.reused.values()) for row in engines.rows.values()) * state.block_tokens
    if (prompts, reused) != (counters.prompt_token_count, counters.reused_token_count):
        _fail("U2", f"engines have {reused} of {prompts} tokens reused, the pool {counters}")
    _check_runs(state)
    if unknown := {author for row in engines.rows.values() for author in row.reused} - engines.rows.keys():
        _fail("U3", f"engines reuse of {unknown}, which are none")


def _check_runs(state: State) -> None:
    """A block that counts others in a row is behind the last of them; what has no author behind such or a root."""
    engines, parents = state.engines, state.tree.parent
    for block, kind in enumerate(state.blocks.state):
        if kind != COMMITTED:
            continue
        run, parent = (engines.author[block], engines.run_length[block]), parents[block]
        before = (engines.author[parent], engines.run_length[parent]) if parent < FIRST_ROOT else None
        if run[1] > 1:
            fits = before == (run[0], run[1] - 1)
        else:
            fits = run[1] == 1 or (run == (EARLIER, 0) and before in (None, run))
        if not fits:
            _fail("U1", f"block {block} ends a row {run}, its parent {before}")


def _fail(rule: str, detail: str) -> NoReturn:
    raise InvariantViolation(rule=rule, detail=detail)
