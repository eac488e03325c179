"""The catalog of a store: the current value of each name, its users, and the puts in flight."""

from __future__ import annotations

import contextlib

from ..errors import CancelledError, OffloadError, UsageError, known
from ..io.engine import cancel_requests
from .slabs import Segment, Stripes
from .transfer import Stage, StoredTensor, Transfer

# The maximum number of bytes that one checksum covers.
SUMMED_BYTES = 8 << 20


class Catalog:
    """The current value of each name. Not thread-safe: the store's lock guards it.

    An in-flight put does not replace the current value until it completes. The space of the old
    value is freed when its last user has finished.
    """

    def __init__(self, space: Stripes, summed: bool) -> None:
        self.in_flight: dict[Transfer, None] = {}  # in order of submission
        self._space = space
        self._summed = summed
        self._stored: dict[str, StoredTensor] = {}
        self._puts: dict[str, Transfer] = {}  # puts in flight
        self._retained: dict[str, StoredTensor] = {}  # values to which `roll_back` returns
        self._unobserved: list[Transfer] = []  # failed transfers whose failure no call has returned

    def sizes(self) -> dict[str, int]:
        """Bytes by name, as of the last put; in-flight and failed puts count."""
        return {name: value.nbytes for name, value in self._stored.items()} | {
            name: put.nbytes for name, put in self._puts.items()
        }

    def nbytes(self, name: object) -> int | None:
        """Bytes of *name*, as in `sizes`; None if there is no such name."""
        found = self._puts.get(name) or self._stored.get(name)  # type: ignore[call-overload]
        return None if found is None else int(found.nbytes)

    def current(self, name: str) -> StoredTensor:
        """The newest value of *name*. Raises: UsageError; the error of the put that lost it."""
        put = self._puts.get(name)
        value = self._stored.get(name) if put is None else put.value
        if value is None:
            raise UsageError(f"no tensor {name!r} in the store")
        if put is None and value.lost_by is not None:
            value.lost_by.raise_failure()
        return value

    def conflicts(self, transfer: Transfer) -> list[Transfer]:
        """The transfers for which *transfer* must wait: the put in flight, and the readers of a
        value that it would overwrite.

        The engine starts it after the transfers in `Transfer.after`. The exception is a put that
        replaces another put: two puts of one name are never in flight at the same time.
        """
        put = self._puts.get(transfer.name)
        found = [] if put is None or (not transfer.writes and put in transfer.after) else [put]
        value = self._overwritten(transfer.name, transfer.nbytes) if transfer.writes else None
        if value is not None:
            found += [reader for reader in value.readers if reader not in transfer.after]
        return found

    def put_in_flight(self, name: str) -> Transfer | None:
        """The put of *name* whose outcome is not recorded, if there is one."""
        return self._puts.get(name)

    def retain(self, name: str) -> None:
        """Keep the value of *name* until `commit` or `roll_back`. Raises: as `current`."""
        if name not in self._retained:
            value = self._retained[name] = self.current(name)
            value.users += 1

    def commit(self, name: str) -> None:
        """Release the retained value of *name*. Raises: UsageError if there is none."""
        self._free_if_unused(self._take_retained(name))

    def roll_back(self, name: str) -> None:
        """Make the retained value the current one. Raises: UsageError if there is none."""
        value, newer = self._take_retained(name), self._stored[name]
        if newer is not value:
            value.dropped = False
            self._stored[name] = value
            self._drop(newer)

    def may_free_space(self) -> list[Transfer]:
        """The transfers in flight that may free space when they finish."""
        return [each for each in self.in_flight if each.writes or known(each.value).dropped]

    def start(self, transfer: Transfer) -> StoredTensor:
        """Put *transfer* in flight. Returns: the value that it reads or writes."""
        name = transfer.name
        if transfer.writes:
            value = self._overwritten(name, transfer.nbytes) or self._new(transfer.nbytes)
        else:
            value = self.current(name)
            if transfer.nbytes != value.nbytes:
                raise UsageError(
                    f"tensor {name!r} has {value.nbytes} bytes, but the tensor to read it into has {transfer.nbytes}"
                )
        if value.readers:
            for reader in list(value.readers):  # record finished reads that no call waits for
                if reader.done():
                    self.complete(reader, reader.outcome())
        value.users += 1
        transfer.value = value
        transfer.stage = Stage.IN_FLIGHT
        self.in_flight[transfer] = None
        if transfer.writes:
            self._puts[name] = transfer
        else:
            value.readers.append(transfer)
        return value

    def abort(self, transfer: Transfer, refusal: OffloadError) -> None:
        """End a transfer if one of its requests was refused. The caller raises the error."""
        for request in transfer.requests:
            cancel_requests([request])  # a request that has started stays
        with contextlib.suppress(OffloadError):
            transfer.outcome()
        self.complete(transfer, refusal)
        transfer.observed = True

    def complete(self, transfer: Transfer, failure: OffloadError | None) -> None:
        """Record the outcome of a transfer whose requests have all finished. Idempotent."""
        if transfer.stage is not Stage.IN_FLIGHT:
            return
        transfer.stage = Stage.RECORDED
        transfer.failure = failure
        if transfer not in self.in_flight:  # `TensorStore.reset` has deleted its value
            return
        del self.in_flight[transfer]
        value = known(transfer.value)
        value.users -= 1
        if failure is not None:
            _name_tensor(failure, transfer.name)
            if not value.dropped and not isinstance(failure, CancelledError):
                self._unobserved = [each for each in self._unobserved if not each.observed]
                self._unobserved.append(transfer)
        if not transfer.writes:
            value.readers.remove(transfer)
        elif self._puts.get(transfer.name) is transfer:
            del self._puts[transfer.name]
            self._written(transfer, value)
        self._free_if_unused(value)

    def forget(self, name: str) -> None:
        """Drop the value of *name*, and the value of its put in flight."""
        put = self._puts.pop(name, None)
        retained = self._take_retained(name) if name in self._retained else None
        for value in (self._stored.pop(name, None), put.value if put else None, retained):
            if value is not None:
                self._drop(value)
        if self._unobserved:
            self._unobserved = [each for each in self._unobserved if each.name != name]

    def take_unobserved(self) -> Transfer | None:
        """The first failed transfer whose failure no call has returned."""
        unobserved = [each for each in self._unobserved if not each.observed]
        self._unobserved.clear()
        return unobserved[0] if unobserved else None

    def _new(self, nbytes: int) -> StoredTensor:
        """Allocate a value, in segments with one checksum each. Raises: NoSpaceError."""
        segments, start = [], 0
        for whole in self._space.allocate(nbytes):
            step = SUMMED_BYTES if self._summed else whole.nbytes
            for inner in range(0, whole.nbytes, step):
                size, offset = min(step, whole.nbytes - inner), whole.offset + inner
                segments.append(Segment(whole.slabs, whole.file, offset, size, start + inner))
            start += whole.nbytes
        return StoredTensor(nbytes, segments)

    def _overwritten(self, name: str, nbytes: int) -> StoredTensor | None:
        """The current value of *name*, if a put of *nbytes* overwrites it."""
        value = self._stored.get(name)
        if value is None or value.nbytes != nbytes or self._retained.get(name) is value:
            return None
        return value

    def _take_retained(self, name: str) -> StoredTensor:
        value = self._retained.pop(name, None)
        if value is None:
            raise UsageError(f"no value of tensor {name!r} is retained")
        value.users -= 1
        return value

    def _written(self, put: Transfer, value: StoredTensor) -> None:
        old = self._stored.get(put.name)
        untouched = not put.requests or isinstance(put.failure, CancelledError)
        if put.failure is not None and old is not value and (old is not None or untouched):
            self._drop(value)  # the old value stays, or the first put of the name never started
            return
        if put.failure is not None and untouched:
            return  # no value was overwritten
        value.lost_by = None if put.failure is None else put
        if put.failure is None:
            for segment, request in zip(value.segments, put.requests, strict=True):
                segment.checksum = request.checksum
        self._stored[put.name] = value
        if old is not None and old is not value:
            self._drop(old)

    def _drop(self, value: StoredTensor) -> None:
        """Free the space of *value* when it has no users."""
        value.dropped = True
        self._free_if_unused(value)

    def _free_if_unused(self, value: StoredTensor) -> None:
        if value.dropped and value.users == 0:
            for segment in value.segments:
                segment.slabs.free(segment)
            value.segments = []


def _name_tensor(error: OffloadError, name: str) -> None:
    """Add the tensor's name to the message of a failed transfer."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, str) and not reason.endswith(suffix := f", of tensor {name!r}"):
        error.reason = reason + suffix  # type: ignore[attr-defined]
