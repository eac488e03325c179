"""Models whose parameters stream on the CPU, in buckets of a few KiB. A slot that a bucket leaves is
filled with NaN, so that a use of it shows in the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# for the modules in this folder
sys.path.append(str(Path(__file__).parent))

from nvme_offload import AioConfig, Offload
from nvme_offload.parameters import setup
from nvme_offload.parameters.buckets import Division


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a few KiB, and NaN in unused slots."""
    division = Division(bucket_bytes=3 << 10, small_bytes=0, trainable_share=0)
    monkeypatch.setattr(setup, "DIVISION", division)
    monkeypatch.setattr(setup, "POISON", True)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Offload]]:
    """A function to an `Offload` with little host memory, so that the drive is used, too."""
    made: list[Offload] = []

    def offload(host_memory: int | str = 160 << 10) -> Offload:
        aio = AioConfig(block_size=16 << 10, queue_depth=4, direct="auto")
        made.append(Offload(tmp_path, host_memory, aio=aio))
        return made[-1]

    yield offload
    for one in made:
        one.close()


@pytest.fixture
def offload(make: Callable[..., Offload]) -> Offload:
    """See `make`."""
    return make()
