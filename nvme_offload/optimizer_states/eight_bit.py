"""Optimizer states in 8 bits: floats with 3 bits of mantissa and a shared exponent for each block,
rounded stochastically.

A code is a part of an IEEE half: value = (code << 7 read as float16) * the block's power of two.

- Unsigned states (the second moment) have 5 exponent and 3 mantissa bits: 30 octaves down from the
  block's maximum. A smaller nonzero value gets the least code, because the step is divided by its
  root: a weight whose gradients are 30,000 times smaller than others in its block takes smaller
  steps than it should.
- Signed states (the first moment) have 4 exponent bits: 14 octaves, and below them uniform steps of
  2**-17 of the maximum's octave, down to zero.

The scale is the octave of the maximum, not the maximum, so a value that was rounded once is not
rounded again when the block's maximum changes, or when states are saved in fp32 and loaded.

In Adam with the usual betas, |exp_avg| <= 7.3 sqrt(exp_avg_sq) for any gradients. The least step of
the first moment is at most that bound times the root of the least code of the second: one rounding
exceeds the bound by at most a fifth.

Rounding to nearest would not work: with beta2 = 0.999 a second moment changes by a thousandth in a
step, and codes are a sixteenth to an eighth apart. Equal seeds and names of blocks give equal
codes, regardless of the place of the block and of the device (`rounding`).

A block with an infinity, a NaN or a magnitude of 1.6e38 or more is decoded as NaN throughout.

On the CPU the extension computes this in one pass over memory (aio/codec.h), elsewhere `on_gpu`.
"""

from __future__ import annotations

import torch

from ..errors import UnsupportedError
from ..extension import _aio
from .on_gpu import kernels
from .rounding import CHUNK, addresses, chunks, random_keys, random_table, randoms

_SIGNED = {
    "exp_avg": True,  # Adam, AdamW, NAdam, RAdam, Adamax, Lion
    "exp_avg_sq": False,
    "max_exp_avg_sq": False,  # Adam with amsgrad
    "exp_inf": False,  # Adamax
    "momentum_buffer": True,  # SGD, RMSprop
    "square_avg": False,  # RMSprop, Adadelta
    "acc_delta": False,  # Adadelta
    "sum": False,  # Adagrad
}


def is_signed(key: str, optimizer: str, state_format: str = "compact") -> bool:
    """Whether values of the state *key* are signed. Raises: UnsupportedError for an unknown state."""
    if key not in _SIGNED:
        raise UnsupportedError(
            f'state_format="{state_format}" does not know the state {key!r} of {optimizer}, so it does not know how to round it; '
            f'it knows {", ".join(sorted(_SIGNED))}: use state_format="split" or "exact"'
        )
    return _SIGNED[key]


def encode(
    values: torch.Tensor,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    *,
    signed: bool,
    seed: tuple[int, ...],
    blocks: torch.Tensor | None = None,
) -> None:
    """Round *values* into *codes*, with an exponent for each block. *blocks* has the names of the
    blocks, for the rounding; by default blocks are numbered.

    Shapes, all flat and contiguous: *values* float32; *codes* uint8 of the same size; exponents
    uint8, one for each whole or partial `BLOCK`; names int64.
    """
    if not values.is_cpu:
        encode_there = kernels(values.device).encode
        encode_there(values, codes, exponents, signed=signed, seed=seed, blocks=blocks)
        return
    count, table = values.numel(), random_table(values.device)
    factors, summands = random_keys(count, seed, values.device, blocks)
    places, randoms = addresses(values, codes, exponents), addresses(table, factors, summands)
    _aio.encode(*places, count, signed, *randoms, torch.get_num_threads())


def round_to_16(
    values: torch.Tensor,
    codes: torch.Tensor,
    *,
    seed: tuple[int, ...],
    blocks: torch.Tensor | None = None,
) -> None:
    """Round *values* to bfloat16 *codes*, stochastically as `encode` does. Shapes: as for `encode`."""
    factors, summands = random_keys(values.numel(), seed, values.device, blocks)
    for part, rows in chunks(values.numel(), 1 << 16 if values.is_cpu else CHUNK):
        bits = values[part].view(torch.int32)
        drawn = randoms(factors[rows], summands[rows]).view(-1)[: bits.numel()].bitwise_and_(0xFFFF)
        drawn.mul_(values[part].isfinite())  # infinities and NaN keep their bits
        codes[part].view(torch.int16).copy_(drawn.add_(bits).bitwise_right_shift_(16))


def round_to_24(
    values: torch.Tensor, *, seed: tuple[int, ...], blocks: torch.Tensor | None = None
) -> None:
    """Round *values* in place to the upper 24 bits of fp32, stochastically. Shapes: as for
    `encode`.
    """
    if not values.is_cpu:
        kernels(values.device).round_to_24(values, seed=seed, blocks=blocks)
        return
    factors, summands = random_keys(values.numel(), seed, values.device, blocks)
    randoms = addresses(random_table(values.device), factors, summands)
    _aio.round_to_24(values.data_ptr(), values.numel(), *randoms, torch.get_num_threads())


def decode(
    codes: torch.Tensor, exponents: torch.Tensor, values: torch.Tensor, *, signed: bool
) -> None:
    """Write the values of *codes* into *values*. Shapes: as for `encode`."""
    if values.is_cpu:
        places = addresses(codes, exponents, values)
        _aio.decode(*places, values.numel(), signed, torch.get_num_threads())
    else:
        kernels(values.device).decode(codes, exponents, values, signed=signed)
