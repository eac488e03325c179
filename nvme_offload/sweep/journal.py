"""The journal of a sweep: every trial as soon as it is done, so that `--resume` goes on where an
interrupted one ended, kill -9 included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nvme_offload.errors import UnsupportedError
from nvme_offload.files import commit, sealed
from nvme_offload.hardware.profile import Setting, require_schema
from nvme_offload.hardware.profile_shelf import user_directory

from .preflight import Refusal
from .verdict import Ask, Result


class Entry(NamedTuple):
    """A trial and its result; *ended_seconds* since the search began."""

    ask: Ask
    result: Result
    ended_seconds: float


@dataclasses.dataclass(frozen=True)
class Begun:
    """What a search began with: the bytes of a file, what the drive and memory did with them a
    second, and the time for it.
    """

    file_bytes: int
    bytes_per_second: float
    copy_bytes_per_second: float
    search_seconds: float


class Journal:
    """The file of one drive's sweep: a line on what was asked for and what the search began with,
    then one for each trial; each has a checksum.

    begun: what the interrupted sweep's search began with, None when there is none to go on from.
    entries: its trials. has_trials: whether there is something to go on from, should this sweep be
    interrupted. warnings: a line on what of it was damaged, if anything: only what stands before
    that counts. Raises: Refusal when the interrupted sweep was asked for otherwise, or nothing of
    its journal is sound.
    """

    def __init__(self, path: Path | None, asked: dict[str, Any], resume: bool = False) -> None:
        self._path = path
        self._asked = asked
        self.begun: Begun | None = None
        self.entries: list[Entry] = []
        self.warnings: list[str] = []
        if resume:
            self._read(asked)
        self.has_trials = bool(self.entries)

    def begin(self, begun: Begun) -> Begun:
        """Start the file, over an earlier one; one that is gone on with keeps what counts of it.
        Returns what the search began with.
        """
        self.begun = self.begun or begun
        header = sealed.dumps(
            {"line": 1, "asked": self._asked, "begun": dataclasses.asdict(self.begun)}
        )
        lines = [
            header,
            *(_line(number, entry) for number, entry in enumerate(self.entries, start=2)),
        ]

        def write(path: Path) -> None:
            commit.make_directory(path.parent)
            commit.write_file(path, "".join(line + "\n" for line in lines))

        self._try(write)
        return self.begun

    def add(self, entry: Entry) -> None:
        """Write down one more trial."""
        self.entries.append(entry)

        def write(path: Path) -> None:
            with path.open("a", encoding="utf-8") as file:
                file.write(_line(1 + len(self.entries), entry) + "\n")

        self._try(write)
        self.has_trials = self._path is not None

    def remove(self) -> None:
        """The sweep came to its end."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _try(self, write: Callable[[Path], None]) -> None:
        """*write* the file; from the first failure on there is none, since a sweep that cannot be
        gone on with is still a sweep.
        """
        try:
            if self._path is not None:
                write(self._path)
        except OSError:
            self._path = None

    def _read(self, asked: dict[str, Any]) -> None:
        try:
            # the last may have been cut
            lines = self._path.read_bytes().split(b"\n")[:-1] if self._path else []
        except OSError:
            return
        if not lines:
            return
        try:
            header = _unsealed(lines[0], 1)
            before, begun = header["asked"], require_schema(Begun(**header["begun"]))
        except (ValueError, KeyError, TypeError):
            raise Refusal(
                f"the journal of the interrupted sweep, {self._path}, is damaged from its first line on: leave out --resume"
            ) from None
        other = [
            f"{name} {before.get(name)!r}, not {value!r}"
            for name, value in asked.items()
            if before.get(name) != value
        ]
        if other:
            raise Refusal(
                f"the interrupted sweep of this drive was made with {'; '.join(other)}: ask for the same, or leave out --resume"
            )
        self.begun = begun
        for number, line in enumerate(lines[1:], start=2):
            try:
                self.entries.append(_entry(_unsealed(line, number)))
            except (ValueError, KeyError, TypeError):
                self.warnings = _warnings(self._path, number, len(lines) - 1)
                return


def journal_path(identity: str, engine: str) -> Path | None:
    """Where the journal of that drive lies; None where this user has no directory for it. Source:
    the XDG Base Directory Specification.
    """
    try:
        return (
            user_directory("XDG_STATE_HOME", ".local/state")
            / "sweeps"
            / f"{identity}-{engine}.jsonl"
        )
    except UnsupportedError:
        return None


class Playback:
    """Clock and trials of a search that may have a beginning already: what was measured is told
    again, at the time that it took, then *measure* goes on.

    As a search asks the same when it is told the same, it goes on as if it had never been
    interrupted. Where it asks for something else, which it may when a limit is met to the
    microsecond, the rest of the beginning is left out.
    """

    def __init__(
        self,
        journal: Journal,
        measure: Callable[[Ask], Result],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._left = deque(journal.entries)
        self._measure = measure
        self._clock = clock
        self._told_seconds = 0.0
        self._live_since: float | None = None if self._left else clock()

    def clock(self) -> float:
        """Seconds that the search has gone on."""
        return self._told_seconds + (
            0.0 if self._live_since is None else self._clock() - self._live_since
        )

    def measure(self, ask: Ask) -> Result:
        """The result of *ask*, from the journal or measured now."""
        if self._left:
            entry = self._left.popleft()
            if _same(entry.ask, ask):
                self._told_seconds = entry.ended_seconds
                return entry.result
            self._left.clear()
        if self._live_since is None:
            self._live_since = self._clock()
        result = self._measure(ask)
        self._journal.add(Entry(ask, result, self.clock()))
        return result


def _same(one: Ask, other: Ask) -> bool:
    return dataclasses.replace(one, seconds=other.seconds) == other


def _warnings(path: Path | None, line: int, trials: int) -> list[str]:
    return [
        f"the journal of the interrupted sweep, {path}, is damaged at line {line}: of its {trials} trials the {line - 2} before that count"
    ]


def _line(number: int, entry: Entry) -> str:
    data = {
        "ask": dataclasses.asdict(entry.ask),
        "result": dataclasses.asdict(entry.result),
        "ended_seconds": entry.ended_seconds,
    }
    return sealed.dumps({"line": number, **data})


def _unsealed(line: bytes, number: int) -> dict[str, Any]:
    """What stands in *line*, the file's *number*th. Raises: ValueError when it is not as it was
    written, or not where.
    """
    data = sealed.loads(line)
    if not sealed.unseal(data) or data.pop("line", None) != number:
        raise ValueError
    return data


def _entry(data: dict[str, Any]) -> Entry:
    ask, result = data["ask"], data["result"]
    samples = tuple((seconds, count) for seconds, count in result["samples"])
    return Entry(
        require_schema(Ask(**{**ask, "setting": Setting(**ask["setting"])})),
        require_schema(Result(**{**result, "samples": samples})),
        0.0 + data["ended_seconds"],
    )
