"""The states of ZeRO-3's sub-groups, and sizes of sub-groups that host memory can hold."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Mapping
from typing import Any, cast

import torch

from ..device.staging import CPU
from ..errors import UnsupportedError
from ..optimizer_states.formats import StateFormat
from ..optimizer_states.traits import alike, examine, known
from ..optimizer_states.tree import is_for_each
from .cpu_adam import is_cpu_adam

_log = logging.getLogger(__name__)


def element_bytes(
    state_format: StateFormat,
    states: Mapping[str, torch.dtype],
    working: torch.dtype,
    master: torch.dtype,
    optimizer: str,
) -> tuple[float, int]:
    """Bytes for each element: first of its *master* weight and *states* when packed, second of the
    scratch memory to which they are unpacked.

    Raises: UnsupportedError if *state_format* cannot keep them.
    """
    if state_format.name == "exact":
        return master.itemsize + sum(dtype.itemsize for dtype in states.values()), 0
    if (working, master) != (torch.bfloat16, torch.float32):
        raise UnsupportedError(
            f'"state_format": "{state_format.name}" is for parameters in bfloat16 with master weights in float32, and these are in {working} with {master}: '
            'enable "bf16", or leave "state_format" out'
        )
    unpacked = state_format.unpacked_elements(state_format.layout(1, states, working, optimizer))
    return state_format.element_bytes(
        states, working, optimizer
    ), unpacked * master.itemsize + working.itemsize


def states_of(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype, device: torch.device = CPU
) -> dict[str, torch.dtype]:
    """The elementwise states that *optimizer* will keep for master weights of *dtype* on *device*,
    by key.

    One step of an optimizer of the same class over a few elements shows them. If that class cannot
    be constructed from the defaults, Adam's states are assumed.
    """
    if is_cpu_adam(optimizer):  # its constructor looks at the processor for a second
        kept = torch.float32 if cast(Any, optimizer).fp32_optimizer_states else dtype
        return {"exp_avg": kept, "exp_avg_sq": kept}
    sample = torch.zeros(8, dtype=dtype, device=device, requires_grad=True)
    sample.grad = torch.zeros_like(sample)
    # AdamW's defaults have more keys than its constructor accepts.
    accepted = inspect.signature(type(optimizer)).parameters
    try:
        like: Any = type(optimizer)(
            [sample], **{key: value for key, value in optimizer.defaults.items() if key in accepted}
        )
        like.step()
        return {key: value.dtype for key, value in elementwise(like.state[sample], sample).items()}
    # An optimizer's constructor may require and raise anything. Only the memory plan depends on
    # the result.
    except Exception:
        return {"exp_avg": dtype, "exp_avg_sq": dtype}


def elementwise(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of *state* with a value for each element of *parameter*."""
    return {
        key: value
        for key, value in state.items()
        if is_for_each(value, parameter.shape)
        and value.device == parameter.device
        and getattr(value, "swappable", True)
    }


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether *optimizer* updates each element of a flat parameter independently, so that it does
    not matter which elements share a tensor.

    The result is known for torch's and DeepSpeed's classes. Other classes are tried, as in
    `NVMeOptimizer`, with *optimizer*'s options and attributes. False if the trial fails.
    """
    decided = known(optimizer)
    if decided is not None:
        return decided
    name = type(optimizer).__name__
    # groups with the same options are tried once
    found = {
        repr({key: value for key, value in group.items() if key != "params"}): group
        for group in optimizer.param_groups
    }
    try:
        traits = [
            examine(name, alike(optimizer, group), [1], torch.float32, CPU)
            for group in found.values()
        ]
    except Exception:  # an optimizer's constructor may require and raise anything
        return False
    elementwise = all(each.elementwise for each in traits)
    _log.info(
        "%s updates %s (%s)",
        name,
        "every element by itself" if elementwise else "sub-groups whole",
        traits[0].why,
    )
    return elementwise


def cut(params: list[Any], wanted: int, most: int, unit: int) -> list[list[Any]]:
    """Cut *params* into consecutive lists of at most *wanted* elements, or of one parameter. The
    number of elements of each list but the last is a multiple of *unit*.

    If a list cannot meet both conditions, it is longer, up to *most* elements. If that does not
    help, its number of elements is not a multiple of *unit*.
    """
    lists: list[list[Any]] = []
    rest = list(params)
    while rest:
        ends = list(itertools.accumulate(param.partition_numel() for param in rest))
        fitting = max(sum(end <= wanted for end in ends), 1)
        whole = [
            count
            for count, end in enumerate(ends, 1)
            if (end % unit == 0 or count == len(rest)) and (count <= fitting or end <= most)
        ]
        shorter = [count for count in whole if count <= fitting]
        count = shorter[-1] if shorter else whole[0] if whole else fitting
        lists.append(rest[:count])
        rest = rest[count:]
    return lists
