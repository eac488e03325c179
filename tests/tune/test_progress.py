from __future__ import annotations

import io
import os

import pytest

from nvme_offload.hardware.profile import Setting
from nvme_offload.tune import progress
from nvme_offload.tune.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return clock


def test_plain_lines_come_with_a_new_topic_or_after_a_while(now: list[float]) -> None:
    stream = io.StringIO()
    shown = Progress(stream)
    for second in range(12):
        now[0] = second
        shown.show("screen" if second < 8 else "final", f"at {second}")
    shown.clear()
    shown.say("done")
    assert stream.getvalue().splitlines() == ["screen: at 0", "screen: at 5", "final: at 8", "done"]


def test_a_terminal_gets_one_line_that_changes(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    shown = Progress(stream)
    shown.show("screen", "a")
    shown.show("screen", "b" * 50)
    shown.say("done")
    assert stream.getvalue() == "\r\x1b[Kscreen: a\r\x1b[Kscreen: " + "b" * 11 + "\r\x1b[Kdone\n"


@pytest.mark.parametrize("stream", [None, Closed()])
def test_without_a_reader_it_is_silent(stream: Closed | None) -> None:
    shown = Progress(stream)
    shown.show("screen", "a")
    shown.say("done")


def test_a_setting_in_few_words() -> None:
    assert str(Setting(1 << 20, 8, 1)) == "1 MiB x 8"
    assert str(Setting(128 << 10, 32, 4)) == "128 KiB x 32, 4 threads"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_last_line_is_said_in_the_middle_of_another(is_terminal: bool) -> None:
    """As a signal's handler does it, which finds the stream's buffer locked."""
    reader, writer = os.pipe()

    class Interrupted(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def fileno(self) -> int:
            return writer

        def isatty(self) -> bool:
            return is_terminal

        def write(self, data: bytes) -> int:
            shown.say_in_handler("stopped")
            return os.write(writer, data)

    shown = Progress(io.TextIOWrapper(io.BufferedWriter(Interrupted())))
    shown.show("screen", "a")
    shown.say("a line")
    said = os.read(reader, 200).decode()
    if is_terminal:
        assert said.startswith("\r\x1b[Kstopped\n")
    else:
        assert said.startswith("stopped\nscreen: a\n")
    os.close(reader)
    os.close(writer)
    shown.say_in_handler("no handler shows it")
