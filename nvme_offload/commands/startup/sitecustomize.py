"""Calls `nvme_offload.zero3.enable()` when this Python process imports DeepSpeed.

`nvme-offload run` puts this directory first on PYTHONPATH, so that the `site` module of every
Python process imports this file at its start, before DeepSpeed and torch. It then runs the
`sitecustomize` that it hides, if there is one. Source: the Python library reference, "site".
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent


def _loaded(spec: ModuleSpec | None) -> ModuleType | None:
    """The module of *spec*, which is in `sys.modules` from then on."""
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _enable(_: ModuleType) -> None:
    from nvme_offload import zero3

    zero3.enable()


# By its path: the process may be of an environment without this package.
_autoload = _loaded(
    importlib.util.spec_from_file_location("_nvme_offload_run", _HERE.parents[1] / "autoload.py")
)
if _autoload is not None:
    _autoload.after_import("deepspeed", _enable)
_loaded(
    PathFinder.find_spec("sitecustomize", [place for place in sys.path if Path(place) != _HERE])
)
