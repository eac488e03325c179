"""How Sphinx builds these pages and the API reference: `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
URL = "https://github.com/nvme-offload/nvme-offload"

project = "nvme-offload"
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
html_theme = "furo"
html_title = "nvme-offload"
html_show_copyright = html_copy_source = False
myst_heading_anchors = 4
smartquotes = False
# A link in a page to a name that is not there is a warning, and -W makes it an error; the types in
# signatures are links where they can be.
nitpicky = True
nitpick_ignore_regex = [("py:(?!obj).*", ".*")]
default_role = "literal"  # docstrings write `code` as Markdown does
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
numpydoc_show_class_members = False


def in_repository(folder: Path, text: str) -> str:
    """*text* with each relative link that leaves docs/ made one into the repository."""

    def absolute(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"]({URL}/{kind}/main/{path.relative_to(ROOT)}{match[2] or ''})"

    return re.sub(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)", absolute, text)


def read(app, name: str, content: list[str]) -> None:
    """Take index.md from the README, whose links into docs/ are absolute there."""
    if name == "index":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        content[0] = re.sub(rf"{URL}/(?:blob|raw)/main/docs/", "", readme) + content[0]
    content[0] = in_repository((ROOT / "docs" / name).parent, content[0])


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read)
