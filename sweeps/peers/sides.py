"""All sides by name, with options: "ours", "ours+sync"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nvme_offload.errors import UsageError

from . import deepspeed_op, fio, kvikio_file, memory_map, ours, tensornvme_offloader
from .buffers import Place
from .job import Job
from .stopwatch import Measurement


class Peer(Protocol):
    """Moves bytes. version: for the report."""

    version: str

    def run(self, place: Place, job: Job) -> Measurement:
        """Move *job* once."""


_SIDES: dict[str, tuple[Callable[[frozenset[str]], Peer], set[str]]] = {
    "ours": (ours.Ours, ours.OPTIONS),
    "fio": (fio.Fio, fio.OPTIONS),
    "deepspeed": (deepspeed_op.DeepSpeedOp, deepspeed_op.OPTIONS),
    "tensornvme": (tensornvme_offloader.TensorNVMe, tensornvme_offloader.OPTIONS),
    "kvikio": (kvikio_file.KvikIO, kvikio_file.OPTIONS),
    "memmap": (memory_map.MemoryMap, memory_map.OPTIONS),
}


def require_known(name: str) -> None:
    """Raises: UsageError, naming all sides, where *name* is unknown."""
    base, *options = name.split("+")
    if base not in _SIDES or not _SIDES[base][1].issuperset(options):
        known = "; ".join(
            " or ".join([side, *(f"{side}+{option}" for option in sorted(has))])
            for side, (_, has) in _SIDES.items()
        )
        raise UsageError(f"{name!r} is no side; there are {known}")


def make(name: str) -> Peer:
    """Make the side *name*. Raises: UsageError; UnsupportedError, with the reason, where this
    machine lacks something it needs.
    """
    require_known(name)
    base, *options = name.split("+")
    return _SIDES[base][0](frozenset(options))
