"""The memory of a GPU: `memory_of` the process, and `DeviceRoom` for values that host memory could
hold.
"""

from __future__ import annotations

from typing import Any

import torch

from ..sizes import MARGIN_PARTS


def memory_of(device: torch.device | None = None) -> tuple[int, int]:
    """The free and the total bytes of *device*, by default the current GPU, that PyTorch may take in
    this process: `torch.cuda.set_per_process_memory_fraction` limits both.
    """
    cuda: Any = torch.cuda
    free, total = cuda.mem_get_info(device)
    fraction_of = getattr(cuda, "get_per_process_memory_fraction", None)  # older torch has none
    fraction = 1.0 if fraction_of is None else fraction_of(device)
    if fraction >= 1:
        return free, total
    most = int(total * fraction)
    return max(min(free, most - cuda.memory_reserved(device)), 0), most


class DeviceRoom:
    """The memory of *device* that forward and backward passes leave free.

    The passes need the peak of memory allocated so far, minus the caller's values at that time.
    *aside* bytes more are reserved for the caller's temporary tensors.
    """

    def __init__(self, device: torch.device, aside: int) -> None:
        self._device = device
        self._aside = aside
        self._peak = 0
        self._most_bytes = 0

    def has_new_peak(self) -> bool:
        """Whether memory allocated has reached another peak since `suffices` was called."""
        return _statistics(self._device)[0] != self._peak

    def suffices(self, held: int, more: int = 0) -> bool:
        """Whether *more* bytes fit in addition to the *held* bytes of the caller's values."""
        free, total = memory_of(self._device)
        peak, reserved = _statistics(self._device)
        if peak != self._peak:  # it may contain values that leave later
            self._peak = peak
            self._most_bytes = max(self._most_bytes, peak - held)
        needed = self._most_bytes + held + more + self._aside
        return needed <= free + reserved - total // MARGIN_PARTS


def _statistics(device: torch.device) -> tuple[int, int]:
    """The peak of the bytes allocated in this process, and the bytes reserved. `max_memory_allocated` and
    `memory_reserved` of torch would each compute all statistics.
    """
    cuda: Any = torch.cuda
    found = cuda.memory_stats_as_nested_dict(device)
    if not found:  # CUDA is not initialized yet
        return 0, 0
    return found["allocated_bytes"]["all"]["peak"], found["reserved_bytes"]["all"]["current"]
