"""`Slabs`: room on one drive, in preallocated files without names."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

from .engine import Engine, File
from .errors import IOFailure
from .extents import Extents

GRANULE_BYTES = 4096
_GROWTH_BYTES = 1 << 30


class Slab(NamedTuple):
    """A file, and what of it is taken."""

    file: File
    extents: Extents


class Extent(NamedTuple):
    """*nbytes* that belong to someone, from *offset* bytes into *slab*."""

    slab: Slab
    offset: int
    nbytes: int


class Slabs:
    """The room that a store has on the drive of *path*; not for several threads at once.

    It grows by one more file at a time: that needs nobody to wait for transfers in the others, and `reserve` makes it a single one. The files have
    no names, so nothing of them stays behind a process that is killed, and no other process can meet them.

    *weight* is the share of new bytes that this drive is to get, beside the weights of the others.
    Raises: IOFailure when *path* is no directory that can be written to; UnsupportedError when it lacks what the engine's configuration demands.
    Source: open(2) for O_TMPFILE, fallocate(2).
    """

    def __init__(self, engine: Engine, path: str, weight: float) -> None:
        self.path = path
        self.weight = weight
        self.used_bytes = 0
        self._engine = engine
        self._slabs: list[Slab] = []
        engine.open_anonymous(path).close()  # what is wrong with the path is heard now
        self.device = Path(path).stat().st_dev

    @property
    def nbytes(self) -> int:
        """Bytes that this store has allocated on the drive."""
        return sum(slab.extents.nbytes for slab in self._slabs)

    @property
    def available_bytes(self) -> int:
        """Bytes that the drive could still give to this process's user."""
        status = os.statvfs(self.path)
        return (status.f_bfree if os.geteuid() == 0 else status.f_bavail) * status.f_frsize

    def take(self, nbytes: int) -> list[Extent]:
        """Take *nbytes* in as few places as can be: in one unless the drive is nearly full, and fewer bytes than that only when it is full."""
        place = self._take_whole(nbytes) or (self._take_whole(nbytes) if self._grow_for(nbytes) else None)
        if place is not None:
            return [place]
        taken: list[Extent] = []
        try:
            while nbytes > 0 and (largest := self._largest_hole_bytes() or self._grow_to_the_end(nbytes)):
                place = self._take_whole(min(nbytes, largest))
                assert place is not None  # as large as a hole that is there
                taken.append(place)
                nbytes -= place.nbytes
        except BaseException:
            for place in taken:
                self.give_back(place)
            raise
        return taken

    def holds(self, extent: Extent) -> bool:
        """Whether *extent* is of this drive."""
        return extent.slab in self._slabs

    def grow_up_to(self, nbytes: int) -> int:
        """Allocate *nbytes* more, or as many as the drive has; returns how many."""
        before = self.nbytes
        if nbytes > 0 and not self._grown(nbytes):
            self._grow_to_the_end(nbytes)
        return self.nbytes - before

    def give_back(self, extent: Extent) -> None:
        """Make the room of *extent* free."""
        extent.slab.extents.free(extent.offset)
        self.used_bytes -= extent.slab.extents.rounded(extent.nbytes)

    def grow(self, nbytes: int) -> None:
        """Allocate *nbytes* more on the drive. Raises: NoSpaceError."""
        size = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
        if size > 0:
            self._slabs.append(Slab(self._engine.open_anonymous(self.path, size), Extents(size, GRANULE_BYTES)))

    def close(self) -> None:
        """Give all room back to the drive, once the transfers under way are finished."""
        for slab in self._slabs:
            slab.file.close()
        self._slabs.clear()

    def _take_whole(self, nbytes: int) -> Extent | None:
        for slab in self._slabs:
            offset = slab.extents.allocate(nbytes)
            if offset is not None:
                self.used_bytes += slab.extents.rounded(nbytes)
                return Extent(slab, offset, nbytes)
        return None

    def _grow_for(self, nbytes: int) -> bool:
        # In steps that leave the drive room for others when there is little, yet stay few, since each is an open file.
        step = min(max(_GROWTH_BYTES, self.nbytes // 10), self.available_bytes // 4)
        return any(self._grown(size) for size in (max(nbytes, step), nbytes))

    def _largest_hole_bytes(self) -> int:
        return max((slab.extents.largest_free_bytes for slab in self._slabs), default=0)

    def _grow_to_the_end(self, nbytes: int) -> int:
        size = min(nbytes, self.available_bytes // GRANULE_BYTES * GRANULE_BYTES)
        while size >= GRANULE_BYTES:  # what a filesystem calls available it may need for its own books in part
            if self._grown(size):
                return self._largest_hole_bytes()
            size = size // 2 // GRANULE_BYTES * GRANULE_BYTES
        return 0

    def _grown(self, nbytes: int) -> bool:
        try:
            self.grow(nbytes)
        except IOFailure as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # the last where one file may not be so large: a smaller one may be
                return False
            raise
        return True
