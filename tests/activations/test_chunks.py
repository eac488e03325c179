"""Many small saved tensors: they share chunks in the swapper, and the cost of each does not grow
with their number.
"""

from __future__ import annotations

import sys

import pytest
import torch
from offloading import Make, left

from nvme_offload import save_on_nvme

ELEMENTS = 256  # a KiB


def chain(x: torch.Tensor, length: int, offload: save_on_nvme) -> torch.Tensor:
    """The end of a chain of *length* operations, each of which saves its input."""
    with offload:
        for _ in range(length):
            x = x.sin()
    return x.sum()


def events(offload: save_on_nvme, length: int) -> int:
    """Calls, of Python and of C, that a third step makes, forward and backward."""
    x = torch.linspace(0, 1, ELEMENTS, requires_grad=True)
    for _ in range(2):
        chain(x, length, offload).backward()
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        chain(x, length, offload).backward()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("part", [2, 0.25], ids=["in memory", "a quarter of it"])
def test_what_a_saved_tensor_costs_does_not_grow_with_their_number(part: float, make: Make) -> None:
    few, many = 256, 1024
    counts = {
        length: events(make(host_memory=int(part * length * ELEMENTS * 4)), length) / length
        for length in (few, many)
    }
    assert counts[many] <= 1.1 * counts[few]
    assert counts[many] < 250  # about 130; how many depends on how soon the drive ends what


def test_a_chunk_lasts_as_long_as_any_tensor_in_it_and_no_longer(make: Make) -> None:
    offload = make(host_memory=128 << 10)
    inputs = [torch.full((ELEMENTS,), float(number), requires_grad=True) for number in range(256)]
    with offload:
        outputs = [
            x.exp().square().sum() for x in inputs
        ]  # `square` saves a tensor with no other owner
    assert offload.stats().bytes_written > 0
    # Every 16th stays; the rest are freed neither in the order of saving nor in reverse.
    kept = outputs[::16]
    for number in sorted(range(256), key=lambda number: number * 37 % 256):
        if number % 16:
            outputs[number].backward()
            assert torch.equal(inputs[number].grad, 2 * inputs[number].detach().exp().square())
            outputs[number] = torch.empty(0)
    names = offload._cache._tier.swapper.names()
    assert 0 < len(names) <= len(kept) + 1
    for output, x in zip(kept, inputs[::16], strict=True):
        output.backward()
        assert torch.equal(x.grad, 2 * x.detach().exp().square())
    del outputs, kept, output
    assert left(offload) == (0, 0, [])


@pytest.mark.parametrize("pieces", [1, 4])
def test_graphs_that_take_turns(pieces: int, make: Make) -> None:
    offload = make(host_memory=64 << 10)
    inputs = [torch.randn(ELEMENTS, requires_grad=True) for _ in range(pieces)]
    for _ in range(3):
        ends = list(inputs)
        with offload:
            for _ in range(200):
                ends = [end.tanh() for end in ends]
        plain = [torch.autograd.grad(_tanh_often(x), x)[0] for x in inputs]
        while ends:
            found = torch.autograd.grad(ends.pop(0).sum(), inputs[len(inputs) - len(ends) - 1])[0]
            assert torch.equal(found, plain[len(inputs) - len(ends) - 1])
    assert offload.stats().bytes_read > 0
    del found
    assert left(offload) == (0, 0, [])


def _tanh_often(x: torch.Tensor) -> torch.Tensor:
    for _ in range(200):
        x = x.tanh()
    return x.sum()
