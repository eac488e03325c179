"""Byte counts as people write and read them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nvme_offload.units import format_bytes, format_gb, parse_bytes

FACTORS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        (4096, 4096),
        ("8g", 8 * 10**9),
        ("1gib", 1 << 30),
        ("512 KiB", 512 << 10),
        (" 2TiB ", 2 << 40),
        ("1.2PB", 1_200 * 10**12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parses(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "1.5",
        "0.3KiB",
        "1e9",
        "1,5GB",
        "1 G B",
        "1EB",
        "0x10",
        "1GiBs",
        "nan",
        "None",
        ".5GiB",
        -4096,
        True,
    ],
)
def test_refuses_what_is_no_size_and_repeats_it(text: str | int) -> None:
    with pytest.raises(ValueError, match="is not a") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(
    number=st.decimals(min_value=0, max_value=10**6, places=3),
    prefix=st.sampled_from(sorted(FACTORS)),
    suffix=st.sampled_from(["", "B"]),
)
def test_parses_exactly_what_is_a_whole_number_of_bytes(
    number: Decimal, prefix: str, suffix: str
) -> None:
    exact = number * FACTORS[prefix]
    text = f"{number}{prefix}{suffix}"
    if exact == int(exact):
        assert parse_bytes(text) == int(exact)
    else:
        with pytest.raises(ValueError, match="whole number"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1000, "1000 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (4 << 20, "4 MiB"),
        (3 << 29, "1.5 GiB"),
        (1000 << 20, "1000 MiB"),
        (2 << 40, "2 TiB"),
        (5000 << 40, "5000 TiB"),
        (1_258_291, "1.2 MiB"),
        (1_023_590, "1000 KiB"),
    ],
)
def test_formats(count: int, text: str) -> None:
    assert format_bytes(count) == text


@example(1_023_590)
@given(st.integers(min_value=1024, max_value=1 << 50))
def test_what_people_read_is_within_half_a_percent_and_never_scientific(count: int) -> None:
    number, prefix = format_bytes(count).removesuffix("B").split()
    assert "e" not in number
    assert abs(float(number) * FACTORS[prefix] - count) <= 0.005 * count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 GB"),
        (53_240, "0.0000532 GB"),
        (3_124_000, "0.00312 GB"),
        (14_920_000_000, "14.9 GB"),
        (100_000_000_000, "100 GB"),
        (999_000_000_000, "999 GB"),
        (999_700_000_000, "1,000 GB"),
        (1_120_400_000_000, "1,120 GB"),
    ],
)
def test_decimal_sizes_have_three_digits_or_are_whole(count, text):
    assert format_gb(count) == text
