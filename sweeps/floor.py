"""The drive's speed at a setting, measured by fio; and the floor, the least time to move given bytes."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.profile import Setting
from nvme_offload.units import format_bytes

from . import fio
from .report import shown

_SECONDS = 3.0  # of each measurement, at least
_BYTES_PER_SECOND = 2e9  # large files are moved about once: a drive may be faster for a few seconds
_CHUNK_BYTES = 16 << 20


class Speeds(NamedTuple):
    """fio's bytes per second: reading alone, writing alone, and both concurrently."""

    read: float
    write: float
    mixed_read: float
    mixed_write: float


def floor_seconds(read: float, written: float, drive: Any) -> float:
    """The least time in which a drive of those speeds moves the bytes, concurrently or alone."""
    both = min(read / drive.mixed_read, written / drive.mixed_write)
    saved = both * (drive.mixed_read / drive.read + drive.mixed_write / drive.write - 1)
    return read / drive.read + written / drive.write - max(saved, 0.0)


def described(speeds: Sequence[Any], aio: AioConfig) -> str:
    """fio's measurements with the settings *aio* as text; "" for none."""
    if not speeds:
        return ""
    each = {name: [getattr(one, name) / 1e9 for one in speeds] for name in Speeds._fields}
    figures = ", ".join(f"{name} {shown(values)}" for name, values in each.items())
    return (
        f"fio, {len(speeds)} times between the runs, with block {format_bytes(aio.block_size)}, depth {aio.queue_depth}, threads {aio.thread_count}, GB/s: "
        f"{figures}; mixed is both concurrently. The floor is the least time to move the bytes, "
        "concurrently or alone, at the mean of fio's figures before and after."
    )


class Floor:
    """fio with two written files on the drive. Made by `floor`."""

    def __init__(self, files: Path, aio: AioConfig, nbytes: int) -> None:
        self.version = fio.version()
        if self.version is None:
            raise UnsupportedError("fio is not installed: apt-get install fio")
        if nbytes < aio.block_size * aio.thread_count:
            raise UnsupportedError(f"fio_bytes of {nbytes} is less than a block for each thread")
        self._nbytes, self._direct = nbytes, _takes_direct(files)
        self._setting = Setting(
            aio.block_size, aio.queue_depth, aio.thread_count, backend=aio.backend
        )
        self._paths = {direction: [str(files / direction)] for direction in ("read", "write")}
        for (path,) in self._paths.values():
            _fill(Path(path), nbytes)

    def measure(self) -> Speeds:
        """Measure reading, writing, and both concurrently."""
        read, write = ({direction: paths} for direction, paths in self._paths.items())
        return Speeds(*self._speeds(read), *self._speeds(write), *self._speeds(read | write))

    def _speeds(self, paths: Mapping[str, Sequence[str]]) -> list[float]:
        seconds = max(_SECONDS, self._nbytes / _BYTES_PER_SECOND)
        return fio.bytes_per_second(paths, self._nbytes, self._setting, seconds, self._direct)


class Beside:
    """The speeds of *drive*, None without fio, before and after runs, added to *speeds*."""

    def __init__(self, drive: Floor | None, speeds: list[Speeds]) -> None:
        self._drive = drive
        self._speeds = speeds

    def begin(self) -> None:
        """Measure before the first of several runs."""
        if self._drive is not None:
            self._speeds.append(self._drive.measure())

    def end(self) -> Speeds | None:
        """Measure after a run: the mean with the last measurement before it."""
        if self._drive is None:
            return None
        before = self._speeds[-1]
        self.begin()
        return Speeds(*map(statistics.fmean, zip(before, self._speeds[-1], strict=True)))


@contextlib.contextmanager
def floor(
    directory: Path, aio: AioConfig, nbytes: int, facts: dict[str, str], notes: list[str]
) -> Iterator[Floor | None]:
    """fio with two files of *nbytes* in *directory*, removed at the end of the `with`.

    None if *nbytes* is 0 or fio cannot be used, which is added to *notes*. Its version is added to
    *facts*.
    """
    with tempfile.TemporaryDirectory(prefix="sweeps-fio-", dir=directory) as files:
        found = None
        try:
            found = Floor(Path(files), aio, nbytes) if nbytes else None
        except UnsupportedError as error:
            notes.append(f"Without the drive's own speed: {error}")
        if found is not None:
            facts["versions"] = ", ".join(filter(None, [found.version, facts.get("versions")]))
        yield found


def _fill(path: Path, nbytes: int) -> None:
    chunk = os.urandom(_CHUNK_BYTES)
    with path.open("wb") as file:
        for begin in range(0, nbytes, _CHUNK_BYTES):
            file.write(chunk[: nbytes - begin])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _takes_direct(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True
