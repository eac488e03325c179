from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from sweeps.compare import checkpoints, state
from sweeps.compare.worker import READ_SEED, Worker
from sweeps.peers import sides
from sweeps.peers.buffers import Shared, fill, require_filled
from sweeps.peers.job import Job
from sweeps.peers.stopwatch import Stopwatch

MIB = 1 << 20
SETTING: dict[str, Any] = {
    "backend": "libaio",
    "block_size": 256 << 10,
    "queue_depth": 4,
    "thread_count": 1,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    content = np.zeros(8 * MIB, np.uint8)
    fill(content, READ_SEED)
    with Engine(AioConfig(direct="auto")) as engine:
        for name in ("read", "write"):
            engine.write(content, tmp_path / name).wait()
    return tmp_path


def direct(place: Path) -> bool:
    with Engine(AioConfig(direct="auto")) as engine, engine.open(place / "read") as file:
        return file.direct


def needs(side: str) -> None:
    module = side
    if module in ("tensornvme", "kvikio") and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    if module == "fio" and shutil.which("fio") is None:
        pytest.skip("fio is not installed")


@pytest.mark.parametrize(
    "side",
    ["ours", "memmap", "memmap, sequential", "tensornvme", "kvikio", "fio"],
)
@pytest.mark.parametrize("direction", ["read", "write", "mixed"])
def test_every_side_moves_every_byte_and_a_worker_looks_at_each(
    place: Path, side: str, direction: str
) -> None:
    side, _, advised = side.partition(", ")
    needs(side)
    if side == "memmap" and direction == "mixed":
        pytest.skip("a memory map does one thing at a time")
    worker = Worker(place, direct(place))
    asked = {
        "side": side,
        "transfer": side,
        "direction": direction,
        "setting": {**SETTING, "sequential": bool(advised)},
        "seed": 5,
        "verify": True,
        "keep": False,
    }
    if side == "kvikio":
        try:
            worker.prepare({"transfer": side, "checkpoint": ""})
        except UnsupportedError as error:
            pytest.skip(str(error))
    answer = worker.transfer({**asked, "request_bytes": 512 << 10, "requests": 8})
    assert answer["nbytes"] == (8 if direction == "mixed" else 4) * MIB
    assert answer["seconds"] > 0
    read = np.fromfile(place / "read", np.uint8)
    require_filled(read, READ_SEED, "another side wrote to the file to read, which")
    if direction == "write" and side not in ("fio", "tensornvme"):
        require_filled(np.fromfile(place / "write", np.uint8)[: 4 * MIB], 5, side)


def test_a_worker_notices_what_was_not_written(place: Path) -> None:
    class Idle:
        version = ""

        def run(self, rig: Shared, job: Job) -> Any:
            with Stopwatch() as watch:
                pass
            return watch.measurement(job.nbytes)

    worker = Worker(place, True)
    worker._peers["ours"] = Idle()  # type: ignore[assignment]
    asked = {
        "side": "x",
        "transfer": "ours",
        "setting": SETTING,
        "seed": 5,
        "verify": True,
        "keep": False,
        "request_bytes": MIB,
        "requests": 4,
    }
    for direction in ("read", "write", "mixed"):
        with pytest.raises(Exception, match=r"did not (move|read) this"):
            worker.transfer({**asked, "direction": direction})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", "torch", "torch-mapped", "safetensors", "memmap"])
def test_checkpoints_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    try:
        side = checkpoints.make(name)
    except UnsupportedError as error:
        pytest.skip(str(error))
    worker = Worker(tmp_path, True)
    asked = {
        "side": name,
        "checkpoint": name,
        "setting": {**SETTING, "crc32": False},
        "nbytes": 2 * MIB,
        "verify": True,
        "keep": False,
    }
    for direction in ("read", "write", "read"):
        answer = worker.checkpoint({**asked, "direction": direction})
        assert answer["nbytes"] == sum(shape.nbytes for shape in state.shapes(2 * MIB))
    files = [path.name for path in tmp_path.iterdir()]
    assert files == [f"{side.format}.{2 * MIB}"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="'zip' does not save checkpoints; choose from ours, fast"):
        checkpoints.make("zip")
    with pytest.raises(UsageError, match="'memory' is no side; there are ours, fio"):
        sides.make("memory")
