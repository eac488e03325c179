"""The report on a drive's profile: one HTML page."""

from __future__ import annotations

from .render import html

__all__ = ["html"]
