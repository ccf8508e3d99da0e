"""What callers give to the pool and get from it: frozen values, safe to keep."""

from array import array
from dataclasses import dataclass

from kvharbor.pool.block_runs import BlockRun
from kvharbor.pool.digest import ExtraKey
from kvharbor.pool.hints import NO_HINTS, Hints
from kvharbor.pool.misses import Miss


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """A pool's shape and rules, fixed for its life.

    `block_count` usable blocks have the ids from `scratch_blocks` on; the ids below are never handed out [P6].
    `identity` is what `digest.pool_identity` made of the layout. A match shorter than `min_reuse_tokens` is
    ignored. Warm pins may hold `warm_budget_ratio` of the usable blocks. One slice touches about `slice_blocks`
    blocks: at one to two microseconds a block the default stays near a millisecond, below what a small request
    notices, and spreads the cost of yielding over many blocks. `policy` is one of `policies.POLICIES`. With
    `history` the pool tells why matches end and how blocks are used.
    """

    block_count: int
    block_tokens: int
    scratch_blocks: int = 0
    identity: bytes = b""
    min_reuse_tokens: int = 0
    warm_budget_ratio: float = 0.25
    slice_blocks: int = 512
    policy: str = "lru"
    history: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, as little-endian uint32, and the parts of their namespace that the caller chooses.

    `hints` are about the blocks that the request publishes, those of the prompt and of what is generated.
    """

    token_ids: bytes
    extra_keys: tuple[ExtraKey, ...] = ()
    version: str = ""
    adapter: str = ""
    salt: bytes = b""
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class Pending:
    """Tokens of a prompt, behind those that are cached, that another session is computing [W2].

    `session` is 0 while the sequence that does is handed off; it has committed nothing for `idle_s`.
    """

    token_count: int
    session: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A sequence as it stands. Cursors: cached <= computed <= token_count <= capacity.

    `pending` is of the moment of its Allocate, and only in the answer to that.
    `miss` tells why its Allocate has not reused more; None if nothing more was to be had, it began otherwise, or the
    pool has no history.
    """

    session: int
    number: int
    block_ids: "array[int]"
    generations: "array[int]"
    cached_tokens: int
    computed_tokens: int
    token_count: int
    capacity_tokens: int
    request_id: str
    group: str
    miss: Miss | None = None
    pending: Pending | None = None


@dataclass(frozen=True, slots=True)
class Extension:
    """Blocks appended to a table, and the room after that."""

    block_ids: "array[int]"
    generations: "array[int]"
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Commit:
    """KV of the first `computed_tokens` tokens is written and visible; `new_token_ids` follow the known tokens.

    `written` names (block ids, generations) of the blocks that hold tokens [computed before, computed now); given,
    it must be right. `switched` lists positions whose shadow the caller has replaced and touches no more.
    `known_token_count` is the token count before `new_token_ids` as the caller knows it; given, the commit can be
    repeated. `appended` are leased blocks to append to the table before anything else; those that are in it already
    are skipped.
    """

    computed_tokens: int
    new_token_ids: bytes = b""
    extra_keys: tuple[ExtraKey, ...] = ()
    written: "tuple[array[int], array[int]] | None" = None
    switched: tuple[int, ...] = ()
    known_token_count: int | None = None
    appended: BlockRun | None = None


@dataclass(frozen=True, slots=True)
class Shadow:
    """The caller's own block at `position`, of its table or chain, has a canonical twin, held from now on [P7]."""

    position: int
    block_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit published."""

    committed_tokens: int
    shadows: tuple[Shadow, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """Children under way: the caller copies whole pages, then calls `finish_fork` or `abort_fork`."""

    session: int
    source: int
    children: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The token that owns the sequence now, and when it expires by the caller's monotonic clock."""

    token: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class Adopted:
    """A sequence in its new session, with all that a `Held` of it needs.

    `tail_token_ids` and `extra_keys` are those from `committed_tokens` on.
    """

    view: SequenceView
    version: str
    adapter: str
    salt: bytes
    committed_tokens: int
    tail_token_ids: bytes
    extra_keys: tuple[ExtraKey, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence as its session has it, for `resume`: cursors include commits that it could not send.

    `committed_tokens` are those that commits have reported as committed, whole blocks. `tail_token_ids` and
    `extra_keys` are those from there to `token_count`.
    """

    number: int
    block_ids: "array[int]"
    generations: "array[int]"
    cached_tokens: int
    computed_tokens: int
    token_count: int
    committed_tokens: int
    tail_token_ids: bytes
    extra_keys: tuple[ExtraKey, ...] = ()
    version: str = ""
    adapter: str = ""
    salt: bytes = b""
    request_id: str = ""
    group: str = ""
    pin_name: str = ""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A resumed sequence as it stands, and every shadow in its table."""

    view: SequenceView
    committed_tokens: int
    shadows: tuple[Shadow, ...]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a recovery found. Missed blocks had been committed; torn ones are those of a damaged record."""

    committed_block_count: int
    private_block_count: int
    missed_block_count: int
    torn_block_count: int
    pin_count: int


@dataclass(frozen=True, slots=True)
class Holding:
    """What a session has: its sequences, and its blocks.

    Private ones are those that are not committed, in its sequences and by itself; leased ones are those of them that
    it holds by itself and may still write. Held ones are committed ones that it holds by itself.
    """

    sequence_count: int
    private_block_count: int
    held_block_count: int = 0
    leased_block_count: int = 0


@dataclass(frozen=True, slots=True)
class Acquired:
    """What of a chain is there, fresh blocks for the rest, and who is computing what comes behind `held`.

    `added` are those of `held` that the session did not hold before: what takes the call back releases these too.
    `stands_back`: nothing was given, for the pending one [W8].
    """

    held: BlockRun
    leased: BlockRun
    pending: Pending | None
    added: BlockRun
    stands_back: bool = False


@dataclass(frozen=True, slots=True)
class Invalidated:
    """Blocks of the session that are leased now, and as they were `before`, in the same order."""

    leased: BlockRun
    before: BlockRun


@dataclass(frozen=True, slots=True)
class Warmed:
    """What a Warmup pinned, and the sequence that shall fill the rest."""

    pinned_tokens: int
    missing_tokens: int
    sequence: SequenceView | None


@dataclass(frozen=True, slots=True)
class PinView:
    """How far a pin is. `filling`: a live sequence is to compute the missing tokens."""

    pinned_tokens: int
    missing_tokens: int
    filling: bool


@dataclass(frozen=True, slots=True)
class Presence:
    """What of a prompt is there: in whole blocks, and what Allocate would reuse.

    `miss` tells why not more: None if all whole blocks are there, or the pool has no history.
    """

    present_tokens: int
    cached_tokens: int
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Who uses the pool."""

    session_count: int
    sequence_count: int
    pin_count: int
