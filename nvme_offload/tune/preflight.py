"""Checks before a sweep: everything that it needs is there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nvme_offload.ds_config import edit as ds_config
from nvme_offload.errors import OffloadError, UnsupportedError, UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.drive import Drive
from nvme_offload.hardware.drive import describe as describe_drive
from nvme_offload.hardware.drive_warnings import warnings as drive_warnings
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS
from nvme_offload.units import format_bytes

MOST_FILE_BYTES = 1 << 30


def require_named(*places: str | os.PathLike[str] | None) -> None:
    """Raises: UsageError when one of *places*, as the user wrote them, is empty."""
    # `Path` would take it for the current directory
    if any(place is not None and not os.fspath(place).strip() for place in places):
        raise UsageError(
            "a path is empty: is a variable of the shell not set? Give a directory on the drive"
        )


def require_drive(path: str, force: bool) -> Drive:
    """The drive of the directory *path*. Raises: UsageError when it is not on a drive, or not writable."""
    require_named(path)
    directory = Path(path)
    try:
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "does not exist"
            raise UsageError(f"{directory} {what}: give a directory on the drive to tune")
        found = describe_drive(directory)
    except OSError as error:
        raise UsageError(f"{directory} cannot be examined: {error.strerror}") from None
    if (found.is_memory or found.is_network) and not force:
        raise UsageError(f"{drive_warnings(found)[0]} (--force measures it nevertheless.)")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(
            f"{directory} is not writable: make a directory there that you own, and give that"
        )
    return found


def config_file(given: Path) -> Path:
    """The DeepSpeed config *given*, or named by Accelerate's YAML *given*. Raises: UsageError."""
    try:
        config = ds_config.locate(given)
        ds_config.read_aio(config)
    except OSError as error:
        raise UsageError(f"{given} cannot be read: {error.strerror}") from None
    if not ds_config.is_writable(config):
        raise UsageError(
            f"{config} is read-only: make it and its directory writable, or leave out --config and copy the settings by hand"
        )
    return config


def check_report_directory(directory: Path) -> None:
    """Raises: UsageError when no report can be written there. Leaves nothing."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=".nvme-sweep-", dir=directory)).rmdir()
    except OSError as error:
        raise UsageError(
            f"no report can be written to {directory}: {error.strerror}; choose another directory with --report-dir"
        ) from None
    finally:
        for place in missing:
            with contextlib.suppress(OSError):
                place.rmdir()


def check_file(path: Path, option: str) -> None:
    """Raises: UsageError when no file can be written at *path*, which *option* names."""
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a directory; give a file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: no file can be written to {path.parent}")


def check_engine(engine: str, backend: str) -> None:
    """Raises: UsageError when that engine does not run here on that backend. Loads DeepSpeed's op."""
    from nvme_offload.io.engine import Engine

    if engine == "deepspeed" and backend != "libaio":
        raise UsageError(
            f"DeepSpeed's op is built on libaio, not on {backend}: leave out --backend"
        )
    try:
        Engine(AioConfig.of(DEEPSPEED_DEFAULTS, backend=backend)).close()
        if engine == "deepspeed":
            from .deepspeed_op import load

            load()
    except UnsupportedError as error:
        raise UsageError(str(error)) from None


def file_bytes(size: int | None, found: Drive, ranks: int) -> int:
    """Bytes of each of the two files of each rank."""
    from .ranks import request_bytes
    from .trial import LEAST_REQUESTS

    least = 2 * LEAST_REQUESTS * request_bytes(ranks) * ranks
    of_ranks, less = (
        (f" with {ranks} ranks", "; fewer --ranks need less") if ranks > 1 else ("", "")
    )
    wanted = min(2 * MOST_FILE_BYTES, found.free_bytes // 2) if size is None else size
    if size is not None and wanted < least:
        raise UsageError(
            f"--size must be at least {format_bytes(least)}{of_ranks}, not {format_bytes(wanted)}: less would stay in the drive's cache"
        )
    if wanted < least or wanted > found.free_bytes:
        needed = max(wanted, 2 * least) if size is None else wanted
        fits = found.free_bytes >= least
        less = f"; {f'--size {least >> 20}MiB is the least, and fits' if fits else 'delete files there'}{less}"
        raise UsageError(
            f"{found.path} is too small: the sweep needs {format_bytes(needed)}{of_ranks}, and {format_bytes(found.free_bytes)} are free{less}"
        )
    return wanted // (2 * ranks)


@contextlib.contextmanager
def locked(directory: Path, found: Drive) -> Iterator[None]:
    """Keep a second sweep off the drive, by a lock on its mount point. Raises: OffloadError."""
    descriptor = -1
    for place in (found.mount_point, directory):
        with contextlib.suppress(OSError):
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            break
    try:
        if descriptor >= 0:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OffloadError(
            f"another nvme-sweep is measuring the drive of {directory}, and two sweeps at the same time would distort each other: wait for it"
        ) from None
    except OSError:
        pass  # a network filesystem without locks
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)
