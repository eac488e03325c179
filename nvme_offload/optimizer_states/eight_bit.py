"""States of an optimizer in 8 bits: small floats with 3 bits of mantissa and an exponent shared by
a block, rounded stochastically.

A code is cut out of the IEEE half: value = code << 7 read as float16, times the block's power of
two.

- States without a sign (the second moment) have 5 bits of exponent and 3 of mantissa: 30 octaves
  from the block's largest value down. Less than that, but not zero, is kept as the least: a second
  moment must not vanish, for the step is divided by its root. So weights whose gradients are 30,000
  times smaller than others in their block take smaller steps than they would. Only zero is zero.
- States with a sign (the first moment) have 4 bits of exponent: 14 octaves, and below them even
  steps, 2**-17 of the largest value's octave, down to zero.

The largest value's octave and not the value is the scale, so that the values that have a code are
the same whatever the scale is: what was rounded once is not rounded again when the block's maximum
moves, nor when states are saved in fp32 and loaded.

It also bounds the step. In Adam, |exp_avg| <= 7.3 sqrt(exp_avg_sq) with the usual betas, whatever
the gradients. Both have the same blocks, and the least step of the first is no more than that times
the root of the least of the second: one rounding makes no step larger than this bound and a fifth.

Rounding is stochastic and unbiased: up with the probability of the share of the step between two
codes. To the nearest would not do: with beta2 = 0.999 a second moment moves by a thousandth a step,
and codes are an eighth to a sixteenth apart, so it would never move at all. Random numbers are a
small table that is multiplied and shifted by a hash of the seed and of what the block is called:
the same seed and name give the same codes, wherever the block lies and on every device.

A block that holds an infinity or a NaN, or a magnitude of 1.6e38 or more, comes back as NaN, all of
it: a fault must not become a number.

On the CPU the extension does all this in one pass over memory (aio/codec.h); elsewhere torch's
operations do it, to the same bits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from .. import _aio
from ..errors import UnsupportedError
from .split import CHUNK

if TYPE_CHECKING:
    import torch

# the values of codes do not depend on it, so errors neither: over real gradients 64 and 4096 gave
# the same
BLOCK = 256

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
_DROPPED = 23 - _MANTISSA_BITS  # bits of fp32's mantissa that go
_STEP = 1 << _DROPPED
_LEAST_NORMAL = 2.0**-14  # of float16
_CODE_ZERO = (127 - 15) << 23  # what an fp32 pattern is less, once it is cut to a code
# where the block's largest value is put among float16's, by signed
_TOP_OCTAVE = {True: 0, False: 15}
_LEAST_EXPONENT = 32  # of a block, so that neither its scale nor its values are fp32's denormals
_NOT_FINITE = 255
_INFINITY = 0x7F800000


def is_signed(key: str, optimizer: str, state_format: str = "compact") -> bool:
    """Whether values of the state *key* have signs. Raises: UnsupportedError for a state that
    nobody has thought about.
    """
    if key not in _SIGNED:
        raise UnsupportedError(
            f'state_format="{state_format}" does not know the state {key!r} of {optimizer}, so not how it may be rounded; '
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
    """Round *values* into *codes*, with an exponent for every block; *blocks* are their names, by
    which they are rounded, else their numbers.

    Shapes: flat, contiguous; float32, uint8 of the same size, uint8 for each `BLOCK` begun, and
    int64 names.
    """
    import torch

    if not values.is_cpu:
        encode_by_torch(values, codes, exponents, signed=signed, seed=seed, blocks=blocks)
        return
    count, table = values.numel(), _table(values.device)
    factors, summands = _keys(count, seed, values.device, blocks)
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
    """Round *values* into *codes*, bfloat16, stochastically as `encode` does.

    Shapes: flat, contiguous; float32 and bfloat16 of the same size, int64 names of blocks.
    """
    import torch

    factors, summands = _keys(values.numel(), seed, values.device, blocks)
    size = min(1 << 16 if values.is_cpu else CHUNK, -(-values.numel() // BLOCK) * BLOCK)
    random = torch.empty(size, dtype=torch.int32, device=values.device)
    for start in range(0, values.numel(), size):
        part = values[start : start + size]
        count = part.numel()
        first_block = start // BLOCK
        drawn = _randoms(
            random[: -(-count // BLOCK) * BLOCK], factors[first_block:], summands[first_block:]
        )[:count].bitwise_and_(0xFFFF)
        drawn.mul_(part.isfinite())  # a fault must stay one
        codes[start : start + count].view(torch.int16).copy_(
            drawn.add_(part.view(torch.int32)).bitwise_right_shift_(16)
        )


def round_to_24(
    values: torch.Tensor, *, seed: tuple[int, ...], blocks: torch.Tensor | None = None
) -> None:
    """Round *values*, in place, to the upper 24 bits of fp32, stochastically as `encode` does.

    Shapes: flat, contiguous, float32; int64 names of blocks.
    """
    import torch

    if not values.is_cpu:
        round_to_24_by_torch(values, seed=seed, blocks=blocks)
        return
    factors, summands = _keys(values.numel(), seed, values.device, blocks)
    randoms = _table(values.device).data_ptr(), factors.data_ptr(), summands.data_ptr()
    _aio.round_to_24(values.data_ptr(), values.numel(), *randoms, torch.get_num_threads())


def round_to_24_by_torch(
    values: torch.Tensor, *, seed: tuple[int, ...], blocks: torch.Tensor | None = None
) -> None:
    """`round_to_24` on any device."""
    import torch

    factors, summands = _keys(values.numel(), seed, values.device, blocks)
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
        bits.bitwise_or_(part.isnan() * 0x400000)  # a NaN stays one without its lowest bits
        bits.add_(drawn).bitwise_and_(~0xFF)


def decode(
    codes: torch.Tensor, exponents: torch.Tensor, values: torch.Tensor, *, signed: bool
) -> None:
    """The *values* of *codes*. Shapes: as in `encode`."""
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
        decode_by_torch(codes, exponents, values, signed=signed)


def encode_by_torch(
    values: torch.Tensor,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    *,
    signed: bool,
    seed: tuple[int, ...],
    blocks: torch.Tensor | None = None,
) -> None:
    """`encode` on any device."""
    import torch

    device = values.device
    values = values.view(-1)
    factors, summands = _keys(values.numel(), seed, device, blocks)
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
            ((254 + _TOP_OCTAVE[signed] - exponent) << 23).view(torch.float32)[:, None],
            out=a.view(-1, BLOCK),
        )
        if signed:
            # Above the least normal the logarithm's steps, below it even ones: whichever is more.
            # They meet there.
            torch.add(a.abs_(), _LEAST_NORMAL, out=b)
            torch.maximum(bits, random.sub_(1 << 23), out=bits)
        else:
            torch.maximum(a, torch.sign(part, out=b).mul_(_LEAST_NORMAL), out=a)
        bits.add_(
            _randoms(random, factors[first_block:], summands[first_block:])
            .bitwise_right_shift_(32 - _DROPPED)
            .add_(_STEP // 2 - _CODE_ZERO)
        )
        if signed:
            sign = torch.bitwise_right_shift(part.view(torch.int32), 24 - _DROPPED, out=random)
            bits.bitwise_or_(sign.bitwise_and_(0x80 << _DROPPED))
        bits.view(-1, BLOCK).bitwise_right_shift_(
            torch.full_like(exponent, _DROPPED).masked_fill_(exponent == _NOT_FINITE, 31)[:, None]
        )
        if not signed:
            bits.clamp_(min=0)  # zero, which is far below every code
        codes[start : start + count].copy_(bits[:count])


def decode_by_torch(
    codes: torch.Tensor, exponents: torch.Tensor, values: torch.Tensor, *, signed: bool
) -> None:
    """`decode` on any device."""
    import torch

    fields = exponents.to(torch.int32)
    scales = ((fields.clamp(min=_LEAST_EXPONENT) - _TOP_OCTAVE[signed]) << 23).view(torch.float32)
    scales.masked_fill_(fields == _NOT_FINITE, torch.nan)
    halves = torch.empty(min(CHUNK, values.numel()), dtype=torch.int16, device=values.device)
    for start in range(0, values.numel(), CHUNK):
        part = values[start : start + CHUNK]
        half = halves[: part.numel()]
        half.copy_(
            codes[start : start + CHUNK].view(torch.int8 if signed else torch.uint8)
        ).bitwise_left_shift_(7)
        if signed:
            half.bitwise_and_(~0x4000)  # what the sign left there as it was shifted
        part.copy_(half.view(torch.float16))
        scale = scales[start // BLOCK : -(-(start + part.numel()) // BLOCK)]
        whole = part.numel() // BLOCK * BLOCK
        part[:whole].view(-1, BLOCK).mul_(scale[: whole // BLOCK, None])
        if whole < part.numel():
            part[whole:].mul_(scale[-1])


def _exponents(blocks: torch.Tensor, signed: bool) -> torch.Tensor:
    """fp32's exponent field of each block's largest magnitude once it is rounded up, as int32;
    `_NOT_FINITE` where values are not what they should be.
    """
    import torch

    # NaN where there is any; five times as fast as aminmax
    least, most = blocks.amin(dim=1), blocks.amax(dim=1)
    most = torch.maximum(most, -least) if signed else most.masked_fill_(least < 0, torch.nan)
    # or rounding would take a NaN out of the range of int32
    magnitude = (most.view(torch.int32) & 0x7FFFFFFF).clamp_(max=_INFINITY)
    exponent = magnitude.add_(_STEP - 1).bitwise_right_shift_(23).clamp_(min=_LEAST_EXPONENT)
    return exponent.masked_fill_(exponent >= 254, _NOT_FINITE)


def _randoms(out: torch.Tensor, factors: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
    """For every element of *out*, which are whole blocks, one of all numbers of 32 bits. The
    others: of `_keys`.
    """
    import torch

    count = out.numel() // BLOCK
    torch.mul(_table(out.device), factors[:count, None], out=out.view(count, BLOCK)).add_(
        summands[:count, None]
    )
    return out


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    import torch

    return torch.randint(
        -(1 << 31),
        1 << 31,
        (BLOCK,),
        dtype=torch.int32,
        generator=torch.Generator().manual_seed(0x5EED),
    ).to(device)


def _keys(
    count: int, seed: tuple[int, ...], device: torch.device, blocks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the random table is multiplied by and what is added to it for each block of *count*
    values: a hash of *seed* and the block's name.
    """
    import torch

    if blocks is None:
        blocks = torch.arange(-(-count // BLOCK), dtype=torch.int64, device=device)

    state = 0
    for part in seed:
        state = _mixed(state ^ (part % (1 << 64)))
    key = blocks.mul(_GOLDEN).add_(_as_signed(state))
    for multiplier in _MULTIPLIERS:
        key.bitwise_xor_((key >> 29) & ((1 << 35) - 1)).mul_(multiplier)
    return (key >> 32).to(torch.int32) | 1, (key ^ (key >> 32)).to(torch.int32)


def _mixed(number: int) -> int:
    """A hash of 64 bits to as many, one to one."""
    number = (number + _GOLDEN) % (1 << 64)
    for multiplier in _MULTIPLIERS:
        number = ((number ^ (number >> 29)) * multiplier) % (1 << 64)
    return number ^ (number >> 32)


def _as_signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


# Odd, about half of the bits set, without a pattern.
_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
_MULTIPLIERS = (0x6A5D39EAE12657A9, 0x2C1B3C6D9E3779BB)
