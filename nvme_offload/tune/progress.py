"""Progress of a sweep: one changing line on a terminal; elsewhere a plain line every few seconds."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from typing import TextIO

from nvme_offload.units import format_change

PLAIN_SECONDS = 5.0  # between two lines that do not go to a terminal
_ERASE = "\r\x1b[K"


class Progress:
    """Writes to *stream*, which may be None or closed at the other end: then it stays silent."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._terminal = stream is not None and stream.isatty()
        self._topic = ""
        self._due = 0.0

    def show(self, topic: str, text: str) -> None:
        """Show the current step."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write(_ERASE + f"{topic}: {text}"[:width])
        elif topic != self._topic or time.monotonic() >= self._due:
            self._topic, self._due = topic, time.monotonic() + PLAIN_SECONDS
            self._write(f"{topic}: {text}\n")

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self.clear()
        self._write(line + "\n")

    def say_in_handler(self, line: str) -> None:
        """As `say`, for a signal handler, which may run in the middle of a write to the stream."""
        with contextlib.suppress(OSError, ValueError):
            if self._stream is not None:
                text = (_ERASE if self._terminal else "") + line + "\n"
                os.write(self._stream.fileno(), text.encode())

    def clear(self) -> None:
        """Remove the changing line."""
        if self._terminal:
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        # a closed stream must not stop the sweep, whose results go to files
        with contextlib.suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()


def change(relative: float, low: float, high: float) -> str:
    """A ratio of two speeds and its interval as a change: "+12 % (+9 to +15 %)"."""
    said = [format_change(value) for value in (relative, low, high)]
    return said[0] + (f" ({said[1].removesuffix(' %')} to {said[2]})" if low != high else "")
