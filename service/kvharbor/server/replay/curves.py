"""Hit ratio over capacity, to be drawn: one curve a policy, capacity on a logarithmic axis."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvharbor.server.replay.policies import OPTIMUM
from kvharbor.server.replay.run import Outcome


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy's (capacity in blocks, hit ratio), by capacity."""

    policy: str
    points: tuple[tuple[int, float], ...]

    @property
    def label(self) -> str:
        """What it is called in a picture."""
        return "offline optimum" if self.policy == OPTIMUM else self.policy


@dataclass(frozen=True, slots=True)
class Frame:
    """Where capacities and ratios lie in a picture whose sides are one long, from the lower left corner."""

    least_blocks: int
    most_blocks: int
    top: float

    def across(self, block_count: int) -> float:
        """Returns a capacity's place from left to right."""
        return math.log(block_count / self.least_blocks) / math.log(self.most_blocks / self.least_blocks)

    def up(self, ratio: float) -> float:
        """Returns a ratio's place from bottom to top."""
        return ratio / self.top


def curves_of(outcomes: Sequence[Outcome]) -> list[Curve]:
    """Returns a curve for each policy, the optimum first so that others are drawn over it."""

    def order(outcome: Outcome) -> tuple[bool, str, int]:
        return outcome.setting.policy != OPTIMUM, outcome.setting.policy, outcome.setting.block_count

    by_policy = groupby(sorted(outcomes, key=order), key=lambda outcome: outcome.setting.policy)
    return [
        Curve(policy, tuple((one.setting.block_count, one.hit_ratio) for one in group)) for policy, group in by_policy
    ]


def frame_of(curves: Sequence[Curve]) -> Frame | None:
    """Returns a frame that has room for all curves; None if there is one capacity only, which makes no curve."""
    capacities = [blocks for curve in curves for blocks, _ in curve.points]
    if len(set(capacities)) < 2:
        return None
    highest = max(ratio for curve in curves for _, ratio in curve.points)
    # Up to the next tenth, so that a ratio can be read off.
    return Frame(min(capacities), max(capacities), max(0.1, math.ceil(highest * 10) / 10))


def ratio_at(curve: Curve, frame: Frame, across: float) -> float:
    """Returns a curve's ratio at a place from left to right, on the straight line between two points."""
    places = [frame.across(blocks) for blocks, _ in curve.points]
    ratios = [ratio for _, ratio in curve.points]
    right = min(max(bisect_left(places, across), 1), len(places) - 1)
    share = (across - places[right - 1]) / (places[right] - places[right - 1])
    return ratios[right - 1] + min(max(share, 0.0), 1.0) * (ratios[right] - ratios[right - 1])
