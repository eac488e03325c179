"""Sizes that the optimizers decide and `nvme-offload plan` predicts with."""

from __future__ import annotations

import dataclasses
import math

# Share of the available memory that host_memory "auto" takes. The rest is for activations, the data
# loader, and the page cache of a checkpoint.
AUTO_SHARE = 0.7

# Sub-groups of ZeRO-3, or buckets of `NVMeOptimizer`, that a budget should hold: one is in use, two
# are prefetched and one is written back. With more of them, less of the budget is lost to a
# part that does not fit.
IN_MEMORY = 16
# Elements. Larger sub-groups gain nothing, and lengthen the first read and the last write of a step.
LARGEST_SUB_GROUP = 1 << 26
# One part in this many of a GPU's memory is left for steps that need more than those before.
MARGIN_PARTS = 10
# Larger buckets gain nothing on a drive, and take several times as much GPU memory.
LARGEST_BUCKET_BYTES = 128 << 20
# Where host memory holds all states and a GPU updates them, the Python for each bucket limits a step. The
# buckets in flight take one part in so many of the GPU's memory at most.
LARGEST_IN_MEMORY_BYTES = 256 << 20
GPU_PARTS = 32
PLACES = 3  # buckets on a GPU: one is filled, one is computed on, one is emptied
# Where updates wait for copies from host memory, up to one part in so many of the states is on the GPU
# before its update: copies then run during the forward pass too.
AHEAD_PARTS = 8
# One part in this many of the budget of `NVMeOptimizer` is scratch memory for updates on CPUs.
SCRATCH_PARTS = 8
# Share of the updates that run in the forward pass where they run in both passes. The forward pass takes
# a third of the time of both, or a quarter with recomputation. If the drive takes longer than both
# passes, any share will do with which it is idle in neither.
FORWARD_SHARE = 0.3
# The smallest budget of `NVMeOptimizer` that is useful for a model of any size: its buckets have 4 MiB.
LEAST_BUDGET_BYTES = 64 << 20
# Memory for rounding each sub-group up to pages, and for a few small parameters.
_SLACK_BYTES = 1 << 16
# Parameters that stream are copied in buckets of this size, into so many places on a GPU at least.
STREAMED_BUCKET_BYTES = 256 << 20
STREAMED_SLOTS = 4
# If they do not all fit into host memory, that many buckets do at least: a few of them are in passage, and
# each of the others saves a read.
STREAMED_IN_MEMORY = 64
# Of the host memory that `Offload` has left, a part that takes as much as it needs leaves one part in so
# many to each part that may follow, and at most so many bytes.
LATER_PARTS = 8
LATER_BYTES = 1 << 30
# The smallest share of a budget that values take which stay in memory, apart from space for a few of the
# other values.
_HELD_SHARE, _PASSING = 0.95, 6


def evenly(number: int) -> float:
    """The term *number* of a sequence between 0 and 1 whose first terms are spread evenly, however
    many they are.
    """
    return number * 0.6180339887498949 % 1  # the golden ratio, modulo 1


def bucket_elements(
    cap_bytes: int, value_bytes: float, scratch_bytes: float, gpu_bytes: int = 0
) -> float:
    """Elements of a bucket of `NVMeOptimizer` with a budget of *cap_bytes*. An element takes
    *value_bytes* in the value, and *scratch_bytes* during an update. *gpu_bytes*: the memory of the
    GPU that makes the updates, if the budget holds all values; otherwise 0.
    """
    part = cap_bytes // IN_MEMORY
    elements = min(LARGEST_BUCKET_BYTES, part) / max(value_bytes, scratch_bytes / 2, 1.0)
    on_gpu = gpu_bytes / GPU_PARTS / (PLACES * value_bytes + scratch_bytes + 1)
    return max(elements, min(min(LARGEST_IN_MEMORY_BYTES, part) / max(value_bytes, 1.0), on_gpu))


def kept_for_later(left_bytes: int, parts: int) -> int:
    """The bytes that a part of `Offload` leaves to *parts* which may follow, if *left_bytes* are left."""
    return parts * min(left_bytes // LATER_PARTS, LATER_BYTES)


def enough_with_later(needed_bytes: int, parts: int) -> int:
    """The bytes of which a part may take *needed_bytes* and leave `kept_for_later` the rest. Also
    enough for an optimizer, if *parts* follow.
    """
    share = -(-needed_bytes * LATER_PARTS // (LATER_PARTS - parts))
    return max(
        min(needed_bytes + parts * LATER_BYTES, share),
        needed_bytes + parts * LEAST_BUDGET_BYTES // 2,
    )


def overflow(nbytes: int, memory_bytes: int, largest: int) -> int:
    """The space on the drive, in bytes, that is enough for values of *nbytes* in total, each of at
    most *largest*, in addition to *memory_bytes* of memory.
    """
    return max(min(nbytes, nbytes - int(_HELD_SHARE * memory_bytes) + _PASSING * largest), 0)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes for each element of a sub-group of ZeRO-3.

    states: packed. gradient: as it is reduced. scratch: what sub-groups share, the widened gradient and
    unpacked states; 0 if updates run on a GPU. parameter: on a drive; 0 for others. largest_parameter:
    the bytes of the largest one on a drive, trained or not. in_flight: sub-groups whose states are in use
    together, if host memory can hold them.
    """

    states: float
    gradient: int
    scratch: int
    parameter: int
    largest_parameter: int = 0
    in_flight: int = 1

    @property
    def _at_once(self) -> float:
        # An update holds the states and the scratch memory. Before and after the states, it holds
        # one 16-bit parameter at a time.
        return self.states + self.scratch + 2 * self.parameter

    def holds_in_flight(self, elements: int, nbytes: int) -> bool:
        """Whether `in_flight` sub-groups of *elements* fit in *nbytes* of memory."""
        return self.least_bytes(elements) + (self.in_flight - 1) * elements * self.states <= nbytes

    def least_bytes(self, elements: int) -> int:
        """The memory, in bytes, that sub-groups of up to *elements* and all parameters need."""
        at_once = max(elements * self._at_once, self.largest_parameter + elements * self.scratch)
        return math.ceil(at_once) + 2 * _SLACK_BYTES

    def most_elements(self, nbytes: int) -> int:
        """The elements of the largest sub-group that fits in *nbytes* of memory."""
        room = nbytes - 2 * _SLACK_BYTES
        most = room / self._at_once
        if self.scratch:
            most = min(most, (room - self.largest_parameter) / self.scratch)
        return int(most)

    def wanted_elements(self, nbytes: int) -> int:
        """The best size of sub-groups for *nbytes* of memory, in elements."""
        return min(
            LARGEST_SUB_GROUP,
            max(1, self.most_elements(nbytes)),
            max(1, int(nbytes / (IN_MEMORY * (self.states + self.gradient) + self.scratch))),
        )

    def whole_bytes(self, sizes: list[int], least: int) -> int:
        """The memory, in bytes, in which everything but parameters stays. *sizes* are the elements
        of each parameter; the largest sub-group has at least *least*.
        """
        largest = min(LARGEST_SUB_GROUP, sum(sizes)) + least
        return (
            math.ceil(sum(sizes) * (self.states + self.gradient))
            + largest * self.scratch
            + 2 * (len(sizes) + 1) * _SLACK_BYTES
        )

    def drive_bytes(self, elements: int) -> int:
        """Drive space for *elements*, in bytes."""
        return math.ceil(elements * (self.states + self.gradient + self.parameter))
