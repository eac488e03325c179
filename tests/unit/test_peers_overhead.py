from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from patience import PATIENCE

from nvme_offload.errors import UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, allocate
from sweeps.peers import overhead

NBYTES = 25 * 4096


def test_the_null_backend_moves_nothing_and_says_that_it_did(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(NBYTES))
    pattern = np.arange(NBYTES, dtype=np.uint8)
    buffer = np.frombuffer(allocate(NBYTES), np.uint8)  # aligned, so that no byte takes a way round
    buffer[:] = pattern
    with (
        Engine(
            AioConfig(block_size=4096, thread_count=2, direct="auto"), _backend="null"
        ) as engine,
        engine.open(path, "rw") as file,
    ):
        assert engine.read(buffer, file).wait(PATIENCE) == NBYTES
        assert engine.write(buffer, file).wait(PATIENCE) == NBYTES
        assert (engine.stats().read.bytes, engine.stats().write.bytes) == (NBYTES, NBYTES)
    assert path.read_bytes() == bytes(NBYTES)
    assert (buffer == pattern).all()


def test_the_null_backend_is_nobodys_choice() -> None:
    with pytest.raises(UsageError, match="libaio, io_uring, posix"):
        AioConfig(backend="null")


def test_a_row_counts_the_blocks_of_all_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([0.0, 2.0])
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: next(moments))
    monkeypatch.setattr(overhead, "cpu_seconds", iter([1.0, 5.0]).__next__)
    monkeypatch.setattr(overhead, "_SMALL_REQUESTS", 3)
    found = overhead.cost(overhead.Row(4096, 4096, 2, 1), np.zeros(4096, np.uint8), tmp_path)
    assert found == overhead.Cost(3 * 2 / 2.0, 3 * 2 / 4.0)


def test_the_report_has_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_LEAST_SECONDS", 1e-9)
    monkeypatch.setattr(overhead, "_SMALL_REQUESTS", 8)
    monkeypatch.setattr(overhead, "_PAUSES", 1)
    asked = [
        str(tmp_path),
        "--rounds",
        "1",
        "--output",
        str(tmp_path / "report"),
        "--note",
        "Shared.",
    ]
    done = CliRunner().invoke(overhead.main, asked, catch_exceptions=False)
    assert done.exit_code == 0
    text = (tmp_path / "report.md").read_text()
    assert text in done.output
    assert "\nShared.\n" in text
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert (
        sum(line[0] in ("| 4 KiB", "| 128 KiB", "| 1 MiB") for line in lines)
        == len(list(overhead.rows()))
        == 33
    )
    assert [
        line[0] for line in lines if line[0] in ("| memoryview", "| ndarray", "| torch.Tensor")
    ] == ["| memoryview", "| ndarray", "| torch.Tensor"]
    assert [line[:2] for line in lines if line[1] in ("apart", "anywhere")] == [
        [f"| {n}", at] for n in (1, 2, 4, 8) for at in ("apart", "anywhere")
    ]
