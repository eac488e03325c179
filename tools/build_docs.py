"""Build the pages of docs/ and the API reference as one site: python tools/build_docs.py DIRECTORY.

Fails with a line for each public name without a docstring and each broken link. Needs Sphinx and the
other packages of the docs extra in pyproject.toml, and no network.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
DOCSTRING_KINDS = (classmethod, staticmethod, property)


def documented_modules() -> list[str]:
    """The modules that the pages of docs/api have a section for."""
    pages = sorted((DOCS / "api").glob("*.md"))
    return [
        name
        for page in pages
        for name in re.findall(r"^\.\. automodule:: (\S+)$", page.read_text("utf-8"), re.MULTILINE)
    ]


def public_names(module: types.ModuleType) -> list[str]:
    """The public names of *module*: its `__all__`, or else the public names that it defines."""
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


def main(directory: str) -> int:
    """Check, then write the site. Returns the exit status."""
    modules = ["nvme_offload", *documented_modules()]
    missing = [name for module in modules for name in undocumented(importlib.import_module(module))]
    for name in missing:
        print(f"{name} has no docstring", file=sys.stderr)
    if missing:
        return 1
    # -E: check the links of unchanged pages too
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html"]
    doctrees = Path(directory).parent / f"{Path(directory).name}-doctrees"
    done = subprocess.run([*command, "-d", doctrees, DOCS, directory])
    if done.returncode == 0:
        print(f"{directory}/index.html")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
