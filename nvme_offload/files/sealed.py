"""JSON with a checksum of what it says: a file that was altered is told from one that was written
so. Whitespace and the order of keys do not count.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

_KEY = "sha256"


def dumps(data: dict[str, Any], indent: int | None = None) -> str:
    """The text of *data* with its seal, the key "sha256"."""
    return json.dumps({**data, _KEY: _digest(data)}, indent=indent)


def loads(text: str | bytes) -> dict[str, Any]:
    """The object that *text* is, sealed or not; an empty one for other JSON. Raises: ValueError."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError from None
    return data if isinstance(data, dict) else {}


def unseal(data: dict[str, Any]) -> bool:
    """Take the seal off *data*, which `loads` returned; whether it is that of the rest."""
    return bool(data.pop(_KEY, None) == _digest(data))


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode("ascii")).hexdigest()
