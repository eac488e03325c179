"""`step_in_one_pass` makes a step of Adam or AdamW on the CPU over packed states, in one pass over
memory (aio/adam.h), with the bits of `StateFormat.unpack`, the optimizer's step and
`StateFormat.pack`.

The bits depend on torch on this machine: the fused kernel rounds the elements after the last whole
vector differently, and the other kernels may take square roots from MKL, which does not round them
correctly. So the extension and the optimizer first update the same sample with several options
(`_arithmetic`). If any bit differs, the optimizer makes the steps.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..extension import _aio
from .formats import FORMATS, Layout, StateFormat, StateSlot
from .packed import MASTER_INDEX, bits_of
from .rounding import BLOCK, random_table, seed_state
from .traits import raw_step

STATES = ("exp_avg", "exp_avg_sq")
_ELEMENTS = {
    torch.float32: _aio.Element.FLOAT32,
    torch.bfloat16: _aio.Element.BFLOAT16,
    torch.float16: _aio.Element.FLOAT16,
}
# float32 values in a vector: AVX-512, AVX2, and NEON
VECTORS = (16, 8, 4)
# Elements of the sample: for each size in VECTORS, some remain after the last whole vector.
_SAMPLE = 4096 + 15

_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """Consecutive elements of a bucket that are one parameter of the optimizer."""

    parameter: torch.Tensor  # the key of the elements' state in the optimizer's state
    group: Mapping[str, Any]  # the options of the parameter group
    weight: torch.Tensor  # flat and contiguous, of the layout's working dtype
    gradient: torch.Tensor  # flat and contiguous, of float32, bfloat16 or float16
    start: int  # the index of the first element in the bucket
    first_block: int  # the name of the first block (`block_names`)


class _Arithmetic(NamedTuple):
    vector: int  # the elements of a vector of the fused kernel; 1 for other kernels
    square_roots: int  # the address of MKL's function, or 0


def step_in_one_pass(
    optimizer: torch.optim.Optimizer,
    state_format: StateFormat,
    layout: Layout,
    buffer: torch.Tensor,
    parts: Sequence[Part],
    seed: int,
    begin: Callable[[], None] = lambda: None,
) -> bool:
    """Make a step of *optimizer* over the packed states in *buffer*, and advance its step counts.
    False, with nothing changed, if the extension does not know this optimizer, its options or the
    layout.

    *parts*: the parameters that have gradients; the rest of the bucket does not change. *seed*: as
    for `StateFormat.pack`. *begin* is called before anything is changed. Do not call this for a
    step at which `widening.looks_at` is true: the extension does not check the states.
    """
    if not is_packed_adam(optimizer, layout):
        return False
    steps = [_next_step(optimizer, part) for part in parts]
    if any(step is None for step in steps):
        return False
    begin()
    for part, step in zip(parts, steps, strict=True):
        update(state_format, layout, buffer, part, step, seed)
        optimizer.state[part.parameter]["step"] += 1
    return True


def is_packed_adam(optimizer: torch.optim.Optimizer, layout: Layout) -> bool:
    """Whether the extension knows the class of *optimizer* and how its states are packed."""
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and getattr(optimizer, "grad_scale", None) is None
        and getattr(optimizer, "found_inf", None) is None
        and has_packed_moments(layout)
    )


def has_packed_moments(layout: Layout) -> bool:
    """Whether the extension can update *layout*: it holds fp32 masters and Adam's two moments."""
    return (
        tuple(layout.states) == STATES
        and all(slot.dtype == torch.float32 and not slot.halved for slot in layout.states.values())
        and layout.working_dtype in _ELEMENTS
        and (layout.master is not None or layout.working_dtype == torch.float32)
    )


def is_usual(group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a step of Adam with the options of *group* uses two moments and numbers alone."""
    numbers = (group["lr"], group["eps"], group["weight_decay"], *group["betas"])
    return (
        state.keys() == {"step", *STATES}
        and all(isinstance(number, float | int) for number in numbers)
        and not any(group.get(name) for name in ("amsgrad", "differentiable"))
    )


def _next_step(optimizer: torch.optim.Optimizer, part: Part) -> Any:
    group, state = part.group, optimizer.state.get(part.parameter, {})
    step = state.get("step")
    if (
        not is_usual(group, state)
        or group.get("capturable")
        or not (torch.is_tensor(step) and step.is_cpu and step.dtype == torch.float32)
        or part.gradient.dtype not in _ELEMENTS
    ):
        return None
    kind: Any = type(optimizer)
    fused = bool(group.get("fused"))
    decoupled = bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW))
    arithmetic = _arithmetic(kind, fused, decoupled)
    if arithmetic is None:
        return None
    number, numel = int(step.item()) + 1, part.weight.numel()
    return _constants(arithmetic, group, number, numel, fused=fused, decoupled=decoupled)


def _constants(
    arithmetic: _Arithmetic,
    group: Mapping[str, Any],
    step: int,
    numel: int,
    *,
    fused: bool,
    decoupled: bool,
) -> Any:
    """Source: torch.optim.adam, `_single_tensor_adam`; ATen's FusedAdamKernel.cpp."""
    rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    square = 1 - beta2**step
    return _aio.AdamStep(
        formula=_aio.AdamFormula.TORCH,
        tail=numel % arithmetic.vector,
        weight=1 - beta1,
        beta1=beta1,
        beta2=beta2,
        square_weight=1 - beta2,
        decays=decay != 0,
        decoupled=decoupled,
        decay=1 - rate * decay if decoupled else decay,
        maximize=bool(group.get("maximize")),
        correction=math.sqrt(square) if fused else square**0.5,
        eps=group["eps"],
        step_size=-(rate / (1 - beta1**step)),
        square_roots=arithmetic.square_roots,
        set_mkl_threads=_mkl("MKL_Set_Num_Threads_Local") if arithmetic.square_roots else 0,
    )


def deepspeed_step(**constants: Any) -> Any:
    """A step of DeepSpeedCPUAdam for `update`. *constants*: see AdamStep in aio/adam.h."""
    return _aio.AdamStep(
        formula=_aio.AdamFormula.DEEPSPEED,
        maximize=False,
        square_roots=0,
        set_mkl_threads=0,
        **constants,
    )


def update(
    state_format: StateFormat,
    layout: Layout,
    buffer: torch.Tensor,
    part: Part,
    step: Any,
    seed: int,
) -> None:
    """Update *part* by the constants of *step*, an `_aio.AdamStep`; see `step_in_one_pass`."""
    weight, numel, start = part.weight, part.weight.numel(), part.start
    if not numel:
        return
    base, master, low, low_bytes = buffer.data_ptr(), 0, 0, 0
    if layout.master is None:
        master = weight.data_ptr()
    elif state_format.splits_master:
        low_bytes = state_format.master_bytes
        low = base + layout.master.offset + start * low_bytes
    else:
        master = base + layout.master.offset + start * 4
    became_nan = _aio.adam(
        count=numel,
        gradient=part.gradient.data_ptr(),
        gradient_element=_ELEMENTS[part.gradient.dtype],
        master=master,
        working=0 if layout.master is None else weight.data_ptr(),
        working_element=_ELEMENTS[layout.working_dtype],
        low=low,
        low_bytes=low_bytes,
        master_seed=seed_state((seed, MASTER_INDEX)),
        first=_moment(base, layout.states["exp_avg"], start, (seed, 0)),
        second=_moment(base, layout.states["exp_avg_sq"], start, (seed, 1)),
        table=random_table(buffer.device).data_ptr(),
        first_block=part.first_block,
        step=step,
        threads=torch.get_num_threads(),
    )
    if became_nan and layout.master is not None:
        weight.copy_(layout.master.of(buffer).view(torch.float32)[start : start + numel])


def _moment(base: int, slot: StateSlot, start: int, seed: tuple[int, int]) -> Any:
    if slot.exponents is None:
        return _aio.Moment(values=base + slot.values.offset + start * 4)
    return _aio.Moment(
        codes=base + slot.values.offset + start,
        exponents=base + slot.exponents.offset + start // BLOCK,
        seed=seed_state(seed),
    )


@functools.cache
def _arithmetic(kind: Any, fused: bool, decoupled: bool) -> _Arithmetic | None:
    """How *kind* rounds on this machine; None if the extension gives different bits."""
    tried = (
        [_Arithmetic(vector, 0) for vector in (1, *VECTORS)]
        if fused
        else [_Arithmetic(1, address) for address in {0: None, _mkl("vmsSqrt"): None}]
    )
    for arithmetic in tried:
        if _gives_same_bits(arithmetic, kind, fused, decoupled):
            return arithmetic
    _log.info(
        "%s updates packed states on the CPU in several passes: the extension does not give the bits of its kernels on this machine",
        kind.__name__,
    )
    return None


def _gives_same_bits(arithmetic: _Arithmetic, kind: Any, fused: bool, decoupled: bool) -> bool:
    exact, numel = FORMATS["exact"], _SAMPLE
    layout = exact.layout(numel, dict.fromkeys(STATES, torch.float32), torch.float32)
    choices = itertools.product(((0.9, 0.999), (0.4, 0.95)), (0.0, 0.1), (False, True))
    for betas, decay, maximize in choices:
        options: dict[str, Any] = (
            {"decoupled_weight_decay": True} if decoupled and kind is torch.optim.Adam else {}
        )
        parameter = torch.nn.Parameter(_sample(0))
        optimizer = kind(
            [parameter],
            lr=1e-2,
            betas=betas,
            weight_decay=decay,
            maximize=maximize,
            fused=fused,
            **options,
        )
        group, state = optimizer.param_groups[0], optimizer.state[parameter]
        state["step"] = torch.tensor(4.0, dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = _sample(1), _sample(2).abs()
        ours, buffer = _sample(0), torch.empty(layout.nbytes, dtype=torch.uint8)
        pairs = [(parameter.detach(), ours)]
        for key, slot in layout.states.items():
            pairs.append((state[key], slot.values.of(buffer).view(torch.float32)))
            pairs[-1][1].copy_(state[key])
        for number in range(5, 8):
            parameter.grad = _sample(number)
            part = Part(parameter, group, ours, parameter.grad, 0, 0)
            constants = _constants(
                arithmetic, group, number, numel, fused=fused, decoupled=decoupled
            )
            raw_step(optimizer)(optimizer)
            update(exact, layout, buffer, part, constants, 0)
            if not all(torch.equal(bits_of(one), bits_of(other)) for one, other in pairs):
                return False
    return True


def _sample(seed: int) -> torch.Tensor:
    """Numbers of many magnitudes, and all kinds of special values."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, _SAMPLE, generator=generator, dtype=torch.float32, device="cpu")
    values = drawn[0] * torch.exp(drawn[1] * 4)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-42, 3e38, 1e-30]
    for place, number in enumerate(special):
        values[seed + 8 * place] = number
    return values


@functools.cache
def _mkl(name: str) -> int:
    """The address of the function *name* of the MKL that torch computes with; 0 if there is none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
