"""Contexts on a drive of the test's own, which must leave nothing behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# for the modules in this folder, which the tests on a GPU import too
sys.path.append(str(Path(__file__).parent))

from offloading import Make, left

from nvme_offload import AioConfig, save_on_nvme


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A function that makes a context for tensors of 1 KiB or more, by default with 96 KiB of host
    memory; the saved tensors must be freed after the test.
    """
    made = []

    def context(**settings: Any) -> save_on_nvme:
        aio = AioConfig(block_size=16 << 10, queue_depth=4, direct="auto")
        offload = save_on_nvme(
            tmp_path, **{"min_bytes": 1 << 10, "host_memory": 96 << 10, "aio": aio, **settings}
        )
        made.append(offload)
        return offload

    yield context
    gc.collect()
    for offload in made:
        assert left(offload) == (0, 0, [])
        offload.close()
