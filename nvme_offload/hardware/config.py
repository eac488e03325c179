"""`AioConfig`: the settings of an engine."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from ..errors import UsageError
from . import profile_shelf
from .profile import Setting

BACKENDS = ("libaio", "io_uring", "posix")
MAX_QUEUE_DEPTH = 4096
MAX_THREAD_COUNT = 128
MAX_BLOCK_SIZE = 1 << 30
MIN_BLOCK_SIZE = 4096


@dataclasses.dataclass(frozen=True)
class AioConfig:
    """Settings of an `Engine`; validated on creation, immutable.

    Parameters
    ----------
    block_size : int
        Size of one I/O to the kernel in bytes: a multiple of 4096, up to 1 GiB.
    queue_depth : int
        Blocks in flight per worker thread, 1 to 4096.
    thread_count : int
        Worker threads, each with its own kernel queue, 1 to 128.
    backend : {"libaio", "io_uring", "posix"}
        Kernel interface: Linux native AIO, io_uring, or pread and pwrite (one block at a time per
        thread; works on any filesystem).
    single_submit : bool
        Submit blocks one by one instead of two per system call (blocks below 64 KiB: all per call).
    overlap_events : bool
        Refill the queue at every completion, instead of when it has drained.
    direct : bool or "auto"
        True requires O_DIRECT, "auto" uses it where the filesystem supports it (see
        `File.direct`), False uses the page cache.

    Raises
    ------
    UsageError
        A value is out of range; the message names the field and its range.
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
    def of(cls, setting: Setting, **others: Any) -> AioConfig:
        """Make the configuration with a setting of a profile. Raises: UsageError.

        Parameters
        ----------
        setting : Setting
            Such as `Profile.chosen`.
        **others
            The remaining fields.
        """
        return cls(**{**dataclasses.asdict(setting), **others})

    @classmethod
    def for_path(cls, path: str | os.PathLike[str], **changes: Any) -> AioConfig:
        """Load the settings that `nvme-sweep` chose for a drive. If the evidence of its profile is poor, a
        warning is logged once.

        Parameters
        ----------
        path : str or os.PathLike
            A path on the drive; it need not exist yet.
        **changes
            Fields to override.

        Raises
        ------
        UnsupportedError
            The drive was never swept; the message gives the command.
        UsageError
            A field of *changes* is invalid, or the profile cannot be read.
        OSError
            *path* cannot be examined.
        """
        return dataclasses.replace(cls.of(profile_shelf.chosen(path)), **changes)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes in flight with all queues full."""
        return self.block_size * self.queue_depth * self.thread_count

    def _require_count(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UsageError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
