"""Access by DeepSpeed's `safe_get_*` and `safe_set_*` functions to parameters whose master weights,
states and gradients are in a tier, under stages 1 and 2. The functions get copies.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils.tensor_fragment import tensor_fragment

from ..errors import UsageError
from ..optimizer_states.split import split
from .reader import MASTER
from .updates import quiesce

if TYPE_CHECKING:
    from .gradients import Gradients
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


class Fragment(tensor_fragment):  # type: ignore[misc]  # untyped
    """DeepSpeed's mapping of a parameter to its part of a partition, of which it returns copies."""

    def __init__(self, original: Any, owner: Stages1And2) -> None:
        self.__dict__.update(vars(original))
        self.owner = owner

    def get_hp_fragment(self, optim_state_key: str | None = None) -> torch.Tensor:
        """A copy of this part of the master weights, or of a state. Raises: UsageError."""
        self._settle()
        found, key = [], optim_state_key or MASTER
        for index, offset, _, count in self._pieces():
            with self.owner.in_memory(index) as held:
                self._require(key, held)
                found.append(held[key][offset : offset + count].clone())
        return torch.cat(found)

    def set_hp_fragment(self, values: torch.Tensor, optim_state_key: str | None) -> None:
        """Copy this part of *values*, of the whole parameter, to the master weights or a state."""
        self.owner.require_whole()
        self._settle()
        key = optim_state_key or MASTER
        for index, offset, own, count in self._pieces():
            with self.owner.in_memory(index, changed=True) as held:
                self._require(key, held)
                self.owner.partly_changed = True
                held[key][offset : offset + count].copy_(self._own(values)[own : own + count])
        self.owner.partly_changed = False

    def get_optim_state_fragment(self, key: str) -> torch.Tensor:
        """A copy of this part of a state."""
        return self.get_hp_fragment(key)

    def get_optim_state_keys(self) -> list[str]:
        """The names of the states."""
        swapper = self.owner.optimizer_swapper
        return list(swapper.states(self.owner.fp32_partitioned_groups_flat[0]))

    def get_lp_grad_fragment(self, index_in_param_group: int) -> torch.Tensor:
        """A copy of this part of the gradients."""
        gradients = self._gradients()
        return torch.cat(
            [
                gradients.widened(index)[offset : offset + count].clone()
                for index, offset, _, count in self._pieces()
            ]
        )

    def set_grad_fragment(self, values: torch.Tensor) -> None:
        """Copy this part of *values*, of the whole parameter, to the gradients."""
        gradients = self._gradients()
        self.owner.note_gradients()
        for index, offset, own, count in self._pieces():
            gradients.widened(index)[offset : offset + count].copy_(
                self._own(values)[own : own + count]
            )
            gradients.replace(index)

    def _require(self, key: str, held: Mapping[str, Any]) -> None:
        if key not in held:
            raise UsageError(
                f"{type(self.owner.optimizer).__name__} has no state {key!r}, or none yet: it makes them in its first step"
            )

    def _pieces(self) -> Iterator[tuple[int, int, int, int]]:
        address = self.hp_fragment_address
        return self.owner.pieces(self.param_group_index, address.start, address.numel)

    def _own(self, values: torch.Tensor) -> torch.Tensor:
        address = self.lp_fragment_address
        return values.detach().flatten().narrow(0, address.start, address.numel)

    def _settle(self) -> None:
        quiesce(self.owner.tier)
        self.owner.give_back()

    def _gradients(self) -> Gradients:
        self._settle()
        self.owner.gradient_store.require_whole()
        return self.owner.gradient_store


def _set_full_hp_param(
    owner: Stages1And2, param: Any, value: torch.Tensor, optim_state_key: str | None = None
) -> None:
    """The method that `safe_set_full_fp32_param` and `safe_set_full_optimizer_state` call."""
    if param._hp_mapping is not None:
        param._hp_mapping.set_hp_fragment(value, optim_state_key)
    if optim_state_key is None and not owner.state_format.in_place:
        # In these formats the 16-bit weight is part of its master weight: set it on all ranks.
        rounded, low = (
            torch.empty(value.numel(), dtype=dtype, device="cpu")
            for dtype in (torch.bfloat16, torch.int16)
        )
        split(value.detach().flatten().float().cpu(), rounded, low)
        param.data.copy_(rounded.view_as(param))


def _set_full_hp_grad(owner: Stages1And2, param: Any, value: torch.Tensor) -> None:
    """The method that `safe_set_full_grad` calls."""
    if param._hp_mapping is not None:
        param._hp_mapping.set_grad_fragment(value)
        if hasattr(owner, "update_offload_overflow_tracker"):
            owner.update_offload_overflow_tracker(value)
