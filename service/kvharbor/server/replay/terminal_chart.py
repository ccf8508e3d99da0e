"""Curves as a picture of characters."""

from collections.abc import Sequence
from itertools import cycle
from string import ascii_uppercase

from rich.text import Text

from kvharbor.server.replay.curves import Curve, Frame, ratio_at
from kvharbor.server.replay.policies import OPTIMUM

_HEIGHT = 14
_LABEL_WIDTH = 5
# A character of braille has two by four dots; these are their bits, from the top down.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800
_STYLES = ("cyan", "yellow", "magenta", "green", "red", "blue")
_OPTIMUM_STYLE = "bright_black"
_LETTER_PAUSE = 12
"""Columns from a letter on a line to the next letter, of any line: colours may not be there."""


def draw(curves: Sequence[Curve], frame: Frame, width: int) -> Text:
    """Returns the picture, `width` characters wide, with both axes and a legend."""
    columns = max(width - _LABEL_WIDTH - 2, 20)
    styles = cycle(_STYLES)
    drawn = [(curve, _OPTIMUM_STYLE if curve.policy == OPTIMUM else next(styles)) for curve in curves]
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for curve, style in drawn:
        _draw_curve(cells, curve, frame, columns, style)
    letters = _letters(drawn, frame, columns)
    picture = Text()
    for row in range(_HEIGHT):
        picture.append(_label(row, frame))
        for column in range(columns):
            bits, style = cells.get((row, column), (0, ""))
            letter, style = letters.get((row, column), (chr(_BRAILLE + bits) if bits else " ", style))
            picture.append(letter, style)
        picture.append("\n")
    picture.append(_capacities(curves, frame, columns))
    picture.append(" " * (_LABEL_WIDTH + 2))
    for letter, (curve, style) in zip(ascii_uppercase, drawn, strict=False):
        picture.append(f"{letter} ━━ {curve.label}   ", style)
    return picture


def _letters(drawn: Sequence[tuple[Curve, str]], frame: Frame, columns: int) -> dict[tuple[int, int], tuple[str, str]]:
    """Returns letters on the lines, by turns: at each place at most one, so that each line can be told."""
    letters = {}
    for turn, column in enumerate(range(_LETTER_PAUSE // 2, columns, _LETTER_PAUSE)):
        letter, (curve, style) = list(zip(ascii_uppercase, drawn, strict=False))[turn % len(drawn)]
        ratio = ratio_at(curve, frame, (2 * column + 1) / (2 * columns - 1))
        letters[_dot_row(frame, ratio) // 4, column] = letter, style
    return letters


def _dot_row(frame: Frame, ratio: float) -> int:
    dot_rows = _HEIGHT * 4
    return dot_rows - 1 - round(frame.up(ratio) * (dot_rows - 1))


def _draw_curve(
    cells: dict[tuple[int, int], tuple[int, str]], curve: Curve, frame: Frame, columns: int, style: str
) -> None:
    dot_columns = columns * 2
    before = None
    for dot_column in range(dot_columns):
        ratio = ratio_at(curve, frame, dot_column / (dot_columns - 1))
        dot_row = _dot_row(frame, ratio)
        # A steep line has several dots in one column.
        from_row = dot_row if before is None else before
        for each in range(min(dot_row, from_row), max(dot_row, from_row) + 1):
            place = each // 4, dot_column // 2
            bits, _ = cells.get(place, (0, style))
            cells[place] = bits | _DOTS[each % 4][dot_column % 2], style
        before = dot_row


def _label(row: int, frame: Frame) -> str:
    """Returns what stands left of a row: a ratio at the top, in the middle and at the bottom."""
    marks = {0: frame.top, _HEIGHT // 2: frame.top / 2, _HEIGHT - 1: 0.0}
    text = f"{marks[row]:.0%}" if row in marks else ""
    return f"{text:>{_LABEL_WIDTH}} {'┤' if text else '│'}"


def _capacities(curves: Sequence[Curve], frame: Frame, columns: int) -> str:
    """Returns the lower axis: a mark for each capacity, and its number where there is room."""
    axis, numbers = ["─"] * columns, [" "] * (columns + _LABEL_WIDTH + 2)
    free_from = 0
    for blocks in sorted({blocks for curve in curves for blocks, _ in curve.points}):
        column = round(frame.across(blocks) * (columns - 1))
        axis[column] = "┬"
        text = f"{blocks:,}"
        start = min(max(column + _LABEL_WIDTH + 2 - len(text) // 2, 0), len(numbers) - len(text))
        if start >= free_from:
            numbers[start : start + len(text)] = text
            free_from = start + len(text) + 1
    corner = f"{'':>{_LABEL_WIDTH}} └"
    return f"{corner}{''.join(axis)}\n{''.join(numbers).rstrip()} blocks\n"
