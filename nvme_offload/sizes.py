"""Sizes that the optimizers decide and `nvme-offload plan` predicts with."""

from __future__ import annotations

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
# Larger buckets gain nothing, and take several times as much GPU memory.
LARGEST_BUCKET_BYTES = 128 << 20
# One part in this many of the budget of `NVMeOptimizer` is scratch memory for updates on CPUs.
SCRATCH_PARTS = 8
# Share of the updates that run in the forward pass where they run in both passes. The forward pass takes
# a third of the time of both, or a quarter with recomputation. If the drive takes longer than both
# passes, any share will do with which it is idle in neither.
FORWARD_SHARE = 0.3
# The smallest budget of `NVMeOptimizer` that is useful for a model of any size: its buckets have 4 MiB.
LEAST_BUDGET_BYTES = 64 << 20
# Parameters that stream are copied in buckets of this size, into so many places on a GPU at least.
STREAMED_BUCKET_BYTES = 256 << 20
STREAMED_SLOTS = 4
# The smallest share of a budget that values take which stay in memory, apart from space for a few of the
# other values.
_HELD_SHARE, _PASSING = 0.95, 6


def bucket_elements(cap_bytes: int, value_bytes: float, scratch_bytes: float) -> float:
    """Elements of a bucket of `NVMeOptimizer` with a budget of *cap_bytes*. An element takes
    *value_bytes* in the value, and *scratch_bytes* during an update.
    """
    largest = min(LARGEST_BUCKET_BYTES, cap_bytes // IN_MEMORY)
    return largest / max(value_bytes, scratch_bytes / 2, 1.0)


def overflow(nbytes: int, memory_bytes: int, largest: int) -> int:
    """The space on the drive, in bytes, that is enough for values of *nbytes* in total, each of at
    most *largest*, in addition to *memory_bytes* of memory.
    """
    return max(min(nbytes, nbytes - int(_HELD_SHARE * memory_bytes) + _PASSING * largest), 0)
