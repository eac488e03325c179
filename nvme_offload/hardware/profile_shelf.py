"""Where the profiles of this user's drives are kept: one for each drive, found again by any path on
it.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from ..errors import UnsupportedError, UsageError
from ..files import commit
from .drive import describe
from .profile import Profile


def directory() -> Path:
    """The directory of the profiles, which need not be there.

    Raises: UnsupportedError when this user has no home directory and XDG_CONFIG_HOME does not name
    another place. Source: the XDG Base Directory Specification, which has relative paths ignored.
    """
    return user_directory("XDG_CONFIG_HOME", ".config") / "profiles"


def user_directory(variable: str, default: str) -> Path:
    """This package's directory below what *variable* names, or else below *default* in the home
    directory. Raises: UnsupportedError.
    """
    named = os.environ.get(variable, "")
    if Path(named).is_absolute():
        return Path(named) / "nvme-offload"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    if not home.is_absolute():
        raise UnsupportedError(
            f"this user has no home directory; set {variable} to a directory that you can write to"
        )
    return home / default / "nvme-offload"


def keep(profile: Profile) -> Path:
    """Put *profile* in the place of its drive's earlier one; returns the file.

    The profile of another engine than this package's has a place of its own, since `find` must not
    take it. Raises: UsageError when it does not say which drive it is of; UnsupportedError as
    `directory`; OSError when it cannot be written.
    """
    path = directory() / _name(_identity(profile), profile.engine.get("name"))
    commit.make_directory(path.parent)
    commit.write_file(path, profile.to_json())
    return path


def find(path: str | Path) -> Profile:
    """The profile of the drive that *path* is on, or will be on once it is made, of this package's
    engine.

    Raises: UnsupportedError, which says what to run, when there is none; UsageError when the one
    there is cannot be read; OSError when *path* cannot be looked at.
    """
    drive = describe(_nearest(path))
    kept = directory() / _name(drive.identity)
    command = f"`nvme-sweep {shlex.quote(drive.path)}`"
    try:
        profile = Profile.load(kept)
    except FileNotFoundError:
        raise UnsupportedError(
            f"no profile of the drive of {drive.path} is kept in {kept.parent}: run {command} first"
        ) from None
    if profile.drive.get("identity") != drive.identity:
        raise UnsupportedError(
            f"{kept} is the profile of another drive than that of {drive.path}: run {command}"
        )
    return profile


def swept_elsewhere(path: str | Path) -> Profile | None:
    """A profile of what *path* was on when it was swept, where that is another drive now, of which
    there is none: a drive that is not mounted, or a new one.
    """
    drive = describe(_nearest(path))
    if (directory() / _name(drive.identity)).exists():
        return None
    place = Path(drive.path)
    for file in sorted(directory().glob("*.json")):
        try:
            profile = Profile.load(file)
        except (UsageError, OSError):  # which `find` says, of the drive's own
            continue
        was = Path(profile.drive.get("mount_point") or profile.drive["path"])
        # What is mounted below it is another place, which was never swept.
        if place.is_relative_to(was) and (
            Path(drive.mount_point) == was or not Path(drive.mount_point).is_relative_to(was)
        ):
            return profile
    return None


def _nearest(path: str | Path) -> Path:
    """*path*, or where it is yet to be made, the nearest directory above it that is there."""
    absolute = Path(path).absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def _identity(profile: Profile) -> str:
    identity = profile.drive.get("identity")
    if not isinstance(identity, str) or not re.fullmatch("[0-9a-f]{32}", identity):
        raise UsageError(
            "the profile does not say which drive it is of: it is older than this version; run nvme-sweep again"
        )
    return identity


def _name(identity: str, engine: object = "native") -> str:
    return f"{identity}.json" if engine == "native" else f"{identity}-{engine}.json"
