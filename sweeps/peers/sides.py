"""All sides by name. Each syncs the file that it writes before its clock stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nvme_offload.errors import UsageError

from . import deepspeed_op, fio, kvikio_file, memory_map, ours, tensornvme_offloader
from .buffers import Shared
from .job import Job
from .stopwatch import Measurement


class Peer(Protocol):
    """Moves bytes. version: for the report."""

    version: str

    def run(self, place: Shared, job: Job) -> Measurement:
        """Move *job* once."""


_SIDES: dict[str, Callable[[], Peer]] = {
    "ours": ours.Ours,
    "fio": fio.Fio,
    "deepspeed": deepspeed_op.DeepSpeedOp,
    "tensornvme": tensornvme_offloader.TensorNVMe,
    "kvikio": kvikio_file.KvikIO,
    "memmap": memory_map.MemoryMap,
}


def make(name: str) -> Peer:
    """Make the side *name*. Raises: UsageError; UnsupportedError, with the reason, where this
    machine lacks something it needs.
    """
    if name not in _SIDES:
        raise UsageError(f"{name!r} is no side; there are {', '.join(_SIDES)}")
    return _SIDES[name]()
