"""Builds the API reference from the docstrings: python tools/build_docs.py DIRECTORY.

Ends with a line for each public name that has no docstring. Needs pdoc, and no network.
"""

from __future__ import annotations

import importlib
import inspect
import re
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
    "nvme_offload.io.engine",
    "nvme_offload.io.pool",
    "nvme_offload.store.store",
    "nvme_offload.swap.swapper",
    "nvme_offload.optim",
    "nvme_offload.activations",
    "nvme_offload.zero3",
    "nvme_offload.zero3.step_stats",
    "nvme_offload.zero3.settings",
    "nvme_offload.swap.drive_use",
    "nvme_offload.hardware.config",
    "nvme_offload.errors",
    "nvme_offload.hardware.drive",
    "nvme_offload.hardware.profile",
    "nvme_offload.hardware.profile_shelf",
    "nvme_offload.ds_config.edit",
    "nvme_offload.planning.model",
    "nvme_offload.hardware.machine",
    "nvme_offload.planning.placement",
    "nvme_offload.planning.plan",
    "nvme_offload.units",
)
DOCSTRING_KINDS = (classmethod, staticmethod, property)


def public_names(module: types.ModuleType) -> list[str]:
    """What *module* offers: what it says, or else what it defines."""
    names: list[str] | None = getattr(module, "__all__", None)
    if names is not None:
        return names
    return [
        name
        for name, found in vars(module).items()
        if not name.startswith("_") and getattr(found, "__module__", None) == module.__name__
    ]


def undocumented(module: types.ModuleType) -> Iterator[str]:
    """The public functions, classes and members of classes in *module* that have no docstring, and
    *module* itself.
    """
    if not module.__doc__:
        yield module.__name__
    for name in public_names(module):
        found = getattr(module, name)
        if not (inspect.isclass(found) or inspect.isfunction(found)):
            continue
        where = f"{module.__name__}.{name}"
        if not found.__doc__:
            yield where
        for member, value in vars(found).items() if inspect.isclass(found) else ():
            described = inspect.isfunction(value) or isinstance(value, DOCSTRING_KINDS)
            if (
                described
                and not member.startswith("_")
                and not inspect.getdoc(getattr(found, member))
            ):
                yield f"{where}.{member}"


def spaced(text: str) -> str:
    """*text* with a paragraph for each line that begins with what it is about: "Raises: ...",
    "queue_depth: ...".
    """
    return re.sub(
        r"(?<=[^\n])\n(?=(?:Shapes|Units|Lifetime|Raises|Source|Attributes|[a-z_]+(?:, [a-z_]+)*): )",
        "\n\n",
        text,
    )


def main(directory: str) -> int:
    """Check, then write the pages. Returns the exit status."""
    # What type checkers alone have, for the annotations.
    typeshed = types.ModuleType("_typeshed")
    for name in ("ReadableBuffer", "WriteableBuffer"):
        setattr(typeshed, name, type(name, (), {"__module__": "_typeshed"}))
    sys.modules["_typeshed"] = typeshed
    package = importlib.import_module("nvme_offload")
    for name in package.__all__:
        # what it imports on first use alone, pdoc would not see
        setattr(package, name, getattr(package, name))
    modules = [importlib.import_module(name) for name in PUBLIC]
    missing = [name for module in modules for name in undocumented(module)]
    for name in missing:
        print(f"{name} has no docstring", file=sys.stderr)
    if missing:
        return 1
    pdoc.render.configure(
        docformat="markdown", show_source=False, footer_text=f"nvme-offload {package.__version__}"
    )
    to_html = pdoc.render.env.filters["to_html"]
    pdoc.render.env.filters["to_html"] = lambda text: to_html(spaced(text))
    for module in modules:
        if hasattr(module, "__path__"):
            # Or pdoc would load all that is inside, which may want what is not installed.
            inside = [
                name.rpartition(".")[2]
                for name in PUBLIC
                if name.rpartition(".")[0] == module.__name__
            ]
            module.__all__ = [*public_names(module), *inside]
    warnings.filterwarnings("error", module="pdoc")
    # in the __init__ of a dataclass it looks in the wrong module
    warnings.filterwarnings("ignore", "Error parsing type annotation", module="pdoc")
    # where another one is installed than lies here, that is meant
    warnings.filterwarnings("ignore", "'nvme_offload' may refer to", module="pdoc")
    pdoc.pdoc(PUBLIC[0], output_directory=Path(directory))
    print(f"{directory}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
