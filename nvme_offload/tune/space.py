"""The settings that a sweep may try: a geometric grid, its neighbours and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, Setting

BLOCK_SIZES = tuple(1 << power for power in range(17, 24))  # 128 KiB to 8 MiB
QUEUE_DEPTHS = tuple(1 << power for power in range(7))  # 1 to 64
THREAD_COUNTS = (1, 2, 4, 8)
MAX_BYTES_IN_FLIGHT = 128 << 20  # of all ranks together
MOST_RANKS = MAX_BYTES_IN_FLIGHT // DEEPSPEED_DEFAULTS.bytes_in_flight  # each can run the defaults

# Deeper queues than the drive serves in this time only make requests wait.
USEFUL_QUEUE_SECONDS = 0.1

# Preferred among settings that are equally fast. DeepSpeed keeps every tensor under
# max(1 MiB, block_size) in RAM (optimizer_utils.py), and smaller blocks take more system calls. The
# bytes in flight are four times as many as the defaults have: a drive that is slower to answer than
# during the sweep still has a full queue.
PREFERRED_BLOCK_SIZE = 1 << 20
PREFERRED_BYTES_IN_FLIGHT = 32 << 20

_COARSE_BLOCK_SIZES = frozenset(BLOCK_SIZES[1::2])
_COARSE_QUEUE_DEPTHS = frozenset(QUEUE_DEPTHS[1::2])
_COARSE_THREAD_COUNTS = frozenset(THREAD_COUNTS[::2])

_Item = TypeVar("_Item")


def grid(
    backend: str,
    cpu_count: int,
    bytes_per_second: float,
    most_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
    ranks: int = 1,
) -> list[Setting]:
    """Every setting worth trying, the cheapest first, for a drive that moves about
    *bytes_per_second*. *ranks* processes share the drive, the processors and the bytes in flight.
    """
    cpu_count //= ranks
    least_bytes = max((16 << 20) // ranks, DEEPSPEED_DEFAULTS.bytes_in_flight)
    useful_bytes = max(least_bytes * ranks, int(bytes_per_second * USEFUL_QUEUE_SECONDS))
    most_bytes = min(most_bytes_in_flight, MAX_BYTES_IN_FLIGHT, useful_bytes) // ranks
    settings = [
        Setting(block_size, queue_depth, thread_count, backend=backend)
        for block_size in BLOCK_SIZES
        # a "posix" worker has one block under way at a time
        for queue_depth in (QUEUE_DEPTHS if backend != "posix" else (1,))
        for thread_count in THREAD_COUNTS
        if thread_count <= max(1, 2 * cpu_count) and 2 * ranks * block_size <= MAX_BYTES_IN_FLIGHT
    ]
    return sorted((each for each in settings if each.bytes_in_flight <= most_bytes), key=cost)


def coarse(settings: Sequence[Setting]) -> list[Setting]:
    """Settings two steps apart in each direction, and one with the most bytes in flight."""
    deepest = max(setting.bytes_in_flight for setting in settings)
    found = [
        setting
        for setting in settings
        if setting.block_size in _COARSE_BLOCK_SIZES
        and (setting.queue_depth in _COARSE_QUEUE_DEPTHS or setting.backend == "posix")
        and setting.thread_count in _COARSE_THREAD_COUNTS
    ]
    if all(setting.bytes_in_flight < deepest for setting in found):
        found.append(next(each for each in settings if each.bytes_in_flight == deepest))
    return found


def neighbours(setting: Setting, settings: Sequence[Setting]) -> list[Setting]:
    """The settings one step away from *setting* in one direction, the cheapest first."""
    names = "block_size", "queue_depth", "thread_count"

    def steps(other: Setting) -> int:
        return sum(_doublings(getattr(setting, name), getattr(other, name)) for name in names)

    return [other for other in settings if steps(other) == 1]


def cost(setting: Setting) -> tuple[int, int, bool, int]:
    """The sort key from cheap to dear: bytes in flight, threads, block sizes up to 1 MiB, the
    nearest first.
    """
    block_doublings = _doublings(setting.block_size, PREFERRED_BLOCK_SIZE)
    large = setting.block_size > PREFERRED_BLOCK_SIZE
    return setting.bytes_in_flight, setting.thread_count, large, block_doublings


def preference(setting: Setting) -> tuple[int, int, int, tuple[int, int, bool, int]]:
    """The sort key of settings that are equally fast: the block size nearest to 1 MiB, then the
    fewest doublings away from 32 MiB in flight and one thread, then the nearest to 32 MiB.
    """
    block_doublings = _doublings(setting.block_size, PREFERRED_BLOCK_SIZE)
    away = _doublings(setting.bytes_in_flight, PREFERRED_BYTES_IN_FLIGHT)
    return block_doublings, away + _doublings(setting.thread_count, 1), away, cost(setting)


def _doublings(one: int, other: int) -> int:
    return abs(one.bit_length() - other.bit_length())


def spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """*count* of *items* at even distances, including both ends; all items if there are not more."""
    if count >= len(items):
        return list(items)
    if count == 1:
        return [items[len(items) // 2]]
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]
