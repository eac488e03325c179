"""A store whose transfers take a drive's time but move no bytes, and a pool of memory that is never
touched.

They measure a planner on shapes of models that fit neither the drive nor the memory of the machine.
"""

from __future__ import annotations

import mmap
import tempfile
from typing import Any

from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, File, StrPath
from nvme_offload.io.pool import PinnedPool
from nvme_offload.store.slabs import Slabs
from nvme_offload.store.store import TensorStore

_MAP_NORESERVE = 0x4000  # linux/mman.h


class NullEngine(Engine):
    """An engine that moves no bytes, on sparse files of any size.

    *read_bytes_per_second*, *write_bytes_per_second*: of a drive that serves one block after
    another, so that both directions share it; without them transfers complete immediately. *faults*
    as in the tests of the engine.
    """

    def __init__(
        self,
        read_bytes_per_second: float = 0,
        write_bytes_per_second: float = 0,
        *,
        faults: Any = (),
    ) -> None:
        speeds = (
            f":{read_bytes_per_second:.0f}:{write_bytes_per_second:.0f}"
            if read_bytes_per_second
            else ""
        )
        super().__init__(
            AioConfig(block_size=1 << 20, queue_depth=32, direct=False),
            _backend=f"null{speeds}",
            _faults=faults,
        )

    def open_anonymous(self, directory: StrPath, size: int = 0, *, padded: bool = False) -> File:
        """A sparse unlinked file in *directory*."""
        with tempfile.NamedTemporaryFile(dir=directory) as made:
            made.truncate(size)
            return self.open(made.name, "rw")


class _EndlessSlabs(Slabs):
    """Space on a drive that is never full."""

    @property
    def available_bytes(self) -> int:
        return 1 << 60


class NullStore(TensorStore):
    """A store on its own `NullEngine`. A read leaves the reader's memory unchanged."""

    def __init__(
        self,
        read_bytes_per_second: float = 0,
        write_bytes_per_second: float = 0,
        *,
        faults: Any = (),
    ) -> None:
        self._null_engine = NullEngine(read_bytes_per_second, write_bytes_per_second, faults=faults)
        super().__init__(tempfile.gettempdir(), engine=self._null_engine)
        self._space.drives[:] = [
            _EndlessSlabs(self._null_engine, drive.path, drive.weight)
            for drive in self._space.drives
        ]

    def close(self) -> None:
        """Close the store and the engine."""
        try:
            super().close()
        finally:
            self._null_engine.close()


class UntouchedPool(PinnedPool):
    """A pool of any size that reserves only addresses: an untouched page takes no memory, and
    nothing touches these.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(1, pin=False)
        self.nbytes = nbytes
        self._addresses = mmap.mmap(
            -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        )

    @property
    def memory(self) -> memoryview:
        """The whole pool, as a swapper requests."""
        return memoryview(self._addresses)
