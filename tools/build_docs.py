"""Builds the API reference from the docstrings: python tools/build_docs.py DIRECTORY.

Ends with a line for each public name that has no docstring. Needs pdoc, and no network.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pdoc
import pdoc.render

# What a program may import, in the order of the pages.
PUBLIC = (
    "nvme_offload",
    "nvme_offload.engine",
    "nvme_offload.pool",
    "nvme_offload.store",
    "nvme_offload.swapper",
    "nvme_offload.optim",
    "nvme_offload.activations",
    "nvme_offload.zero3",
    "nvme_offload.zero3.step_stats",
    "nvme_offload.zero3.settings",
    "nvme_offload.config",
    "nvme_offload.errors",
    "nvme_offload.drive",
    "nvme_offload.profile",
    "nvme_offload.profile_shelf",
    "nvme_offload.ds_config",
    "nvme_offload.model",
    "nvme_offload.machine",
    "nvme_offload.placement",
    "nvme_offload.plan",
    "nvme_offload.units",
)
DOCSTRING_KINDS = (classmethod, staticmethod, property)


def undocumented(module: types.ModuleType) -> Iterator[str]:
    """The public functions, classes and members of classes in *module* that have no docstring, and *module* itself."""
    if not module.__doc__:
        yield module.__name__
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        found = getattr(module, name)
        if not (inspect.isclass(found) or inspect.isfunction(found)) or (not hasattr(module, "__all__") and found.__module__ != module.__name__):
            continue
        where = f"{module.__name__}.{name}"
        if not found.__doc__:
            yield where
        for member, value in vars(found).items() if inspect.isclass(found) else ():
            described = inspect.isfunction(value) or isinstance(value, DOCSTRING_KINDS)
            if described and not member.startswith("_") and not inspect.getdoc(getattr(found, member)):
                yield f"{where}.{member}"


def main(directory: str) -> int:
    """Check, then write the pages. Returns the exit status."""
    # What type checkers alone have, for the annotations.
    typeshed = types.ModuleType("_typeshed")
    for name in ("ReadableBuffer", "WriteableBuffer"):
        setattr(typeshed, name, type(name, (), {"__module__": "_typeshed"}))
    sys.modules["_typeshed"] = typeshed
    package = importlib.import_module("nvme_offload")
    for name in package.__all__:
        setattr(package, name, getattr(package, name))  # what it imports on first use alone, pdoc would not see
    missing = [name for each in PUBLIC for name in undocumented(importlib.import_module(each))]
    for name in missing:
        print(f"{name} has no docstring", file=sys.stderr)
    if missing:
        return 1
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text=f"nvme-offload {package.__version__}")
    private = {module.name for module in pkgutil.walk_packages(package.__path__, "nvme_offload.")} - set(PUBLIC)
    named = [name for name in PUBLIC if name.rpartition(".")[0] in ("", "nvme_offload")]  # the others come with their packages
    warnings.filterwarnings("error", module="pdoc")
    warnings.filterwarnings("ignore", "Error parsing type annotation", module="pdoc")  # in the __init__ of a dataclass it looks in the wrong module
    pdoc.pdoc(*named, *(f"!{name}" for name in sorted(private)), output_directory=Path(directory))
    print(f"{directory}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
