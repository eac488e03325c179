"""Exceptions at any line of the package: Ctrl-C can come between two lines, and memory can run out in
any of them.

`places` lists the lines that a call executes. `raising` raises an exception at one of them. `sample`
chooses some of many. `deadline` ends a call that hangs. Both work with threads that were started
under `watched`.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import nvme_offload

PACKAGE = str(Path(nvme_offload.__file__).parent) + "/"
# Of the times that a line runs in one step: the first, and later ones by which the state is another.
OCCURRENCES = (1, 2, 5)
# Where a thread of the package loops for as long as it lives. Its frame is there already when an
# exception is to be raised.
_LOOPS = ("_work", "_make_jobs")


Found = TypeVar("Found")


class Place(NamedTuple):
    """The *occurrence*th time that a *line* of a *file* of the package is about to run."""

    file: str
    line: int
    occurrence: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}#{self.occurrence}"


class Hang(BaseException):
    """A call has not ended in time. It has the stack."""


class _Tracer:
    """Calls *on_line* before each line of the package, in the threads that it is set in, while it
    is not None. With *file*, only before the lines of that file, which takes less time.
    """

    def __init__(self) -> None:
        self.on_line: Callable[[str, int], None] | None = None
        self.file: str | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        file = code.co_filename[len(PACKAGE) :]
        wanted = self.on_line is not None and self.file in (None, file)
        if not wanted and code.co_name not in _LOOPS:
            return None

        def local(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line" and self.on_line is not None:
                self.on_line(file, frame.f_lineno)
            return local

        return local


_tracer = _Tracer()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Let `places` and `raising` see the threads, too, that are started in the context."""
    before = threading.gettrace()
    threading.settrace(_tracer)
    try:
        yield
    finally:
        threading.settrace(before)  # type: ignore[arg-type]


@contextlib.contextmanager
def _on_line(call: Callable[[str, int], None], file: str | None = None) -> Iterator[None]:
    before = sys.gettrace()
    _tracer.on_line, _tracer.file = call, file
    sys.settrace(_tracer)
    try:
        yield
    finally:
        sys.settrace(before)
        _tracer.on_line = None


def places(
    call: Callable[[], Any], occurrences: Sequence[int] = OCCURRENCES, *, but: Sequence[str] = ()
) -> list[Place]:
    """The lines of the package that *call* executes, but for files that begin with any of *but*."""
    counts: Counter[tuple[str, int]] = Counter()

    def count(file: str, line: int) -> None:
        counts[file, line] += 1

    with _on_line(count):
        call()
    return sorted(
        Place(file, line, occurrence)
        for (file, line), count in counts.items()
        for occurrence in occurrences
        if occurrence <= count and not file.startswith(tuple(but))
    )


def first_place(call: Callable[[], Any]) -> Place:
    """The line of the package that *call* executes first."""
    lines: list[tuple[str, int]] = []
    with _on_line(lambda file, line: lines.append((file, line))):
        call()
    return Place(*lines[0], 1)


class Raising:
    """What `raising` has raised. *where* is the stack then; None if it never came to the place."""

    def __init__(self) -> None:
        self.where: str | None = None


@contextlib.contextmanager
def raising(place: Place, error: BaseException) -> Iterator[Raising]:
    """Raise *error* when *place* is reached, once."""
    raised, count = Raising(), 0

    def look(file: str, line: int) -> None:
        nonlocal count
        if (file, line) == place[:2]:
            count += 1
            if count == place.occurrence:
                _tracer.on_line = None
                raised.where = stack(4)
                raise error

    with _on_line(look, place.file):
        yield raised


def sample(found: Sequence[Found], most: int, first: int = 0) -> Sequence[Found]:
    """At most *most* of those that were *found*, spread evenly, from the *first* on."""
    step = max(-(-len(found) // most), 1)
    return found[first % step :: step]


def each_line(found: Sequence[Place]) -> Sequence[Place]:
    """One place of each line that was *found*; the next line has the next occurrence."""
    lines: dict[tuple[str, int], list[Place]] = {}
    for place in found:
        lines.setdefault(place[:2], []).append(place)
    return [of[number % len(of)] for number, of in enumerate(lines.values())]


def stack(depth: int) -> str:
    """The innermost frames of the package in this thread."""
    frames = [one for one in traceback.extract_stack() if one.filename.startswith(PACKAGE)]
    return innermost(frames, depth)


def innermost(frames: Sequence[traceback.FrameSummary], depth: int) -> str:
    """The *depth* innermost *frames*, the innermost first."""
    return " < ".join(
        f"{frame.filename.removeprefix(PACKAGE)}:{frame.lineno}"
        for frame in frames[: -depth - 1 : -1]
    )


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise `Hang` in the main thread when the context takes longer. A pause of the whole machine
    counts as one second. The message says what all threads did after a tenth of the time, too: a
    drive that other tests keep busy makes progress meanwhile.
    """
    ticks, first = 0, ""

    def tick(*_: Any) -> None:
        nonlocal ticks, first
        ticks += 1
        if ticks == max(seconds // 10, 1):
            first = doing()
        if ticks == seconds:
            now = doing()
            raise Hang(now if now == first else f"{now}; after {seconds // 10} s: {first}")

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def doing() -> str:
    """The innermost frames of this thread and of the others that run the package, and the system
    call that each thread of the process is in, of the engine's too.
    """
    this = threading.get_ident()
    frames = sys._current_frames()
    python = [
        f"{thread.name}: {innermost(traceback.extract_stack(frames[thread.ident]), 12)}"
        for thread in threading.enumerate()
        if thread.ident in frames and thread.ident != this
    ]
    kernel = []
    for task in sorted(Path("/proc/self/task").iterdir()):
        with contextlib.suppress(OSError):  # the thread has ended
            name, call, where = (
                (task / file).read_text().strip() for file in ("comm", "syscall", "wchan")
            )
            kernel.append(f"{name} in system call {call.split()[0]}, {where}")
    return "; ".join([stack(8), *python, *kernel])
