"""The common harness of the benchmarks: the order of rounds, their end, and sides in separate processes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from sweeps import apart, report, turns

SENDS = "from sweeps.apart import event_sender; send = event_sender(); print('to the log'); send('step', number=1)"


@pytest.fixture
def side(tmp_path: Path):
    """Runs a module with this text; returns its events, and why it failed."""

    def run(text: str, timeout_seconds: float = 300, ranks: int = 1):
        (tmp_path / "its_side.py").write_text(text)
        environment = {"PYTHONPATH": f"{tmp_path}:{apart.ROOT}"}
        job = {"steps": 1}
        return apart.run(
            "its_side", job, tmp_path, timeout_seconds, ranks=ranks, environment=environment
        )

    return run


def test_the_order_of_sides_changes_with_the_round():
    assert [turns.there_and_back("abc", number) for number in (0, 1, 2)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_no_round_begins_that_would_end_too_late(monkeypatch):
    clock = iter([0.0, 4.0, 4.0, 8.0, 8.0])  # begin and end of each round
    monkeypatch.setattr(turns, "BEGAN", 0.0)
    monkeypatch.setattr(turns.time, "monotonic", lambda: next(clock))
    notes: list[str] = []
    assert list(turns.rounds(5, 10.0, notes)) == [0, 1]
    assert notes == ["2 of 5 rounds fitted into the given time."]


def test_an_interrupt_is_noted_and_an_error_is_not_held_back():
    facts, notes = {}, ["Shared."]
    with turns.interruptible(facts, notes):
        raise KeyboardInterrupt
    assert notes == ["Interrupted: not all rounds ran.", "Shared."]
    assert "took" in facts
    with pytest.raises(OSError, match="full"), turns.interruptible(facts, notes):
        raise OSError("full")


def test_a_side_sends_its_events(side):
    assert side(SENDS) == ([{"event": "step", "number": 1}], None)


def test_events_before_a_failure_are_kept_with_the_reason(side):
    events, error = side(f"{SENDS}; raise ValueError('no room')")
    assert events == [{"event": "step", "number": 1}]
    assert error == "ValueError: no room (exit status 1)"
    _, error = side("import os; os.kill(os.getpid(), 9)")
    assert error == "killed by SIGKILL, as the kernel does when memory runs out"


def test_a_side_that_hangs_is_ended(side):
    events, error = side("import signal; signal.pause()", timeout_seconds=0.5)
    assert (events, error) == ([], "not done after 0.5 s")


def test_a_rank_that_fails_ends_the_others(side):
    _, error = side(
        "import sys, signal; sys.exit(3) if sys.argv[2] == '1' else signal.pause()", 300, 2
    )
    assert error == "it printed nothing (exit status 3)"


def test_ratios_are_of_rounds_that_have_both():
    mine, others = pd.Series({0: 1.0, 1: 6.0, 3: 9.0}), pd.Series({0: 2.0, 1: 2.0, 2: 1.0})
    assert report.spread(report.ratios(mine, others)) == (0.5, 1.75, 3.0)
    assert report.shown(report.ratios(mine, pd.Series(dtype=float))) == ""


def test_columns_with_headings_alike_are_both_there():
    text = report.columns([3], {"n": str, "ratio": lambda n: n / 2, "ratio ": lambda n: n / 4})
    assert text == "| n | ratio | ratio |\n| --- | --- | --- |\n| 3 | 1.5 | 0.75 |"
