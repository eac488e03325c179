"""Saves and loads the states of a `Stages1And2` in the form of DeepSpeed's checkpoints: one flat
parameter for each parameter group, as in a run with states in memory.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    OPTIMIZER_STATE_DICT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)

from ..errors import OffloadError, UnsupportedError, UsageError
from ..io import archive
from ..io.archive import Part, Provider, offloaded
from ..io.engine import Ticket
from . import states
from .reader import MASTER

if TYPE_CHECKING:
    from .stage_1_and_2 import Stages1And2

_UNPADDED = "unpadded"  # the key of master weights without the padding at the end of the group


def providers(owner: Stages1And2) -> list[Provider]:
    """The providers of the states of each sub-group."""
    return [_provider(owner, index) for index in range(len(owner.spans))]


def _provider(owner: Stages1And2, index: int) -> Provider:
    group, start, _ = owner.spans[index]
    count = max(_unpadded(owner)[group] - start, 0)
    lend = states._provider(owner, index)

    @contextlib.contextmanager
    def lending() -> Iterator[Mapping[str, torch.Tensor]]:
        with lend() as lent:
            yield {**lent, _UNPADDED: lent[MASTER][:count]}

    return lending


def _unpadded(owner: Stages1And2) -> list[int]:
    """The elements of this rank's partition of each parameter group that are not padding."""
    return [
        int(size) - padding
        for size, padding in zip(owner.partition_size, owner.groups_padding, strict=True)
    ]


def masters(owner: Stages1And2, lenders: Sequence[Provider]) -> list[torch.Tensor]:
    """The master weights of each parameter group. A checkpoint stores them without padding."""
    return [
        offloaded(
            [end],
            owner.master_weights_and_grads_dtype,
            [
                Part(lenders[index], _UNPADDED, start)
                for index, (group, start, _) in enumerate(owner.spans)
                if group == number and start < end
            ],
        )
        for number, end in enumerate(_unpadded(owner))
    ]


def state(owner: Stages1And2, number: int, lenders: Sequence[Provider]) -> dict[str, Any]:
    """The state of parameter group *number*, in the form of one flat parameter."""
    indexes = [index for index, (group, _, _) in enumerate(owner.spans) if group == number]
    first = owner.fp32_partitioned_groups_flat[indexes[0]]
    dtypes = owner.optimizer_swapper.states(first)

    def shown(key: str) -> torch.Tensor:
        parts = [Part(lenders[index], key, owner.spans[index][1]) for index in indexes]
        return offloaded([int(owner.partition_size[number])], dtypes[key], parts)

    return {
        key: shown(key) if key in dtypes else value
        for key, value in owner.optimizer.state.get(first, {}).items()
    }


def require_complete(owner: Stages1And2, saved: Mapping[str, Any]) -> None:
    """Check that *saved* has a master weight and every state for each element. Raises: OffloadError."""
    tree = saved.get(OPTIMIZER_STATE_DICT) or {}
    weights = sum(found.numel() for found in tree.get(SINGLE_PARTITION_OF_FP32_GROUPS, []))
    kept = (tree.get(BASE_OPTIMIZER_STATE) or {}).get("state", {}).values()
    found = sum(
        value.numel()
        for state in kept
        for value in state.values()
        if torch.is_tensor(value) and value.dim() > 0
    )
    wanted = sum(
        (end - start) * len(owner.optimizer_swapper.states(parameter))
        for parameter, (_, start, end) in zip(
            owner.fp32_partitioned_groups_flat, owner.spans, strict=True
        )
    )
    if (weights, found) != (sum(_unpadded(owner)), wanted):
        raise OffloadError(
            f"the checkpoint would have {weights} of {sum(_unpadded(owner))} master weights and {found} of {wanted} "
            "optimizer states, so it was not saved: this is a bug of nvme_offload with this release of DeepSpeed"
        )


def load(owner: Stages1And2, saved: Mapping[str, Any], load_optimizer_states: bool) -> None:
    """Load *saved*, the state dict of this rank, whose tensors may be in a file.

    Raises: UsageError or UnsupportedError, before anything is changed, if its partitions do not
    match *owner*'s.
    """
    weights = _masters_in(owner, saved)
    optimizer = saved[BASE_OPTIMIZER_STATE]
    identifiers = [group["params"][0] for group in optimizer["param_groups"]]
    loaded = None
    if load_optimizer_states:
        found = [optimizer["state"].get(identifier, {}) for identifier in identifiers]
        shapes = [torch.Size([int(size)]) for size in owner.partition_size]
        loaded = states.load_options(owner, optimizer, found, shapes)
        states._restore_powers(owner, saved, loaded)
    owner._load_global_state(saved)
    for index, (group, start, end) in enumerate(owner.spans):

        def fill(
            key: str, into: torch.Tensor, group: int = group, start: int = start, end: int = end
        ) -> Iterator[Ticket]:
            source = (
                weights[group] if key == MASTER else optimizer["state"][identifiers[group]][key]
            )
            count = max(min(source.numel(), end) - start, 0)
            into[count:].zero_()  # padding
            if count:
                yield from archive.fetch(source, start, into[:count])

        kept = None if loaded is None else copy.deepcopy(loaded[group])
        states.refill(owner, index, kept, fill)


def _masters_in(owner: Stages1And2, saved: Mapping[str, Any]) -> list[torch.Tensor]:
    """The master weights in *saved*. Raises: UnsupportedError or UsageError if they do not match
    *owner*'s partitions.
    """
    found: list[torch.Tensor] = list(saved[SINGLE_PARTITION_OF_FP32_GROUPS])
    if not isinstance(saved[BASE_OPTIMIZER_STATE], Mapping):
        raise UnsupportedError(
            'the checkpoint was saved with "elastic_checkpoint": load it with "device": "cpu", save it without that setting, and load the new one'
        )
    sizes, wanted = [master.numel() for master in found], _unpadded(owner)
    if sizes != wanted:
        raise UsageError(
            f"the checkpoint has parameter groups of {sizes} elements for this rank, and the model has {wanted}: "
            "it is from another model, other parameter groups, or another number of ranks"
        )
    return found
