"""What the sweep's tests run on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine


@pytest.fixture(autouse=True, scope="module")
def _nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user without GPUs, profiles and launcher, on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def disk(
    tmp_path_factory: pytest.TempPathFactory, filesystems: Callable[[str], Path]
) -> Iterator[Path]:
    """An empty directory with direct I/O: on a separate filesystem if one can be mounted, so
    that no other sweep holds its lock.
    """
    try:
        place = filesystems("ext4")
    except pytest.skip.Exception:
        place = tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(dir=place) as directory:
        try:
            with Engine(AioConfig(backend="posix")) as engine:
                engine.open_anonymous(directory).close()
        except UnsupportedError as error:
            pytest.skip(f"no disk to sweep here: {error}")
        yield Path(directory)
