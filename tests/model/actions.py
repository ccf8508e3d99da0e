"""What may happen to a pool, for walks of chance: each action with how often, when, and with which arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crossing import Crossing
from keeping import SCHEMES

from kvharbor.pool import PoolConfig

WHICH = range(12)
# Long runs of one token with a change somewhere: most prompts share a prefix, and no two are far apart.
PROMPTS = [
    [1] * length if change is None else [1] * change + [2] + [1] * (length - change - 1)
    for length in (2, 3, 4, 5, 6, 8, 9, 11)
    for change in (None, None, 1, 4, 7)
    if change is None or change < length
]
NEW_TOKENS = [[], [1], [1, 1], [2], [1, 1, 1, 1], [1, 2]]
EXTRAS: list[dict[int, bytes]] = [{}, {}, {}, {}, {2: b"i"}, {0: b"i", 3: b"j"}]
GROUPS = ["", "g"]
YES_OR_NO = [False, True]


@dataclass(frozen=True)
class Action:
    """One method of Crossing: how often, when it makes sense, and what its arguments may be."""

    name: str
    weight: int
    ready: Callable[[Crossing], object] = lambda _: True
    options: dict[str, Sequence[object]] = field(default_factory=dict)


ACTIONS = [
    Action("run_a_slice", 20, lambda world: world.under_way(), {"which": WHICH}),
    Action("leave_during_the_match", 2, lambda world: world.matching(), {"which": WHICH}),
    Action(
        "publish",
        4,
        lambda world: world.idle(),
        {"which": WHICH, "tokens": PROMPTS, "reserve": range(3), "releases": [True, True, False]},
    ),
    Action(
        "allocate",
        6,
        lambda world: world.idle(),
        {
            "which": WHICH,
            "tokens": PROMPTS,
            "extras": EXTRAS,
            "reserve": range(5),
            "most": [None, None, None, 0, 3, 11],
            "salt": [b"", b"", b"", b"s"],
            "request_id": ["", "", "a", "f/1"],
            "group": GROUPS,
            "waits": YES_OR_NO,
        },
    ),
    Action("look_again", 3, lambda world: world.waiting, {"which": WHICH, "stays": [True, True, False]}),
    Action("extend", 2, lambda world: world.callable(), {"which": WHICH, "more": range(7)}),
    Action(
        "compute_and_commit",
        8,
        lambda world: world.callable(),
        {"which": WHICH, "new": NEW_TOKENS, "extras": EXTRAS, "keep": range(4), "names_blocks": YES_OR_NO},
    ),
    Action("switch_shadows", 2, lambda world: world.shadowed(), {"which": WHICH}),
    Action(
        "release",
        4,
        lambda world: world.callable(),
        {"which": WHICH, "how": ["number", "number", "request", "group"]},
    ),
    Action(
        "fork",
        5,
        lambda world: world.callable(),
        {
            "which": WHICH,
            "child_count": range(1, 4),
            "reserve": range(4),
            "request_id": ["", "f", "f"],
            "group": GROUPS,
        },
    ),
    Action("end_copies", 6, lambda world: world.copying(), {"which": WHICH, "copy_count": [None, None, None, 0, 1]}),
    Action(
        "handoff",
        2,
        lambda world: world.callable(),
        {"which": WHICH, "new": NEW_TOKENS, "keep": range(4), "ttl": range(1, 4)},
    ),
    Action("adopt", 2, lambda world: world.harbour.given and world.idle(), {"which": WHICH, "group": GROUPS}),
    Action(
        "warmup",
        3,
        options={
            "which": [None, *WHICH],
            "tokens": PROMPTS,
            "name": ["x", "y"],
            "ttl": [None, 0, 1, 2],
            "present_only": YES_OR_NO,
        },
    ),
    Action("unwarm", 1, lambda world: not world.operator, {"which": WHICH, "name": ["x", "y"]}),
    Action(
        "evict_block",
        2,
        lambda world: not world.operator,
        {"which": range(24), "is_stale": [False, False, True], "is_held": [False, False, True]},
    ),
    Action("evict_unheld", 1, lambda world: not world.operator),
    Action("retire", 2, lambda world: not world.operator, {"which": WHICH}),
    Action("lookup", 1, lambda world: not world.operator, {"which": WHICH, "tokens": PROMPTS}),
    Action("expire", 1, lambda world: not world.operator),
    Action(
        "acquire",
        5,
        lambda world: world.idle(),
        {
            "which": WHICH,
            "scheme": SCHEMES,
            "tokens": PROMPTS,
            "extras": EXTRAS,
            "more": [0, 0, 1, 2, 3],
            "computes": YES_OR_NO,
            "unless_pending": [True, False, False, False],
        },
    ),
    Action(
        "abandon",
        2,
        lambda world: world.idle(),
        {"which": WHICH, "scheme": SCHEMES, "tokens": PROMPTS, "extras": EXTRAS},
    ),
    Action("lease", 2, lambda world: world.idle(), {"which": WHICH, "least": range(4), "more": range(3)}),
    Action(
        "commit_blocks",
        8,
        lambda world: world.leasing(),
        {"which": WHICH, "scheme": SCHEMES, "place": WHICH, "tokens": PROMPTS, "extras": EXTRAS},
    ),
    Action(
        "append",
        2,
        lambda world: world.appending(),
        {"which": WHICH, "count": range(1, 4), "new": NEW_TOKENS, "keep": range(4)},
    ),
    Action(
        "release_blocks",
        5,
        lambda world: world.keeping(),
        {
            "which": WHICH,
            "places": [[0], [1], [5, 4, 3, 2], [0, 1, 2, 3], [*range(12)], [*range(11, -1, -1)]],
            "is_stale": [False, False, False, True],
        },
    ),
    Action("invalidate", 2, lambda world: world.reading(), {"which": WHICH, "place": WHICH}),
    Action("lose_session", 1, lambda world: world.idle(), {"which": WHICH}),
    Action("scribble", 1, lambda world: world.lost(), {"which": WHICH}),
    Action("prove_writers_quiet", 1, lambda world: world.lost(), {"which": WHICH}),
    Action("prove_quiet", 2, lambda world: world.lost(), {"which": WHICH}),
]


def config(block_count: int, slice_blocks: int, min_reuse_tokens: int, policy: str = "lru") -> PoolConfig:
    return PoolConfig(
        block_count,
        block_tokens=2,
        scratch_blocks=1,
        min_reuse_tokens=min_reuse_tokens,
        warm_budget_ratio=0.5,
        slice_blocks=slice_blocks,
        policy=policy,
        history=True,
    )
