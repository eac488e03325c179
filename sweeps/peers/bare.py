"""The least that can be done through libaio, as a side of a contest: what the kernel and the drive
give to memory of this size.

fio moves everything through as much memory as it has blocks in flight, which caches may hold. This
side has the same memory as ours, so what it lacks against fio nobody can make up, and what we lack
against it is our own.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvme_offload.errors import UnsupportedError

from .plan import Job
from .rig import Place, failed, memory_of, require_read, spoil
from .stopwatch import Measurement, Stopwatch

OPTIONS: set[str] = set()
_OPCODES = {"read": 0, "write": 1}
# struct iocb and struct io_event of linux/aio_abi.h, on little-endian machines.
_CONTROL_BLOCK = np.dtype(
    {
        "names": [
            *("data", "key", "rw_flags", "opcode", "priority", "descriptor"),
            *("buffer", "nbytes", "offset", "reserved", "flags", "event_descriptor"),
        ],
        "formats": ["u8", "u4", "u4", "u2", "i2", "u4", "u8", "u8", "i8", "u8", "u4", "u4"],
    }
)
_EVENT = np.dtype([("data", "u8"), ("block", "u8"), ("result", "i8"), ("result2", "i8")])


class Bare:
    """A loop of io_submit(2) for one block at a time and io_getevents(2). One thread; its CPU time
    is mostly Python's.

    Raises: UnsupportedError where libaio is not installed.
    """

    version = ""

    def __init__(self, options: frozenset[str]) -> None:
        try:
            self._libaio = ctypes.CDLL("libaio.so.1")
        except OSError:
            raise UnsupportedError("libaio is not installed: apt-get install libaio1") from None

    def run(self, rig: Place, job: Job) -> Measurement:
        """Move *job* once. Raises: UnsupportedError, IOFailure."""
        if job.backend != "libaio" or job.thread_count != 1:
            raise UnsupportedError("the bare loop is one thread with libaio")
        buffers = memory_of(rig, job)
        direct = os.O_DIRECT if rig.direct else 0
        descriptors = {
            direction: os.open(rig.path(direction), os.O_RDWR | direct)
            for direction in job.directions
        }
        try:
            if "read" in buffers:
                spoil(buffers["read"])
            blocks = _control_blocks(job, buffers, descriptors)
            measurement = self._time(blocks, job)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        if "read" in buffers:
            require_read(buffers["read"], "the bare loop")
        return measurement

    def _time(self, blocks: NDArray[Any], job: Job) -> Measurement:
        address = int(blocks.ctypes.data)
        pointers = [
            ctypes.c_void_p(address + index * _CONTROL_BLOCK.itemsize)
            for index in range(len(blocks))
        ]
        events = np.zeros(job.queue_depth, _EVENT)
        place = ctypes.c_void_p(int(events.ctypes.data))
        context = ctypes.c_void_p()
        self._require(self._libaio.io_setup(job.queue_depth, ctypes.byref(context)), job)
        with Stopwatch() as watch:
            submitted = finished = 0
            while finished < len(blocks):
                while submitted < len(blocks) and submitted - finished < job.queue_depth:
                    submitted += self._require(
                        self._libaio.io_submit(
                            context, ctypes.c_long(1), ctypes.byref(pointers[submitted])
                        ),
                        job,
                    )
                count = self._require(
                    self._libaio.io_getevents(
                        context, ctypes.c_long(1), ctypes.c_long(job.queue_depth), place, None
                    ),
                    job,
                )
                if (events["result"][:count] != job.block_size).any():
                    raise failed("the bare loop failed", job)
                finished += count
        self._libaio.io_destroy(context)
        return watch.measurement(job.nbytes)

    def _require(self, result: int, job: Job) -> int:
        if result == -errno.EINTR:  # nothing happened, and every caller comes back for it
            return 0
        if result < 0:
            raise failed(os.strerror(-result), job, -result)
        return result


def _control_blocks(job: Job, buffers: dict[str, Any], descriptors: dict[str, int]) -> NDArray[Any]:
    begins = np.arange(0, job.file_bytes * job.passes, job.block_size)
    blocks = np.zeros((len(begins), len(buffers)), _CONTROL_BLOCK)
    blocks["nbytes"] = job.block_size
    for column, (direction, buffer) in enumerate(buffers.items()):
        lane = blocks[:, column]
        lane["opcode"], lane["descriptor"] = _OPCODES[direction], descriptors[direction]
        lane["buffer"], lane["offset"] = (
            int(buffer.ctypes.data) + begins % job.footprint_bytes,
            begins % job.file_bytes,
        )
    return blocks.reshape(-1)
