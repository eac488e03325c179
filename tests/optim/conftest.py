"""`reference` is imported by these tests and by those on a GPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from nvme_offload.hardware import disk_counters, profile_shelf
from nvme_offload.hardware.drive import describe
from nvme_offload.swap import tier


@pytest.fixture(scope="module", autouse=True)
def drives_are_examined_once() -> Iterator[None]:
    """An optimizer examines its drive five times, each time in 60 files of /sys."""
    once = functools.cache(describe)
    with pytest.MonkeyPatch.context() as patch:
        for module in (disk_counters, profile_shelf, tier):
            patch.setattr(module, "describe", once)
        yield
