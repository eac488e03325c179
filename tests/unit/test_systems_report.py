"""The report of `python -m sweeps.systems`, from the events of runs."""

from __future__ import annotations

from sweeps.floor import Speeds
from sweeps.system_steps import SYSTEMS
from sweeps.systems import Results, render


def run(system, number, seconds, moved=(0, 0), error=None, drive=None):
    """The events of a run of three steps, of which one counts, and the drive's speeds."""
    events = [{"event": "made", "seconds": 7.0}]
    for step in range(3):
        taken = {
            "seconds": seconds if step == 2 else 50.0,
            "cpu_seconds": 1.5,
            "disk_read_bytes": moved[0],
            "disk_written_bytes": moved[1],
            "disk_busy_seconds": 0.5 * seconds,
            "disk_request_seconds": 6 * seconds,
        }
        events.append(
            {"event": "step", "number": step, "loss": 9.0 - step, "gpu_bytes": 4e9, "taken": taken}
        )
    events = events[: 2 if error else None]
    found = {"system": system, "round": number, "error": error, "drive": drive}
    return {**found, "host_bytes": 3e9, "events": events}


def cells(found):
    """The cells of the report, by system and heading."""
    options = {"model": "tiny", "gpus": 1, "batch": 2, "sequence": 1000}
    text = render(Results({}, options, 10**9, found, ["A note."]))
    head, _, *rows = [
        line.strip("| ").split(" | ") for line in text.split("\n") if line.startswith("|")
    ]
    assert "A note." in text
    titles = {one.title: name for name, one in SYSTEMS.items()}
    return {titles[row[0]]: dict(zip(["", *head], row, strict=False)) for row in rows}, text


def test_a_row_has_the_drives_floor_and_the_ratio_within_each_round():
    speeds = Speeds(read=4e9, write=4e9, mixed_read=2.5e9, mixed_write=2.5e9)
    slower = Speeds(read=4e9, write=1e9, mixed_read=4e9, mixed_write=1e9)
    found = [
        run("zero-infinity", 0, 4.0, (4e9, 8e9), drive=speeds),
        run("zero3", 0, 2.0, drive=speeds),
        run("zero3", 1, 3.0, drive=slower),
        run("zero-infinity", 1, 12.0, (4e9, 8e9), drive=slower),
    ]
    rows, _ = cells(found)
    # 8 GB take 1.6 s concurrently and 4 GB 1 s alone, of 4 s; writing 8 GB takes 8 of 12 s
    assert rows["zero-infinity"]["floor / time"] == "0.66"
    assert rows["zero-infinity"]["s a step"] == "8.00"
    assert rows["zero-infinity"]["drive busy, requests in flight"] == "0.50, 6.0"
    assert rows["zero3"]["floor / time"] == ""
    assert rows["zero3"]["over zero-infinity"] == "0.38 [0.25 to 0.50]"
    assert rows["zero3"]["tokens a second"] == "800"
    rows, _ = cells([{**one, "drive": None} for one in found])
    assert rows["zero-infinity"]["floor / time"] == ""


def test_a_system_that_ended_before_a_step_that_counts_has_a_reason_and_no_figures():
    rows, text = cells([run("zero3", 0, 2.0, error="out | of memory"), run("exact", 0, 2.0)])
    assert rows["zero3"]["steps that count"] == "0"
    assert rows["exact"]["over zero3"] == ""
    assert rows["exact"]["s a step"] == "2.00"
    assert "updates" not in text
    assert '- ZeRO-3 with nvme_offload, "compact": out \\| of memory' in text


def test_an_interrupt_before_the_first_run_leaves_an_empty_table():
    text = render(Results({}, {"model": "7b", "gpus": 1, "batch": 4, "sequence": 8}, 7, [], []))
    assert text.startswith("# 7b by each system\n")
