"""`Transfer`: one put or get of a named value, from the plan to the outcome. `StoredTensor`: the
bytes on the drives that it reads or writes.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from ..errors import OffloadError, WaitTimeout, known
from ..io.engine import Request, cancel_requests
from .slabs import Segment

if TYPE_CHECKING:
    from .store import TensorStore


@dataclasses.dataclass(eq=False, slots=True)
class StoredTensor:
    """The bytes stored under a name, and their users.

    The space is freed once the value is *dropped* and has no users. *lost_by* is the put that
    failed while it overwrote the value.
    """

    nbytes: int
    segments: list[Segment]
    users: int = 0
    dropped: bool = False
    lost_by: Transfer | None = None
    readers: list[Transfer] = dataclasses.field(default_factory=list)


class Stage(IntEnum):
    """The progress of a transfer."""

    PLANNED = 0
    IN_FLIGHT = 1  # its requests were submitted to the engine
    RECORDED = 2  # the store has recorded the outcome
    ENDED = 3  # the planner of a swapper has recorded it, too


@dataclasses.dataclass(eq=False, slots=True)
class Transfer:
    """One put or get of a named value. `TensorStore.put`, `TensorStore.get` and the planner of a
    swapper make transfers.

    The requests do not depend on this object: dropping it neither cancels them nor releases the
    tensor's memory. `TensorStore.close` raises a failure that no call has returned, unless the name
    was deleted.
    """

    name: str
    writes: bool  # a put
    nbytes: int
    after: Sequence[Transfer] = ()  # of the same store; they must succeed before this one starts
    offset: int = 0  # of the value in host memory, chosen by the planner
    block_bytes: int = 0  # the size of its block there
    stage: Stage = Stage.PLANNED
    cancelled: bool = False  # it must not start, because one of *after* has failed
    requests: list[Request] = dataclasses.field(default_factory=list)  # one for each segment
    failure: OffloadError | None = None  # as recorded
    observed: bool = False  # whether a call has returned or raised the failure
    store: TensorStore | None = None  # None before the start
    value: StoredTensor | None = None  # the bytes on the drives; None before the start

    @property
    def ended(self) -> bool:
        """Whether the planner has recorded the outcome."""
        return self.stage is Stage.ENDED

    def done(self) -> bool:
        """Whether every request has finished, successfully or not. Never blocks."""
        if self.requests:
            return all(request.done() for request in self.requests)
        return all(blocker.done() for blocker in self.after)  # a tensor of no bytes

    def wait(self, timeout: float | None = None) -> int:
        """Wait until every byte has been moved, or for *timeout* seconds. A second call has the same
        outcome. Returns: the size of the tensor in bytes.

        Raises: after all requests have finished, the first failure of one (IOFailure, NoSpaceError,
        TruncatedError, CorruptionError, BufferChangedError; the message names the tensor);
        CancelledError if the transfer never started; WaitTimeout, after which the requests continue;
        UsageError in a forked process, or if *timeout* is not a number.
        """
        known(self.store).finish(self, timeout)
        self.raise_failure()
        return self.nbytes

    def cancel(self) -> bool:
        """Cancel the put or get before it starts. The name keeps its previous value.

        This transfer, and transfers that wait for it (*after*), fail with `CancelledError`, which
        `TensorStore.close` does not report. Returns: False if a part of the transfer has been
        submitted to a drive; it then continues. Raises: UsageError in a forked process.
        """
        store = known(self.store)
        store.check_process()
        if not cancel_requests(self.requests):
            return False
        store.finish(self)
        return True

    def raise_failure(self) -> None:
        """Raise the failure that was recorded, if there is one."""
        failure = self.observe()
        if failure is not None:
            raise failure

    def observe(self) -> OffloadError | None:
        """A copy of the failure that was recorded; None if there is none."""
        self.observed = True
        return copy.copy(self.failure)

    def outcome(self, timeout: float | None = None) -> OffloadError | None:
        """Wait until every request has finished. Returns: the first failure. Raises: WaitTimeout."""
        if not self.requests:
            for blocker in self.after:
                blocker.outcome(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        failure = None
        for request in self.requests:
            try:
                request.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except WaitTimeout:
                raise WaitTimeout(
                    f"{'put' if self.writes else 'get'} of tensor {self.name!r} did not finish within {timeout} s; it continues"
                ) from None
            except OffloadError as error:
                failure = failure or error
        if failure is not None:
            # Keep the error, but not the objects that the frames of its traceback reference.
            failure.with_traceback(None)
        return failure
