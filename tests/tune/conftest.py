"""What the sweep's tests run on."""

from __future__ import annotations

import io
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.tune import cli
from nvme_offload.tune.progress import Progress
from nvme_offload.tune.ranks import SIGNALS


@pytest.fixture(autouse=True, scope="module")
def _nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user without GPUs, profiles and launcher, on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """A function from the arguments of `nvme-sweep` to the one line that refuses them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["nvme-sweep", *map(str, arguments)])
        # else it writes to the standard error of the time when it was imported
        monkeypatch.setattr(cli, "_progress", Progress(said := io.StringIO()))
        assert cli.main() == 2, arguments
        (line,) = said.getvalue().splitlines()
        assert (capfd.readouterr().out, line[:12]) == ("", "nvme-sweep: "), arguments
        return line

    yield ask
    for number, handler in before.items():
        signal.signal(number, handler)


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
