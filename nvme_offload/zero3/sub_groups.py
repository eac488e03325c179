"""How ZeRO-3's sub-groups are cut so that a budget of host memory can hold them."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Sub-groups that the budget should hold, where parameters are small enough: one is in use, two are
# read ahead, one is written back, and the more the others are, the less of the budget is lost to
# what does not fit whole.
_IN_MEMORY = 16
# elements; more at a time gains nothing and makes the first read and the last write of a step
# longer
_LARGEST_SUB_GROUP = 1 << 26
# of a sub-group's place for its rounding to pages, and of a few small parameters beside it
_SLACK_BYTES = 1 << 16

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes that one element takes: of master weights and *states*, of its *gradient* as it is
    reduced, and of a *parameter* on a drive.

    beside: of the memory that all sub-groups share, in which gradients are widened and, where they
    are not kept as they are, states unpacked.
    """

    states: float
    gradient: int
    beside: int
    parameter: int

    @property
    def _at_once(self) -> float:
        # An update holds the states, what is beside, and one 16-bit parameter after another, to
        # either side of the states.
        return self.states + self.beside + 2 * self.parameter

    def least_bytes(self, elements: int) -> int:
        """Memory that sub-groups of *elements*, and parameters of no more, can do with."""
        return math.ceil(elements * self._at_once) + 2 * _SLACK_BYTES

    def most_elements(self, nbytes: int) -> int:
        """The largest sub-group that *nbytes* of memory can do with."""
        return int((nbytes - 2 * _SLACK_BYTES) / self._at_once)

    def wanted_elements(self, nbytes: int) -> int:
        """How large sub-groups are best made for *nbytes* of memory."""
        return min(
            _LARGEST_SUB_GROUP,
            max(1, int(nbytes / (_IN_MEMORY * (self.states + self.gradient) + self.beside))),
        )

    def whole_bytes(self, sizes: list[int], least: int) -> int:
        """Memory in which everything stays but parameters, of which there are *sizes* elements; the
        largest sub-group cannot be less than *least*.
        """
        largest = min(_LARGEST_SUB_GROUP, sum(sizes)) + least
        return (
            math.ceil(sum(sizes) * (self.states + self.gradient))
            + largest * self.beside
            + 2 * (len(sizes) + 1) * _SLACK_BYTES
        )

    def drive_bytes(self, elements: int) -> int:
        """Of the drive, for *elements*."""
        return math.ceil(elements * (self.states + self.gradient + self.parameter))


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether *optimizer* updates every element of flat parameters by itself, so that it does not
    matter which are in a tensor together.

    It is known, or is tried as `NVMeOptimizer` tries its own, with the options and attributes that
    *optimizer* has; where that fails it is taken not to.
    """
    import torch

    from ..optimizer_states.traits import alike, examine, known

    decided = known(optimizer)
    if decided is not None:
        return decided
    name = type(optimizer).__name__
    # many have the same options
    found = {
        repr({key: value for key, value in group.items() if key != "params"}): group
        for group in optimizer.param_groups
    }
    try:
        traits = [
            examine(name, alike(optimizer, group), [1], torch.float32, torch.device("cpu"))
            for group in found.values()
        ]
    except Exception:  # the constructor of an optimizer may want anything, and raise anything
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
    """*params* in consecutive lists of at most *wanted* elements each, or of one parameter, that
    are whole *units* but for the last.

    Where they cannot be both, they are longer, up to *most* elements; and where that does not help,
    they are not whole units.
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
