"""Access by DeepSpeed's `safe_get_*` and `safe_set_*` functions to parameters whose master weights,
states and gradients are in a tier, under stages 1 and 2. The functions get copies.
"""

from __future__ import annotations

import functools
import itertools
import types
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils.tensor_fragment import tensor_fragment

from ..errors import UsageError
from ..optimizer_states.split import split
from .reader import MASTER
from .updates import quiesce

if TYPE_CHECKING:
    from .stage_1_and_2 import Stages1And2


def link(owner: Stages1And2) -> None:
    """Make DeepSpeed's functions access the values of *owner*'s parameters in the tier."""
    for param in itertools.chain.from_iterable(owner.bit16_groups):
        if param._hp_mapping is not None:
            param._hp_mapping = Fragment(param._hp_mapping, owner)
        for name, function in (
            ("set_full_hp_param", _set_full_hp_param),
            ("set_full_hp_grad", _set_full_hp_grad),
        ):
            setattr(param, name, types.MethodType(functools.partial(function, owner), param))


def read_states(
    owner: Stages1And2, group: int, start: int, numel: int, key: str | None
) -> torch.Tensor:
    """A copy of *numel* elements, from *start* in this rank's partition of *group*, of the state
    *key* or of the master weights. Raises: UsageError if there is no state *key*.
    """
    found = []
    for index, offset, _, count in owner.pieces(group, start, numel):
        with owner.in_memory(index) as held:
            if (key or MASTER) not in held:
                raise UsageError(
                    f"{type(owner.optimizer).__name__} has no state {key!r}, or none yet: it makes them in its first step"
                )
            found.append(held[key or MASTER][offset : offset + count].clone())
    return torch.cat(found)


def write_states(
    owner: Stages1And2, group: int, start: int, values: torch.Tensor, key: str | None
) -> None:
    """Replace the elements that `read_states` returns by *values*."""
    owner.require_whole()
    owner.partly_changed = True
    for index, offset, first, count in owner.pieces(group, start, values.numel()):
        with owner.in_memory(index, changed=True) as held:
            held[key or MASTER][offset : offset + count].copy_(values[first : first + count])
    owner.partly_changed = False


def read_gradients(owner: Stages1And2, group: int, start: int, numel: int) -> torch.Tensor:
    """A copy of the gradients of the elements that `read_states` returns."""
    quiesce(owner.tier)
    owner.gradient_store.require_whole()
    owner.give_back()
    return torch.cat(
        [
            owner.gradient_store.widened(index)[offset : offset + count].clone()
            for index, offset, _, count in owner.pieces(group, start, numel)
        ]
    )


def write_gradients(owner: Stages1And2, group: int, start: int, values: torch.Tensor) -> None:
    """Replace the gradients that `read_gradients` returns by *values*."""
    quiesce(owner.tier)
    owner.gradient_store.require_whole()
    owner.give_back()
    owner.note_gradients()
    for index, offset, first, count in owner.pieces(group, start, values.numel()):
        gradient = owner.gradient_store.widened(index)
        gradient[offset : offset + count].copy_(values[first : first + count])
        owner.gradient_store.replace(index)


class Fragment(tensor_fragment):  # type: ignore[misc]  # untyped
    """DeepSpeed's mapping of a parameter to a part of its group's partition. This one returns
    copies of the part.
    """

    def __init__(self, original: Any, owner: Stages1And2) -> None:
        self.__dict__.update(vars(original))
        self.owner = owner

    @property
    def place(self) -> tuple[int, int, int]:
        """Parameter group, first element in this rank's partition, and number of elements."""
        address = self.hp_fragment_address
        return self.param_group_index, address.start, address.numel

    def get_hp_fragment(self, optim_state_key: str | None = None) -> torch.Tensor:
        """A copy of this part of the master weights, or of a state."""
        return read_states(self.owner, *self.place, optim_state_key)

    def get_optim_state_fragment(self, key: str) -> torch.Tensor:
        """A copy of this part of a state."""
        return self.get_hp_fragment(key)

    def get_optim_state_keys(self) -> list[str]:
        """The names of the states."""
        swapper = self.owner.optimizer_swapper
        return list(swapper.states(self.owner.fp32_partitioned_groups_flat[0]))

    def get_lp_grad_fragment(self, index_in_param_group: int) -> torch.Tensor:
        """A copy of this part of the gradients."""
        return read_gradients(self.owner, *self.place)


def _own_values(param: Any, value: torch.Tensor) -> torch.Tensor:
    address = param._hp_mapping.lp_fragment_address
    return value.detach().flatten().narrow(0, address.start, address.numel)


def _set_full_hp_param(
    owner: Stages1And2, param: Any, value: torch.Tensor, optim_state_key: str | None = None
) -> None:
    """The method that `safe_set_full_fp32_param` and `safe_set_full_optimizer_state` call."""
    if param._hp_mapping is not None:
        group, start, _ = param._hp_mapping.place
        write_states(owner, group, start, _own_values(param, value), optim_state_key)
    if optim_state_key is None and not owner.state_format.in_place:
        # In these formats the 16-bit weight is part of its master weight: set it on all ranks.
        rounded = torch.empty(value.numel(), dtype=torch.bfloat16)
        low = torch.empty(value.numel(), dtype=torch.int16)
        split(value.detach().flatten().float().cpu(), rounded, low)
        param.data.copy_(rounded.view_as(param))


def _set_full_hp_grad(owner: Stages1And2, param: Any, value: torch.Tensor) -> None:
    """The method that `safe_set_full_grad` calls."""
    if param._hp_mapping is not None:
        group, start, _ = param._hp_mapping.place
        write_gradients(owner, group, start, _own_values(param, value))
        if hasattr(owner, "update_offload_overflow_tracker"):
            owner.update_offload_overflow_tracker(value)
