"""The commit protocol for files and directories: write a temporary one next to the target, sync it,
rename it over the target. A crash at any point leaves the old version or the new one.

The temporary one is called `.NAME.XXXXXXXX.partial` and its writer holds a lock (flock(2)) on it. A
killed writer leaves it without the lock; the next commit to NAME removes it. All functions raise
OSError.
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
_partials: set[Path] = set()  # temporary files and directories of this process
# renameat2 is missing in this kernel or filesystem, or a container refuses it
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def write_file(
    path: Path, data: str | bytes, mode: int | None = 0o600, owner: tuple[int, int] | None = None
) -> None:
    """Replace the contents of the file *path*, which need not exist, atomically. *mode* None is the
    default of this process (umask); *owner* is a user and a group id. Source: rename(2), fsync(2).
    """
    with _partial_path(path, 0o666 if mode is None else 0o600) as (partial, descriptor):
        _write_all(descriptor, data.encode("utf-8") if isinstance(data, str) else data)
        if owner is not None:
            os.fchown(descriptor, *owner)
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
        partial.replace(path)
    sync_directory(path.parent)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file, which the caller fills and syncs; then rename it to *path*, whose
    missing parents are created.
    """
    make_directory(path.parent)
    with _partial_path(path, 0o666) as (partial, _):
        yield partial
        partial.replace(path)
    sync_directory(path.parent)


def overwrite_file(path: Path, data: bytes) -> None:
    """Replace the contents of an existing file in place, keeping its inode: ACL, hard links and
    bind mounts stay. As this is not atomic, `kept_of(path)` has the old contents until the new ones
    are synced.
    """
    kept = kept_of(path)
    old = path.read_bytes()
    write_file(kept, old)
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        # Shorter data are padded first: no intermediate state ends with a piece of the old
        # contents.
        _write_all(descriptor, data + b"\n" * (len(old) - len(data)))
        os.fsync(descriptor)
        os.ftruncate(descriptor, len(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    kept.unlink()
    sync_directory(kept.parent)


def kept_of(path: Path) -> Path:
    """The path to which `overwrite_file` saves the old contents."""
    return path.with_name(f".{path.name}.before")


@contextlib.contextmanager
def partial_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory next to *path*, whose missing parents are created, for
    `publish_directory`. On exit it is removed if it was not committed.
    """
    make_directory(path.parent)
    with _partial_path(path, None) as (partial, _):
        yield partial


def publish_directory(partial: Path, path: Path, *, over: bool = False) -> Path | None:
    """Rename *partial*, of `partial_directory`, whose contents are synced, to *path*. Returns where
    a replaced directory is now, for the caller to remove. Raises: FileExistsError.

    With *over* an existing *path* is replaced: the two names are exchanged atomically
    (renameat2(2)). A filesystem that cannot exchange names (NFS) needs two renames;
    `recover_directory` undoes the first after a crash.
    """
    sync_directory(partial)
    replaced: Path | None = None
    if not os.path.lexists(path):
        # rename(2) replaces a directory created meanwhile only if that is empty
        partial.rename(path)
    elif not over:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    elif _exchanged(partial, path):
        replaced = partial
    else:
        replaced = _replaced(path)
        remove(replaced)
        path.rename(replaced)
        partial.rename(path)
    sync_directory(path.parent)
    return replaced


def recover_directory(path: Path) -> Path | None:
    """Repair what a `publish_directory` with *over* left when it was killed between its two
    renames. Returns a replaced directory for the caller to remove.
    """
    replaced = _replaced(path)
    if not replaced.is_dir():
        return None
    if os.path.lexists(path):
        return replaced
    with contextlib.suppress(FileNotFoundError):  # another process has repaired it
        replaced.rename(path)
        sync_directory(path.parent)
    return None


def keep_others(path: Path, partial: Path, replaced: str) -> None:
    """Add to *partial*, which is to replace the directory *path*, the entries that *path* alone has,
    as hard links where the filesystem has them; but none whose name matches the regular expression
    *replaced*. Raises: OSError.
    """
    for entry in path.iterdir():
        if re.fullmatch(replaced, entry.name) or os.path.lexists(partial / entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, partial / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(entry, partial / entry.name)


def make_directory(path: Path) -> None:
    """Create the directory *path* and its missing parents durably. Raises: OSError."""
    missing = [place for place in (path, *path.parents) if not place.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_directory(place.parent)


def sync_tree(directory: Path) -> None:
    """Sync every file and directory below *directory*, and *directory* itself. Raises: OSError."""
    for place, _, names in os.walk(directory, topdown=False):
        for name in names:
            _sync(Path(place, name), os.O_RDONLY)
        sync_directory(Path(place))


def sync_directory(directory: Path) -> None:
    """Sync the entries of *directory*. Raises: OSError."""
    _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def remove(path: Path) -> None:
    """Remove the file or directory *path* if it exists. Raises: OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished() -> None:
    """Remove the temporary files and directories of this process, from a signal handler."""
    for partial in list(_partials):
        with contextlib.suppress(OSError):
            remove(partial)


def remove_abandoned(directory: Path, name: str) -> None:
    """Remove what killed writers left in *directory* for target names that match the regular
    expression *name*.
    """
    for left in abandoned(directory, rf"\.(?:{name})\.[0-9a-f]{{8}}\.partial"):
        remove(left)


def abandoned(directory: Path, name: str) -> Iterator[Path]:
    """Yield the entries of *directory* whose names match the regular expression *name* and that no
    process has locked. Each stays locked until the next one is asked for.
    """
    for left in list(directory.iterdir()):
        if re.fullmatch(name, left.name):
            with contextlib.suppress(OSError), _locked(left):
                yield left


def is_locked(path: Path) -> bool:
    """Whether a process has locked *path* by `claim`. False where the filesystem lacks locks."""
    try:
        with _locked(path):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context in which this process has locked *path*. Raises: BlockingIOError if another one has;
    OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _partial_path(path: Path, mode: int | None) -> Iterator[tuple[Path, int]]:
    """A new locked file with *mode*, or a directory (None), next to *path*, and its descriptor."""
    # without the right to list the directory there is nothing to find
    with contextlib.suppress(OSError):
        remove_abandoned(path.parent, re.escape(path.name))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    _partials.add(partial)  # before it exists: a signal may arrive at any point
    try:
        descriptor = claim(partial, mode)
        try:
            yield partial, descriptor
        finally:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                remove(partial)
    finally:
        _partials.discard(partial)


def claim(path: Path, mode: int | None = None) -> int:
    """Create the file *path* with *mode*, or a directory, and lock it, so that `abandoned` skips it,
    until the returned descriptor is closed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if mode is None:
        flags = os.O_RDONLY | os.O_DIRECTORY
    while True:  # another process may take it for abandoned, and remove it, before it is locked
        try:
            if mode is None:
                path.mkdir()
            descriptor = os.open(path, flags | os.O_CLOEXEC, mode or 0)
        except FileNotFoundError:
            if mode is None and path.parent.is_dir():
                continue
            raise
        # A network filesystem may lack locks: `abandoned` does not remove anything there either.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink > 0:
            return descriptor
        os.close(descriptor)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False where this is not supported."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _link(source: Path | str, target: Path | str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # such as exFAT
        shutil.copy2(source, target, follow_symlinks=False)


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
