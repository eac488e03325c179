"""Where the profiles of this user's drives are kept: one for each drive, found again by any path on
it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from pathlib import Path

from ..errors import UnsupportedError, UsageError
from ..files import commit
from .drive import describe
from .profile import Profile
from .profile_grade import grade


def directory() -> Path:
    """The directory of the profiles.

    Returns
    -------
    Path
        It may not exist.

    Raises
    ------
    UnsupportedError
        This user has no home directory, and XDG_CONFIG_HOME does not name another place.

    Notes
    -----
    Source: the XDG Base Directory Specification, which has relative paths ignored.
    """
    return user_directory("XDG_CONFIG_HOME", ".config") / "profiles"


def user_directory(variable: str, default: str) -> Path:
    """This package's directory among this user's files of one kind.

    Parameters
    ----------
    variable : str
        Environment variable with the directory of that kind, such as "XDG_CONFIG_HOME". A relative
        path in it is ignored.
    default : str
        That directory, relative to the home directory, where *variable* does not name it.

    Returns
    -------
    Path
        The directory "nvme-offload" below it; it may not exist.

    Raises
    ------
    UnsupportedError
        This user has no home directory, and *variable* does not name another place.
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
    """Keep a profile, in place of the earlier one of its drive.

    The profile of another engine than this package's has a place of its own, since `find` must not
    take it.

    Parameters
    ----------
    profile : Profile
        Of any grade.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    UsageError
        *profile* does not say which drive it is of.
    UnsupportedError
        As `directory`.
    OSError
        The file cannot be written.
    """
    path = directory() / _name(_identity(profile), profile.engine.get("name"))
    commit.make_directory(path.parent)
    commit.write_file(path, profile.to_json())
    return path


def better(profile: Profile) -> Profile | None:
    """The profile that *profile* must not replace without being told to.

    Parameters
    ----------
    profile : Profile
        A new one.

    Returns
    -------
    Profile or None
        The one that is kept for its drive and engine, where it has a better grade; None where there
        is none, or it cannot be read.

    Raises
    ------
    UsageError, UnsupportedError
        As `keep`.
    """
    place = directory() / _name(_identity(profile), profile.engine.get("name"))
    with contextlib.suppress(OSError, UsageError):
        kept = Profile.load(place)
        if grade(kept).level > grade(profile).level:
            return kept
    return None


def find(path: str | Path) -> Profile:
    """Find the profile of a drive, measured with this package's engine.

    Parameters
    ----------
    path : str or Path
        A path on the drive; it need not exist yet.

    Returns
    -------
    Profile
        The one that `keep` put there last.

    Raises
    ------
    UnsupportedError
        There is no profile, which the message says how to make, or as `directory`.
    UsageError
        The profile is damaged, or of a schema that this version does not know.
    OSError
        *path* cannot be looked at, or the profile not be read.
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
    """Find the profile of a drive that a path was on when it was swept, and is not on now.

    The drive is not mounted, or a new one is in its place.

    Parameters
    ----------
    path : str or Path
        It need not exist yet.

    Returns
    -------
    Profile or None
        None where the drive that *path* is on now has a profile, or nothing that *path* is in was
        swept. Profiles that cannot be read are skipped.

    Raises
    ------
    UnsupportedError
        As `directory`.
    OSError
        *path* cannot be looked at.
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
