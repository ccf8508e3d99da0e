"""Horizontal bars over a logarithmic axis, as an SVG picture for documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 780, 320, 90, 56, 22
# Apart from each other for colour-blind readers too (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what it stands for, how long it is, what is written behind it, and which of the colours it has."""

    label: str
    value: float
    text: str
    colour: int = 0


def picture(title: str, axis: str, bars: Sequence[Bar], line: float | None = None) -> str:
    """Returns the picture as a document of its own, with a line at a value that matters."""
    first = math.floor(math.log10(min(bar.value for bar in bars) * 0.8))
    last = math.ceil(math.log10(max(bar.value for bar in bars)))
    bottom = _TOP + _ROW * len(bars)

    def across(value: float) -> float:
        return _LEFT + (math.log10(value) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 48}" font-family="sans-serif" '
        'font-size="12" fill="#222222">',
        f'<rect width="{_WIDTH}" height="{bottom + 48}" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="14">{escape(title)}</text>',
    ]
    for power in range(first, last + 1):
        x = across(10.0**power)
        parts += [
            f'<path d="M{x:.1f} {_TOP - 8}V{bottom}" stroke="#dddddd"/>',
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{10.0**power:g}</text>',
        ]
    texts = []
    for place, bar in enumerate(bars):
        y, end = _TOP + _ROW * place, across(bar.value)
        parts.append(
            f'<rect x="{_LEFT}" y="{y + 1}" width="{end - _LEFT:.1f}" height="14" fill="{COLOURS[bar.colour]}"/>'
        )
        texts += [
            f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(bar.label)}</text>',
            # With a rim, as it may lie on the line.
            f'<text x="{end + 6:.1f}" y="{y + 12}" stroke="#ffffff" stroke-width="4" paint-order="stroke">'
            f"{escape(bar.text)}</text>",
        ]
    if line is not None:
        x = across(line)
        parts.append(
            f'<path d="M{x:.1f} {_TOP - 8}V{bottom}" stroke="#222222" stroke-width="2" stroke-dasharray="6 4"/>'
        )
    parts += texts
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">{escape(axis)}</text>')
    return "\n".join([*parts, "</svg>\n"])
