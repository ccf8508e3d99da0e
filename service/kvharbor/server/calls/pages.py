"""Lists in pages."""

from typing import Final

from kvharbor.pool.errors import InvalidField

DEFAULT_PAGE_SIZE: Final = 50
MAX_PAGE_SIZE: Final = 200


def page_size_of(asked: int) -> int:
    """Returns how many entries a page gets."""
    if asked < 0:
        raise InvalidField(field="page_size", value=asked, limit="0 or more", remedy="0 means the default")
    return min(asked or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
