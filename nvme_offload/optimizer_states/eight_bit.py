"""Optimizer states in 8 bits: floats with 3 bits of mantissa and a shared exponent for each block,
rounded stochastically.

A code is a part of an IEEE half: value = (code << 7 read as float16) * the block's power of two.

- Unsigned states (the second moment) have 5 exponent and 3 mantissa bits: 30 octaves down from the
  block's maximum. A smaller nonzero value gets the least code: a second moment must not become
  zero, because the step is divided by its root. A weight whose gradients are 30,000 times smaller
  than others in its block therefore takes smaller steps than it should. Only zero becomes zero.
- Signed states (the first moment) have 4 exponent bits: 14 octaves, and below them uniform steps of
  2**-17 of the maximum's octave, down to zero.

The scale is the octave of the maximum, not the maximum, so the values that have a code do not
depend on the scale. A value that was rounded once is not rounded again when the block's maximum
changes, or when states are saved in fp32 and loaded.

This also bounds the update. In Adam with the usual betas, |exp_avg| <= 7.3 sqrt(exp_avg_sq) for any
gradients. Both states have the same blocks, and the least step of the first is at most that bound
times the root of the least code of the second: one rounding exceeds the bound by at most a fifth.

Rounding is stochastic and unbiased. Rounding to nearest would not work: with beta2 = 0.999 a second
moment changes by a thousandth in a step, and codes are a sixteenth to an eighth apart, so it would
never change. Equal seeds and names of blocks give equal codes, regardless of the place of the block
and of the device (`rounding`).

A block with an infinity, a NaN or a magnitude of 1.6e38 or more is decoded as NaN throughout: an
overflow must not become a number.

On the CPU the extension does this in one pass over memory (aio/codec.h). On GPUs Triton
does, if it is installed (`by_triton`). Otherwise torch operations do it, with the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UnsupportedError
from ..extension import _aio
from .on_gpu import kernels
from .rounding import BLOCK, random_keys, random_table
from .split import CHUNK

if TYPE_CHECKING:
    import torch

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

_MANTISSA_BITS = 3
DROPPED = 23 - _MANTISSA_BITS  # mantissa bits of fp32 that a code lacks
STEP = 1 << DROPPED
LEAST_NORMAL = 2.0**-14  # of float16
CODE_ZERO = (127 - 15) << 23  # the difference of the exponents' biases, as fp32 bits
# Whether signed -> the float16 exponent to which the block's maximum is scaled.
TOP_OCTAVE = {True: 0, False: 15}
LEAST_EXPONENT = 32  # minimum for a block: keeps its scale and values out of fp32's subnormals
NOT_FINITE = 255
INFINITY = 0x7F800000


def is_signed(key: str, optimizer: str, state_format: str = "compact") -> bool:
    """Whether values of the state *key* are signed.

    Raises: UnsupportedError for a state that is not in the table.
    """
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
    """Round *values* into *codes*, with an exponent for each block.

    *blocks* has the names of the blocks, for the rounding; by default blocks are numbered. Shapes,
    all flat and contiguous: *values* float32; *codes* uint8 of the same size; exponents uint8, one
    for each whole or partial `BLOCK`; names int64.
    """
    import torch

    if not values.is_cpu:
        encode_there = kernels(values.device).encode
        encode_there(values, codes, exponents, signed=signed, seed=seed, blocks=blocks)
        return
    count, table = values.numel(), random_table(values.device)
    factors, summands = random_keys(count, seed, values.device, blocks)
    randoms = table.data_ptr(), factors.data_ptr(), summands.data_ptr()
    _aio.encode(
        values.data_ptr(),
        codes.data_ptr(),
        exponents.data_ptr(),
        count,
        signed,
        *randoms,
        torch.get_num_threads(),
    )


def round_to_16(
    values: torch.Tensor,
    codes: torch.Tensor,
    *,
    seed: tuple[int, ...],
    blocks: torch.Tensor | None = None,
) -> None:
    """Round *values* to bfloat16 *codes*, stochastically as `encode` does.

    Shapes, all flat and contiguous: float32; bfloat16 of the same size; int64 names of blocks.
    """
    import torch

    factors, summands = random_keys(values.numel(), seed, values.device, blocks)
    size = min(1 << 16 if values.is_cpu else CHUNK, -(-values.numel() // BLOCK) * BLOCK)
    random = torch.empty(size, dtype=torch.int32, device=values.device)
    for start in range(0, values.numel(), size):
        part = values[start : start + size]
        count = part.numel()
        first_block = start // BLOCK
        drawn = _randoms(
            random[: -(-count // BLOCK) * BLOCK], factors[first_block:], summands[first_block:]
        )[:count].bitwise_and_(0xFFFF)
        drawn.mul_(part.isfinite())  # infinities and NaN keep their bits
        codes[start : start + count].view(torch.int16).copy_(
            drawn.add_(part.view(torch.int32)).bitwise_right_shift_(16)
        )


def round_to_24(
    values: torch.Tensor, *, seed: tuple[int, ...], blocks: torch.Tensor | None = None
) -> None:
    """Round *values* in place to the upper 24 bits of fp32, stochastically as `encode` does.

    Shapes: flat, contiguous, float32; int64 names of blocks.
    """
    import torch

    if not values.is_cpu:
        kernels(values.device).round_to_24(values, seed=seed, blocks=blocks)
        return
    factors, summands = random_keys(values.numel(), seed, values.device, blocks)
    randoms = random_table(values.device).data_ptr(), factors.data_ptr(), summands.data_ptr()
    _aio.round_to_24(values.data_ptr(), values.numel(), *randoms, torch.get_num_threads())


def round_to_24_by_torch(
    values: torch.Tensor, *, seed: tuple[int, ...], blocks: torch.Tensor | None = None
) -> None:
    """`round_to_24`, on any device."""
    import torch

    factors, summands = random_keys(values.numel(), seed, values.device, blocks)
    size = min(CHUNK, -(-values.numel() // BLOCK) * BLOCK)
    random = torch.empty(size, dtype=torch.int32, device=values.device)
    for start in range(0, values.numel(), CHUNK):
        part = values[start : start + size]
        first_block = start // BLOCK
        drawn = _randoms(
            random[: -(-part.numel() // BLOCK) * BLOCK],
            factors[first_block:],
            summands[first_block:],
        )[: part.numel()]
        drawn.bitwise_right_shift_(24).bitwise_and_(0xFF)
        drawn.mul_(part.isfinite())
        bits = part.view(torch.int32)
        bits.bitwise_or_(part.isnan() * 0x400000)  # quiet: not an infinity without low bits
        bits.add_(drawn).bitwise_and_(~0xFF)


def decode(
    codes: torch.Tensor, exponents: torch.Tensor, values: torch.Tensor, *, signed: bool
) -> None:
    """Write the values of *codes* into *values*. Shapes: as for `encode`."""
    import torch

    if values.is_cpu:
        _aio.decode(
            codes.data_ptr(),
            exponents.data_ptr(),
            values.data_ptr(),
            values.numel(),
            signed,
            torch.get_num_threads(),
        )
    else:
        kernels(values.device).decode(codes, exponents, values, signed=signed)


def encode_by_torch(
    values: torch.Tensor,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    *,
    signed: bool,
    seed: tuple[int, ...],
    blocks: torch.Tensor | None = None,
) -> None:
    """`encode`, on any device."""
    import torch

    device = values.device
    values = values.view(-1)
    factors, summands = random_keys(values.numel(), seed, device, blocks)
    size = min(CHUNK, -(-values.numel() // BLOCK) * BLOCK)
    scaled, other = (torch.empty(size, dtype=torch.float32, device=device) for _ in range(2))
    for start in range(0, values.numel(), CHUNK):
        part = values[start : start + CHUNK]
        count = part.numel()
        if count % BLOCK:
            part = torch.nn.functional.pad(part, (0, -count % BLOCK))
        blocks = part.view(-1, BLOCK)
        first_block = start // BLOCK
        exponent = _exponents(blocks, signed)
        exponents[first_block : first_block + len(blocks)].copy_(exponent)

        a, b = scaled[: part.numel()], other[: part.numel()]
        bits, random = a.view(torch.int32), b.view(torch.int32)
        torch.mul(
            blocks,
            ((254 + TOP_OCTAVE[signed] - exponent) << 23).view(torch.float32)[:, None],
            out=a.view(-1, BLOCK),
        )
        if signed:
            # Above the least normal number, the distance between codes doubles with the exponent.
            # Below, it is uniform. The larger of the two is right; they are equal at the boundary.
            torch.add(a.abs_(), LEAST_NORMAL, out=b)
            torch.maximum(bits, random.sub_(1 << 23), out=bits)
        else:
            torch.maximum(a, torch.sign(part, out=b).mul_(LEAST_NORMAL), out=a)
        bits.add_(
            _randoms(random, factors[first_block:], summands[first_block:])
            .bitwise_right_shift_(32 - DROPPED)
            .add_(STEP // 2 - CODE_ZERO)
        )
        if signed:
            sign = torch.bitwise_right_shift(part.view(torch.int32), 24 - DROPPED, out=random)
            bits.bitwise_or_(sign.bitwise_and_(0x80 << DROPPED))
        bits.view(-1, BLOCK).bitwise_right_shift_(
            torch.full_like(exponent, DROPPED).masked_fill_(exponent == NOT_FINITE, 31)[:, None]
        )
        if not signed:
            bits.clamp_(min=0)  # zero is far below every code
        codes[start : start + count].copy_(bits[:count])


def decode_by_torch(
    codes: torch.Tensor, exponents: torch.Tensor, values: torch.Tensor, *, signed: bool
) -> None:
    """`decode`, on any device."""
    import torch

    fields = exponents.to(torch.int32)
    scales = ((fields.clamp(min=LEAST_EXPONENT) - TOP_OCTAVE[signed]) << 23).view(torch.float32)
    scales.masked_fill_(fields == NOT_FINITE, torch.nan)
    halves = torch.empty(min(CHUNK, values.numel()), dtype=torch.int16, device=values.device)
    for start in range(0, values.numel(), CHUNK):
        part = values[start : start + CHUNK]
        half = halves[: part.numel()]
        half.copy_(
            codes[start : start + CHUNK].view(torch.int8 if signed else torch.uint8)
        ).bitwise_left_shift_(7)
        if signed:
            half.bitwise_and_(~0x4000)  # the sign's copy, from widening int8
        part.copy_(half.view(torch.float16))
        scale = scales[start // BLOCK : -(-(start + part.numel()) // BLOCK)]
        whole = part.numel() // BLOCK * BLOCK
        part[:whole].view(-1, BLOCK).mul_(scale[: whole // BLOCK, None])
        if whole < part.numel():
            part[whole:].mul_(scale[-1])


def _exponents(blocks: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 exponent field of each block's largest magnitude, rounded up, as int32. `NOT_FINITE`
    for a block that is not finite, or is unsigned and has a negative value.
    """
    import torch

    # This propagates NaN, and is five times as fast as aminmax.
    least, most = blocks.amin(dim=1), blocks.amax(dim=1)
    most = torch.maximum(most, -least) if signed else most.masked_fill_(least < 0, torch.nan)
    # Otherwise the rounding below would overflow int32 for a NaN.
    magnitude = (most.view(torch.int32) & 0x7FFFFFFF).clamp_(max=INFINITY)
    exponent = magnitude.add_(STEP - 1).bitwise_right_shift_(23).clamp_(min=LEAST_EXPONENT)
    return exponent.masked_fill_(exponent >= 254, NOT_FINITE)


def _randoms(out: torch.Tensor, factors: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
    """Fill *out*, int32 of whole blocks, with random bits. *factors* and *summands* are from
    `_keys`.
    """
    import torch

    count = out.numel() // BLOCK
    torch.mul(random_table(out.device), factors[:count, None], out=out.view(count, BLOCK)).add_(
        summands[:count, None]
    )
    return out
