"""Gradients in a tier: in memory or on the drive as there is room, summed, widened, replaced and
forgotten; and the state after a failure.
"""

from __future__ import annotations

import errno

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402  # where there is torch
from hypothesis import strategies as st  # noqa: E402
from late_copies import LateCopies  # noqa: E402

import nvme_offload.store.store  # noqa: E402
from nvme_offload._aio import FaultKind  # noqa: E402
from nvme_offload.errors import IOFailure, UsageError  # noqa: E402
from nvme_offload.hardware.config import AioConfig  # noqa: E402
from nvme_offload.io.engine import Engine  # noqa: E402
from nvme_offload.swap.tier import Tier  # noqa: E402
from nvme_offload.update.gradients import GradientValues  # noqa: E402
from nvme_offload.zero3.gradients import Gradients, KeptGradients, LastGradients  # noqa: E402

NUMELS = [6000, 5000, 7000, 4096]
# a widened gradient, one gradient, and both rounded up to pages
SMALLEST = 4 * 7000 + 2 * 7000 + (8 << 10)
CONFIG = AioConfig(backend="posix", block_size=64 << 10, queue_depth=4, direct="auto")


@pytest.fixture
def make(tmp_path):
    """A function from bytes of memory to a tier and the gradients in it."""
    tiers = []

    def of(nbytes, dtype=torch.bfloat16, kind=Gradients):
        tier = Tier([str(tmp_path)], CONFIG, host_memory=nbytes)
        tiers.append(tier)
        tier.require(nbytes)
        return tier, kind(tier, NUMELS, dtype, torch.float32)

    yield of
    for tier in tiers:
        tier.close()


class Room:
    """A device with *nbytes* of room for gradients: here the CPU is the device."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def suffices(self, held, more=0):
        return held + more <= self.nbytes


@pytest.fixture(params=["host", "device", "partly"])
def anywhere(request, make):
    """As *make*, with gradients in the tier, on a device, or on the device as far as they fit."""

    def of(nbytes, kind=Gradients):
        tier, gradients = make(nbytes, kind=kind)
        if request.param != "host":
            gradients._values._room = Room(16_000 if request.param == "partly" else 1 << 30)
        return tier, gradients

    return of


def some(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("nbytes", [SMALLEST, 1 << 20])
def test_they_come_back_as_they_were_reduced(make, nbytes):
    tier, gradients = make(nbytes)
    for step in range(4):
        for index in reversed(range(4)):
            gradients.add(index, [(0, some(NUMELS[index], step + index))], to_earlier=False)
        gradients.pause()
        for index in range(4):
            assert torch.equal(
                gradients.widened(index, last=True), some(NUMELS[index], step + index).float()
            )
        gradients.spend()
        tier.swapper.step()
    moved = tier.swapper.stats()
    assert (moved.bytes_read, moved.bytes_written) == (0, 0) or nbytes == SMALLEST
    assert nbytes != SMALLEST or 4 * 2 * min(
        NUMELS
    ) <= moved.bytes_read <= moved.bytes_written <= 4 * 2 * sum(NUMELS)


def test_sums_are_made_in_the_type_of_the_gradients_and_what_was_not_reduced_is_zero(anywhere):
    _, gradients = anywhere(SMALLEST)
    first, second = some(1000, 1), some(1000, 2)
    gradients.add(0, [(500, first), (1500, first)], to_earlier=False)
    gradients.add(1, [(0, first)], to_earlier=False)  # another in between
    totals = gradients.add(0, [(1500, second), (5000, second)], to_earlier=True)
    assert torch.equal(totals[0], first + second)
    assert torch.equal(totals[1], second)  # of which there was nothing earlier
    gradients.add(0, [(500, second)], to_earlier=False)  # not added, though there was
    expected = torch.zeros(6000)
    expected[500:1500], expected[1500:2500], expected[5000:] = (
        second.float(),
        (first + second).float(),
        second.float(),
    )
    assert torch.equal(gradients.widened(0), expected)
    assert torch.equal(gradients.widened(0), expected)
    assert gradients.reduced(0) == {500: 1000, 1500: 1000, 5000: 1000}
    part = torch.empty_like(second)
    gradients.read(0, 500, part)
    assert torch.equal(part, second)
    assert not gradients.widened(2).any()
    assert torch.equal(gradients.widened(1)[:1000], first.float())


def test_what_replaces_them_keeps_all_its_bits_until_it_is_reduced_again(anywhere):
    _, gradients = anywhere(SMALLEST + (32 << 10))
    gradients.add(0, [(0, some(6000))], to_earlier=False)
    gradients.widened(0).mul_(1 / 3)
    gradients.replace(0)
    for index in (1, 2, 3):
        gradients.add(index, [(0, some(NUMELS[index]))], to_earlier=False)
    expected = some(6000).float() * (1 / 3)
    assert torch.equal(gradients.widened(0), expected)
    gradients.add(0, [(100, some(50, 3))], to_earlier=False)
    expected[100:150] = some(50, 3).float()
    assert torch.equal(gradients.widened(0, last=True), expected)
    gradients.spend()
    gradients.add(0, [(100, some(50, 3))], to_earlier=False)
    assert torch.equal(gradients.widened(0)[100:150], some(50, 3).float())
    assert gradients.widened(0).count_nonzero() <= 50


def test_a_step_uses_gradients_once_and_readers_see_them_until_the_next_backward_pass(anywhere):
    tier, gradients = anywhere(SMALLEST + (64 << 10))
    for index in (0, 1):
        gradients.add(index, [(0, some(NUMELS[index]))], to_earlier=False)
    gradients.close()  # zero_grad(): the step still uses them
    for index in range(4):
        used = gradients.widened(index, last=True)
        assert used.any() == (index < 2)
        used.mul_(0.25)
        gradients.used(index, 0.25)
    gradients.spend()
    assert torch.equal(gradients.widened(0), 0.25 * some(6000).float())
    assert gradients.reduced(0) == {}
    gradients.widened(1).fill_(7)
    gradients.replace(1)
    assert torch.equal(gradients.widened(1), torch.full((5000,), 7.0))
    assert not gradients.widened(0, last=True).any()
    assert not gradients.widened(1, last=True).any()

    # another step, in which sub-group 1 gets none
    assert gradients.add(0, [(0, some(6000, 5))], to_earlier=True)[0].equal(some(6000, 5))
    assert torch.equal(gradients.widened(0, last=True), some(6000, 5).float())
    assert not gradients.widened(1).any()
    gradients.spend()
    if not gradients._values._on_device:
        assert len(tier.swapper.names()) == 2  # the scratch memory, and sub-group 0
    gradients.spend()  # a step without a backward pass
    assert len(tier.swapper.names()) == 1  # and nothing on a device
    assert not gradients._values._on_device
    assert not gradients.widened(0).any()
    gradients.abandon()
    assert tier.swapper.names() == []


def test_what_is_forgotten_is_gone(make):
    tier, gradients = make(SMALLEST)
    for index in range(4):
        gradients.add(index, [(0, some(NUMELS[index]))], to_earlier=False)
    gradients.forget_all()
    assert len(tier.swapper.names()) == 1
    assert not any(gradients.widened(index).any() for index in range(4))
    assert gradients.add(0, [(0, some(6000, 5))], to_earlier=True)[0].equal(some(6000, 5))
    gradients.abandon()
    assert tier.swapper.names() == []


@pytest.mark.parametrize("nbytes", [SMALLEST, 1 << 20])
def test_last_ones_stay_as_the_optimizer_left_them_until_others_come(make, nbytes):
    tier, _ = make(nbytes)
    _.abandon()
    gradients = LastGradients(tier, NUMELS, torch.bfloat16, torch.float32)
    first, second = some(1000, 1), some(1000, 2)
    totals = gradients.add(0, [(500, first), (1500, first)], to_earlier=False)
    assert torch.equal(torch.cat(totals), torch.cat([first, first]))
    gradients.complete(0, [500, 1500])
    assert not gradients.widened(1, last=True).any()
    expected = torch.zeros(6000)
    expected[500:1500] = expected[1500:2500] = first.float()
    assert torch.equal(gradients.widened(0, last=True).mul_(1 / 3), expected * (1 / 3))
    gradients.spend()
    assert gradients.reduced(0) == {}

    # in an early micro-batch only: for whatever is added to it, but not for the optimizer
    gradients.add(0, [(500, second)], to_earlier=False)
    assert torch.equal(gradients.widened(0, last=True).mul_(1 / 3), expected * (1 / 3) * (1 / 3))
    gradients.spend()
    (total,) = gradients.add(0, [(500, second)], to_earlier=True)
    assert torch.equal(total, second + second)
    gradients.complete(0, [500])
    expected = expected * (1 / 3) * (1 / 3)
    expected[500:1500] = (second + second).float()
    assert torch.equal(gradients.widened(0), expected)
    gradients.widened(0).fill_(7)  # of no account, for it was not handed out to the optimizer
    assert torch.equal(gradients.widened(0), expected)
    gradients.widened(0).fill_(7)
    gradients.replace(0)
    assert torch.equal(gradients.widened(0), torch.full((6000,), 7.0))
    gradients.forget_all()
    assert not gradients.widened(0).any()
    assert torch.equal(gradients.add(0, [(500, first)], to_earlier=True)[0], first)
    gradients.abandon()
    assert tier.swapper.names() == []


@settings(deadline=None, max_examples=30)
@given(slices=st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=20))
def test_any_part_of_a_sub_group_may_be_reduced(tmp_path_factory, slices):
    numel = sum(size for size, _ in slices)
    tier = Tier([str(tmp_path_factory.mktemp("drive"))], CONFIG, host_memory=1 << 20)
    tier.require(1 << 20)
    gradients = Gradients(tier, [numel], torch.float16, torch.float32)
    gradients.add(0, [(0, torch.full((numel,), 77.0))], to_earlier=False)
    gradients.widened(0, last=True)  # leaves its bytes where the next is widened
    gradients.spend()
    expected = torch.zeros(numel)
    offset = 0
    for number, (size, reduced) in enumerate(slices):
        if reduced:
            gradients.add(0, [(offset, torch.full((size,), number + 1.0))], to_earlier=False)
            expected[offset : offset + size] = number + 1
        offset += size
    assert torch.equal(gradients.widened(0, last=True), expected)
    tier.close()


@pytest.mark.parametrize("kind", [Gradients, KeptGradients, LastGradients])
def test_copies_are_waited_for_before_anybody_may_have_the_memory(make, monkeypatch, kind):
    late = LateCopies()
    monkeypatch.setattr(GradientValues, "_copies_between", lambda *_: late)
    tier, gradients = make(1 << 20, kind=kind)
    for step in range(3):
        for micro_batch in range(2):
            for index in (1, 0):
                part = some(4000, 10 * step + micro_batch + index)
                gradients.add(index, [(0, part)], to_earlier=micro_batch > 0)
                with pytest.raises(UsageError, match="is in use already"):
                    tier.swapper.swap_in(gradients.name(index))
        for index in (0, 1):
            gradients.complete(index, [0])
            expected = some(4000, 10 * step + index) + some(4000, 10 * step + 1 + index)
            assert torch.equal(gradients.widened(index, last=True)[:4000], expected.float())
            tier.swapper.swap_in(gradients.name(index))
            tier.swapper.release(gradients.name(index), changed=False)
        gradients.spend()
    gradients.widened(1).fill_(7)
    gradients.replace(1)
    assert torch.equal(gradients.widened(1), torch.full((5000,), 7.0))
    assert len(late.events) > 12
    assert all(event.query() for event in late.events)


def test_a_drive_that_fails_is_an_error_and_nothing_is_lost_when_it_works_again(make, monkeypatch):
    engines = []

    def faulty(*arguments, **named):
        engines.append(Engine(*arguments, _faults=[(0, 3, FaultKind.FAIL, errno.EIO)], **named))
        return engines[-1]

    monkeypatch.setattr(nvme_offload.store.store, "Engine", faulty)
    _, gradients = make(SMALLEST)
    failures = 0
    for index in range(4):
        while True:
            try:
                gradients.add(index, [(0, some(NUMELS[index], index))], to_earlier=False)
                break
            except IOFailure:
                failures += 1
    for index in range(4):
        while True:
            try:
                assert torch.equal(
                    gradients.widened(index, last=True), some(NUMELS[index], index).float()
                )
                break
            except IOFailure:
                failures += 1
    assert 1 <= failures <= 3


def test_updates_in_backward_use_gradients_up(anywhere):
    _, gradients = anywhere(SMALLEST + (64 << 10))
    for step in range(2):
        gradients.add(1, [(0, some(5000, step))], to_earlier=False)
        gradients.require_whole()
        assert torch.equal(gradients.widened(1, last=True), some(5000, step).float())
        gradients.use_up(1)
        with pytest.raises(UsageError, match="uses up in backward"):
            gradients.require_whole()
        gradients.add(0, [(0, some(6000, step))], to_earlier=False)
        assert torch.equal(gradients.widened(0, last=True), some(6000, step).float())
        gradients.spend()


def test_kept_ones_are_sums_of_all_steps(anywhere):
    _, gradients = anywhere(SMALLEST + (64 << 10), KeptGradients)
    gradients.add(0, [(0, some(100, 1)), (100, some(100, 2))], to_earlier=False)
    gradients.widened(0, last=True).mul_(0.5)
    gradients.used(0, 0.5)
    gradients.spend()
    gradients.add(0, [(0, some(100, 3))], to_earlier=False)  # the other part gets none
    gradients.add(0, [(100, some(100, 4))], to_earlier=True)  # until the next micro-batch
    found = gradients.widened(0, last=True)
    assert torch.equal(found[:100], some(100, 3).float())
    assert torch.equal(found[100:200], (some(100, 2) + some(100, 4)).float())
    assert gradients.reduced(0) == {0: 100, 100: 100}
    gradients.spend()
    assert torch.equal(gradients.widened(0, last=True)[:100], some(100, 3).float())
    gradients.forget_all()
    assert not gradients.widened(0).any()
