"""What the tests ask of a context, and copies that end late."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from nvme_offload import save_on_nvme
from nvme_offload.activations.copies import Copier

Make = Callable[..., save_on_nvme]


def left(offload: save_on_nvme) -> tuple[int, int, list[str]]:
    """What *offload* still has: for graphs, in host memory, on the drive."""
    stats = offload.stats()
    return stats.alive_bytes, stats.host_bytes, offload._cache._tier.store.names()


class LateCopy:
    """A copy that is made when it is waited for, found to be done, or must be: whatever comes in
    between sees the memory as it was.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor, chance: random.Random) -> None:
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = (target, source)
        self._chance = chance

    def done(self) -> bool:
        if self._pair is not None and self._chance.random() < 0.2:
            self.wait()
        return self._pair is None

    def wait(self) -> None:
        if self._pair is not None:
            self._pair[0].copy_(self._pair[1])
            self._pair = None

    def release_device(self) -> None:
        self.wait()

    def precede(self, storage: torch.UntypedStorage) -> None:
        self.wait()


class LateCopier(Copier):
    """Starts such copies, on the CPU."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def overlaps(self, device: torch.device) -> bool:
        return True

    def _start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        target.fill_(77)
        return LateCopy(target, source, self._chance)
