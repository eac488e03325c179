"""The workers of a comparison, seen from the command: started, asked, and ended when they hang."""

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
    """A side did not do what it was asked for; the message says how."""


class Team:
    """Processes by name, each of which does one thing at a time.

    Lifetime: `close`, or the end of the `with` block, ends them and whatever they started.
    """

    def __init__(self, directory: Path, direct: bool, timeout_seconds: float) -> None:
        self._arguments = [str(directory), "direct" if direct else "buffered"]
        self._timeout_seconds = timeout_seconds
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, worker: str, asked: dict[str, Any]) -> None:
        """Give *worker* something to do, without waiting for it."""
        process = self._processes.get(worker)
        if process is None:
            command = [sys.executable, "-m", "sweeps.compare.worker", *self._arguments]
            # A session of its own, so that all it starts can be ended with it and Ctrl-C is for the
            # command alone. Without a buffer here, so that what was not read yet is in the pipe,
            # where `_line` waits for it.
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
        with contextlib.suppress(BrokenPipeError):  # its end is what `answer` tells
            process.stdin.write(json.dumps(asked).encode() + b"\n")

    def answer(self, worker: str, timeout_seconds: float | None = None) -> dict[str, Any]:
        """What *worker* says to what it was given first of all that is not answered.

        Raises: UnsupportedError where the side says that it cannot on this machine; SideFailed
        where it fails, ends or takes too long, after which the worker is a new process.
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
        """Give *worker* something to do and wait for it. Raises: as `answer`."""
        self.start(worker, asked)
        return self.answer(worker)

    def prepared(self, worker: str) -> dict[str, Any]:
        """As `answer`, for something that may take a compiler."""
        return self.answer(worker, _PREPARE_SECONDS)

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """The next line; empty where there is none any more, None where none came in time."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
        return process.stdout.readline()  # an answer is written whole

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
