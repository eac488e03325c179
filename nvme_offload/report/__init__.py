"""A drive profile for people: one HTML page, a short Markdown text and a table of all trials."""

from __future__ import annotations
