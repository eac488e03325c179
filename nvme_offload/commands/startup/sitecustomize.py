"""Calls `nvme_offload.zero3.enable()` when this Python process imports DeepSpeed.

`nvme-offload run` puts this directory first on PYTHONPATH, so that the `site` module of every
Python process imports this file at its start, before DeepSpeed and torch. It then runs the
`sitecustomize` that it hides, if there is one. Source: the Python library reference, "site".

The process may be of an environment without this package, and imports nothing more than this file.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).parent


class _EnablingFinder:
    """Finds DeepSpeed, and makes its import call `enable`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "deepspeed":
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec: ModuleSpec | None = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_enable(module: ModuleType) -> None:
                execute(module)
                from nvme_offload import zero3

                zero3.enable()

            loader.exec_module = execute_and_enable
        return spec


sys.meta_path.insert(0, _EnablingFinder())
_hidden = PathFinder.find_spec(
    "sitecustomize", [place for place in sys.path if Path(place) != _HERE]
)
if _hidden is not None and _hidden.loader is not None:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(_hidden)
    _hidden.loader.exec_module(sys.modules["sitecustomize"])
