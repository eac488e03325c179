"""Byte counts, speeds and ratios as text."""

from __future__ import annotations

import re
from decimal import Decimal

_FACTORS: dict[str, int] = {
    "": 1,
    **{f"{letter}i": 1 << (10 * power) for power, letter in enumerate("KMGTP", 1)},
    **{letter: 1000**power for power, letter in enumerate("KMGTP", 1)},
}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[KMGTP]i?|)B?\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Parse a size: "1GiB" is 2**30, "8GB" and "8G" are 8 * 10**9, "4096" is 4096 bytes. Case does
    not matter. Raises: ValueError if *text* is not a size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ValueError(
            f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, TiB, PiB, KB, MB, GB, TB or PB"
        )
    prefix = match["prefix"]
    prefix = prefix[:1].upper() + prefix[1:].lower()
    # Decimal, not float: 4.1GB is a whole number of bytes
    value = Decimal(match["number"]) * _FACTORS[prefix]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def format_bytes(count: int) -> str:
    """Format *count* bytes in binary units, to three digits: "4 MiB", "1.5 GiB", "1000 bytes"."""
    for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if abs(count) >= 1 << (10 * power):
            scaled = count / (1 << (10 * power))
            return f"{scaled:{'.0f' if abs(scaled) >= 999.5 else '.3g'}} {letter}iB"
    return f"{count} byte{'' if count == 1 else 's'}"


def format_gb(count: float) -> str:
    """Format *count* bytes in decimal units, to three digits: "14.9 GB", "0.00312 GB", "1,120 GB"."""
    scaled = count / 1e9
    # by way of Decimal, which is never scientific
    return f"{scaled:,.0f} GB" if scaled >= 999.5 else f"{Decimal(f'{scaled:.3g}'):f} GB"


def format_digits(value: float) -> str:
    """Format *value* to three digits, or as a whole number: "7.62", "1,467"."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def format_speed(value: float) -> str:
    """Format *value*, a speed in GB/s or a time, to three digits, zeros included: "2.20", "15.1",
    "104".
    """
    return f"{value:#.3g}".rstrip(".")


def format_ratio(ratio: float) -> str:
    """Format *ratio*: "1.17"."""
    return f"{ratio:.2f}"


def format_change(ratio: float) -> str:
    """Format *ratio* as the change that `format_ratio` shows: "+17 %" for 1.17."""
    return f"{round(100 * float(format_ratio(ratio))) - 100:+d} %"
