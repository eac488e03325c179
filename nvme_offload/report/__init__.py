"""A drive profile for people: one HTML page, a Markdown text, a table of all trials and charts as
PNG files; and two profiles side by side.
"""

from __future__ import annotations

from .comparison import Comparison, compare
from .render import html, markdown, write

__all__ = ["Comparison", "compare", "html", "markdown", "write"]
