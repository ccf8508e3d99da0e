"""Amounts of memory as operators write them."""

from decimal import Decimal

import pytest

from kvharbor.gpumem import amounts
from kvharbor.server import sizes
from kvharbor.server.sizes import Share, format_size, parse_size, parse_size_or_share


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1GiB", 1_073_741_824),
        ("1GB", 1_000_000_000),
        ("1.5GiB", 1_610_612_736),
        ("2097151B", 2_097_151),
        ("64 mib", 67_108_864),
        ("0.3KB", 300),
        ("1.0000001B", 1),
    ],
)
def test_decimal_and_binary_units_are_told_apart(text: str, size_bytes: int) -> None:
    """GB is 10^9 and GiB 2^30, fractions are exact, and the rest is rounded down."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("512", "write e.g. 512MiB or 512GiB, or 512B for bytes"),
        ("0", "write a positive number and a unit"),
        ("0GiB", "write a positive number and a unit"),
        ("0.5B", "less than one byte"),
        ("-1", "write a positive number and a unit"),
        ("1Gi", "use B, KB, MB"),
        ("lots", "write a positive number and a unit"),
        ("80%", "write an amount"),
        ("٣GiB", "write a positive number and a unit"),
    ],
)
def test_what_is_no_amount_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    """A bare number is nobody's size: it might be meant in any unit."""
    with pytest.raises(ValueError, match=remedy):
        parse_size(text)


def test_a_share_is_a_percentage_of_the_room() -> None:
    """80 % of 1,001 bytes are 800: rounded down."""
    share = parse_size_or_share("80%")
    assert share == Share(Decimal(80))
    assert isinstance(share, Share)
    assert share.of(1001) == 800


@pytest.mark.parametrize("text", ["0%", "100.1%", "-5%"])
def test_a_share_outside_its_range_is_refused(text: str) -> None:
    """More than there is cannot be shared out, and nothing is no pool."""
    with pytest.raises(ValueError, match="write"):
        parse_size_or_share(text)


def test_sizes_are_shown_in_the_largest_unit_that_fits() -> None:
    """For people: one decimal, binary units."""
    assert [format_size(size) for size in (0, 1023, 1536, 2**30)] == ["0 B", "1023 B", "1.5 KiB", "1.0 GiB"]


def test_a_size_that_is_refused_is_told_to_the_byte_and_in_units() -> None:
    """What is needed and what is there may differ by less than a unit shows."""
    for told in (sizes.exact_size, amounts.exact_size):
        assert [told(size) for size in (0, 1023, 1024)] == ["0 bytes", "1023 bytes", "1024 bytes (1.0 KiB)"]
        assert [told(size) for size in (2**31, 2**60)] == ["2147483648 bytes (2.0 GiB)", f"{2**60} bytes (1024.0 PiB)"]
