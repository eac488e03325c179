"""Calls `nvme_offload.zero3.enable()` when this Python process imports DeepSpeed.

`nvme-offload run` puts this directory first on PYTHONPATH, so that the `site` module of every
Python process imports this file at its start, before DeepSpeed and torch. It then runs the
`sitecustomize` that it hides, if there is one. Source: the Python library reference, "site".
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class _Finder:
    """Finds DeepSpeed through the other finders, and wraps its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "deepspeed":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                spec.loader = _EnablingLoader(spec.loader)
                return spec
        return None


class _EnablingLoader(importlib.abc.Loader):
    """The loader of DeepSpeed, which also enables this package once the module is loaded."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # DeepSpeed sees its own loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        from nvme_offload import zero3

        zero3.enable()


def _run_hidden() -> None:
    """Run the `sitecustomize` that comes after this one on the path."""
    here = Path(__file__).parent
    spec = PathFinder.find_spec(
        "sitecustomize", [place for place in sys.path if Path(place) != here]
    )
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _Finder())
_run_hidden()
