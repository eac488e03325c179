"""`fingerprint` detects changes to the bits of a tensor without keeping a copy."""

from __future__ import annotations

import functools

import torch

from ..extension import _aio
from .on_gpu import kernels

WORD_BYTES = 4  # half the size of a factor, so that a product preserves every difference
CHUNK = 1 << 20  # words multiplied at a time
_MOST_CHUNKS = 1 << 16


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two numbers of 64 bits, on the device of *tensor*, that change if any bit of it changes: XXH3
    on the CPU, elsewhere sums of its words with random factors, modulo 2**64.

    Two different tensors of one shape have the same sums with a probability below 2**-50. Source:
    Carter and Wegman, Universal classes of hash functions, 1979.
    """
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        found = _aio.fingerprint(flat.data_ptr(), flat.numel())
        if found is not None:
            return torch.tensor([number - (number >> 63 << 64) for number in found])
    if flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()
    if flat.numel() % WORD_BYTES:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % WORD_BYTES))
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    kernels(flat.device).add_sums(flat.view(torch.int32), *_factors(flat.device), sums)
    return sums


@functools.cache
def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the words of a chunk, and of the chunks; two rows each, different in each
    process.
    """
    generator = torch.Generator()  # the default generator belongs to the user
    generator.seed()
    least, beyond = -(1 << 63), (1 << 63) - 1
    rows = torch.randint(least, beyond, (2, CHUNK + _MOST_CHUNKS), generator=generator).to(device)
    return rows[:, :CHUNK].contiguous(), rows[:, CHUNK:].contiguous()
