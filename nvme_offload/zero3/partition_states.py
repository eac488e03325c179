"""Saves and loads the states of a `Stages1And2` in the form of DeepSpeed's checkpoints: one flat
parameter for each parameter group, as in a run with states in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS

from ..errors import UsageError
from .reader import CheckpointReader, Saved, as_of_stage_3, in_flat_groups
from .states import Share

if TYPE_CHECKING:
    from .stage_1_and_2 import Stages1And2


def unpadded(owner: Stages1And2) -> list[int]:
    """The elements of this rank's partition of each parameter group that are not padding."""
    return [
        max(int(size) - padding, 0)  # older releases count the padding of all ranks
        for size, padding in zip(owner.partition_size, owner.groups_padding, strict=True)
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
