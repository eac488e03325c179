"""Cuts ZeRO-3's sub-groups to sizes that the host memory budget can hold."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

from ..sizes import Footprint as Footprint

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether *optimizer* updates each element of a flat parameter independently, so that it does
    not matter which elements share a tensor.

    The result is known for torch's and DeepSpeed's classes. Other classes are tried, as in
    `NVMeOptimizer`, with *optimizer*'s options and attributes. False if the trial fails.
    """
    import torch

    from ..optimizer_states.traits import alike, examine, known

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
            examine(name, alike(optimizer, group), [1], torch.float32, torch.device("cpu"))
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
