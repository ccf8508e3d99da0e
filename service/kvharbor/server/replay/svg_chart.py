"""Curves as an SVG picture, for documents."""

from collections.abc import Sequence
from html import escape
from itertools import cycle

from kvharbor.server.replay.curves import Curve, Frame
from kvharbor.server.replay.policies import OPTIMUM

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 40, 48
# Apart from each other for colour-blind readers too (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_OPTIMUM_COLOUR = "#777777"
# And without any colour: a line of its own each.
_DASHES = ("", "2 3", "10 3 2 3", "12 4", "4 2", "10 3 2 3 2 3")
_OPTIMUM_DASH = "6 4"
_GRID_COUNT = 5


def svg(title: str, curves: Sequence[Curve], frame: Frame) -> str:
    """Returns the picture as a document of its own."""
    looks = cycle(zip(_COLOURS, _DASHES, strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#222222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *_grid(curves, frame),
    ]
    for place, curve in enumerate(curves):
        colour, dash = (_OPTIMUM_COLOUR, _OPTIMUM_DASH) if curve.policy == OPTIMUM else next(looks)
        parts += _curve(curve, frame, colour, dash, place)
    return "\n".join([*parts, "</svg>\n"])


def _across(frame: Frame, block_count: int) -> float:
    return _LEFT + frame.across(block_count) * (_WIDTH - _LEFT - _RIGHT)


def _up(frame: Frame, ratio: float) -> float:
    return _HEIGHT - _BOTTOM - frame.up(ratio) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(curves: Sequence[Curve], frame: Frame) -> list[str]:
    parts = []
    for step in range(_GRID_COUNT + 1):
        ratio = frame.top * step / _GRID_COUNT
        y = _up(frame, ratio)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{ratio:.0%}</text>')
    free_from = 0.0
    for blocks in sorted({blocks for curve in curves for blocks, _ in curve.points}):
        x, text = _across(frame, blocks), f"{blocks:,}"
        parts.append(f'<path d="M{x:.1f} {_HEIGHT - _BOTTOM}v5" stroke="#222222"/>')
        # Seven units a digit; a number that would touch the one before it is left out.
        half_width = 3.5 * len(text)
        if x - half_width >= free_from:
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{text}</text>')
            free_from = x + half_width + 6
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">capacity in blocks</text>')
    return parts


def _curve(curve: Curve, frame: Frame, colour: str, dashes: str, place: int) -> list[str]:
    points = [(_across(frame, blocks), _up(frame, ratio)) for blocks, ratio in curve.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    y = _TOP + 10 + 20 * place
    x = _WIDTH - _RIGHT + 16
    return [
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points),
        f'<path d="M{x} {y}h20" stroke="{colour}" stroke-width="2"{dash}/>',
        f'<text x="{x + 26}" y="{y + 4}">{escape(curve.label)}</text>',
    ]
