"""A pool whose process is replaced by the next one: short forms for tests that tell a story."""

from array import array
from collections.abc import Iterable, Mapping

from calls import encode

from kvharbor.pool import ExtraKey, Held, Ledger, Pool, PoolConfig, Resumed, SequenceView, ledger_bytes
from kvharbor.pool.steps import finish

SESSIONS = {1: "t", 2: "t", 3: "u"}


class Restarts:
    """One ledger and the process that has it now. Sessions 1 and 2 are of tenant "t", session 3 of tenant "u"."""

    def __init__(self, block_count: int, slice_blocks: int = 512, **config: float | str) -> None:
        self.config = PoolConfig(block_count, 4, slice_blocks=slice_blocks, **config)  # type: ignore[arg-type]
        self.buffer = bytearray(ledger_bytes(self.config))
        self.pool = Pool(self.config, Ledger.create(self.config, self.buffer))
        self.restart_count = 0
        for session, tenant in SESSIONS.items():
            self.pool.open_session(session, tenant)

    def restart(self, sessions: Mapping[int, str] = SESSIONS) -> Pool:
        """Kills the process; the next one knows these sessions."""
        self.restart_count += 1
        ledger = Ledger.open(self.config, self.buffer)
        self.pool = Pool.recovered(
            self.config,
            ledger,
            sessions,
            first_number=self.restart_count << 40 | 1,
            first_revision=self.restart_count << 40,
        )
        self.pool.check_invariants()
        return self.pool

    def resume(self, session: int, held: Held) -> Resumed:
        resumed = finish(self.pool.resume(session, held))
        self.pool.check_invariants()
        return resumed

    def finish_resume(self, *sessions: int) -> list[int]:
        freed = [finish(self.pool.finish_resume(session)) for session in sessions]
        self.pool.check_invariants()
        return freed


def held(
    view: SequenceView,
    tokens: list[int],
    *,
    committed: int = 0,
    computed: int | None = None,
    extra_keys: Iterable[ExtraKey] = (),
    pin_name: str = "",
) -> Held:
    """A sequence as its session has it: `tokens` are all that it knows, `committed` of them by the replies."""
    return Held(
        number=view.number,
        block_ids=array("I", view.block_ids),
        generations=array("Q", view.generations),
        cached_tokens=view.cached_tokens,
        computed_tokens=view.computed_tokens if computed is None else computed,
        token_count=len(tokens),
        committed_tokens=committed,
        tail_token_ids=encode(tokens[committed:]),
        extra_keys=tuple(key for key in extra_keys if key.token_offset >= committed),
        request_id=view.request_id,
        group=view.group,
        pin_name=pin_name,
    )
