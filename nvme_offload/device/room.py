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

    The passes need the peak of memory allocated so far, minus the caller's values. *aside* bytes
    more are reserved for the caller's temporary tensors.
    """

    def __init__(self, device: torch.device, aside: int) -> None:
        self._device = device
        self._aside = aside
        self._most_bytes = 0

    def suffices(self, held: int, more: int = 0) -> bool:
        """Whether *more* bytes fit in addition to the *held* bytes of the caller's values."""
        cuda = torch.cuda
        free, total = memory_of(self._device)
        allocated = cuda.max_memory_allocated(self._device) - held
        self._most_bytes = max(self._most_bytes, allocated)
        ours = free + cuda.memory_reserved(self._device)
        needed = self._most_bytes + held + more + self._aside
        return needed <= ours - total // MARGIN_PARTS
