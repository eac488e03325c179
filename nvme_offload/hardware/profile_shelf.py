"""The profiles of this user's drives: one file for each drive, found by any path on the drive."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from pathlib import Path

from ..errors import UnsupportedError, UsageError
from ..files import commit
from .drive import Drive, describe
from .profile import Profile, Setting
from .profile_grade import grade

_log = logging.getLogger(__name__)


def directory() -> Path:
    """The directory of the profiles; it may not exist. Raises: UnsupportedError.

    Source: the XDG Base Directory Specification, by which relative paths in the variable are ignored.
    """
    named = os.environ.get("XDG_CONFIG_HOME", "")
    if Path(named).is_absolute():
        return Path(named) / "nvme-offload" / "profiles"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    if not home.is_absolute():
        raise UnsupportedError(
            "this user has no home directory; set XDG_CONFIG_HOME to a directory that you can write to"
        )
    return home / ".config" / "nvme-offload" / "profiles"


def keep(profile: Profile) -> Path:
    """Write *profile* to its file, over an earlier profile of the drive. Returns the file. Raises:
    UnsupportedError; OSError.
    """
    path = _file(profile)
    commit.make_directory(path.parent)
    commit.write_file(path, profile.to_json())
    return path


def better(profile: Profile) -> Profile | None:
    """The kept profile of the same drive and engine, if its grade is better; else None."""
    with contextlib.suppress(OSError, UsageError):
        kept = Profile.load(_file(profile))
        if grade(kept).level > grade(profile).level:
            return kept
    return None


def find(path: str | os.PathLike[str]) -> Profile:
    """The profile of the drive of *path*, measured with this package's engine. *path* need not exist.

    Raises: UnsupportedError when there is none, with the command that makes one; UsageError when the
    file is damaged or of an unknown schema; OSError.
    """
    return of_drive(describe(_nearest(path)))


def of_drive(drive: Drive) -> Profile:
    """The profile of *drive*. Raises: as `find`."""
    kept = directory() / f"{drive.identity}.json"
    command = f"`nvme-sweep {shlex.quote(drive.path)}`"
    try:
        profile = Profile.load(kept)
    except FileNotFoundError:
        raise UnsupportedError(
            f"no profile of the drive of {drive.path} is kept in {kept.parent}: run {command} first"
        ) from None
    if profile.drive.get("identity") != drive.identity:
        raise UnsupportedError(
            f"{kept} is not a profile of the drive of {drive.path}: run {command}"
        )
    return profile


def chosen(path: str | os.PathLike[str]) -> Setting:
    """The setting that the sweep chose for the drive of *path*. Logs a warning, once for each drive, if
    the evidence for it is poor. Raises: as `find`.
    """
    profile = find(path)
    key = profile.drive["identity"], profile.created
    if key not in _warned and grade(profile).name == "poor":
        _warned.add(key)
        _log.warning(
            "the settings for %s are from a sweep of its drive on %s that had little evidence: run `nvme-sweep %s`, which takes a minute",
            *(path, profile.created[:10], shlex.quote(os.fspath(path))),
        )
    return profile.chosen


_warned: set[tuple[str, str]] = set()  # drives and dates of their profiles


def swept_elsewhere(drive: Drive) -> Profile | None:
    """The profile of another drive that was swept at the path of *drive* and is not mounted there
    now, or was replaced; None when *drive* has a profile. Raises: UnsupportedError; OSError.
    """
    if (directory() / f"{drive.identity}.json").exists():
        return None
    place = Path(drive.path)
    for file in sorted(directory().glob("*.json")):
        try:
            profile = Profile.load(file)
        except (UsageError, OSError):  # `find` reports a file that is unreadable
            continue
        was = Path(profile.drive.get("mount_point") or profile.drive["path"])
        # Another filesystem that is mounted below it was not swept.
        if place.is_relative_to(was) and (
            Path(drive.mount_point) == was or not Path(drive.mount_point).is_relative_to(was)
        ):
            return profile
    return None


def _nearest(path: str | os.PathLike[str]) -> Path:
    """*path*, or its nearest parent directory that exists."""
    absolute = Path(path).absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def _file(profile: Profile) -> Path:
    """A profile of DeepSpeed's op has a separate file, since `find` must not return it."""
    identity, engine = profile.drive["identity"], profile.engine["name"]
    return directory() / (f"{identity}.json" if engine == "native" else f"{identity}-{engine}.json")
