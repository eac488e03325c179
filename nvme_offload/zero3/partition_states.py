"""Saves and loads the states of a `Stages1And2` in the form of DeepSpeed's checkpoints: one flat
parameter for each parameter group, as in a run with states in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS

from ..errors import UsageError
from ..io.archive import Provider
from . import states
from .reader import MASTER, CheckpointReader, Saved, as_of_stage_3, in_flat_groups
from .states import Share

if TYPE_CHECKING:
    from .stage_1_and_2 import Stages1And2

_UNPADDED = "unpadded"  # the key of master weights without the padding at the end of the group


def providers(owner: Stages1And2) -> list[Provider]:
    """The providers of the states of each sub-group."""
    return [_provider(owner, index) for index in range(len(owner.spans))]


def _provider(owner: Stages1And2, index: int) -> Provider:
    group, start, _ = owner.spans[index]
    count = max(unpadded(owner)[group] - start, 0)
    lend = states.provider(owner, index)

    @contextlib.contextmanager
    def lending() -> Iterator[Mapping[str, torch.Tensor]]:
        with lend() as lent:
            yield {**lent, _UNPADDED: lent[MASTER][:count]}

    return lending


def unpadded(owner: Stages1And2) -> list[int]:
    """The elements of this rank's partition of each parameter group that are not padding."""
    return [
        max(int(size) - padding, 0)  # older releases count the padding of all ranks
        for size, padding in zip(owner.partition_size, owner.groups_padding, strict=True)
    ]


def masters(owner: Stages1And2, lenders: Sequence[Provider]) -> list[torch.Tensor]:
    """The master weights of each parameter group. A checkpoint stores them without padding."""
    return [
        states.joined(
            [part for part in _parts(owner, number, lenders) if part[1] < end],
            _UNPADDED,
            owner.master_weights_and_grads_dtype,
            end,
        )
        for number, end in enumerate(unpadded(owner))
    ]


def state(owner: Stages1And2, number: int, lenders: Sequence[Provider]) -> dict[str, Any]:
    """The state of parameter group *number*, in the form of one flat parameter."""
    first = next(index for index, (group, _, _) in enumerate(owner.spans) if group == number)
    parts = _parts(owner, number, lenders)
    return states.joined_state(owner, first, parts, int(owner.partition_size[number]))


def _parts(
    owner: Stages1And2, number: int, lenders: Sequence[Provider]
) -> list[tuple[Provider, int]]:
    """The *lenders* of parameter group *number*, each with its first element in the group."""
    return [
        (lender, start)
        for lender, (group, start, _) in zip(lenders, owner.spans, strict=True)
        if group == number
    ]


def of_state_dict(owner: Stages1And2, tree: Mapping[str, Any]) -> CheckpointReader:
    """The values in *tree*, DeepSpeed's state dict. Raises: UsageError, UnsupportedError."""
    tree = as_of_stage_3(tree)
    sizes = [master.numel() for master in tree[FP32_FLAT_GROUPS]]
    if sizes != (wanted := unpadded(owner)):
        raise UsageError(
            f"the checkpoint has parameter groups of {sizes} elements for this rank, and the model has {wanted}: "
            "it is from another model, other parameter groups, or another number of ranks"
        )
    return CheckpointReader(
        dist.get_world_size(group=owner.dp_process_group),
        layout(owner),
        lambda _: tree,
        partition_sizes=owner.partition_size,
    )


def layout(owner: Stages1And2) -> dict[str, Saved]:
    """The place of each parameter in its flat group."""
    return in_flat_groups(
        [
            {owner.param_names[param]: param.shape for param in params}
            for params in owner.round_robin_bit16_groups
        ],
        owner.partition_size,
        getattr(owner, "round_robin_bit16_padding", None),  # of newer releases
    )


def shares(owner: Stages1And2, index: int) -> list[Share]:
    """The parts of parameters in sub-group *index*; an empty one if it has only padding."""
    places, (group, start, end) = layout(owner), owner.spans[index]
    rank = dist.get_rank(group=owner.real_dp_process_group[group])
    low = rank * int(owner.partition_size[group]) + start
    high = low + end - start
    found = []
    for param in owner.round_robin_bit16_groups[group]:
        offset = places[owner.param_names[param]].offset
        first, last = max(low, offset), min(high, offset + param.numel())
        if first < last:
            found.append(Share(param, first - offset, last - first, first - low))
    return found or [Share(param, 0, 0, 0)]
