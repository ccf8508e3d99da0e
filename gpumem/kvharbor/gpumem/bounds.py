"""Checks of values that may come from the wire: each is bounded before anything is computed from it [M3]."""

import enum

from kvharbor.gpumem.errors import LayoutInvalid, OutOfBounds


def check_layer(layer: int, layer_count: int) -> None:
    """Raises OutOfBounds unless the plane has the layer. Negative indices never count from the end here."""
    _check_bounds("layer", layer, layer_count, "count the plane's layers from 0")


def check_block(kind: str, block: int, block_count: int) -> None:
    """Raises OutOfBounds unless the descriptor has the block, which `kind` is what for."""
    _check_bounds(kind, block, block_count, "take blocks from a table of this pool")


def _check_bounds(kind: str, value: int, limit: int, remedy: str) -> None:
    if not 0 <= value < limit:
        raise OutOfBounds(kind, value, limit=limit, remedy=remedy)


def check_int(field: str, value: int, least: int, most: int, multiple_of: int = 1) -> None:
    """Raises LayoutInvalid unless `value` is a plain int from `least` to `most` and a whole multiple."""
    # Plain ints only: a numpy integer would overflow silently when offsets are computed from it.
    if type(value) is int and least <= value <= most and value % multiple_of == 0:
        return
    limit = f"an int from {least} to {most}" + (f", a multiple of {multiple_of}" if multiple_of > 1 else "")
    raise LayoutInvalid(field, value, limit, "correct it in the layout that is opened")


def check_text(field: str, value: str, most: int) -> None:
    """Raises LayoutInvalid unless `value` is printable text of 1 to `most` characters."""
    if not (isinstance(value, str) and 1 <= len(value) <= most and value.isprintable()):
        raise LayoutInvalid(field, value, f"1 to {most} printable characters", "shorten or rename it")


def check_member(field: str, value: enum.Enum, kind: type[enum.Enum]) -> None:
    """Raises LayoutInvalid unless `value` is a member of the enum `kind`."""
    if not isinstance(value, kind):
        members = ", ".join(member.name for member in kind)
        raise LayoutInvalid(field, value, f"a {kind.__name__}", f"use one of {members}")
