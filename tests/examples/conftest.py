"""The scripts of `examples/` run in separate processes, see `doors`: all are slow, since each
starts launchers and frameworks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for doors
sys.path.append(str(Path(__file__).parents[1] / "zero3"))  # for forked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in this folder."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slow)
