"""A drive with a record of its writes and flushes, and its possible contents after a loss of power
at any moment.

The drive is a loop device whose every write and flush is on record (logged_disk.py). Writes before
a flush are on the drive after it; any part of the later writes may be. Images with such contents
are made for every flush, and mounted: the kernel then replays the filesystem's journal.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logged_disk import Write, read_log
from processes import finished

_MEBIBYTES = 24
_PIECE_BYTES = 4096  # of which a drive writes each whole, or not
# By kind of filesystem: the command that makes it, and the options to mount a copy of a filesystem
# that is mounted already. XFS calls 24 MiB unsupported.
_KINDS = {
    "ext4": (
        [
            "mkfs.ext4",
            "-q",
            "-E",
            "nodiscard,lazy_itable_init=0,lazy_journal_init=0",
            "-J",
            "size=4",
        ],
        "loop",
    ),
    "xfs": (["mkfs.xfs", "-q", "-K", "--unsupported"], "loop,nouuid"),
}
FILESYSTEMS = ["ext4", pytest.param("xfs", marks=pytest.mark.slow)]


def command(*arguments: str | Path) -> str:
    return finished([str(argument) for argument in arguments], check=True).stdout.strip()


class Drive:
    """A filesystem of *kind* at *place*, on a drive with a record, in *directory*."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack, kind: str) -> None:
        make, self._mount_options = _KINDS[kind]
        self._image, self._log, behind, self.place = (
            directory / name for name in ("image", "log", "behind", "place")
        )
        self._directory = directory
        for path in (behind, self.place):
            path.mkdir()
        self._image.touch()
        os.truncate(self._image, _MEBIBYTES << 20)
        command(*make, self._image)
        server = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("logged_disk.py")),
                str(self._image),
                str(behind),
                str(self._log),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(server)
        stack.callback(server.kill)
        self._server = server
        assert server.stdout is not None
        assert server.stderr is not None
        if server.stdout.readline() != "ready\n":
            pytest.skip(server.stderr.read().strip().splitlines()[-1])
        stack.callback(command, "umount", "--lazy", behind)
        device = command("losetup", "--show", "--find", behind / "disk")
        try:
            command("mount", device, self.place)
        finally:
            # which the kernel puts off until it is unmounted
            command("losetup", "--detach", device)
        stack.callback(command, "umount", "--lazy", self.place)

    def now(self) -> int:
        """The length of the record so far."""
        return self._log.stat().st_size

    def go(self) -> None:
        """Take the drive away: from now on every request to it fails, and so does every later
        flush.
        """
        self._server.kill()
        self._server.wait()

    def after_loss(self, start: int, end: int, seed: int) -> Iterator[tuple[bool, Path]]:
        """What may be found after a loss of power between two times, mounted until the next is
        asked for, and whether it is the least that may be there.

        The last one is the least of *end*.
        """
        draw = random.Random(seed)
        state = bytearray(self._image.read_bytes())
        for write in read_log(self._log.read_bytes()[:start]):
            _apply(state, [write] if write else [])
        since: list[Write] = []  # the last flush, in pieces
        for write in read_log(self._log.read_bytes()[start:end]):
            if write is not None:
                since += [
                    Write(write.offset + at, write.data[at : at + _PIECE_BYTES])
                    for at in range(0, len(write.data), _PIECE_BYTES)
                ]
            elif since:
                for part in _parts(since, draw):
                    yield False, self._mounted(_apply(bytearray(state), part))
                _apply(state, since)
                since = []
                yield True, self._mounted(state)
        for part in _parts(since, draw):
            yield False, self._mounted(_apply(bytearray(state), part))
        yield True, self._mounted(state)
        self._unmount()

    def _mounted(self, state: bytearray) -> Path:
        self._unmount()
        found, image = self._directory / "found", self._directory / "found image"
        found.mkdir(exist_ok=True)
        image.unlink(missing_ok=True)
        image.write_bytes(state)
        command("mount", "-o", self._mount_options, image, found)
        return found

    def _unmount(self) -> None:
        if (self._directory / "found").is_mount():
            command("umount", self._directory / "found")


def _parts(writes: list[Write], draw: random.Random) -> Iterator[list[Write]]:
    """Some of the parts of *writes* that a drive may have written, in any order."""
    if len(writes) > 1:
        yield writes[: draw.randrange(1, len(writes))]
        yield writes[draw.randrange(1, len(writes)) :]
        yield [write for write in writes if draw.random() < 0.5]


def _apply(state: bytearray, writes: list[Write]) -> bytearray:
    for offset, data in writes:
        state[offset : offset + len(data)] = data
    return state


@contextlib.contextmanager
def recorded(directory: Path, kind: str = "ext4") -> Iterator[Drive]:
    """A drive in *directory*, which is made, with a filesystem of *kind*, mounted until the end of
    the context.
    """
    if not Path("/dev/fuse").exists():
        pytest.skip("no /dev/fuse here, to keep a record of a drive's writes with")
    if shutil.which(maker := _KINDS[kind][0][0]) is None:
        pytest.skip(f"{maker} is not installed")
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        made = Drive(directory, stack, kind)
        stack.callback(made._unmount)
        yield made


def seen_after_loss(
    drive: Drive, start: int, end: int, judge: Callable[[Path], str]
) -> tuple[list[str], list[str]]:
    """What *judge* says of the least that is there at each flush, and of everything else that may
    be found.
    """
    least, others = [], []
    for is_least, found in drive.after_loss(start, end, seed=17):
        (least if is_least else others).append(judge(found))
    return least, others
