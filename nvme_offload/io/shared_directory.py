"""`SharedDirectory`: a directory that several ranks write together, and that appears complete, in
place of an older one, or not at all.

Every rank writes its files into a temporary directory, `.NAME.partial`, and syncs them. When all
ranks have, the manifest is added, and one rename puts the directory under its name.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import UsageError
from ..files import commit
from . import archive, manifest
from .engine import Engine
from .manifest import Entry, Manifest
from .ranks import Ranks

_TOKEN = re.compile(r"generation-[0-9a-f]{32}")
# A client of a network filesystem may see a new directory only after it has asked the server again.
_LATE_SECONDS = 10.0
_POLL_SECONDS = 0.1


class SharedDirectory:
    """The directory *place*, which *ranks* write together with an *engine*; a link is followed.
    Every method but `write` and `discard` is a collective call, and raises on every rank what went
    wrong on one.

    *is_ours*: whether a file of a name may be removed with an old or an unfinished directory; other
    files are kept. *title* is the subject of errors, *hint* says what to do if the ranks do not
    share a filesystem. *first_of_node*: whether this rank makes the directory of its node; None:
    all ranks share one directory.
    """

    def __init__(
        self,
        place: Path,
        ranks: Ranks,
        engine: Engine,
        *,
        is_ours: Callable[[str], bool],
        title: str,
        hint: str,
        first_of_node: bool | None = None,
    ) -> None:
        self.place = place.resolve()
        self.partial = self.place.with_name(f".{self.place.name}.partial")
        self.generation = ""
        self.publishes = False  # whether this rank renames the directory
        self.checksum = "xxh3" if manifest.has_checksums() else "crc32"
        self._ranks = ranks
        self._engine = engine
        self._is_ours = is_ours
        self._refusal = f"{title} was not saved"
        self._hint = hint
        self._first_of_node = first_of_node
        self._entries: list[Entry] = []
        self._lock: int | None = None

    def begin(self) -> None:
        """Make the temporary directory, and see that every rank finds it."""
        self.generation = str(self._ranks.gather(os.urandom(16).hex())[0])
        self._on(self._ranks.rank == 0, self._make)
        shared = self._ranks.gather(self._is_there(wait=self._first_of_node is None))
        if all(shared):
            return
        if self._first_of_node is not None:
            self._on(self._first_of_node and not shared[self._ranks.rank], self._make)
            shared = self._ranks.gather(self._is_there(wait=True))
        if not all(shared):
            blind = [rank for rank, found in enumerate(shared) if not found]
            raise UsageError(
                f"{self._refusal}: rank{'s' if len(blind) > 1 else ''} {', '.join(map(str, blind))} of {len(shared)} cannot see {self.partial}, "
                f"which another rank has made: {self._hint}"
            )

    def write(self, name: str, write: Callable[[str], list[archive.Piece]]) -> None:
        """Let *write* make the file *name*, and note its checksums, of which it returns some."""
        path = self.partial / name
        try:
            known = write(str(path))
            self._entries.append(
                manifest.entry_of(path, name, self._ranks.rank, known, self._engine, self.checksum)
            )
        except (RuntimeError, OSError) as error:
            raise archive.as_failure(error, self.place / name) from error

    def publish(self, failure: Exception | None, step: int) -> None:
        """Show the directory if every rank has written all of its files, and this one has no
        *failure*.
        """
        self._ranks.agree(failure, self._refusal)
        files = tuple(entry for entries in self._ranks.gather(self._entries) for entry in entries)

        def show() -> None:
            self._token.unlink()  # fails if another run has taken its place, where locks are missing
            Manifest(self.generation, step, self._ranks.count, self.checksum, files).write(
                self.partial
            )
            self._clear(commit.publish_directory(self.partial, self.place, over=True))

        self._on(self.publishes, show)

    def discard(self) -> None:
        """Delete the temporary directory if it was not published."""
        if self.publishes:
            with contextlib.suppress(OSError):
                commit.remove(self.partial)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _token(self) -> Path:
        return self.partial / f"generation-{self.generation}"

    def _on(self, here: bool, action: Callable[[], None]) -> None:
        """Run *action* on the ranks with *here*."""

        def act() -> None:
            try:
                if here:
                    action()
            except Exception as error:
                raise archive.as_failure(error, self.place) from error

        self._ranks.together(act, self._refusal)

    def _make(self) -> None:
        commit.make_directory(self.place.parent)
        if commit.is_locked(self.partial):
            raise UsageError(
                f"{self._refusal}: another run is saving to it: give each run its own directory"
            )
        for left in (commit.recover_directory(self.place), self.partial):
            self._clear(left)
        with contextlib.suppress(OSError):
            # left by a killed save of another name
            for left in commit.abandoned(self.place.parent, r"\..+\.partial"):
                if left.is_dir() and all(self._is_mine(entry.name) for entry in left.iterdir()):
                    commit.remove(left)
        self._lock = commit.claim(self.partial)
        self.publishes = True
        self._token.touch()

    def _is_there(self, *, wait: bool) -> bool:
        """Whether this rank sees the temporary directory of this save; with *wait*, soon."""
        end = time.monotonic() + _LATE_SECONDS
        while True:
            # NFS asks the server again when a directory is listed, not when a name is looked up
            with contextlib.suppress(OSError):
                os.listdir(self.place.parent)  # noqa: PTH208
            if self._token.exists():
                return True
            if not wait or time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)

    def _is_mine(self, name: str) -> bool:
        return name == manifest.NAME or _TOKEN.fullmatch(name) is not None or self._is_ours(name)

    def _clear(self, directory: Path | None) -> None:
        """Remove *directory*. Files in it that are not ours move to *place*."""
        if directory is None or not directory.is_dir():
            return
        for entry in list(directory.iterdir()):
            if (
                self._is_mine(entry.name)
                or os.path.lexists(self.place / entry.name)
                or not self.place.is_dir()
            ):
                commit.remove(entry)
            else:
                entry.rename(self.place / entry.name)
        directory.rmdir()
