"""What the sweep's tests run on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvme_offload.config import AioConfig
from nvme_offload.engine import Engine
from nvme_offload.errors import UnsupportedError


@pytest.fixture(autouse=True, scope="module")
def _no_gpus() -> Iterator[None]:
    """One rank unless a test says more, on every machine: there is one for each GPU otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory, mounted: Callable[[str], Path]) -> Iterator[Path]:
    """An empty directory with direct I/O: on a filesystem of its own where one can be mounted, so that no other sweep holds its lock."""
    try:
        place = mounted("ext4")
    except pytest.skip.Exception:
        place = tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(dir=place) as directory:
        try:
            with Engine(AioConfig(backend="posix")) as engine:
                engine.open_anonymous(directory).close()
        except UnsupportedError as error:
            pytest.skip(f"no disk to sweep here: {error}")
        yield Path(directory)
