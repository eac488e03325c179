"""Numbers and values of a profile as text, for pages and charts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from nvme_offload.hardware.profile import Best, Sustained
from nvme_offload.units import format_bytes, format_ratio, format_speed

if TYPE_CHECKING:
    from markupsafe import Markup

speed = format_speed
TIMES, DASH, SPACE = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{NO-BREAK SPACE}"
NONE = DASH

_UNITS = ("_bytes_per_second", "_bytes", "_seconds", "_celsius", "_kib")


def ratio(relative: float) -> str:
    """A ratio with its times sign: "1.17x"."""
    return f"{format_ratio(relative)}{TIMES}"


def interval(best: Best) -> str:
    """The 90 % interval of the ratio."""
    low, high = format_ratio(best.relative_low), format_ratio(best.relative_high)
    return f"{low}{TIMES}" if low == high else f"{low}{DASH}{high}{TIMES}"


def percent(share: float) -> str:
    """A share: "94 %"."""
    return f"{100 * share:.0f}{SPACE}%"


def size(count: int) -> str:
    """Bytes in binary units that do not break apart: "1 MiB"."""
    return format_bytes(count).replace(" ", SPACE)


def decimal_bytes(count: float) -> str:
    """Bytes in units of 1000: "224 GB"."""
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9)):
        if count >= factor:
            return f"{count / factor:.3g}{SPACE}{unit}"
    return f"{count / 1e6:.3g}{SPACE}MB"


def duration(seconds: float) -> str:
    """A time: "55.1 s", "1 min 42 s", "9 h 3 min", "12 days"."""
    if seconds < 99.5:
        return f"{seconds:.3g}{SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours / 24:.3g}{SPACE}days"
    return (
        f"{hours}{SPACE}h {minutes}{SPACE}min" if hours else f"{minutes}{SPACE}min {rest}{SPACE}s"
    )


def sustained(run: Sustained) -> str:
    """The result of writing without a pause."""
    first, last = speed(run.first_gb_per_s), speed(run.steady_gb_per_s)
    if run.cache_ends_bytes is None:
        return f"Over {decimal_bytes(run.bytes)} the drive went from {first} to {last} GB/s: no end of a cache was seen."
    return f"After {decimal_bytes(run.cache_ends_bytes)} the drive fell from {first} to {last} GB/s: its fast cache is full."


def plural(count: int, word: str) -> str:
    """A count with its word: "1 trial", "2 trials"."""
    return f"{count}{SPACE}{word}{'' if count == 1 else 's'}"


def label(key: str) -> str:
    """A key of the profile in words, without the unit that `shown` gives to the value."""
    if key == "name":
        return "Engine"
    for unit in _UNITS:
        key = key.removesuffix(unit)
    words = key.replace("_", " ")
    for name in ("CPU", "NUMA", "PCIe"):
        words = words.replace(name.lower(), name)
    return words[:1].upper() + words[1:]


def shown(value: Any, key: str) -> str:
    """A value of the profile for people, in the unit that its key names."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return _number(value, key)
    if isinstance(value, dict):
        # {"file_bytes": {"read": n}}: the unit may stand in the outer key.
        return ", ".join(
            f"{inner} {shown(item, key if key.endswith(_UNITS) else inner)}"
            for inner, item in value.items()
        )
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(item, key) for item in value)
    return "not known" if value in (None, "") else str(value)


def _number(value: float, key: str) -> str:
    if key.endswith("_bytes_per_second"):
        return f"{value / 1e9:.3g}{SPACE}GB/s"
    if key.endswith(("size_bytes", "free_bytes")):
        return decimal_bytes(value)
    if key.endswith("_bytes"):
        return size(int(value))
    if key.endswith("seconds"):
        return duration(value)
    if key.endswith("_celsius"):
        return f"{value:.0f}{SPACE}\N{DEGREE SIGN}C"
    if key.endswith("_kib"):
        return size(int(value) * 1024)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def code_spans(text: str) -> Markup:
    """A sentence as HTML, with text between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
