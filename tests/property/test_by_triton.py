"""Codes of 8 bits, rests and masters are the same by Triton's kernels as by torch's operations, bit
for bit: on a GPU, and where there is none by Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from bit_patterns import SPECIAL, numbers, patterns

from nvme_offload import optimizer_states
from nvme_offload.commands import checks
from nvme_offload.optimizer_states import by_torch, on_gpu, one_pass
from nvme_offload.optimizer_states.adam_by_kernels import step_by_kernels
from nvme_offload.optimizer_states.formats import FORMATS
from nvme_offload.optimizer_states.packed import MASTER_INDEX, Look, Pieces
from nvme_offload.optimizer_states.rounding import BLOCK, block_names, random_keys, random_table

# of numpy, with which the interpreter computes
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# a program works on 2048 values
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2047, 2048, 2049, 5 * 2048 + 3]
signed_or_not = pytest.mark.parametrize("signed", [True, False])


@pytest.fixture(scope="module")
def by_triton():
    pytest.importorskip("triton")
    if DEVICE.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("no CUDA device, and no TRITON_INTERPRET=1")
    from nvme_offload.optimizer_states import by_triton

    return by_triton


def empty(like: torch.Tensor, dtype: torch.dtype, size: int | None = None) -> torch.Tensor:
    """One more than *size*, so that a write beyond it shows."""
    return torch.ones((like.numel() if size is None else size) + 1, dtype=dtype, device=DEVICE)


def same(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    """Bit for bit, but that a NaN is any NaN."""
    if ours.dtype == torch.float32:
        ours, reference = (torch.where(one.isnan(), torch.nan, one) for one in (ours, reference))
    return torch.equal(ours.view(torch.uint8), reference.view(torch.uint8))


def check_codes(by_triton, values, *, signed, seed=0, first=0):
    values = values.to(DEVICE)
    blocks = -(-values.numel() // BLOCK)
    found = []
    for encode, decode in (
        (by_triton.encode, by_triton.decode),
        (by_torch.encode, by_torch.decode),
    ):
        codes, back = empty(values, torch.uint8), empty(values, torch.float32)
        exponents = empty(values, torch.uint8, blocks)
        names = block_names(first, values.numel(), DEVICE)
        encode(values, codes[:-1], exponents[:-1], signed=signed, seed=(seed, 1), blocks=names)
        decode(codes[:-1], exponents[:-1], back[:-1], signed=signed)
        found.append((codes, exponents, back))
    assert all(map(same, *found))


def check_masters(by_triton, bits, seed=0):
    master = bits.to(DEVICE).view(torch.float32)
    rounded = [master.clone(), master.clone()]
    by_triton.round_to_24(rounded[0], seed=(seed,))
    by_torch.round_to_24(rounded[1], seed=(seed,))
    assert torch.equal(rounded[0].view(torch.int32), rounded[1].view(torch.int32))
    for of, dtype in ((master, torch.int16), (rounded[1], torch.int8)):
        found = []
        for split, join in ((by_triton.split, by_triton.join), (by_torch.split, by_torch.join)):
            working, low = empty(of, torch.bfloat16), empty(of, dtype)
            back = empty(of, torch.float32)
            split(of, working[:-1], low[:-1])
            join(working[:-1], low[:-1], back[:-1])
            found.append((working.view(torch.int16), low, back.view(torch.int32)))
        assert all(map(torch.equal, *found))


@signed_or_not
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("octaves", [1, 16, 40, 254])
def test_numbers_of_every_octave(by_triton, signed, numel, octaves):
    values = numbers(numel, octaves)
    check_codes(by_triton, values, signed=signed, seed=numel, first=numel * BLOCK)
    check_codes(by_triton, values.abs(), signed=signed, seed=-numel)


@pytest.mark.parametrize("numel", [0, 1, 8191, 8192, 8193, 3 * 8192, 10 * 8192 + 5])
def test_sums_of_words(by_triton, numel):
    generator = torch.Generator().manual_seed(numel)
    least, most = -(1 << 63), (1 << 63) - 1
    words = patterns(numel + 1).to(DEVICE)[:-1]
    factors, of_chunks = (
        torch.randint(least, most, (2, size), generator=generator).to(DEVICE)
        for size in (2 * 8192, 7)
    )
    found = [torch.tensor([3, -5], device=DEVICE) for _ in range(2)]
    for sums, by in zip(found, (by_triton, by_torch), strict=True):
        by.add_sums(words, factors, of_chunks, sums)
    assert torch.equal(*found)


@signed_or_not
@pytest.mark.parametrize("numel", SIZES)
def test_any_patterns(by_triton, signed, numel):
    check_codes(by_triton, patterns(numel).view(torch.float32), signed=signed)


@signed_or_not
@pytest.mark.parametrize("place", [0, 5, BLOCK - 1])
def test_one_that_is_special_among_others(by_triton, signed, place):
    for sign in (0, -(1 << 31)):
        values = numbers(len(SPECIAL) * BLOCK, 20).abs()
        values.view(torch.int32)[place::BLOCK] = torch.tensor(SPECIAL, dtype=torch.int32) | sign
        for others in (values, torch.zeros(len(values)).copysign(values), torch.zeros(len(values))):
            others.view(torch.int32)[place::BLOCK] = values.view(torch.int32)[place::BLOCK]
            check_codes(by_triton, others, signed=signed)


@signed_or_not
def test_the_largest_of_a_block_at_the_edge_of_an_octave(by_triton, signed):
    # with a mantissa of 0x700000 it has just a code of its octave
    mantissas = torch.tensor([0, 1, 0x6FFFFF, 0x700000, 0x700001, 0x7FFFFF]).repeat(250)
    values = torch.zeros(len(mantissas) * BLOCK)
    exponents = torch.arange(1, 251).repeat_interleave(6)
    values.view(torch.int32)[7::BLOCK] = (exponents << 23 | mantissas).to(torch.int32)
    check_codes(by_triton, values, signed=signed)


@signed_or_not
def test_values_at_the_edge_of_their_rounding(by_triton, signed):
    """Where one more in the last bit, or in the random number, gives another code."""
    count = 8 * BLOCK
    factors, summands = random_keys(count, (5, 1), torch.device("cpu"), None)
    drawn = random_table(torch.device("cpu")) * factors[:, None] + summands[:, None]
    least = (1 << 20) - ((drawn.flatten() >> 12) + (1 << 19))  # that is rounded up
    for below in (0, 1):
        bits = 0x40000000 | patterns(count) & 0x700000 | (least - below) & 0xFFFFF
        check_codes(by_triton, bits.view(torch.float32), signed=signed, seed=5)
    found = [torch.zeros(count, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    for codes, below in zip(found, (0, 1), strict=True):
        bits = 0x40000000 | (least - below).clamp(0, 0xFFFFF)
        exponents = torch.zeros(8, dtype=torch.uint8, device=DEVICE)
        values = bits.view(torch.float32).to(DEVICE)
        by_triton.encode(values, codes, exponents, signed=signed, seed=(5, 1))
    assert torch.equal(
        *(codes.to(torch.int16) - step for codes, step in zip(found, (1, 0), strict=True))
    )


@signed_or_not
def test_every_code_in_a_block_of_every_exponent(by_triton, signed):
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(256)
    exponents = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    ours, reference = (torch.empty(1 << 16, device=DEVICE) for _ in range(2))
    by_triton.decode(codes, exponents, ours, signed=signed)
    by_torch.decode(codes, exponents, reference, signed=signed)
    assert same(ours, reference)


@pytest.mark.parametrize("numel", SIZES)
def test_masters_of_any_bits(by_triton, numel):
    check_masters(by_triton, patterns(numel), seed=numel)


def test_masters_that_are_halfway_the_largest_and_no_numbers(by_triton):
    uppers = torch.tensor([0x0000, 0x007F, 0x3F80, 0x7F7F, 0x7F80, 0x7FBF, 0x7FC0, 0x7FFF])
    uppers = torch.cat([uppers, uppers | 0x8000])[:, None] << 16
    lowers = torch.tensor([0, 1, 0x7F, 0x80, 0xFF, 0x7F00, 0x7FFF, 0x8000, 0x8001, 0xFF00, 0xFFFF])
    check_masters(by_triton, (uppers | lowers).flatten().to(torch.int32))


def test_weights_that_were_changed_are_joined_alike(by_triton):
    weights = torch.arange(1 << 16).to(torch.int16).to(DEVICE).view(torch.bfloat16)
    for low in (0, 1, 0x7FFF, -0x8000, -1):
        for dtype in (torch.int16, torch.int8):
            rests = torch.full((1 << 16,), low >> (8 if dtype == torch.int8 else 0)).to(dtype)
            ours, reference = (torch.empty(1 << 16, device=DEVICE) for _ in range(2))
            by_triton.join(weights, rests.to(DEVICE), ours)
            by_torch.join(weights, rests.to(DEVICE), reference)
            assert torch.equal(ours.view(torch.int32), reference.view(torch.int32))


def test_the_trial_of_the_kernels_finds_no_difference(by_triton):
    assert on_gpu._differing(by_triton, DEVICE) == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_in_the_interpreter_of_a_triton_that_is_installed_for_it():
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        got = subprocess.run(
            [*pip, "--no-deps", "--no-compile", "--target", place, "triton"],
            stderr=subprocess.PIPE,
            text=True,
        )
        if got.returncode:
            pytest.skip(f"no Triton to be had: {got.stderr.strip()[-200:]}")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", __file__],
            env={**os.environ, "PYTHONPATH": place, "TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 0, done.stdout
    assert "SKIPPED" not in done.stdout


@pytest.mark.parametrize(
    ("kernel", "made"),
    [
        ("encode", "codes"),
        ("encode", "exponents"),
        ("decode", "values"),
        ("round_to_24", "masters of 24 bits"),
        ("split", "weights"),
        ("split", "rests"),
        ("join", "masters"),
    ],
)
def test_one_bit_that_differs_is_found(kernel, made):
    """A compiler may change any value: check the last one that the kernel writes."""
    place = {"codes": 1, "exponents": 2, "values": 2, "masters of 24 bits": 0}
    place |= {"weights": 1, "rests": 2, "masters": 2}
    by = SimpleNamespace(**vars(by_torch))
    right = getattr(by, kernel)

    def wrong(*tensors, **options):
        right(*tensors, **options)
        tensors[place[made]].view(torch.uint8)[-1] ^= 1

    setattr(by, kernel, wrong)
    found = on_gpu._differing(by, torch.device("cpu"))
    assert any(name.startswith(made) for name in found)


@pytest.fixture
def not_loaded(monkeypatch):
    """The module `by_triton` is yet to be imported, and tried."""
    monkeypatch.delattr(optimizer_states, "by_triton", raising=False)
    monkeypatch.delitem(sys.modules, f"{optimizer_states.__name__}.by_triton", raising=False)
    for chosen in (on_gpu.fault, on_gpu.kernels):
        monkeypatch.setattr(on_gpu, chosen.__name__, chosen.__wrapped__)


def test_what_gives_other_bits_is_not_used(monkeypatch, caplog, not_loaded):
    monkeypatch.setattr(optimizer_states, "by_triton", by_torch, raising=False)
    monkeypatch.setattr(on_gpu, "_differing", lambda by, device: ["codes, signed=True"])
    with caplog.at_level(logging.INFO):
        assert on_gpu.kernels(torch.device("cuda", 0)) == by_torch
    assert "Triton gives other bits in codes, signed=True" in caplog.text


def test_without_triton_torchs_operations_pack(monkeypatch, caplog, not_loaded):
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.INFO):
        assert on_gpu.kernels(torch.device("cuda", 0)) == by_torch
    assert "Triton cannot be used" in caplog.text
    assert on_gpu.kernels(torch.device("cpu")) == by_torch


def test_a_full_gpu_is_no_fault_of_triton(monkeypatch, not_loaded):
    def full(by, device):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optimizer_states, "by_triton", by_torch, raising=False)
    monkeypatch.setattr(on_gpu, "_differing", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        on_gpu.kernels(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert checks.packing().status == "note"


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("octaves", [1, 40, 254])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_far_blocks(by_triton, numel, octaves, eps):
    values = numbers(numel, octaves).abs().to(DEVICE)
    for first in (None, values.sqrt()):
        marks = [empty(values, torch.bool, -(-numel // BLOCK)) for _ in range(2)]
        for by, far in zip((by_triton, by_torch), marks, strict=True):
            far[:-1] = False
            by.mark_far(values, first, far[:-1], eps)
        assert torch.equal(*marks)


def fused(one, other, summand):
    """The product plus the summand, rounded once."""
    exact = [np.float64(x) for x in (one, other, summand)]
    return (exact[0] * exact[1] + exact[2]).astype(np.float32)


def rounded_twice(one, other, summand):
    """The same as the interpreters of older releases of Triton compute it."""
    return one * other + summand


def adam(fused, master, gradient, first, second, powers, options):
    """A step as torch's fused kernel computes it. *fused* adds to a product."""
    weight, gradient, first, second, powers = (
        one.cpu().numpy() for one in (master, gradient, first, second, powers)
    )
    (beta1, beta2), rate, decay, eps = (
        np.float32(options[name]) for name in ("betas", "lr", "weight_decay", "eps")
    )
    weight = fused(weight, -(rate * decay), weight)
    first = fused(first, beta1, fused(gradient, -beta1, gradient))
    square = gradient * gradient
    second = fused(second, beta2, fused(square, -beta2, square))
    root = np.sqrt(second) / np.sqrt(1 - powers[1]) + eps
    made = weight - first * (rate / (1 - powers[0])) / root, first, second
    return [torch.from_numpy(one).to(DEVICE) for one in made]


def pack(weight, low, master, first, second, pairs, seed):
    """As `StateFormat` does from block 3 on."""
    blocks = block_names(3 * BLOCK, master.numel(), DEVICE)
    if low is not None:
        if low.dtype == torch.int8:
            by_torch.round_to_24(master, seed=(seed, MASTER_INDEX), blocks=blocks)
        by_torch.split(master, weight, low)
    for index, (pair, values) in enumerate(zip(pairs, (first, second), strict=False)):
        by_torch.encode(values, *pair, signed=index == 0, seed=(seed, index), blocks=blocks)


def unpack(weight, low, master, first, second, pairs):
    if low is not None:
        by_torch.join(weight, low, master)
    for pair, values, signed in zip(pairs, (first, second), (True, False), strict=False):
        by_torch.decode(*pair, values, signed=signed)


@pytest.mark.parametrize("numel", SIZES[1:])
@pytest.mark.parametrize("codes", [True, False])
@pytest.mark.parametrize(
    ("dtype", "low"),
    [
        (torch.bfloat16, torch.int16),
        (torch.bfloat16, torch.int8),
        (torch.bfloat16, None),
        (torch.float32, None),
    ],
    ids=str,
)
def test_a_step_of_adam_in_one_kernel(by_triton, numel, low, codes, dtype):
    """Is unpacking, the step, and packing."""
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8}
    options |= {"maximize": False, "decoupled_weight_decay": True}
    powers = torch.tensor([0.6, 0.995], device=DEVICE)
    gradient = numbers(numel, 3).to(DEVICE, dtype)

    def after(fused=None):
        """The tensors after a step; without *fused*, after one of the kernel."""
        master, first, second = numbers(numel, 4), numbers(numel, 4) / 8, numbers(numel, 6) ** 2
        master, first, second = (one.to(DEVICE) for one in (master, first, second))
        bytes_of = [empty(master, torch.uint8) for _ in range(2)]
        fields = [empty(master, torch.uint8, -(-numel // BLOCK)) for _ in range(2)]
        pairs = [(one[:-1], field[:-1]) for one, field in zip(bytes_of, fields, strict=True)]
        weight = master.to(dtype) if dtype != master.dtype else master
        rests = None if low is None else empty(master, low)
        pairs = pairs if codes else []
        values = weight, None if rests is None else rests[:-1], master, first, second
        pack(*values, pairs, 1)
        if fused is None:
            pieces = Pieces(*values[:3], pairs or [(first, None), (second, None)])
            by_triton.adam(pieces, gradient, powers, options, 3, 2)
        else:
            unpack(*values, pairs)
            made = adam(fused, master, gradient.float(), first, second, powers, options)
            for old, new in zip((master, first, second), made, strict=True):
                old.copy_(new)
            pack(*values, pairs, 2)
        found = [*bytes_of, *fields]
        if rests is None:
            found.append(master)
        else:
            rests[:-1][weight.isnan()] = 0  # any NaN
            found += [rests, weight.float()]
        return found if codes else [*found, first, second]

    ours, ways = after(), [fused, *([rounded_twice] if DEVICE.type == "cpu" else [])]
    assert any(all(map(same, ours, after(way))) for way in ways)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_step_over_the_parts_of_a_bucket(by_triton, name, dtype):
    """A step of some elements, and of none, leaves the rest of the bucket as it is."""
    state_format, starts, sizes = FORMATS[name], [0, 512, 1024], [300, 0, 2049]
    numel = starts[-1] + sizes[-1]
    layout = state_format.layout(numel, dict.fromkeys(one_pass.STATES, torch.float32), dtype)
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8}
    options |= {"maximize": False, "decoupled_weight_decay": True}
    blocks = block_names(3 * BLOCK, numel, DEVICE)
    # without NaN, of which processors make several
    sampled = torch.randn(4, numel, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    sampled[:, sizes[0] : 2 * BLOCK] = 0  # the rest of the block in which the first part ends
    gradient = sampled[3]

    def after(fused=None):
        master, first, second = (one.clone() for one in sampled[:3])
        weight, buffer = master.to(dtype), torch.zeros(layout.nbytes, dtype=torch.uint8).to(DEVICE)

        def pack(*values, seed):
            whole, *states = values
            states = dict(zip(one_pass.STATES, states, strict=True))
            whole = None if layout.master is None else whole
            state_format.pack(layout, buffer, [weight], whole, states, seed, blocks)

        pack(master, first, second.square(), seed=1)
        slices = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        if fused is None:
            optimizer = SimpleNamespace(state={})
            parts = []
            for part in slices:
                parameter = torch.empty(0)
                optimizer.state[parameter] = {"step": torch.tensor(4.0, device=DEVICE)}
                place = part.start, 3 + part.start // BLOCK
                parts.append(
                    one_pass.Part(parameter, options, weight[part], gradient[part], *place)
                )
            step_by_kernels(optimizer, state_format, layout, buffer, parts, 2, lambda: None)
            assert [int(state["step"]) for state in optimizer.state.values()] == [5] * 3
        else:
            master, states = state_format.unpack(layout, buffer, [weight])
            values = [weight if master is None else master, *states.values()]
            # there, since processors round powers in other ways
            powers = torch.pow(*(torch.tensor(x, device=DEVICE) for x in (options["betas"], [5.0])))
            for part in slices:
                olds = [value[part] for value in values]
                news = adam(fused, olds[0], gradient[part], *olds[1:], powers, options)
                for old, new in zip(olds, news, strict=True):
                    old.copy_(new)
            pack(*values, seed=2)
        return [weight.float(), buffer]

    ours, ways = after(), [fused, *([rounded_twice] if DEVICE.type == "cpu" else [])]
    assert any(all(map(same, ours, after(way))) for way in ways)


@pytest.mark.parametrize("numel", [1, 2049, 5 * 2048 + 3])
@pytest.mark.parametrize("octaves", [1, 40])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_the_look_in_a_step_of_adam(by_triton, numel, octaves, eps):
    """It finds what `mark_far` finds in the new moments, and changes no result."""
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8}
    options |= {"maximize": False, "decoupled_weight_decay": True}
    powers = torch.tensor([0.6, 0.995], device=DEVICE)
    flag, made = torch.zeros(1, dtype=torch.int8, device=DEVICE), []
    for look in (None, Look(flag, eps)):
        second = (numbers(numel, octaves) ** 2).to(DEVICE)
        first, master = second.sqrt(), numbers(numel, 3).to(DEVICE)
        pieces = Pieces(master, None, master, [(first, None), (second, None)])
        by_triton.adam(pieces, torch.zeros_like(master), powers, options, 0, 0, look)
        made.append([master, first, second])
    assert all(map(same, *made))
    far = torch.zeros(-(-numel // BLOCK), dtype=torch.bool, device=DEVICE)
    by_torch.mark_far(made[0][2], made[0][1], far, eps)
    assert bool(flag) == bool(far.any())
