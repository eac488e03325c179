"""What the drive gives at the setting of the training, by fio: the floor under every phase."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, cast

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from sweeps.peers.fio import Fio
from sweeps.peers.plan import Job
from sweeps.peers.rig import Buffers, Rig

from .plan import Plan
from .runs import Speeds

_CHUNK_BYTES = 16 << 20
_PIECES = 64  # that the engine is given of each file


class _Files(NamedTuple):
    """What fio wants of a rig."""

    directory: Path
    direct: bool

    def path(self, direction: str) -> Path:
        return self.directory / direction


class Floor:
    """fio with two files on the drive, every byte of them written. Lifetime: the files are removed
    at the end of the `with`.

    Raises: UnsupportedError where fio is not installed; OSError.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._fio = Fio(frozenset())
        self.version = self._fio.version
        aio = plan.aio
        block_size, threads = int(aio["block_size"]), int(aio["intra_op_parallelism"])
        unit = block_size * threads
        nbytes = plan.fio_bytes // unit * unit
        if nbytes == 0:
            raise UnsupportedError(
                f"fio_bytes of {plan.fio_bytes} is less than a block for each thread"
            )
        self._jobs = {
            direction: Job(
                direction,
                "libaio",
                block_size,
                int(aio["queue_depth"]),
                threads,
                "huge",
                nbytes,
                nbytes,
                1,
                1,
            )
            for direction in Speeds._fields
        }
        self._directory = tempfile.TemporaryDirectory(prefix="sweeps-training-fio-", dir=directory)
        self._files = _Files(Path(self._directory.name), _takes_direct(Path(self._directory.name)))
        for direction in ("read", "write"):
            _fill(self._files.path(direction), nbytes)

    def measure(self) -> Speeds:
        """Read, write, and both at once."""
        found = []
        for job in self._jobs.values():
            measurement = self._fio.run(cast(Rig, self._files), job)
            found.append(measurement.nbytes / measurement.seconds)
        return Speeds(*found)

    def engine_speed(self, config: AioConfig, nbytes: int) -> float:
        """Bytes a second that the engine reads and writes at once through *nbytes* of memory, with
        nothing else to do.

        fio moves everything through as much memory as it has blocks in flight, which caches may
        hold: what this is slower, no schedule makes up.
        """
        job = self._jobs["mixed"]
        piece = max(job.file_bytes // _PIECES // job.block_size, 1) * job.block_size
        footprint = max(min(nbytes // 2, job.file_bytes) // piece, 1) * piece
        buffers = Buffers(footprint)
        with Engine(config) as engine:
            files = {
                direction: engine.open(self._files.path(direction), direction[0])
                for direction in ("read", "write")
            }
            memory = {
                direction: buffers.get("huge", number) for number, direction in enumerate(files)
            }
            verbs = {"read": engine.read, "write": engine.write}
            began = time.perf_counter()
            tickets = [
                verbs[direction](memory[direction][begin % footprint :][:piece], file, begin)
                for begin in range(0, job.file_bytes - piece + 1, piece)
                for direction, file in files.items()
            ]
            for ticket in tickets:
                ticket.wait()
            return len(tickets) * piece / (time.perf_counter() - began)

    def __enter__(self) -> Floor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._directory.cleanup()


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
