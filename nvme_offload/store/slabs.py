"""Room on drives: `Slabs` on one, in preallocated files without names; `Stripes` over several, by
weight.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import IOFailure, NoSpaceError
from ..io.engine import Engine, File
from ..io.extents import Extents
from ..units import format_bytes

GRANULE_BYTES = 4096
_GROWTH_BYTES = 1 << 30
# below, cutting a tensor over the drives costs more in requests than it gains
_STRIPED_FROM_BYTES = 4 << 20
_STRIPE_UNIT_BYTES = 64 << 10


class Extent(NamedTuple):
    """*nbytes* that belong to someone, from *offset* bytes into *file*, one of the drive
    *slabs*.
    """

    slabs: Slabs
    file: File
    offset: int
    nbytes: int


class Slabs:
    """The room that a store has on the drive of *path*; not for several threads at once.

    It grows by one more file at a time: that needs nobody to wait for transfers in the others, and
    `reserve` makes it a single one. The files have no names, so nothing of them stays behind a
    process that is killed, and no other process can meet them.

    *weight* is the share of new bytes that this drive is to get, beside the weights of the others.
    Raises: IOFailure when *path* is no directory that can be written to; UnsupportedError when it
    lacks what the engine's configuration demands. Source: open(2) for O_TMPFILE, fallocate(2).
    """

    def __init__(self, engine: Engine, path: str, weight: float) -> None:
        self.path = path
        self.weight = weight
        self.used_bytes = 0
        self._engine = engine
        self._files: dict[File, Extents] = {}  # and what is taken of each
        engine.open_anonymous(path).close()  # what is wrong with the path is heard now
        self.device = Path(path).stat().st_dev

    @property
    def nbytes(self) -> int:
        """Bytes that this store has allocated on the drive."""
        return sum(extents.nbytes for extents in self._files.values())

    @property
    def available_bytes(self) -> int:
        """Bytes that the drive could still give to this process's user."""
        status = os.statvfs(self.path)
        return (status.f_bfree if os.geteuid() == 0 else status.f_bavail) * status.f_frsize

    def take(self, nbytes: int) -> list[Extent]:
        """Take *nbytes* in as few places as can be: in one unless the drive is nearly full, and
        fewer bytes than that only when it is full.
        """
        place = self._take_whole(nbytes) or (
            self._take_whole(nbytes) if self._grow_for(nbytes) else None
        )
        if place is not None:
            return [place]
        taken: list[Extent] = []
        try:
            while nbytes > 0 and (
                largest := self._largest_hole_bytes() or self._grow_to_the_end(nbytes)
            ):
                place = self._take_whole(min(nbytes, largest))
                assert place is not None  # as large as a hole that is there
                taken.append(place)
                nbytes -= place.nbytes
        except BaseException:
            for place in taken:
                self.give_back(place)
            raise
        return taken

    def grow_up_to(self, nbytes: int) -> int:
        """Allocate *nbytes* more, or as many as the drive has; returns how many."""
        before = self.nbytes
        if nbytes > 0 and not self._grown(nbytes):
            self._grow_to_the_end(nbytes)
        return self.nbytes - before

    def give_back(self, extent: Extent) -> None:
        """Make the room of *extent* free."""
        extents = self._files.get(extent.file)
        if extents is not None:  # else closed meanwhile
            extents.free(extent.offset)
            self.used_bytes -= extents.rounded(extent.nbytes)

    def grow(self, nbytes: int) -> None:
        """Allocate *nbytes* more on the drive. Raises: NoSpaceError."""
        size = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
        if size > 0:
            self._files[self._engine.open_anonymous(self.path, size, padded=True)] = Extents(
                size, GRANULE_BYTES
            )

    def close(self) -> None:
        """Give all room back to the drive, once the transfers under way are finished."""
        for file in self._files:
            file.close()
        self._files.clear()

    def _take_whole(self, nbytes: int) -> Extent | None:
        for file, extents in self._files.items():
            offset = extents.allocate(nbytes)
            if offset is not None:
                self.used_bytes += extents.rounded(nbytes)
                return Extent(self, file, offset, nbytes)
        return None

    def _grow_for(self, nbytes: int) -> bool:
        # In steps that leave the drive room for others when there is little, yet stay few, since
        # each is an open file.
        step = min(max(_GROWTH_BYTES, self.nbytes // 10), self.available_bytes // 4)
        return any(self._grown(size) for size in (max(nbytes, step), nbytes))

    def _largest_hole_bytes(self) -> int:
        return max((extents.largest_free_bytes for extents in self._files.values()), default=0)

    def _grow_to_the_end(self, nbytes: int) -> int:
        size = min(nbytes, self.available_bytes // GRANULE_BYTES * GRANULE_BYTES)
        # what a filesystem calls available it may need for its own books in part
        while size >= GRANULE_BYTES:
            if self._grown(size):
                return self._largest_hole_bytes()
            size = size // 2 // GRANULE_BYTES * GRANULE_BYTES
        return 0

    def _grown(self, nbytes: int) -> bool:
        try:
            self.grow(nbytes)
        except NoSpaceError:
            return False
        except IOFailure as error:
            if error.errno == errno.EFBIG:  # one file may not be so large: a smaller one may be
                return False
            raise
        return True


class Stripes:
    """The room of a store on all its drives; not for several threads at once.

    What has 4 MiB or more is cut over the drives in proportion to their weights, in units of 64
    KiB; what is smaller goes whole to the drive that has the least for its weight. A drive that is
    full leaves its share to the others.
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
        """Bytes taken on all drives."""
        return sum(drive.used_bytes for drive in self.drives)

    @property
    def available_bytes(self) -> int:
        """Bytes that the drives could still give; two paths on one filesystem share what it has."""
        return sum({drive.device: drive.available_bytes for drive in self.drives}.values())

    def take(self, nbytes: int, operation: str) -> list[Extent]:
        """Take *nbytes*, in the order of the bytes. Raises: NoSpaceError, of *operation*, and none
        is taken.
        """
        taken: list[Extent] = []
        try:
            for drive, share in zip(self.drives, self._shares(nbytes), strict=True):
                if share > 0:
                    taken += drive.take(share)
            missing = nbytes - sum(extent.nbytes for extent in taken)
            for drive in sorted(self.drives, key=_fullness):
                if missing > 0:
                    taken += (spilt := drive.take(missing))
                    missing -= sum(extent.nbytes for extent in spilt)
            if missing > 0:
                raise self._no_space(operation, nbytes, missing)
        except BaseException:
            self.give_back(taken)
            raise
        # The one that is no whole number of granules comes last, so that all others begin on a
        # granule of the tensor as well.
        return sorted(taken, key=lambda extent: extent.nbytes % GRANULE_BYTES != 0)

    def give_back(self, extents: Sequence[Extent]) -> None:
        """Make the room of *extents* free."""
        for extent in extents:
            extent.slabs.give_back(extent)

    def reserve(self, nbytes: int) -> None:
        """Allocate until there are *nbytes* in all. Raises: NoSpaceError."""
        missing = nbytes - self.nbytes
        if missing > self.available_bytes:
            raise self._no_space("reserve", nbytes, missing - self.available_bytes)
        weights = sum(drive.weight for drive in self.drives)
        for drive in self.drives:
            missing -= drive.grow_up_to(
                min(missing, math.ceil(nbytes * drive.weight / weights) - drive.nbytes)
            )
        for drive in self.drives:  # what did not fit on its own drive
            missing -= drive.grow_up_to(missing)
        if missing > 0:
            raise self._no_space("reserve", nbytes, missing)

    def close(self) -> None:
        """Give all room back to the drives, once the transfers under way are finished."""
        for drive in self.drives:
            drive.close()

    def _shares(self, nbytes: int) -> list[int]:
        if len(self.drives) == 1 or nbytes < _STRIPED_FROM_BYTES:
            emptiest = min(self.drives, key=_fullness)
            return [nbytes if drive is emptiest else 0 for drive in self.drives]
        total, reached, ends = sum(drive.weight for drive in self.drives), 0.0, [0]
        for drive in self.drives:
            reached += drive.weight
            ends.append(
                min(
                    nbytes,
                    round(nbytes * reached / total / _STRIPE_UNIT_BYTES) * _STRIPE_UNIT_BYTES,
                )
            )
        ends[-1] = nbytes
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def _no_space(self, operation: str, nbytes: int, missing: int) -> NoSpaceError:
        room = "; ".join(
            f"{drive.path} has {format_bytes(drive.nbytes - drive.used_bytes)} free in the store and {format_bytes(drive.available_bytes)} outside"
            for drive in self.drives
        )
        reason = f"{os.strerror(errno.ENOSPC)} for {format_bytes(nbytes)}: {room}; {missing} bytes are missing"
        path = ", ".join(drive.path for drive in self.drives)
        return NoSpaceError(
            errno.ENOSPC, reason, operation=operation, path=path, offset=0, nbytes=0, done=0
        )


def _fullness(drive: Slabs) -> float:
    return drive.used_bytes / drive.weight
