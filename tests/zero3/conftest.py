"""Training runs in processes of their own, see `launch`; without DeepSpeed none of it can be tested."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for launch, models and training, which a script imports too

TRAINS = {"test_faults.py", "test_parity.py", "test_recovery.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what trains, and skip it where DeepSpeed is not installed."""
    missing = importlib.util.find_spec("deepspeed") is None
    for item in items:
        if item.path.name in TRAINS and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.deepspeed)
            if missing:
                item.add_marker(pytest.mark.skip(reason="DeepSpeed is not installed"))
