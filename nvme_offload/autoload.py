"""Kept for editable installations whose metadata still name it: `import torch` fails if the entry
point of an installed package does not load. Reinstalling removes the entry point.
"""

from __future__ import annotations


def install() -> None:
    """Do nothing."""
