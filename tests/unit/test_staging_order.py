"""`DeviceStager`: events order all accesses to the memory that copies and kernels use."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from virtual_gpu import VirtualDevice, VirtualGpu, virtual_gpu

from nvme_offload.device.staging import DeviceStager
from nvme_offload.errors import OffloadError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.swap.tier import Tier

NBYTES = 256
DEVICE = VirtualDevice("cpu")


class Program:
    """A random program of uses. *contents*: what each value must be."""

    def __init__(self, gpu: VirtualGpu, tier: Tier, seed: int) -> None:
        self.gpu = gpu
        self.tier = tier
        self.random = random.Random(seed)
        kinds = ["read", "renew", "renew held", "newer", "beside", "weights", "cancel"]
        self.chances = {"update": 5, **{kind: self.random.choice([0, 0, 1, 3]) for kind in kinds}}
        self.looks_ahead = self.random.random() < 0.5
        self.stager = DeviceStager(tier, DEVICE, looks_ahead=self.looks_ahead)
        self.names = [f"n{number}" for number in range(self.random.randint(1, 14))]
        self.contents = dict.fromkeys(self.names, 0)
        self.pinned = torch.zeros(5, NBYTES, dtype=torch.uint8)
        gpu.watch(self.pinned, is_host=True)
        self.newer: set[str] = set()
        self.at_home = list(range(len(self.pinned) - 1))  # weights that do not visit the device
        self.updating = gpu.stream()

    def run(self, steps: int) -> None:
        for name in self.names:
            self.tier.swapper.create(name, NBYTES).zero_()
            self.tier.swapper.release(name, changed=True)
        for _ in range(steps):
            order = list(self.names)
            if self.random.random() < 0.2:
                self.random.shuffle(order)
            for name in order:
                self.use(name)
                if self.random.random() < 0.05:
                    self.foreign()
            self.end_step()
        self.stager.cancel()
        for name in self.names:
            assert int(self.tier.swapper.swap_in(name)[0]) == self.contents[name]
            self.tier.swapper.release(name, changed=False)

    def use(self, name: str) -> None:
        """As an update of a bucket does."""
        kind = self.random.choices([*self.chances], [*self.chances.values()])[0]
        if kind == "newer" and name in self.newer:
            kind = "update"
        # The program computes on another stream, on which its gradients are written.
        written = self.gpu.current_stream().record_event()
        with self.gpu.on(self.updating):
            self._use(name, kind, written)

    def _use(self, name: str, kind: str, written: Any) -> None:
        if kind == "renew":
            self._renew(name)
            return
        if kind == "weights":
            self._visit(written)
            self.stager.give_back(changed=False)
            return
        memory = self.stager.fetch(name, NBYTES)
        assert int(memory[0]) == self.contents[name]
        assert memory.unique().numel() == 1
        if kind == "renew held":
            self._renew(name)
            return
        if kind == "cancel":
            self.stager.cancel()
            self.at_home.clear()
            return
        if kind == "newer":
            memory = self.stager.renew_beside(memory)
            self.newer.add(name)
        if kind == "beside":
            self._visit(written)
        if kind == "read":
            self.stager.give_back(changed=False)
            return
        memory.add_(1)
        self.contents[name] = (self.contents[name] + 1) % 256
        self.stager.give_back(changed=True)

    def _renew(self, name: str) -> None:
        self.stager.renew(name, NBYTES).fill_(7)
        self.contents[name] = 7
        self.stager.give_back(changed=True)

    def _visit(self, written: Any) -> None:
        """Weights and gradients visit the device: each weight once between two drains."""
        if self.looks_ahead or not self.at_home:
            return
        weights = [self.pinned[self.at_home.pop()]]
        *brought, gradient = self.stager.bring(weights, [self.pinned[-1]], written)
        for part in brought:
            part.add_(gradient)
        self.stager.take_back(list(zip(weights, brought, strict=True)))

    def end_step(self) -> None:
        if self.newer or self.random.random() < 0.3:
            self.stager.drain()
            for name in sorted(self.newer):
                self.tier.swapper.commit(name)
            self.newer.clear()
            self.at_home = list(range(len(self.pinned) - 1))
            self.pinned.add_(1)
        else:
            self.stager.ease()
        self.tier.swapper.step()

    def foreign(self) -> None:
        """A use by the program: of a value whose copy is in flight, it is refused."""
        name = self.random.choice(self.names)
        if name in self.newer:
            return
        if self.random.random() < 0.5:
            self.stager.drain()
        try:
            memory = self.tier.swapper.swap_in(name, in_order=False)
        except OffloadError:
            return
        assert int(memory[0]) == self.contents[name]
        changed = self.random.random() < 0.5
        if changed:
            memory.fill_(9)
            self.contents[name] = 9
        self.tier.swapper.release(name, changed=changed)


@pytest.mark.parametrize("seed", range(24))
def test_events_order_all_accesses(seed, tmp_path):
    chance = random.Random(seed)
    values = chance.choice([4, 7, 40])
    tier = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=1 << 20)
    try:
        tier.require(values * 4096)
        likely = chance.choice([0.0, 0.3, 1.0])
        gpu = VirtualGpu(lambda: chance.random() < likely)
        gpu.watch(tier.swapper._runner.memory, is_host=True)
        with virtual_gpu(gpu):
            Program(gpu, tier, seed).run(steps=12)
    finally:
        tier.close()
