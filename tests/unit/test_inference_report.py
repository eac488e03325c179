"""The report of `python -m sweeps.inference`, from the events of runs."""

from __future__ import annotations

from sweeps.floor import Speeds
from sweeps.inference import SIDES, Results, render


def run(side, number, seconds, logits="a", error=None):
    """The events of a run in which one token counts, or none with an *error*."""
    events = [{"event": "made", "taken": {"seconds": 2.0}, "over_bytes": 3e8}]
    last = SIDES[side].settling
    for token in range(last if error else last + 1):
        taken = {"seconds": seconds if token == last else 50.0, "read_bytes": 8e9}
        events.append(
            {"event": "token", "number": token, "taken": taken, "logits": logits, "gpu_bytes": 1e9}
        )
    drive = Speeds(5e9, 5e9, 2.5e9, 2.5e9)
    return {"side": side, "round": number, "error": error, "drive": drive, "events": events}


def report(*runs):
    """The row of each side in the report, by heading, and the whole text."""
    text = render(Results({}, {"model": "tiny"}, 4 * 10**9, list(runs), ["A note."]))
    head, _, *rows = [
        line.strip("| ").split(" | ") for line in text.split("\n") if line.startswith("|")
    ]
    return [dict(zip(["", *head], row, strict=False)) for row in rows], text


def test_a_row_has_the_ratio_within_each_round_and_the_speed_of_loading():
    (ours, others), text = report(
        run("offload", 0, 2.0),
        run("accelerate", 0, 6.0),
        run("accelerate", 1, 4.0),
        run("offload", 1, 4.0),
    )
    assert ours["s a token"] == "3.000"
    assert ours["floor / time"] == "0.60"  # 8 GB at 5 GB/s take 1.6 s, of 2 and of 4 s
    assert ours["loaded, GB/s"] == "2.00"
    assert ours["peak of memory in loading beyond the budget, GB"] == "0.30"
    assert others["time over offload"] == "2.00 [1.00 to 3.00]"
    assert "equal bit for bit in all runs" in text
    assert "A note." in text


def test_other_logits_and_a_failed_side_are_reported():
    (_, failed), text = report(
        run("accelerate", 0, 2.0),
        run("accelerate", 1, 2.0, logits="b"),
        run("offload", 0, 1.0, error="out | of memory"),
    )
    assert "The logits of the first 2 tokens are not equal." in text
    assert failed["tokens that count"] == "0"
    assert not failed.get("s a token")
    assert "- Offload: streamed parameters: out \\| of memory" in text
