"""Tests on a GPU: without one, or without DeepSpeed where they train with it, they are skipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in this folder, and skip those that cannot run."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif item.get_closest_marker("deepspeed") and not importlib.util.find_spec("deepspeed"):
            item.add_marker(pytest.mark.skip(reason="DeepSpeed is not installed"))
