"""Ctrl-C and other exceptions at any line of a swapper, of its store and of a tier."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from interrupts import Hang, Place, Raising, deadline, each_line, places, raising, sample

from nvme_offload.errors import UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.pool import PinnedPool
from nvme_offload.store.store import TensorStore
from nvme_offload.swap.swapper import TensorSwapper
from nvme_offload.swap.tier import Tier

SIZE = 16 << 10
COUNT = 6
SECONDS = 600  # for a trial: hundredths of one are usual


def pattern(number: int, version: int) -> torch.Tensor:
    return torch.full((SIZE,), (number * 16 + version) % 251, dtype=torch.uint8)


class Values:
    """A swapper with memory for half of its values, and their expected contents. One value is
    created anew in each step, and one is undone.
    """

    def __init__(self, place: Path) -> None:
        self.store = TensorStore(place, AioConfig(block_size=8 << 10, direct="auto"))
        self.swapper = TensorSwapper(self.store, PinnedPool(COUNT // 2 * SIZE, pin=False))
        self.versions: dict[int, int] = {}
        self.create()

    def create(self) -> None:
        for number in range(COUNT):
            self.swapper.swap_out(f"n{number}", pattern(number, 0))
            self.versions[number] = 0

    def step(self) -> None:
        for number in range(COUNT):
            name = f"n{number}"
            if number == 2:
                self.swapper.write_back(name)
            memory = self.swapper.swap_in(name)
            assert torch.equal(memory, pattern(number, self.versions[number])), number
            if number == 2:
                self.swapper.retain(name)
            self.versions[number] += 1
            memory.copy_(pattern(number, self.versions[number]))
            self.swapper.release(name, changed=True)
        self.versions[2] = -1  # of two versions either is right
        self.swapper.roll_back("n2")
        self.versions[2] = int(self.swapper.swap_in("n2")[0]) - 2 * 16
        self.swapper.release("n2", changed=False)
        self.versions[0] = -1
        self.swapper.swap_out("n0", pattern(0, 0))
        self.versions[0] = 0
        self.swapper.prefetch(["n1", "n2"])
        self.swapper.step()

    def check(self) -> None:
        for number, version in self.versions.items():
            if number == 0 and version < 0 and "n0" not in self.swapper:
                continue  # `swap_out` deletes a value that it has copied in part
            memory = self.swapper.swap_in(f"n{number}")
            if version >= 0:
                assert torch.equal(memory, pattern(number, version)), number
            self.swapper.release(f"n{number}", changed=False)

    def close(self) -> None:
        self.swapper.close()
        self.store.close()


def found(place: Path) -> list[Place]:
    values = Values(place)
    values.step()
    result = places(values.step, but=("errors.py", "units.py"))
    values.close()
    return result


def outcome(at: Place, error: BaseException, place: Path) -> str:
    raised = Raising()
    try:
        with deadline(SECONDS):
            values = Values(place)
            values.step()
            with raising(at, error) as raised:
                try:
                    values.step()
                except BaseException as failure:
                    if failure is not error:
                        raise
            result = "exact"
            values.swapper.end_uses()
            try:
                values.check()
                if values.versions[0] < 0 or values.versions[2] < 0:
                    values.create()
            except UsageError as refusal:
                if "reset()" not in str(refusal):
                    raise
                result = "refused"
                if at.line % 3:
                    values.swapper.reset()
                    values.create()
            if result == "exact" or at.line % 3:
                for _ in range(2):
                    values.step()
            values.close()
            return result if raised.where else "unreached"
    except Hang as hang:
        return f"hung in {hang} after {raised.where}"
    except BaseException as failure:
        return f"wrong: {type(failure).__name__}: {failure} after {raised.where}"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exception_at_any_line_leaves_right_values_or_is_known(tmp_path, every):
    all_places = found(tmp_path)
    outcomes: Counter[str] = Counter()
    # of neighbouring lines one
    chosen = each_line(all_places)[::2] if every else sample(all_places, 160)
    for index, at in enumerate(chosen):
        error = (KeyboardInterrupt, MemoryError)[index % 2]("made up")
        outcomes[outcome(at, error, tmp_path)] += 1
    assert outcomes.keys() <= {"exact", "refused", "unreached"}, outcomes
    assert outcomes["exact"] > 0, outcomes
    assert outcomes["refused"] > 0, outcomes


def test_a_wait_that_is_interrupted_changes_nothing(tmp_path, monkeypatch):
    values = Values(tmp_path)
    values.step()

    def outcome(transfer, timeout=None):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("nvme_offload.store.transfer.Transfer.outcome", outcome)
    with pytest.raises(KeyboardInterrupt):
        values.step()
    assert not values.swapper.interrupted
    values.swapper.end_uses()
    values.check()
    values.close()


def test_a_tier_is_reset_with_its_scratch_memory(tmp_path):
    tier = Tier([str(tmp_path)], AioConfig(direct="auto"), host_memory=1 << 20)
    tier.require(1 << 20)
    tier.make_scratch("scratch", 8192)
    tier.foretell({f"n{number}": SIZE for number in range(COUNT)}, at_once=1)
    tier.swapper.swap_out("n0", pattern(0, 0))
    at = next(place for place in places(tier.swapper.step) if place.file == "swap/runner.py")
    with raising(at, KeyboardInterrupt()) as raised, pytest.raises(KeyboardInterrupt):
        tier.swapper.step()
    assert raised.where is not None
    assert tier.interrupted
    with pytest.raises(UsageError, match="load a checkpoint"):
        tier.swapper.swap_in("n0")
    tier.reset()
    assert not tier.interrupted
    assert "n0" not in tier.swapper
    tier.scratch("scratch").fill_(3)
    tier.swapper.swap_out("n0", pattern(0, 1))
    assert torch.equal(tier.swapper.swap_in("n0"), pattern(0, 1))
    assert tier.scratch("scratch").eq(3).all()
    tier.close()


def test_counters_of_a_tier_do_not_wait_for_a_call(tmp_path):
    tier = Tier([str(tmp_path)], AioConfig(direct="auto"), host_memory=1 << 20)
    tier.require(1 << 20)
    counters: list[object] = []
    with tier.swapper.exclusive():  # as while another thread waits for the drive
        other = threading.Thread(target=lambda: counters.append(tier.counters()))
        other.start()
        other.join(SECONDS)
        assert len(counters) == 1
    tier.close()
