"""DeepSpeed's op in a trial: batches, errors and verification. With the op itself where it is built,
otherwise with a scripted handle.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import finished

from nvme_offload.errors import IOFailure
from nvme_offload.tune.deepspeed_op import DeepSpeedEngine, warn_of_builds


class Handle:
    """Does what the op does with files, when it is waited for; *lost* of its requests are
    not done.
    """

    def __init__(self, lost: int = 0, refuse: bool = False) -> None:
        self.pending: list[tuple[Any, str, int]] = []
        self.lost = lost
        self.refuse = refuse
        self.waits = 0

    def async_pread(self, tensor: Any, path: str, offset: int) -> int:
        self.pending.append((tensor, path, offset))
        return -1 if self.refuse else 0

    async_pwrite = async_pread

    def wait(self) -> int:
        assert self.pending, "the op ends the process here"
        self.waits += 1
        for tensor, path, offset in self.pending:
            tensor[:] = np.fromfile(path, np.uint8, len(tensor), offset=offset)
        done, self.pending = len(self.pending) - self.lost, []
        return done


class Torch:
    """As much of torch as the engine asks for."""

    @staticmethod
    def from_numpy(array: Any) -> Any:
        return array


class File:
    path = "/made/up"


@pytest.fixture
def file(tmp_path: Path) -> Any:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 64)
    return File()


def engine(
    reading: Handle, file: Any, tmp_path: Path, writing: Handle | None = None
) -> DeepSpeedEngine:
    return DeepSpeedEngine(reading, writing or Handle(), Torch, {file: str(tmp_path / "file")})


def test_a_request_is_done_when_its_batch_is(file: Any, tmp_path: Path) -> None:
    reading, writing = Handle(), Handle()
    made = engine(reading, file, tmp_path, writing)
    buffers = [np.zeros(4096, np.uint8) for _ in range(3)]
    tickets = [
        made.read(buffers[0].data, file, 0),
        made.read(buffers[1].data, file, 4096 + 7),
        made.write(buffers[2].data, file, 0),
    ]
    assert not any(ticket.done() for ticket in tickets)
    assert (made.stats().read.bytes, made.stats().write.bytes) == (0, 0)
    assert tickets[1].wait() == 4096
    assert all(ticket.done() for ticket in tickets)
    assert (made.stats().read.bytes, made.stats().write.bytes) == (8192, 4096)
    assert buffers[1][0] == 7
    assert tickets[0].wait() == 4096
    made.settle()
    assert (reading.waits, writing.waits) == (1, 1)


def test_what_the_op_did_not_do_is_an_error_and_everything_is_waited_for(
    file: Any, tmp_path: Path
) -> None:
    writing = Handle()
    made = engine(Handle(lost=1), file, tmp_path, writing)
    ticket = made.read(np.zeros(4096, np.uint8).data, file, 0)
    made.write(np.zeros(4096, np.uint8).data, file, 0)
    with pytest.raises(IOFailure, match="did 0 of 1 requests") as caught:
        ticket.wait()
    assert (caught.value.operation, caught.value.path, caught.value.nbytes) == (
        "read",
        "/made/up",
        4096,
    )
    made.settle()
    assert writing.pending == []


def test_what_the_op_refuses_is_an_error(file: Any, tmp_path: Path) -> None:
    with pytest.raises(IOFailure, match="refused"):
        engine(Handle(refuse=True), file, tmp_path).read(np.zeros(4096, np.uint8).data, file, 0)


def test_without_deepspeed_there_is_one_line(disk: Path, tmp_path: Path) -> None:
    script = "import sys\nsys.modules['deepspeed'] = None\nfrom nvme_offload.tune import cli\nsys.exit(cli.main())"
    command = [
        *(sys.executable, "-c", script, str(disk), "--engine", "deepspeed"),
        *("--report-dir", str(tmp_path)),
    ]
    result = finished(command)
    assert (result.returncode, result.stdout) == (2, "")
    *_, last = result.stderr.splitlines()
    assert last.startswith("nvme-sweep: DeepSpeed is not installed here")
    assert last.endswith("pip install deepspeed, or leave out --engine deepspeed")


def test_the_lock_of_a_killed_build_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch waits for such a lock without an end."""
    pytest.importorskip("torch.utils.cpp_extension")
    caplog.clear()  # its import warns of a compiler for CUDA without a GPU
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    warn_of_builds()
    assert not caplog.messages
    (lock := tmp_path / "async_io" / "lock").touch()
    warn_of_builds()
    (line,) = caplog.messages
    assert line.endswith(f"remove {lock}")


def test_a_sweep_of_the_op_itself(deepspeeds_op: Path, disk: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "nvme_offload.tune", str(disk), "--engine", "deepspeed"),
        *("--report-dir", str(tmp_path)),
    ]
    # A process that is killed while torch compiles leaves a lock, at which all others would wait
    # for ever.
    result = finished([*command, "--seconds", "1", "--size", "128MiB"])
    assert result.returncode == 0, result.stderr
    assert "DeepSpeed's own op" in result.stdout.splitlines()[0]
    assert list(disk.iterdir()) == []
