"""`Records`: growth of a unit's value, and its state after an exception, with a stager that copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvme_offload.device.staging import HostStager
from nvme_offload.errors import OutOfHostMemoryError, known
from nvme_offload.hardware.config import AioConfig
from nvme_offload.optimizer_states.formats import FORMATS
from nvme_offload.swap.tier import Tier
from nvme_offload.update.records import Records, RetainedError, Unit

CPU = torch.device("cpu")


class Elsewhere(HostStager):
    """A stager with copies of values, as on a GPU."""

    def fetch(self, name: str, nbytes: int) -> torch.Tensor:
        self.host = super().fetch(name, nbytes)
        self.copy = self.host.clone()
        return self.copy

    def renew(self, name: str, nbytes: int) -> torch.Tensor:
        self.host = super().renew(name, nbytes)
        self.host.fill_(255)  # what another value has left
        self.copy = torch.empty_like(self.host)
        return self.copy

    def give_back(self, *, changed: bool, nbytes: int | None = None) -> None:
        if changed:
            self.host[:nbytes].copy_(self.copy[:nbytes])
        super().give_back(changed=changed, nbytes=nbytes)


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    tier = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=1 << 20)
    tier.require(1 << 19)
    made = Records(tier, FORMATS["split"], "Adam")
    made._stagers[CPU] = Elsewhere(tier)
    yield made
    tier.close()


def unit_of(records: Records, **states: torch.dtype) -> Unit:
    unit = Unit(name="one", dtype=torch.bfloat16, device=CPU, numel=100)
    unit.layout = records._layout(unit, states)
    return unit


def opened(records: Records, unit: Unit) -> torch.Tensor:
    records._open(unit)
    return known(unit.memory)


class Behind(HostStager):
    """A stager whose copies to host memory end only when they are waited for."""

    returning: str | None = None

    def give_back(self, *, changed: bool, nbytes: int | None = None) -> None:
        self.returning, self._held = self._held, None

    def drain(self) -> None:
        if self.returning is not None:
            self._tier.swapper.release(self.returning, changed=True)
            self.returning = None


@pytest.mark.parametrize("is_stored", [False, True])
def test_values_on_their_way_from_another_device_make_room(
    records: Records, is_stored: bool
) -> None:
    records.tier.require(1 << 19)
    elsewhere = torch.device("meta")
    records._stagers[elsewhere] = Behind(records.tier)
    here, there = (
        Unit(name=str(device), dtype=torch.bfloat16, device=device, numel=1 << 16)
        for device in (CPU, elsewhere)
    )
    for unit in (here, there):
        unit.layout = records._layout(unit, {"exp_avg": torch.float32, "exp_avg_sq": torch.float32})
    if is_stored:
        opened(records, here).fill_(7)
        records._give_back(here, changed=True)
    opened(records, there)
    records._give_back(there, changed=True)
    with pytest.raises(OutOfHostMemoryError):
        records.tier.swapper.create("another", here.nbytes)
    memory = opened(records, here)
    assert not is_stored or memory[: here.nbytes].eq(7).all()
    records._give_back(here, changed=True)


def test_a_new_value_that_was_not_given_back_is_made_again(records: Records) -> None:
    unit = unit_of(records, exp_avg=torch.float32)
    opened(records, unit).fill_(1)
    records._stager(unit).cancel()  # after an exception
    memory = opened(records, unit)
    assert memory[: unit.nbytes].eq(0).all()
    memory.fill_(2)
    records._give_back(unit, changed=False)  # a new value is kept all the same
    assert opened(records, unit)[: unit.nbytes].eq(2).all()


@pytest.mark.parametrize("room_bytes", [0, 4096])
def test_a_state_that_is_added_keeps_the_others(records: Records, room_bytes: int) -> None:
    unit = unit_of(records, exp_avg=torch.float32)
    unit.room_bytes = room_bytes
    memory = opened(records, unit)
    _, states = records._format.unpack(unit.layout, memory, [torch.zeros(100).bfloat16()])
    first = states["exp_avg"].copy_(torch.arange(100))
    wanted = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    records._relay(unit, wanted, 64, [first])
    grown = unit.memory
    assert (grown is memory) == bool(room_bytes)
    assert unit.dtypes == wanted
    assert grown.numel() >= unit.nbytes == unit.layout.nbytes + 64
    assert first.equal(torch.arange(100).float())
    records._relay(unit, wanted, 0, [first])
    assert unit.memory is grown


def test_a_retained_unit_gets_no_other_layout(records: Records) -> None:
    unit = unit_of(records, exp_avg=torch.float32)
    records._open(unit)
    unit.is_retained = True
    with pytest.raises(RetainedError, match="Adam keeps other states"):
        records._relay(unit, {}, 0, [])
