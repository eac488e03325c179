"""Cuts ZeRO-3's sub-groups to sizes that the host memory budget can hold."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from typing import TYPE_CHECKING, Any

from ..sizes import IN_MEMORY, LARGEST_SUB_GROUP

if TYPE_CHECKING:
    import torch

# Memory for rounding each sub-group up to pages, and for a few small parameters.
_SLACK_BYTES = 1 << 16

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes for each element.

    Attributes
    ----------
    states
        Packed master weights and optimizer states.
    gradient
        The gradient, as it is reduced.
    scratch
        Scratch memory that sub-groups share: the widened gradient and, in packed formats, unpacked
        states. 0 if updates run on a GPU, which has it in its own memory.
    parameter
        A parameter on a drive; 0 for others.
    largest_parameter
        Total bytes of the largest parameter on a drive, trained or not; 0 for none.
    in_flight
        Sub-groups whose states are in use together, if host memory can hold them.
    """

    states: float
    gradient: int
    scratch: int
    parameter: int
    largest_parameter: int = 0
    in_flight: int = 1

    @property
    def _at_once(self) -> float:
        # An update holds the states and the scratch memory. Before and after the states, it holds
        # one 16-bit parameter at a time.
        return self.states + self.scratch + 2 * self.parameter

    def holds_in_flight(self, elements: int, nbytes: int) -> bool:
        """Whether `in_flight` sub-groups of *elements* fit in *nbytes* of memory."""
        return self.least_bytes(elements) + (self.in_flight - 1) * elements * self.states <= nbytes

    def least_bytes(self, elements: int) -> int:
        """The memory, in bytes, that sub-groups of up to *elements* and all parameters need."""
        at_once = max(elements * self._at_once, self.largest_parameter + elements * self.scratch)
        return math.ceil(at_once) + 2 * _SLACK_BYTES

    def most_elements(self, nbytes: int) -> int:
        """The elements of the largest sub-group that fits in *nbytes* of memory."""
        room = nbytes - 2 * _SLACK_BYTES
        most = room / self._at_once
        if self.scratch:
            most = min(most, (room - self.largest_parameter) / self.scratch)
        return int(most)

    def wanted_elements(self, nbytes: int) -> int:
        """The best size of sub-groups for *nbytes* of memory, in elements."""
        return min(
            LARGEST_SUB_GROUP,
            max(1, self.most_elements(nbytes)),
            max(1, int(nbytes / (IN_MEMORY * (self.states + self.gradient) + self.scratch))),
        )

    def whole_bytes(self, sizes: list[int], least: int) -> int:
        """The memory, in bytes, in which everything but parameters stays. *sizes* are the elements
        of each parameter; the largest sub-group has at least *least*.
        """
        largest = min(LARGEST_SUB_GROUP, sum(sizes)) + least
        return (
            math.ceil(sum(sizes) * (self.states + self.gradient))
            + largest * self.scratch
            + 2 * (len(sizes) + 1) * _SLACK_BYTES
        )

    def drive_bytes(self, elements: int) -> int:
        """Drive space for *elements*, in bytes."""
        return math.ceil(elements * (self.states + self.gradient + self.parameter))


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
