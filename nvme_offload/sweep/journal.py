"""The journal of a sweep: every trial as soon as it is done, so that `--resume` goes on where an interrupted one ended, kill -9 included."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nvme_offload.errors import UnsupportedError
from nvme_offload.profile import Setting, require_schema
from nvme_offload.profile_shelf import user_directory

from .preflight import Refusal
from .verdict import Ask, Result


class Entry(NamedTuple):
    """A trial and its result; *ended_seconds* since the search began."""

    ask: Ask
    result: Result
    ended_seconds: float


class Journal:
    """The file of one drive's sweep: a line on what was asked for, one on what the search began with, then one for each trial.

    begun: what the interrupted sweep's search began with, None when there is none to go on from. entries: its trials. has_trials: whether there is
    something to go on from, should this sweep be interrupted. Raises: Refusal when the interrupted sweep was asked for otherwise.
    """

    def __init__(self, path: Path | None, asked: dict[str, Any], resume: bool = False) -> None:
        self._path = path
        self._asked = asked
        self.begun: dict[str, Any] | None = None
        self.entries: list[Entry] = []
        if resume:
            self._read(asked)
        self.has_trials = bool(self.entries)

    def begin(self, begun: dict[str, Any]) -> None:
        """Start the file, over an earlier one, unless it is gone on with."""
        if self.begun is None:
            self._write("w", self._asked, begun)

    def add(self, entry: Entry) -> None:
        """Write down one more trial."""
        data = dataclasses.asdict(entry.ask), dataclasses.asdict(entry.result), entry.ended_seconds
        self._write("a", data)
        self.has_trials = self._path is not None

    def remove(self) -> None:
        """The sweep came to its end."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write(self, mode: str, *lines: Any) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode, encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError:  # a sweep that cannot be gone on with is still a sweep
            self._path = None

    def _read(self, asked: dict[str, Any]) -> None:
        try:
            lines = self._path.read_text(encoding="utf-8").split("\n")[:-1] if self._path else []  # the last may have been cut
            before, begun, *trials = map(json.loads, lines)
            if not (isinstance(before, dict) and isinstance(begun, dict)):
                raise TypeError
            entries = [Entry(_ask(ask), _result(result), 0.0 + ended) for ask, result, ended in trials]
        except (OSError, ValueError, TypeError, KeyError):
            return  # there is none, or what there is was cut too early or is damaged
        other = [f"{name} {before.get(name)!r}, not {value!r}" for name, value in asked.items() if before.get(name) != value]
        if other:
            raise Refusal(f"the interrupted sweep of this drive was made with {'; '.join(other)}: ask for the same, or leave out --resume")
        self.begun, self.entries = begun, entries


def journal_path(identity: str, engine: str) -> Path | None:
    """Where the journal of that drive lies; None where this user has no directory for it. Source: the XDG Base Directory Specification."""
    try:
        return user_directory("XDG_STATE_HOME", ".local/state") / "sweeps" / f"{identity}-{engine}.jsonl"
    except UnsupportedError:
        return None


class Playback:
    """Clock and trials of a search that may have a beginning already: what was measured is told again, at the time that it took, then *measure* goes on.

    As a search asks the same when it is told the same, it goes on as if it had never been interrupted. Where it asks for something else, which it may
    when a limit is met to the microsecond, the rest of the beginning is left out.
    """

    def __init__(self, journal: Journal, measure: Callable[[Ask], Result], clock: Callable[[], float] = time.monotonic) -> None:
        self._journal = journal
        self._left = deque(journal.entries)
        self._measure = measure
        self._clock = clock
        self._told_seconds = 0.0
        self._live_since: float | None = None if self._left else clock()

    def clock(self) -> float:
        """Seconds that the search has gone on."""
        return self._told_seconds + (0.0 if self._live_since is None else self._clock() - self._live_since)

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


def _ask(data: dict[str, Any]) -> Ask:
    return require_schema(Ask(**{**data, "setting": Setting(**data["setting"])}))


def _result(data: dict[str, Any]) -> Result:
    return require_schema(Result(**{**data, "samples": tuple((seconds, count) for seconds, count in data["samples"])}))
