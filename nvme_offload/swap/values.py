"""`Value`: the planner's record of a value. `Block`: its memory. `Glimpse`: its state before
a use. `Need`: the value that is requested next.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ..errors import InvariantError
from ..store.transfer import Transfer
from .value_states import TABLE, Event, State

IDLE = frozenset({State.CLEAN, State.DIRTY, State.DIRTY_FAILED, State.WRITING, State.REDIRTY})
EVICTABLE = frozenset({State.CLEAN, State.DIRTY, State.WRITING})


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value, or a block that is reserved for one."""

    name: str
    nbytes: int  # of the tensor that its user gets
    value_bytes: int  # the number of leading bytes with contents
    size: int  # bytes of its block, in whole granules
    exists: bool = True  # False: a reservation
    lowest: bool = False  # placed as low as possible
    state: State = State.NEW
    block: Block | None = None
    read: Transfer | None = None
    write: Transfer | None = None  # in flight, from its block or from an earlier block
    # The position of the use for which it was read or reserved; -1 for a hint.
    prefetched_for: int | None = None
    prefetched_unused: bool = False  # read and not used since
    read_failed: bool = False
    retained_bytes: int | None = None  # bytes of the on-drive version to which `roll_back` returns
    keeps_copy: bool = False  # keeps its copy on the drive until its next use ends
    last_use: int = 0
    uses: int = 0  # how often a use has begun, or the contents were rolled back
    stamp: int = 0  # of its valid entry in a heap

    def to(self, event: Event) -> None:
        """Change the state. Raises: InvariantError if *event* cannot happen in the present state."""
        state = TABLE[self.state][event]
        if state is None:
            raise InvariantError(f"{event.name} in {self.state.name}, of {self.name!r}")
        self.state = state

    @property
    def is_kept(self) -> bool:
        """Whether the value is idle, and in a block that no other value may get."""
        return self.state in IDLE and self.block is not None and not self.block.reclaimable


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """The bytes from *start* to *end*."""

    start: int
    end: int
    owner: Value | None = None  # of the contents
    writes: tuple[Transfer, ...] = ()  # from these bytes; they must end before the next contents
    reclaimable: bool = False  # another value may get the block


class Glimpse(NamedTuple):
    """A value in memory as it was before its use number *uses*, and its *block*."""

    value: Value
    uses: int
    block: Block


@dataclasses.dataclass(slots=True)
class Need:
    """The value that a user has requested, until it is taken."""

    value: Value | None = None
    creates: bool = False
    awaited: list[Transfer] = dataclasses.field(default_factory=list)
    failed_write: str | None = None  # the value whose failed write keeps this one from fitting
    retried: Value | None = None  # the value whose failed write is tried again for this one

    def begin(self, value: Value | None, creates: bool = False) -> None:
        """Request *value*; None for no value."""
        self.value = value
        self.creates = creates
        self.awaited = []
        self.failed_write = self.retried = None
