"""A side in a separate process: start it with a job, receive its events, monitor it, and end it
after a time limit. In that process, `event_sender` returns the function that reports events.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from .command import stop_at_sigterm

ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 15
_NOISE = ("Exception ignored", "[W", "[E", "  ", "Traceback")
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before each line of a traceback

Event = dict[str, Any]


def run(
    module: str,
    job: Mapping[str, Any],
    work: Path,
    timeout_seconds: float,
    *,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    on_event: Callable[[Event], object] | None = None,
    poll: Callable[[int], object] | None = None,
) -> tuple[list[Event], str | None]:
    """Run `python -m module JOB.json RANK`, once for each of *ranks*, and wait for all.

    Parameters
    ----------
    job
        Written to `job.json` in the directory *work*, next to the log.
    environment
        Variables in addition to the environment, RANK and LOCAL_RANK.
    on_event
        Called with each event of the first rank, in another thread.
    poll
        Called with the number of the first process, every 50 ms while it runs.

    Returns
    -------
    tuple
        The events of the first rank, and why it did not finish, or None.
    """
    (work / "job.json").write_text(json.dumps(job))
    events: list[Event] = []
    command = [sys.executable, "-m", module, str(work / "job.json")]
    with (work / "log").open("w+") as log:
        sides = [
            subprocess.Popen(
                [*command, str(rank)],
                cwd=ROOT,
                env=_environment(rank, environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log if rank else subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]
        listener = threading.Thread(target=_listen, args=(sides[0].stdout, events, on_event))
        listener.start()
        deadline, ended = time.monotonic() + timeout_seconds, False
        try:
            while not ended and time.monotonic() < deadline:
                if poll is not None:
                    poll(sides[0].pid)
                running = next((side for side in sides if side.poll() is None), sides[0])
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(_POLL_SECONDS)
                statuses = [side.poll() for side in sides]
                ended = None not in statuses or any(statuses)  # a failed rank ends the others
        finally:
            failed = next((side.returncode for side in sides if side.returncode), 0)
            _end(sides)
            listener.join()
            assert sides[0].stdout is not None
            sides[0].stdout.close()
        if not ended:
            return events, f"not done after {timeout_seconds:g} s"
        return events, _error(failed, log)


@contextlib.contextmanager
def place(name: str, directory: Path) -> Iterator[Path]:
    """A new directory in *directory* for the files of a side; removed at the end of the `with`."""
    with tempfile.TemporaryDirectory(prefix=f"sweeps-{name}-", dir=directory) as made:
        yield Path(made)


def launched(ranks: int = 1) -> dict[str, str]:
    """The environment variables of a launcher with that many ranks, for DeepSpeed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # ninja may exist only next to the interpreter. It goes last: another ninja than the shell finds
    # would recompile everything, since their logs differ by version.
    path = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    return threads(ranks) | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
    }


def threads(ranks: int) -> dict[str, str]:
    """The variable that divides the cores among the threads of several ranks."""
    if ranks == 1:
        return {}
    each = max((os.cpu_count() or 1) // ranks, 1)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(each))}


def of(events: Sequence[Event], kind: str) -> list[Event]:
    """The events of that kind, without their kind."""
    return [
        {key: value for key, value in event.items() if key != "event"}
        for event in events
        if event["event"] == kind
    ]


def event_sender() -> Callable[..., None]:
    """In a side's process: the function that reports an event with its values to the command.

    From here on standard output is the log, for the prints of libraries; SIGTERM raises
    KeyboardInterrupt; and the kernel ends this process first when memory runs out.
    """
    stop_at_sigterm()
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")

    def send(event: str, **values: Any) -> None:
        print(json.dumps({"event": event, **values}), file=events)

    return send


def last_error(log: str) -> str:
    """The error in *log*: the exception of the last traceback, or the last line outside of
    tracebacks.
    """
    lines = [line for line in (_RANK.sub("", line) for line in log.splitlines()) if line.strip()]
    tracebacks = [index for index, line in enumerate(lines) if line.startswith("Traceback")]
    after = lines[tracebacks[-1] + 1 :] if tracebacks else []
    said = next((line for line in after if not line.startswith(" ")), None)
    if said is None:
        said = next(
            (line for line in reversed(lines) if not line.startswith(_NOISE)), "it printed nothing"
        )
    return said.strip()[:300]


def _environment(rank: int, beside: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), **beside}


def _listen(
    stream: TextIO, events: list[Event], on_event: Callable[[Event], object] | None
) -> None:
    for line in stream:
        try:
            events.append(json.loads(line))
        except ValueError:  # cut short by the end of the process
            return
        if on_event is not None:
            on_event(events[-1])


def _end(sides: Sequence[subprocess.Popen[str]]) -> None:
    """End the running processes, first by SIGTERM: a process that is compiling an extension would
    otherwise leave a lock file for which later builds wait forever.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [side for side in sides if side.poll() is None]
        for side in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(side.pid, number)
        for side in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                side.wait(_PATIENCE_SECONDS)


def _error(status: int, log: TextIO) -> str | None:
    if status == 0:
        return None
    if status == -signal.SIGKILL:
        return "killed by SIGKILL, as the kernel does when memory runs out"
    log.seek(0)
    text = log.read()
    sys.stderr.write(text[-6000:])
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"{last_error(text)} ({how})"
