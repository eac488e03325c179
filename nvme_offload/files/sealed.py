"""JSON with a checksum of its contents, whatever its whitespace and the order of keys."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_KEY = "sha256"


def dumps(data: dict[str, Any], indent: int | None = None) -> str:
    """Serialize *data* with its checksum under the key "sha256"."""
    return json.dumps({**data, _KEY: _digest(data)}, indent=indent)


def loads(text: str | bytes) -> dict[str, Any]:
    """Parse an object, with a checksum or without; {} for other JSON. Raises: ValueError."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError from None
    return data if isinstance(data, dict) else {}


def unseal(data: dict[str, Any]) -> bool:
    """Remove the checksum from *data*, which `loads` returned; whether it matches the rest."""
    return bool(data.pop(_KEY, None) == _digest(data))


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode("ascii")).hexdigest()
