"""Space on drives. `Slabs` is space on one drive, in preallocated unnamed files. `Stripes` spreads
tensors over several drives, by weight.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import IOFailure, NoSpaceError
from ..hardware import sysfs
from ..hardware.drive import filesystem_space
from ..io.engine import Engine, File
from ..io.extents import Extents
from ..units import format_bytes

GRANULE_BYTES = 4096
_GROWTH_BYTES = 1 << 30
# Below this size, the additional requests of striping cost more than it gains.
_STRIPED_FROM_BYTES = 4 << 20
_STRIPE_UNIT_BYTES = 64 << 10


@dataclasses.dataclass(slots=True)
class Segment:
    """Allocated bytes: *nbytes* at *offset* of *file*, on the drive of *slabs*."""

    slabs: Slabs
    file: File
    offset: int
    nbytes: int
    start: int = 0  # of the tensor's bytes
    checksum: int | None = None  # if the store keeps checksums


class Slabs:
    """The space of a store on the drive of *path*, in unnamed files. Not thread-safe.

    It grows by one file at a time, so it need not wait for transfers in other files. `grow` ahead
    of use makes it a single file. Unnamed files vanish with the process, even after kill -9, and no
    other process can open them.

    *weight* is this drive's share of new bytes, relative to the weights of other drives. Raises:
    IOFailure if *path* is not a writable directory; UnsupportedError if the drive lacks a feature
    that the engine's configuration requires. Source: open(2) for O_TMPFILE, fallocate(2).
    """

    def __init__(self, engine: Engine, path: str, weight: float) -> None:
        self.path = path
        self.weight = weight
        self.nbytes = 0  # allocated on the drive
        self.used_bytes = 0
        self._engine = engine
        self._files: dict[File, Extents] = {}  # the free extents of each file
        engine.open_anonymous(path).close()  # reports a bad path now
        self.device = Path(path).stat().st_dev

    @property
    def available_bytes(self) -> int:
        """Bytes that the drive can still allocate for this user."""
        status = filesystem_space(self.path)
        blocks = status.f_bavail
        if os.geteuid() == 0:  # root can also use the blocks that are reserved for root
            blocks = max(status.f_bfree - sysfs.blocks_for_ext4_itself(self.device), 0)
        return blocks * status.f_frsize

    def allocate(self, nbytes: int) -> list[Segment]:
        """Allocate *nbytes*, or fewer on a full drive, in as few segments as possible."""
        if self._largest_free_bytes < nbytes:
            self._grow_for(nbytes)
        taken: list[Segment] = []
        try:
            while nbytes > 0 and (
                largest := self._largest_free_bytes or self._grow_remaining(nbytes)
            ):
                taken.append(self._take(min(nbytes, largest)))
                nbytes -= taken[-1].nbytes
        except BaseException:
            for segment in taken:
                self.free(segment)
            raise
        return taken

    def grow_up_to(self, nbytes: int) -> int:
        """Grow by *nbytes*, or by as many as the drive has. Returns: how many."""
        before = self.nbytes
        if nbytes > 0 and not self._try_grow(nbytes):
            self._grow_remaining(nbytes)
        return self.nbytes - before

    def free(self, segment: Segment) -> None:
        """Free *segment*."""
        extents = self._files.get(segment.file)
        if extents is not None:  # None after close
            size = _whole_granules(segment.nbytes)
            extents.add(segment.offset, segment.offset + size)
            self.used_bytes -= size

    def grow(self, nbytes: int) -> None:
        """Allocate *nbytes* more on the drive. Raises: NoSpaceError."""
        size = _whole_granules(nbytes)
        if size > 0:
            file = self._engine.open_anonymous(self.path, size, padded=True)
            self._files[file] = Extents()
            self._files[file].add(0, size)
            self.nbytes += size

    def close(self) -> None:
        """Return all space to the drive, once the transfers in flight have finished."""
        for file in self._files:
            file.close()
        self._files.clear()

    @property
    def _largest_free_bytes(self) -> int:
        return max((extents.largest_bytes for extents in self._files.values()), default=0)

    def _take(self, nbytes: int) -> Segment:
        """Take *nbytes*, at most `_largest_free_bytes`, from the first file that has them."""
        size = _whole_granules(nbytes)
        file, extents, offset = next(
            (file, extents, offset)
            for file, extents in self._files.items()
            if (offset := extents.best_fit(size)) is not None
        )
        extents.remove(offset, offset + size)
        self.used_bytes += size
        return Segment(self, file, offset, nbytes)

    def _grow_for(self, nbytes: int) -> None:
        # Steps of at most a quarter of the free space leave space for others; large steps keep the
        # number of open files small.
        step = min(max(_GROWTH_BYTES, self.nbytes // 10), self.available_bytes // 4)
        if not (step > nbytes and self._try_grow(step)):
            self._try_grow(nbytes)

    def _grow_remaining(self, nbytes: int) -> int:
        size = min(nbytes, self.available_bytes // GRANULE_BYTES * GRANULE_BYTES)
        # A filesystem may need part of the available space for metadata.
        while size >= GRANULE_BYTES:
            if self._try_grow(size):
                return self._largest_free_bytes
            size = size // 2 // GRANULE_BYTES * GRANULE_BYTES
        return 0

    def _try_grow(self, nbytes: int) -> bool:
        try:
            self.grow(nbytes)
        except NoSpaceError:
            return False
        except IOFailure as error:
            # The size exceeds the filesystem's limit for a file; a smaller file may fit.
            if error.errno == errno.EFBIG:
                return False
            raise
        return True


class Stripes:
    """The space of a store on all its drives. Not thread-safe.

    A tensor of 4 MiB or more is striped over the drives in proportion to their weights, in units of
    64 KiB. A smaller tensor goes to the drive with the fewest bytes for its weight. The share of a
    full drive goes to the other drives.
    """

    def __init__(self, engine: Engine, paths: Sequence[str], weights: Sequence[float]) -> None:
        self.drives = [
            Slabs(engine, path, weight) for path, weight in zip(paths, weights, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes allocated on all drives."""
        return sum(drive.nbytes for drive in self.drives)

    @property
    def used_bytes(self) -> int:
        """Bytes in use on all drives."""
        return sum(drive.used_bytes for drive in self.drives)

    @property
    def available_bytes(self) -> int:
        """Bytes that the drives can still allocate. Paths on one filesystem count once."""
        return sum({drive.device: drive.available_bytes for drive in self.drives}.values())

    def allocate(self, nbytes: int) -> list[Segment]:
        """Allocate *nbytes*, in order. Raises: NoSpaceError, without allocating anything."""
        taken: list[Segment] = []
        try:
            for drive, share in zip(self.drives, self._shares(nbytes), strict=True):
                if share > 0:
                    taken += drive.allocate(share)
            for drive in sorted(self.drives, key=_fullness):
                missing = nbytes - sum(segment.nbytes for segment in taken)
                taken += drive.allocate(missing)
            missing = nbytes - sum(segment.nbytes for segment in taken)
            if missing > 0:
                raise self._no_space("put", nbytes, missing)
        except BaseException:
            for segment in taken:
                segment.slabs.free(segment)
            raise
        # The segment that is not a whole number of granules is last, so that all others start at a
        # granule of the tensor, too.
        return sorted(taken, key=lambda segment: segment.nbytes % GRANULE_BYTES != 0)

    def reserve(self, nbytes: int) -> None:
        """Grow to *nbytes* in total. Raises: NoSpaceError."""
        missing = nbytes - self.nbytes
        if missing > self.available_bytes:
            raise self._no_space("reserve", nbytes, missing - self.available_bytes)
        weights = sum(drive.weight for drive in self.drives)
        for drive in self.drives:
            missing -= drive.grow_up_to(
                min(missing, math.ceil(nbytes * drive.weight / weights) - drive.nbytes)
            )
        for drive in self.drives:  # bytes that did not fit on full drives
            missing -= drive.grow_up_to(missing)
        if missing > 0:
            raise self._no_space("reserve", nbytes, missing)

    def close(self) -> None:
        """Return all space to the drives, once the transfers in flight have finished."""
        for drive in self.drives:
            drive.close()

    def _shares(self, nbytes: int) -> list[int]:
        if len(self.drives) == 1 or nbytes < _STRIPED_FROM_BYTES:
            emptiest = min(self.drives, key=_fullness)
            return [nbytes if drive is emptiest else 0 for drive in self.drives]
        *reached, total = itertools.accumulate(drive.weight for drive in self.drives)
        units = (round(nbytes * each / total / _STRIPE_UNIT_BYTES) for each in reached)
        ends = [0, *(min(nbytes, unit * _STRIPE_UNIT_BYTES) for unit in units), nbytes]
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def _no_space(self, operation: str, nbytes: int, missing: int) -> NoSpaceError:
        room = "; ".join(
            f"{drive.path} has {format_bytes(drive.nbytes - drive.used_bytes)} free in the store and {format_bytes(drive.available_bytes)} outside"
            for drive in self.drives
        )
        reason = f"{os.strerror(errno.ENOSPC)} for {format_bytes(nbytes)}: {room}; {missing} bytes are missing"
        path = ", ".join(drive.path for drive in self.drives)
        return NoSpaceError(errno.ENOSPC, reason, operation=operation, path=path)


def _whole_granules(nbytes: int) -> int:
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES


def _fullness(drive: Slabs) -> float:
    return drive.used_bytes / drive.weight
