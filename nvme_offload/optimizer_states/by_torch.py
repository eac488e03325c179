"""The formats' kernels by torch's operations, on any device, with the names and the bits of
`by_triton`.
"""

from __future__ import annotations

import torch

from .rounding import BLOCK, chunks, random_keys, randoms

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
RANGE = 2.0**-30  # ratio of the least code of an unsigned state to its block's maximum
# exp_avg below 1/64 of the denominator moves a weight by less than 1/64 of the learning rate
NEGLIGIBLE_RATIO = 64.0
MOST_FAR = BLOCK // 16  # values of a block that may be below the least code and matter


def encode(
    values: torch.Tensor,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    *,
    signed: bool,
    seed: tuple[int, ...],
    blocks: torch.Tensor | None = None,
) -> None:
    """See `eight_bit.encode`."""
    factors, summands = random_keys(values.numel(), seed, values.device, blocks)
    for part, rows in chunks(values.numel()):
        block = _in_blocks(values.view(-1)[part])
        exponent = _exponents(block, signed)
        exponents[rows].copy_(exponent)
        scaled = block * ((254 + TOP_OCTAVE[signed] - exponent) << 23).view(torch.float32)[:, None]
        if signed:
            # Above the least normal number, the distance between codes doubles with the exponent.
            # Below, it is uniform. The larger of the two is right; they are equal at the boundary.
            bits = scaled.abs_().view(torch.int32)
            bits = torch.maximum(bits, (scaled + LEAST_NORMAL).view(torch.int32) - (1 << 23))
        else:
            bits = torch.maximum(scaled, block.sign() * LEAST_NORMAL).view(torch.int32)
        bits += randoms(factors[rows], summands[rows]) >> 32 - DROPPED
        bits += STEP // 2 - CODE_ZERO
        if signed:
            bits |= (block.view(torch.int32) >> 24 - DROPPED) & (0x80 << DROPPED)
        bits >>= torch.full_like(exponent, DROPPED).masked_fill_(exponent == NOT_FINITE, 31)[
            :, None
        ]
        if not signed:
            bits.clamp_(min=0)  # zero is far below every code
        codes[part].copy_(bits.view(-1)[: part.stop - part.start])


def decode(
    codes: torch.Tensor, exponents: torch.Tensor, values: torch.Tensor, *, signed: bool
) -> None:
    """See `eight_bit.decode`."""
    fields = exponents.to(torch.int32)
    scales = ((fields.clamp(min=LEAST_EXPONENT) - TOP_OCTAVE[signed]) << 23).view(torch.float32)
    scales.masked_fill_(fields == NOT_FINITE, torch.nan)
    for part, rows in chunks(values.numel()):
        half = codes[part].view(torch.int8 if signed else torch.uint8).to(torch.int16) << 7
        if signed:
            half &= ~0x4000  # the sign's copy, from widening int8
        scale = scales[rows].repeat_interleave(BLOCK)[: half.numel()]
        values[part].copy_(half.view(torch.float16)).mul_(scale)


def round_to_24(
    values: torch.Tensor, *, seed: tuple[int, ...], blocks: torch.Tensor | None = None
) -> None:
    """See `eight_bit.round_to_24`."""
    factors, summands = random_keys(values.numel(), seed, values.device, blocks)
    for part, rows in chunks(values.numel()):
        bits = values[part].view(torch.int32)
        drawn = randoms(factors[rows], summands[rows]).view(-1)[: bits.numel()]
        drawn.bitwise_right_shift_(24).bitwise_and_(0xFF).mul_(values[part].isfinite())
        bits |= values[part].isnan() * 0x400000  # quiet: not an infinity without low bits
        bits.add_(drawn).bitwise_and_(~0xFF)


def split(master: torch.Tensor, working: torch.Tensor, low: torch.Tensor) -> None:
    """See `split.split`."""
    for part, _ in chunks(master.numel()):
        bits = master[part].view(torch.int32)
        upper = bits >> 16
        quiet = torch.where((upper & 0x7F) == 0, upper | 0x40, upper)
        high = torch.where(master[part].isnan(), quiet, (bits + 0x8000) >> 16)
        working[part].view(torch.int16).copy_(high)
        low[part].copy_(bits if low.dtype == torch.int16 else bits >> 8)


def join(working: torch.Tensor, low: torch.Tensor, master: torch.Tensor) -> None:
    """See `split.join`."""
    for part, _ in chunks(master.numel()):
        upper = working[part].view(torch.int16).to(torch.int32) << 16
        lacking = low[part].to(torch.int32) << (8 if low.dtype == torch.int8 else 0)
        whole = torch.where(working[part].isnan(), upper | (lacking & 0xFFFF), upper + lacking)
        master[part].view(torch.int32).copy_(whole)


def mark_far(
    values: torch.Tensor, first: torch.Tensor | None, far: torch.Tensor, eps: float
) -> None:
    """Set *far* for each block of the second moments *values* in which too many values matter.
    *first*: the first moments of the same elements.
    """
    for place, rows in chunks(values.numel()):
        part = _in_blocks(values[place])
        least = part.amax(dim=1, keepdim=True) * RANGE
        roots = part.sqrt()
        updates = roots * 8 if first is None else _in_blocks(first[place]).abs() * NEGLIGIBLE_RATIO
        matter = (part > 0) & (part < least) & (least.sqrt() > eps / 8) & (updates >= roots + eps)
        far[rows] |= matter.sum(dim=1) > MOST_FAR


def add_sums(
    words: torch.Tensor, factors: torch.Tensor, of_chunks: torch.Tensor, sums: torch.Tensor
) -> None:
    """Add to *sums*, for each row of factors, the products of *words* with *factors*, a chunk's sum
    times its factor *of_chunks*, modulo 2**64.
    """
    size = factors.shape[1]
    for number, start in enumerate(range(0, words.numel(), size)):
        chunk = words[start : start + size]
        found = [(chunk * row[: chunk.numel()]).sum() for row in factors]
        sums += torch.stack(found) * of_chunks[:, number]


def _exponents(blocks: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 exponent field of each block's largest magnitude, rounded up; `NOT_FINITE` for a
    block that is not finite, or is unsigned and has a negative value.
    """
    # This propagates NaN, and is five times as fast as aminmax.
    least, most = blocks.amin(dim=1), blocks.amax(dim=1)
    most = torch.maximum(most, -least) if signed else most.masked_fill_(least < 0, torch.nan)
    # Otherwise the rounding below would overflow int32 for a NaN.
    magnitude = (most.view(torch.int32) & 0x7FFFFFFF).clamp_(max=INFINITY)
    exponent = magnitude.add_(STEP - 1).bitwise_right_shift_(23).clamp_(min=LEAST_EXPONENT)
    return exponent.masked_fill_(exponent >= 254, NOT_FINITE)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
