"""The formats' kernels for GPUs. Each makes one pass over memory, where torch's operations make ten
to fifty. Names, shapes and bits are the same as in `by_torch`; `eight_bit` and `split` explain
the arithmetic, and `on_gpu` chooses the kernels.

A program processes several rows of `BLOCK` values. Bits are int32 throughout, and every cast to
fewer bits drops the upper ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from .by_torch import (
    CODE_ZERO,
    DROPPED,
    INFINITY,
    LEAST_EXPONENT,
    LEAST_NORMAL,
    MOST_FAR,
    NEGLIGIBLE_RATIO,
    NOT_FINITE,
    RANGE,
    STEP,
    TOP_OCTAVE,
)
from .packed import MASTER_INDEX, Look, Pieces
from .rounding import BLOCK, GOLDEN, MULTIPLIERS, block_names, random_table, seed_state

_ROWS = tl.constexpr(8)  # rows of a program: 2048 values
_WORDS = 8192  # of a program of `_add_sums`
_BLOCK = tl.constexpr(BLOCK)
_INFINITY = tl.constexpr(INFINITY)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_OCTAVE = tl.constexpr(1 << 23)
_DROPPED = tl.constexpr(DROPPED)
_STEP = tl.constexpr(STEP)
_CODE_ZERO = tl.constexpr(CODE_ZERO)
_LEAST_NORMAL = tl.constexpr(LEAST_NORMAL)
_LEAST_NORMAL_BITS = tl.constexpr((127 - 14) << 23)
_LEAST_EXPONENT = tl.constexpr(LEAST_EXPONENT)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_TOP_SIGNED = tl.constexpr(TOP_OCTAVE[True])
_TOP_UNSIGNED = tl.constexpr(TOP_OCTAVE[False])
_RANGE = tl.constexpr(RANGE)
_NEGLIGIBLE_RATIO = tl.constexpr(NEGLIGIBLE_RATIO)
_MOST_FAR = tl.constexpr(MOST_FAR)
_HALF_INFINITY = tl.constexpr(0xF8)
_GOLDEN = tl.constexpr(GOLDEN)
_FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


@triton.jit
def _places(count):
    # the rows of this program, the places of their values, and a mask of the places that exist
    row = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    place = row[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    return row, place, place < count


@triton.jit
def _randoms(name, table, state):
    # 32 random bits for each value: the table, scaled and shifted by a hash of seed and row name
    key = name * _GOLDEN + state
    key = key ^ ((key >> 29) & 0x7FFFFFFFF)
    key = key * _FIRST
    key = key ^ ((key >> 29) & 0x7FFFFFFFF)
    key = key * _SECOND
    factor = (key >> 32).to(tl.int32) | 1
    summand = (key ^ (key >> 32)).to(tl.int32)
    drawn = tl.load(table + tl.arange(0, _BLOCK))
    return drawn[None, :] * factor[:, None] + summand[:, None]


@triton.jit
def _names(row, names, count):
    return tl.load(names + row, mask=row * _BLOCK < count, other=0)


@triton.jit
def _store_codes(bits, codes, exponents, table, name, state, count, SIGNED: tl.constexpr):
    row, place, inside = _places(count)
    magnitude = bits & _MAGNITUDE
    largest = tl.minimum(tl.max(magnitude, axis=1), _INFINITY)  # for a NaN the sum would overflow
    exponent = tl.maximum((largest + _STEP - 1) >> 23, _LEAST_EXPONENT)
    finite = exponent < 254
    top: tl.constexpr = _TOP_SIGNED if SIGNED else _TOP_UNSIGNED
    scale = ((254 - exponent + top) << 23).to(tl.float32, bitcast=True)
    scaled = magnitude.to(tl.float32, bitcast=True) * scale[:, None]
    if SIGNED:
        held = (scaled + _LEAST_NORMAL).to(tl.int32, bitcast=True) - _OCTAVE
        sign = (bits >> 24) & 0x80
    else:
        held = tl.where(magnitude > 0, _LEAST_NORMAL_BITS, _CODE_ZERO)
        sign = bits & 0
        finite = finite & (tl.max(((bits < 0) & (magnitude > 0)).to(tl.int32), axis=1) == 0)
    random = (_randoms(name, table, state) >> 12) + _STEP // 2
    cut = tl.maximum(scaled.to(tl.int32, bitcast=True), held) - _CODE_ZERO + random
    code = (cut >> _DROPPED) | sign
    code = tl.where(finite[:, None], code, 0)
    tl.store(codes + place, code.to(tl.uint8), mask=inside)
    field = tl.where(finite, exponent, _NOT_FINITE)
    tl.store(exponents + row, field.to(tl.uint8), mask=row * _BLOCK < count)


@triton.jit(do_not_specialize=["state"])
def _encode(values, codes, exponents, table, names, state, count, SIGNED: tl.constexpr):
    row, place, inside = _places(count)
    name = _names(row, names, count)
    bits = tl.load(values + place, mask=inside, other=0)
    _store_codes(bits, codes, exponents, table, name, state, count, SIGNED)


@triton.jit
def _decoded(codes, exponents, count, SIGNED: tl.constexpr):
    row, place, inside = _places(count)
    field = tl.load(exponents + row, mask=row * _BLOCK < count, other=0).to(tl.int32)
    code = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    if SIGNED:
        magnitude = code & 0x7F
        sign = (code >> 7) << 31
    else:
        magnitude = code
        sign = code & 0
    top: tl.constexpr = _TOP_SIGNED if SIGNED else _TOP_UNSIGNED
    octave = tl.maximum(field, _LEAST_EXPONENT) - top
    scale = (octave << 23).to(tl.float32, bitcast=True)
    scale = tl.where(field == _NOT_FINITE, float("nan"), scale)
    bits = (magnitude << _DROPPED) + _CODE_ZERO
    # even steps below the least normal number of IEEE's halves
    even = (bits + _OCTAVE).to(tl.float32, bitcast=True) - _LEAST_NORMAL
    bits = tl.minimum(bits, even.to(tl.int32, bitcast=True))
    bits = bits | tl.where(magnitude < _HALF_INFINITY, 0, _INFINITY) | sign
    return bits.to(tl.float32, bitcast=True) * scale[:, None]


@triton.jit
def _decode(codes, exponents, values, count, SIGNED: tl.constexpr):
    _, place, inside = _places(count)
    decoded = _decoded(codes, exponents, count, SIGNED)
    tl.store(values + place, decoded, mask=inside)


@triton.jit
def _with_24_bits(bits, random):
    magnitude = bits & _MAGNITUDE
    quiet = tl.where(magnitude > _INFINITY, bits | 0x400000, bits)  # a NaN stays a NaN
    return tl.where(magnitude < _INFINITY, bits + ((random >> 24) & 0xFF), quiet) & ~0xFF


@triton.jit(do_not_specialize=["state"])
def _round_to_24(values, table, names, state, count):
    row, place, inside = _places(count)
    random = _randoms(_names(row, names, count), table, state)
    bits = tl.load(values + place, mask=inside, other=0)
    tl.store(values + place, _with_24_bits(bits, random), mask=inside)


@triton.jit
def _store_halves(bits, working, low, place, inside):
    upper = bits >> 16
    quiet = tl.where((upper & 0x7F) == 0, upper | 0x40, upper)
    rounded = tl.where((bits & _MAGNITUDE) > _INFINITY, quiet, (bits + 0x8000) >> 16)
    tl.store(working + place, rounded.to(tl.int16), mask=inside)
    if low.dtype.element_ty == tl.int8:
        tl.store(low + place, (bits >> 8).to(tl.int8), mask=inside)
    else:
        tl.store(low + place, bits.to(tl.int16), mask=inside)


@triton.jit
def _split(master, working, low, count):
    _, place, inside = _places(count)
    bits = tl.load(master + place, mask=inside, other=0)
    _store_halves(bits, working, low, place, inside)


@triton.jit
def _joined(working, low, count):
    _, place, inside = _places(count)
    upper = tl.load(working + place, mask=inside, other=0).to(tl.int32) << 16
    lower = tl.load(low + place, mask=inside, other=0).to(tl.int32)
    if low.dtype.element_ty == tl.int8:
        lower = lower << 8
    is_nan = (upper & _MAGNITUDE) > _INFINITY
    return tl.where(is_nan, upper | (lower & 0xFFFF), upper + lower)


@triton.jit
def _join(working, low, master, count):
    _, place, inside = _places(count)
    tl.store(master + place, _joined(working, low, count), mask=inside)


@triton.jit
def _far_rows(square, roots, updates, eps):
    largest = tl.max(square, axis=1)
    is_nan = tl.max((square != square).to(tl.int32), axis=1) > 0
    least = tl.where(is_nan, float("nan"), largest) * _RANGE
    allowed = tl.sqrt_rn(least) > eps / 8
    matter = (square > 0) & (square < least[:, None]) & allowed[:, None] & (updates >= roots + eps)
    return (tl.sum(matter.to(tl.int32), axis=1) > _MOST_FAR).to(tl.int8)


@triton.jit
def _mark_far(values, first, far, count, eps):
    row, place, inside = _places(count)
    part = tl.load(values + place, mask=inside, other=0.0)
    roots = tl.sqrt_rn(part)
    updates = roots * 8
    if first is not None:
        updates = tl.abs(tl.load(first + place, mask=inside, other=0.0)) * _NEGLIGIBLE_RATIO
    before = tl.load(far + row, mask=row * _BLOCK < count, other=0)
    found = _far_rows(part, roots, updates, eps)
    tl.store(far + row, before | found, mask=row * _BLOCK < count)


@triton.jit
def _add_sums(
    words,
    factors,
    of_chunks,
    sums,
    count,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * SIZE
    place = first + tl.arange(0, SIZE)
    word = tl.load(words + place, mask=place < count, other=0).to(tl.int64)
    factor = factors + first % CHUNK + tl.arange(0, SIZE)
    of_chunk = of_chunks + first // CHUNK
    for row in tl.static_range(2):
        of_words = tl.sum(word * tl.load(factor + row * CHUNK), axis=0)
        tl.atomic_add(sums + row, of_words * tl.load(of_chunk + row * CHUNKS))


@triton.jit
def _load_gradient(gradient, place, inside):
    values = tl.load(gradient + place, mask=inside, other=0)
    if gradient.dtype.element_ty == tl.int16:  # bfloat16, the upper half of a float32
        values = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def _store_master(bits, working, low, table, name, state, place, inside):
    if low.dtype.element_ty == tl.int8:
        bits = _with_24_bits(bits, _randoms(name, table, state))
    _store_halves(bits, working, low, place, inside)


_NOT_SPECIALIZED = [
    *("first_name", "master_state", "first_state", "second_state"),
    *("rate", "beta1", "beta2", "decay", "eps", "far_eps"),
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _adam(
    working,
    low,
    master,
    gradient,
    first,
    first_exponents,
    second,
    second_exponents,
    powers,
    table,
    first_name,
    master_state,
    first_state,
    second_state,
    rate,
    beta1,
    beta2,
    decay,
    eps,
    far,
    far_eps,
    count,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
):
    # Source: adam_math in ATen/native/cuda/fused_adam_utils.cuh, with the sums that nvcc fuses with a
    # product.
    row, place, inside = _places(count)
    grad = _load_gradient(gradient, place, inside)
    if MAXIMIZE:
        grad = -grad
    if low is not None:  # noqa: SIM108  # Triton would compile both sides of an expression
        value = _joined(working, low, count).to(tl.float32, bitcast=True)
    else:
        value = tl.load(master + place, mask=inside, other=0)
    if first_exponents is not None:
        average = _decoded(first, first_exponents, count, True)
        square = _decoded(second, second_exponents, count, False)
    else:
        average = tl.load(first + place, mask=inside, other=0)
        square = tl.load(second + place, mask=inside, other=0)
    if DECAYS:
        if DECOUPLED:
            value = tl.fma(value, 0 - rate * decay, value)
        else:
            grad = tl.fma(value, decay, grad)
    average = tl.fma(average, beta1, tl.fma(grad, 0 - beta1, grad))
    product = grad * grad
    square = tl.fma(square, beta2, tl.fma(product, 0 - beta2, product))
    size = tl.div_rn(rate, 1 - tl.load(powers))
    root = tl.div_rn(tl.sqrt_rn(square), tl.sqrt_rn(1 - tl.load(powers + 1))) + eps
    value = value - tl.div_rn(average * size, root)
    if far is not None:
        updates = tl.abs(average) * _NEGLIGIBLE_RATIO
        found = tl.max(_far_rows(square, tl.sqrt_rn(square), updates, far_eps), axis=0)
        tl.store(far, found, mask=found > 0)
    name = row + first_name
    if low is not None:
        bits = value.to(tl.int32, bitcast=True)
        _store_master(bits, working, low, table, name, master_state, place, inside)
    else:
        tl.store(master + place, value, mask=inside)
    if first_exponents is not None:
        bits = average.to(tl.int32, bitcast=True)
        _store_codes(bits, first, first_exponents, table, name, first_state, count, True)
        bits = square.to(tl.int32, bitcast=True)
        _store_codes(bits, second, second_exponents, table, name, second_state, count, False)
    else:
        tl.store(first + place, average, mask=inside)
        tl.store(second + place, square, mask=inside)


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
    randoms = _randoms_of(values, seed, blocks)
    places = values.view(torch.int32), codes, exponents
    _launch(_encode, *places, *randoms, count=values.numel(), SIGNED=signed)


def decode(
    codes: torch.Tensor, exponents: torch.Tensor, values: torch.Tensor, *, signed: bool
) -> None:
    """See `eight_bit.decode`."""
    _launch(_decode, codes, exponents, values, count=values.numel(), SIGNED=signed)


def round_to_24(
    values: torch.Tensor, *, seed: tuple[int, ...], blocks: torch.Tensor | None = None
) -> None:
    """See `eight_bit.round_to_24`."""
    randoms = _randoms_of(values, seed, blocks)
    _launch(_round_to_24, values.view(torch.int32), *randoms, count=values.numel())


def split(master: torch.Tensor, working: torch.Tensor, low: torch.Tensor) -> None:
    """See `split.split`."""
    places = master.view(torch.int32), working.view(torch.int16), low
    _launch(_split, *places, count=master.numel())


def join(working: torch.Tensor, low: torch.Tensor, master: torch.Tensor) -> None:
    """See `split.join`."""
    places = working.view(torch.int16), low, master.view(torch.int32)
    _launch(_join, *places, count=master.numel())


def mark_far(
    values: torch.Tensor, first: torch.Tensor | None, far: torch.Tensor, eps: float
) -> None:
    """See `by_torch.mark_far`."""
    places = values, first, far.view(torch.int8)
    _launch(_mark_far, *places, count=values.numel(), eps=float(eps))


def adam(
    pieces: Pieces,
    gradient: torch.Tensor,
    powers: torch.Tensor,
    options: Mapping[str, Any],
    first_block: int,
    seed: int,
    look: Look | None = None,
) -> None:
    """A step of Adam, as torch's fused kernel makes it, in one pass over packed states. A weight
    with a whole master does not follow it.

    *powers*: the betas to the power of the step count, float32. *options*: of the parameter group.
    *look*: for far blocks of the new second moments.
    """
    weight, low, master, moments = pieces
    numbers = (options["lr"], *options["betas"], options["weight_decay"], options["eps"])
    _launch(
        _adam,
        _bits(weight),
        low,
        master,
        _bits(gradient),
        *moments[0],
        *moments[1],
        powers,
        random_table(weight.device),
        first_block,
        *(seed_state((seed, index)) for index in (MASTER_INDEX, 0, 1)),
        *map(float, numbers),
        *(look or (None, 0.0)),
        count=weight.numel(),
        DECAYS=options["weight_decay"] != 0,
        DECOUPLED=bool(options["decoupled_weight_decay"]),
        MAXIMIZE=bool(options["maximize"]),
        enable_fp_fusion=False,
    )


def add_sums(
    words: torch.Tensor, factors: torch.Tensor, of_chunks: torch.Tensor, sums: torch.Tensor
) -> None:
    """See `by_torch.add_sums`. A chunk is a multiple of the words of a program."""
    sizes = {"SIZE": _WORDS, "CHUNK": factors.shape[1], "CHUNKS": of_chunks.shape[1]}
    _launch(_add_sums, words, factors, of_chunks, sums, count=words.numel(), each=_WORDS, **sizes)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


def _randoms_of(
    values: torch.Tensor, seed: tuple[int, ...], blocks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The arguments of `_randoms`: the table, the names of blocks, and the hash of the seed."""
    if blocks is None:
        blocks = block_names(0, values.numel(), values.device)
    return random_table(values.device), blocks, seed_state(seed)


def _launch(
    kernel: Any, *arguments: Any, count: int, each: int = BLOCK * _ROWS.value, **options: Any
) -> None:
    """Launch *kernel* on the current stream of the device of the first of the *arguments*, with a
    program for *each* so many of *count* values.
    """
    programs = -(-count // each)
    if programs:
        device_of: Any = torch.cuda.device_of
        with device_of(arguments[0]):
            kernel[programs,](*arguments, count=count, **options)
