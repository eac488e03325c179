"""Read plans in TOML into dataclasses, with errors that name the wrong key."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nvme_offload.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along

Made = TypeVar("Made")


def read(path: Path, make: Callable[[dict[str, Any]], Made]) -> Made:
    """Read the plan in *path* and convert it by *make*.

    Raises: UsageError naming a missing, unknown or invalid key; OSError.
    """
    try:
        return make(tomllib.loads(path.read_text()))
    except KeyError as error:
        raise UsageError(f"{path}: {error} is missing") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: {error}") from None


def made(kind: type[Made], entry: Mapping[str, Any], **instead: Any) -> Made:
    """The dataclass *kind* with the fields of *entry*, some of them with other values *instead*.

    Raises: ValueError for a key that is no field, KeyError for a field without a value.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    require_known(entry, [field.name for field in fields])
    given = {**entry, **instead}
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in given:
            raise KeyError(field.name)
    return kind(**given)


def require_known(found: Iterable[str], known: Collection[str]) -> None:
    """Raises: ValueError where one of *found* is none of *known*."""
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(sorted(known))}")
