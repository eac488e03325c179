"""The worker processes of a comparison: start them, send them tasks, end them when they hang."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from nvme_offload.errors import OffloadError, UnsupportedError

_ROOT = Path(__file__).parents[2]
_PREPARE_SECONDS = 600.0  # a compiler may run
_FAREWELL_SECONDS = 5.0


class SideFailed(OffloadError):
    """A side did not complete its task; the message says why."""


class Team:
    """Worker processes by name; each runs one task at a time.

    Lifetime: `close`, or the end of the `with` block, ends them and their children.
    """

    def __init__(self, directory: Path, direct: bool, timeout_seconds: float) -> None:
        self._arguments = [str(directory), "direct" if direct else "buffered"]
        self._timeout_seconds = timeout_seconds
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, worker: str, asked: dict[str, Any]) -> None:
        """Send *worker* a task without waiting for it."""
        process = self._processes.get(worker)
        if process is None:
            command = [sys.executable, "-m", "sweeps.compare.worker", *self._arguments]
            # A separate session, so that killpg also ends its children and Ctrl-C reaches only the
            # command. Unbuffered, so that unread answers stay in the pipe, where `_line` polls.
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=_ROOT,
                start_new_session=True,
            )
            self._processes[worker] = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` reports that the process ended
            process.stdin.write(json.dumps(asked).encode() + b"\n")

    def answer(self, worker: str, timeout_seconds: float | None = None) -> dict[str, Any]:
        """The answer of *worker* to its first unanswered task.

        Raises: UnsupportedError where this machine lacks something the side needs; SideFailed where
        the side fails, ends or takes too long. After the last two, the next task gets a new process.
        """
        process = self._processes.get(worker)
        if process is None:
            raise SideFailed("the process that it shares with another side has ended")
        line = self._line(process, time.monotonic() + (timeout_seconds or self._timeout_seconds))
        if line is None:
            self._end(worker)
            raise SideFailed(f"no answer within {timeout_seconds or self._timeout_seconds:.0f} s")
        if not line:
            code = process.wait()
            self._end(worker)
            raise SideFailed(
                f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "unsupported" in answer:
            raise UnsupportedError(answer["unsupported"])
        if "failed" in answer:
            raise SideFailed(answer["failed"])
        return answer

    def ask(self, worker: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Send *worker* a task and wait for the answer. Raises: as `answer`."""
        self.start(worker, asked)
        return self.answer(worker)

    def prepared(self, worker: str) -> dict[str, Any]:
        """As `answer`, with time for a compiler."""
        return self.answer(worker, _PREPARE_SECONDS)

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """The next line; empty at the end of the stream, None after *deadline*."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
        return process.stdout.readline()  # a worker writes whole lines

    def _end(self, worker: str) -> None:
        process = self._processes.pop(worker)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(0 if process.poll() is not None else _FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """End every worker."""
        for process in self._processes.values():
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for worker in list(self._processes):
            self._end(worker)

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
