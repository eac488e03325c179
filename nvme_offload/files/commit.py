"""One commit protocol: write aside, sync, show by one rename. A crash at any point leaves the old
file or directory, or the new one, and never a third.

What is aside has a name of its own, `.NAME.XXXXXXXX.partial`, and is locked by its writer. A
process that is killed leaves it there without the lock; the next commit to NAME removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # fcntl.h
_unfinished: set[Path] = set()  # what this process has aside just now
_NOT_THERE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)  # a kernel or filesystem without


def write_file(
    path: Path, data: str | bytes, mode: int | None = 0o600, owner: tuple[int, int] | None = None
) -> None:
    """Put *data* (text as UTF-8) in the place of the file *path*.

    *mode* is None for that of any new file of this process; *owner* is a user and a group. Raises:
    OSError, and *path* is as it was. Source: rename(2), fsync(2).
    """
    with _aside(path, 0o666 if mode is None else 0o600) as (aside, descriptor):
        _write_all(descriptor, data.encode("utf-8") if isinstance(data, str) else data)
        if owner is not None:
            os.fchown(descriptor, *owner)
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
        aside.replace(path)
    sync_directory(path.parent)


def overwrite_file(path: Path, data: bytes) -> None:
    """Put *data* into the file *path*, which stays the same file: its ACL, its other names, what is
    mounted on it.

    That is no rename: so the old bytes are first kept beside it, as `kept_of(path)`, and are there
    until the new ones are synced.
    Raises: OSError. Source: fsync(2).
    """
    kept = kept_of(path)
    old = path.read_bytes()
    write_file(kept, old)
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        # A shorter text is padded first, so that no state in between ends with a piece of the old
        # one.
        _write_all(descriptor, data + b"\n" * (len(old) - len(data)))
        os.fsync(descriptor)
        os.ftruncate(descriptor, len(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    kept.unlink()
    sync_directory(kept.parent)


def kept_of(path: Path) -> Path:
    """Where `overwrite_file` keeps the old bytes."""
    return path.with_name(f".{path.name}.before")


@contextlib.contextmanager
def aside_directory(path: Path) -> Iterator[Path]:
    """A new directory beside *path*, to be filled and shown by `show_directory`; removed if it was
    not.

    Raises: OSError.
    """
    with _aside(path, None) as (aside, _):
        yield aside


def show_directory(aside: Path, path: Path, *, over: bool = False) -> Path | None:
    """Rename the directory *aside*, whose contents are synced, to *path*.

    With *over*, what is at *path* goes aside in the same instant; returns where it is now, for the
    caller to remove. A filesystem that cannot exchange two names (NFS) needs two renames for that:
    `recover_directory` undoes the first.

    Raises: FileExistsError when *path* is there and not to be replaced; OSError.
    Source: renameat2(2).
    """
    sync_directory(aside)
    replaced: Path | None = None
    if not os.path.lexists(path):
        aside.rename(path)  # over another that came meanwhile only if that is empty
    elif not over:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    elif _exchanged(aside, path):
        replaced = aside
    else:
        replaced = _replaced(path)
        remove(replaced)
        path.rename(replaced)
        aside.rename(path)
    sync_directory(path.parent)
    return replaced


def recover_directory(path: Path) -> Path | None:
    """Put back what a `show_directory` over *path* left beside it, killed between two renames.

    Returns what is left of one that was killed after both, for the caller to remove. Raises:
    OSError.
    """
    replaced = _replaced(path)
    if not replaced.is_dir():
        return None
    if os.path.lexists(path):
        return replaced
    replaced.rename(path)
    sync_directory(path.parent)
    return None


def make_directory(path: Path) -> None:
    """Make the directory *path* and those above it that are missing, to stay. Raises: OSError."""
    missing = [place for place in (path, *path.parents) if not place.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_directory(place.parent)


def sync_tree(directory: Path) -> None:
    """Have every file and directory below *directory*, and itself, on the drive. Raises:
    OSError.
    """
    for place, _, names in os.walk(directory, topdown=False):
        for name in names:
            _sync(Path(place, name), os.O_RDONLY)
        sync_directory(Path(place))


def sync_directory(directory: Path) -> None:
    """Have the names in *directory* on the drive. Raises: OSError."""
    _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def remove(path: Path) -> None:
    """Remove the file or the directory *path*, if it is there. Raises: OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished() -> None:
    """Remove what this process has aside. For the handler of a signal that ends it,
    wherever it is.
    """
    for aside in list(_unfinished):
        with contextlib.suppress(OSError):
            remove(aside)


def remove_abandoned(directory: Path, name: str) -> None:
    """Remove what killed writers left aside in *directory* for names that match the regular
    expression *name*. Raises: OSError.
    """
    for left in abandoned(directory, rf"\.(?:{name})\.[0-9a-f]{{8}}\.partial"):
        remove(left)


def abandoned(directory: Path, name: str) -> Iterator[Path]:
    """What is in *directory* under names that match the regular expression *name*, and locked by
    nobody; it is locked until the next is asked for.

    Raises: OSError when it cannot be looked into.
    """
    for left in list(directory.iterdir()):
        if re.fullmatch(name, left.name):
            with contextlib.suppress(OSError):
                descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield left
                finally:
                    os.close(descriptor)


@contextlib.contextmanager
def _aside(path: Path, mode: int | None) -> Iterator[tuple[Path, int]]:
    """A new file with *mode*, or directory (None), beside *path*, locked, and its descriptor; what
    is there in the end is removed.
    """
    # whoever may not look into the directory leaves nothing to find either
    with contextlib.suppress(OSError):
        remove_abandoned(path.parent, re.escape(path.name))
    while True:
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        _unfinished.add(aside)  # before it is there: a signal may come at any time
        try:
            descriptor = _claimed(aside, mode)
            if descriptor is None:
                continue
            try:
                yield aside, descriptor
            finally:
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    remove(aside)
            return
        finally:
            _unfinished.discard(aside)


def _claimed(aside: Path, mode: int | None) -> int | None:
    """The descriptor of the new *aside*, locked; None where another writer took it for an abandoned
    one, before it was locked. Raises: OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if mode is None:
        aside.mkdir()
        flags = os.O_RDONLY | os.O_DIRECTORY
    try:
        descriptor = os.open(aside, flags | os.O_CLOEXEC, mode or 0)
    except FileNotFoundError:
        if mode is None:
            return None
        raise
    lock(descriptor)
    if os.fstat(descriptor).st_nlink > 0:
        return descriptor
    os.close(descriptor)
    return None


def lock(descriptor: int) -> None:
    """Lock what is open as *descriptor*: whoever would remove it finds it in use, until it is
    closed or the process ends.
    """
    # a network filesystem without locks: there nobody removes anything
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether the kernel exchanged the two names; False where it cannot. Raises: OSError."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_THERE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
