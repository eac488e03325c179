"""The codec gives the same bits whatever vectors the processor has: compiled once for each width,
and as it is in the package.
"""

from __future__ import annotations

import ctypes
import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE

from nvme_offload import _aio

pytestmark = pytest.mark.processor

ROOT = Path(__file__).parents[2]
CHECK_WHEEL = runpy.run_path(str(ROOT / "tools" / "check_wheel.py"))
WIDTHS = {
    "sse2": ["-march=x86-64"],
    "avx2": ["-march=haswell"],
    "avx512f": ["-march=skylake-avx512"],
}
ROW, BLOCK = 1 << 16, 256
# more than a row, and neither whole blocks nor whole vectors at the end
NUMEL = 2 * ROW + 5 * BLOCK + 77

SHIM = """
#include "adam.h"
#include "codec.h"
using namespace nvme_offload;
extern "C" void c_split(const std::uint32_t* m, std::uint16_t* w, std::uint16_t* l, std::size_t n) { split(m, w, l, n, 1); }
extern "C" void c_join(const std::uint16_t* w, const std::uint16_t* l, std::uint32_t* m, std::size_t n) { join(w, l, m, n, 1); }
extern "C" void c_split_short(const std::uint32_t* m, std::uint16_t* w, std::uint8_t* l, std::size_t n) { split(m, w, l, n, 1); }
extern "C" void c_join_short(const std::uint16_t* w, const std::uint8_t* l, std::uint32_t* m, std::size_t n) { join(w, l, m, n, 1); }
extern "C" void c_round_to_24(std::uint32_t* v, std::size_t n, const std::uint32_t* t, const std::uint32_t* f, const std::uint32_t* a) {
  round_to_24(v, n, {t, f, a}, 1);
}
extern "C" void c_encode(const float* v, std::uint8_t* c, std::uint8_t* e, std::size_t n, bool s, const std::uint32_t* t, const std::uint32_t* f,
                         const std::uint32_t* a) { encode(v, c, e, n, s, {t, f, a}, 1); }
extern "C" void c_decode(const std::uint8_t* c, const std::uint8_t* e, float* v, std::size_t n, bool s) { decode(c, e, v, n, s, 1); }
extern "C" void c_mark_far(const float* v, const float* m, std::uint8_t* f, std::size_t n) { mark_far(v, m, f, n, 1e-8, 1); }
extern "C" void c_adam(bool torch, bool short_low, std::uint16_t* g, std::uint16_t* w, void* l, std::uint8_t* c, std::uint8_t* e, float* v, std::size_t n,
                       std::uint32_t* t) {
  const AdamStep step{torch ? AdamFormula::kTorch : AdamFormula::kDeepSpeed, n % 16, 0.1F, 0.9F, 0.999F, 0.001F, true, true, 0.999F, false, 0.07F, 1e-8F,
                      -0.01F, nullptr};
  adam({n, g, Element::kBFloat16, nullptr, w, Element::kBFloat16, l, short_low ? 1U : 2U, 5, {nullptr, c, e, 7}, {v, nullptr, nullptr, 0}, t, 11}, step, 1);
}
"""


class Codec:
    """The functions, of a library compiled for one width or of the package's own (None)."""

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self.library = library

    def call(self, name: str, *arguments: object) -> None:
        plain = [each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments]
        if self.library is None:
            getattr(_aio, name)(*plain, 1)
        else:
            kinds = {bool: ctypes.c_bool}
            # an address is as large as a size
            converted = [kinds.get(type(each), ctypes.c_size_t)(each) for each in plain]
            getattr(self.library, f"c_{name}")(*converted)


@pytest.fixture(
    scope="module",
    params=[
        "sse2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in WIDTHS if name != "sse2"),
    ],
)
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Codec:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    if request.param not in CHECK_WHEEL["processor_flags"]():
        pytest.skip(f"this processor has no {request.param}")
    place = tmp_path_factory.mktemp(request.param)
    (place / "shim.cpp").write_text(SHIM)
    # NVME_OFFLOAD_SANITIZED: one version, for the compiler's flags. FMA may be used where the
    # processor has it, as a compiler does by default.
    options = [
        *WIDTHS[request.param],
        "-std=c++17",
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fPIC",
        "-shared",
        "-DNVME_OFFLOAD_SANITIZED",
        f"-I{ROOT / 'aio'}",
    ]
    command = [
        compiler,
        *options,
        ROOT / "aio" / "adam.cpp",
        ROOT / "aio" / "codec.cpp",
        place / "shim.cpp",
        "-o",
        place / "codec.so",
        "-ldl",
        "-pthread",
    ]
    subprocess.run([*map(str, command)], check=True, timeout=PATIENCE)
    return Codec(ctypes.CDLL(str(place / "codec.so")))


def patterns() -> np.ndarray:
    """fp32 values of every kind: all exponents, denormals, zeros of both signs, infinities, NaNs,
    and blocks with only one of these.
    """
    generator = np.random.default_rng(7)
    bits = generator.integers(0, 1 << 32, NUMEL, dtype=np.uint32)
    moderate = (
        (generator.standard_normal(NUMEL) * np.exp(4 * generator.standard_normal(NUMEL)))
        .astype(np.float32)
        .view(np.uint32)
    )
    found = np.where(np.arange(NUMEL) // BLOCK % 3 == 0, bits, moderate)
    special = np.array(
        [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0x00800000, 0x807FFFFF],
        np.uint32,
    )
    found[ROW : ROW + 9 * BLOCK] = np.repeat(special, BLOCK)
    found[generator.integers(0, NUMEL, 100)] = generator.choice(special, 100)
    return found


def randoms() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What rounding draws on: a table of a block, and two numbers for each block."""
    generator = np.random.default_rng(11)
    table, factors, summands = (
        generator.integers(0, 1 << 32, size, dtype=np.uint32)
        for size in (BLOCK, -(-NUMEL // BLOCK), -(-NUMEL // BLOCK))
    )
    return table, factors | np.uint32(1), summands


def test_the_extension_uses_the_vectors_of_the_processor() -> None:
    assert _aio.widest_vectors().name == CHECK_WHEEL["processor_vectors"]()


@pytest.mark.parametrize(("form", "dtype"), [("", np.uint16), ("_short", np.uint8)])
def test_split_and_join(codec: Codec, form: str, dtype: type) -> None:
    reported = []
    for each in (codec, Codec(None)):
        master, working, low = patterns(), np.zeros(NUMEL, np.uint16), np.zeros(NUMEL, dtype)
        if form:
            each.call("round_to_24", master, NUMEL, *randoms())
        each.call(f"split{form}", master, working, low, NUMEL)
        again = np.zeros(NUMEL, np.uint32)
        each.call(f"join{form}", working, low, again, NUMEL)
        reported.append((working.tobytes(), low.tobytes(), again.tobytes()))
    assert reported[0] == reported[1]
    numbers = (master & 0x7FFFFFFF) <= 0x7F800000
    assert (again == master)[numbers].all()


@pytest.mark.parametrize("signed", [True, False])
def test_encode_and_decode(codec: Codec, signed: bool) -> None:
    values = (
        patterns().view(np.float32)
        if signed
        else (patterns() & np.uint32(0x7FFFFFFF)).view(np.float32)
    )
    reported = []
    for each in (codec, Codec(None)):
        codes, exponents, back = (
            np.zeros(NUMEL, np.uint8),
            np.zeros(-(-NUMEL // BLOCK), np.uint8),
            np.zeros(NUMEL, np.float32),
        )
        each.call("encode", values, codes, exponents, NUMEL, signed, *randoms())
        each.call("decode", codes, exponents, back, NUMEL, signed)
        reported.append((codes.tobytes(), exponents.tobytes(), back.tobytes()))
    assert reported[0] == reported[1]
    assert len(set(codes.tolist())) > 100  # the compared values differ from each other


@pytest.mark.parametrize("has_first", [True, False])
def test_far_blocks(codec: Codec, has_first: bool) -> None:
    first = patterns().view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        second = np.square(first)
    reported = []
    for each in (codec, Codec(None)):
        far = np.zeros(-(-NUMEL // BLOCK), np.uint8)
        eps = () if each is codec else (1e-8,)
        each.call("mark_far", second, first if has_first else 0, far, NUMEL, *eps)
        reported.append(far.tolist())
    assert reported[0] == reported[1]
    assert set(reported[0]) == {0, 1}


@pytest.mark.parametrize("short_low", [False, True])
@pytest.mark.parametrize("formula", ["TORCH", "DEEPSPEED"])
def test_adam(codec: Codec, formula: str, short_low: bool) -> None:
    reported = []
    for is_package in (False, True):
        generator = np.random.default_rng(3)
        gradient, working = (
            generator.standard_normal(NUMEL, np.float32).view(np.uint32) >> np.uint32(16)
            for _ in range(2)
        )
        gradient, working = gradient.astype(np.uint16), working.astype(np.uint16)
        low = generator.integers(0, 1 << 8, NUMEL * (1 if short_low else 2), dtype=np.uint8)
        codes = generator.integers(0, 1 << 8, NUMEL, dtype=np.uint8)
        exponents = generator.integers(100, 130, -(-NUMEL // BLOCK), dtype=np.uint8)
        second = np.square(generator.standard_normal(NUMEL, np.float32))
        table = randoms()[0]
        places = gradient, working, low, codes, exponents, second
        if is_package:
            step = _aio.AdamStep(
                formula=getattr(_aio.AdamFormula, formula),
                tail=NUMEL % 16,
                weight=0.1,
                beta1=0.9,
                beta2=0.999,
                square_weight=0.001,
                decays=True,
                decoupled=True,
                decay=0.999,
                maximize=False,
                correction=0.07,
                eps=1e-8,
                step_size=-0.01,
                square_roots=0,
                set_mkl_threads=0,
            )
            _aio.adam(
                count=NUMEL,
                gradient=gradient.ctypes.data,
                gradient_element=_aio.Element.BFLOAT16,
                master=0,
                working=working.ctypes.data,
                working_element=_aio.Element.BFLOAT16,
                low=low.ctypes.data,
                low_bytes=1 if short_low else 2,
                master_seed=5,
                first=_aio.Moment(codes=codes.ctypes.data, exponents=exponents.ctypes.data, seed=7),
                second=_aio.Moment(values=second.ctypes.data),
                table=table.ctypes.data,
                first_block=11,
                step=step,
                threads=2,
            )
        else:
            codec.call("adam", formula == "TORCH", short_low, *places, NUMEL, table)
        reported.append([place.copy() for place in places])
    for one, other in zip(*reported, strict=True):
        assert np.array_equal(one, other)
