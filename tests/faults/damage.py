"""One fault at a time: what a drive, a copy or an editor may make of a file's bytes, drawn from a
generator, so that a seed has the same again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

_OTHERS = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3.5,
    1 << 40,
    10**400,
    "",
    "text",
    "\ud800",
    [],
    {},
    [[1]],
    {"sha256": "0"},
)


def bit(data: bytes, draw: random.Random) -> bytes:
    """Another bit."""
    at = draw.randrange(8 * len(data))
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def byte(data: bytes, draw: random.Random) -> bytes:
    """Another byte."""
    at = draw.randrange(len(data))
    return data[:at] + draw.randbytes(1) + data[at + 1 :]


def truncation(data: bytes, draw: random.Random) -> bytes:
    """Only the beginning."""
    return data[: draw.randrange(len(data))]


def growth(data: bytes, draw: random.Random) -> bytes:
    """More at the end."""
    return data + draw.randbytes(draw.randint(1, 600))


def zeros(data: bytes, draw: random.Random) -> bytes:
    """A range that was never written, as delayed allocation leaves it after a loss of power."""
    start = draw.randrange(len(data)) // 512 * 512
    end = min(len(data), start + 512 * draw.randint(1, 8))
    return data[:start] + bytes(end - start) + data[end:]


def misdirected(data: bytes, draw: random.Random) -> bytes:
    """A range that was written to another place."""
    nbytes = draw.randint(1, min(512, len(data)))
    here, there = (draw.randrange(len(data) - nbytes + 1) for _ in range(2))
    return data[:there] + data[here : here + nbytes] + data[there + nbytes :]


def lost(data: bytes, draw: random.Random) -> bytes:
    """A range that is missing."""
    start = draw.randrange(len(data))
    return data[:start] + data[start + draw.randint(1, 600) :]


def field(data: bytes, draw: random.Random) -> bytes:
    """JSON in which one value is changed or missing, or one key is changed; in text with an object a
    line, one line is damaged.
    """
    lines = data.decode().splitlines(keepends=True)
    number = (
        draw.randrange(len(lines))
        if all(line.startswith("{") and line.rstrip().endswith("}") for line in lines)
        else -1
    )
    tree = json.loads(lines[number] if number >= 0 else data)
    parent, key = draw.choice(list(_places(tree)))
    what = draw.choice(["other", "missing", "renamed", "near"])
    if what == "missing":
        del parent[key]
    elif what == "renamed" and isinstance(parent, dict):
        parent[draw.choice(["x", "sha256", "line", str(key).upper()])] = parent.pop(key)
    elif (
        what == "near"
        and isinstance(parent[key], (int, float))
        and not isinstance(parent[key], bool)
    ):
        parent[key] += draw.choice([1, -1, 0.5])
    else:
        parent[key] = draw.choice(_OTHERS)
    text = json.dumps(tree, indent=2 if number < 0 and b"\n  " in data else None)
    if number < 0:
        return text.encode()
    return "".join([*lines[:number], text + "\n", *lines[number + 1 :]]).encode()


BINARY = (bit, byte, truncation, growth, zeros, misdirected, lost)
TEXT = (*BINARY, field, field, field)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from _places(value)
