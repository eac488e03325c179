"""`AioConfig`: how an engine talks to a drive."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from typing import Any, Literal

from ..errors import UsageError

BACKENDS = ("libaio", "io_uring", "posix")
MAX_QUEUE_DEPTH = 4096
MAX_THREAD_COUNT = 128
MAX_BLOCK_SIZE = 1 << 30
MIN_BLOCK_SIZE = 4096

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AioConfig:
    """Settings of an `Engine`; validated on creation, immutable after.

    block_size: bytes handed to the kernel at a time, a multiple of 4096. queue_depth: blocks in
    flight for one worker thread. thread_count: worker threads, each with a kernel queue of its own.
    backend: "libaio" (Linux native AIO), "io_uring", or "posix" (pread and pwrite, one block at a
    time for each thread; any filesystem). single_submit: hand blocks to the kernel one by one
    rather than two by two (or, blocks below 64 KiB, all at once). overlap_events: refill the queue
    whenever a block completes; otherwise only when it has run empty. direct: True for O_DIRECT or
    an error, "auto" for O_DIRECT where the filesystem has it (`File.direct` tells), False for the
    page cache.

    Raises: UsageError naming the field and the values that are possible.
    """

    block_size: int = 1 << 20
    queue_depth: int = 32
    thread_count: int = 1
    backend: str = "libaio"
    single_submit: bool = False
    overlap_events: bool = True
    direct: bool | Literal["auto"] = True

    def __post_init__(self) -> None:
        self._require_count("block_size", MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
        if self.block_size % MIN_BLOCK_SIZE:
            raise UsageError(
                f"block_size must be a multiple of {MIN_BLOCK_SIZE} bytes, not {self.block_size}"
            )
        self._require_count("queue_depth", 1, MAX_QUEUE_DEPTH)
        self._require_count("thread_count", 1, MAX_THREAD_COUNT)
        if self.backend not in BACKENDS:
            raise UsageError(f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        for name in ("single_submit", "overlap_events"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if not (isinstance(self.direct, bool) or self.direct == "auto"):
            raise UsageError(f"direct must be true, false or 'auto', not {self.direct!r}")

    @classmethod
    def for_path(cls, path: str | os.PathLike[str], **changes: Any) -> AioConfig:
        """The settings that `nvme-sweep` chose for a drive.

        Parameters
        ----------
        path : str or os.PathLike
            Any path on the drive, or one that will be on it once it is made.
        **changes
            Fields that are not to be as the sweep chose them.

        Returns
        -------
        AioConfig
            Those settings, with *changes*.

        Raises
        ------
        UnsupportedError
            That drive was never swept; the message says what to run.
        UsageError
            A change is not possible, or the profile cannot be read.
        OSError
            *path* cannot be looked at.

        Notes
        -----
        Where the profile has little evidence (`profile_grade.grade`), a warning is logged, once.
        """
        from . import profile_grade, profile_shelf  # which know this module

        profile = profile_shelf.find(os.fspath(path))
        found = profile_grade.grade(profile)
        if found.name != "good":
            _warn_of_evidence(profile.drive["path"], profile.created[:10], str(found))
        return dataclasses.replace(profile.chosen.config(), **changes)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that the kernel holds at once when every queue is full."""
        return self.block_size * self.queue_depth * self.thread_count

    def _require_count(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UsageError(f"{name} must be a whole number from {low} to {high}, not {value!r}")


@functools.cache
def _warn_of_evidence(path: str, date: str, found: str) -> None:
    _log.warning(
        "the profile of the drive of %s, of %s, has little evidence: %s; run nvme-sweep again",
        *(path, date, found),
    )
