"""`Records` moves the packed optimizer states of units between a tier and the device of updates. A
`Unit` is a bucket of `NVMeOptimizer` or a sub-group of ZeRO-3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch

from ..device.staging import DeviceStager, HostStager
from ..errors import OutOfHostMemoryError, known
from ..optimizer_states.formats import Layout, StateFormat
from ..optimizer_states.tree import Key
from ..swap.tier import Tier


class RetainedError(Exception):
    """The value of a unit that is retained would need another layout."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Unit:
    """Parameters that are updated together. Their packed states are the value *name* of a tier.

    *dtype*: of the weights. *device*: of the updates. *layout*: of the value, None while there are
    no states. *rest_bytes*: the bytes behind the layout, for states whose shape is not their
    parameter's. *room_bytes*: the size of the value. *memory*: of the value on *device*, while the unit
    is in use there. *is_stored*: whether the tier has the value.
    *is_retained*: the drive keeps the old version, so the layout must not change.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    numel: int = 0
    layout: Layout | None = None
    rest_bytes: int = 0
    room_bytes: int = 0
    memory: torch.Tensor | None = None
    is_stored: bool = False
    is_retained: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of the states."""
        return self.rest_bytes + (0 if self.layout is None else self.layout.nbytes)

    @property
    def dtypes(self) -> dict[Key, torch.dtype]:
        """The dtypes of the states in the layout, by key."""
        slots = {} if self.layout is None else self.layout.states
        return {key: slot.dtype for key, slot in slots.items()}


class Records:
    """The states that an optimizer of the class *name* keeps for units, in *tier* and in
    *state_format*. One unit at a time is in use, from `_open` or `_renew` to `_give_back`.

    *looks_ahead*: whether values are copied to a GPU before their use.
    """

    def __init__(self, tier: Tier, state_format: StateFormat, name: str) -> None:
        self.tier = tier
        self._format = state_format
        self._name = name
        self.looks_ahead = False
        self._host = HostStager(tier)  # for units that are not on their device
        self._stagers: dict[torch.device, HostStager] = {}

    def drain(self) -> None:
        """Return when the copies of all units to host memory have ended."""
        for stager in self._stagers.values():
            stager.drain()

    def ease(self) -> None:
        """At the end of a step: return when the program may use what the updates have changed, and
        the tier may end its period.
        """
        for stager in self._stagers.values():
            stager.ease()

    def _stager(self, unit: Unit) -> HostStager:
        stager = self._stagers.get(unit.device)
        if stager is None:
            stager = self._stagers[unit.device] = (
                HostStager(self.tier)
                if unit.device.type == "cpu"
                else DeviceStager(self.tier, unit.device, looks_ahead=self.looks_ahead)
            )
        return stager

    def _layout(self, unit: Unit, states: Mapping[Key, torch.dtype]) -> Layout:
        return self._format.layout(unit.numel, states, unit.dtype, self._name)

    def _open(self, unit: Unit) -> None:
        """Begin the use of *unit*, which has a layout. Raises: as `TensorSwapper.swap_in`."""
        if not unit.is_stored:
            self._renew(unit)
        elif not unit.nbytes:
            unit.memory = nothing(unit.device)
        else:
            stager = self._stager(unit)
            unit.memory = self._with_room(lambda: stager.fetch(unit.name, unit.room_bytes))

    def _renew(self, unit: Unit) -> None:
        """Begin the use of *unit* with a new value."""
        unit.memory = self._renewed(unit, self._stager(unit))

    def _renewed(self, unit: Unit, stager: HostStager) -> torch.Tensor:
        """A new value in place of the value of *unit*: zeros, but undefined in "exact"."""
        unit.room_bytes = max(unit.room_bytes, unit.nbytes)
        if not unit.nbytes:
            return nothing(unit.device)
        memory = self._with_room(lambda: stager.renew(unit.name, unit.room_bytes))
        if not self._format.in_place:  # low bits of masters that are zero say: as the weights are
            memory[: unit.nbytes].zero_()
        return memory

    def _with_room(self, ask: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of *ask*, repeated once after the copies from all devices have ended."""
        try:
            return ask()
        except OutOfHostMemoryError:
            self.drain()
            return ask()

    def _give_back(self, unit: Unit, *, changed: bool) -> None:
        """End the use of *unit*."""
        self._stager(unit).give_back(changed=changed or not unit.is_stored, nbytes=unit.nbytes)
        unit.is_stored, unit.memory = True, None

    def _relay(
        self,
        unit: Unit,
        states: Mapping[Key, torch.dtype],
        rest_bytes: int,
        held: Iterable[torch.Tensor],
    ) -> None:
        """Give *unit*, which is in use, a layout for *states* and *rest_bytes*. If its memory is too
        small, it is renewed, and the tensors *held* in it become copies.
        """
        if (
            list(states.items()) == list(unit.dtypes.items())  # the order decides places
            and rest_bytes <= unit.rest_bytes
            and not self._is_too_narrow(known(unit.layout))
        ):
            return
        if unit.is_retained:
            raise RetainedError(f"{self._name} keeps other states from this step on")
        unit.layout, unit.rest_bytes = self._layout(unit, states), rest_bytes
        memory = known(unit.memory)
        if unit.nbytes > memory.numel():
            storage = memory.untyped_storage().data_ptr()
            for tensor in held:
                if tensor.untyped_storage().data_ptr() == storage:
                    tensor.data = tensor.clone()
            self._renew(unit)

    def _is_too_narrow(self, layout: Layout) -> bool:
        return self._format.wide and any(
            slot.exponents is not None for slot in layout.states.values()
        )


def nothing(device: torch.device) -> torch.Tensor:
    """The value of a unit without states."""
    return torch.empty(0, dtype=torch.uint8, device=device)
