"""`python -m sweeps.formats`: its text, its trainings, and its report."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from click.testing import CliRunner

from sweeps import apart
from sweeps.formats import Recipe, main, read_text, render, train


def report(compact: list[float]) -> str:
    finals = {"exact": [2.00, 2.02, 1.98][: len(compact)], "compact": compact}
    runs = [
        {"format": name, "seed": seed, "error": None, "validation": final}
        for name, losses in finals.items()
        for seed, final in enumerate(losses)
    ]
    failed = {"format": "split", "seed": 0, "error": "OSError: full"}
    return render({"date": "today"}, [*runs, failed])


@pytest.mark.parametrize(
    ("compact", "within"),
    [([2.09, 1.98, 1.96], True), ([2.03, 2.03, 2.03], False), ([1.9, 1.95, 2.0], False)],
)
def test_a_mean_outside_the_range_of_the_seeds_of_exact_is_reported(compact, within):
    assert ("mean loss is within" in report(compact)) is within
    assert ("mean loss is NOT within" in report(compact)) is not within


def test_the_mean_of_differences_has_its_standard_error():
    # of 0.01, 0.03 and 0.02
    row = "| compact | 4.008 | 2.0100 | 2.0500 | 2.0000 | 2.0200 | 0.0500 | +0.0200 ± 0.0058 |"
    assert row in report([2.01, 2.05, 2.00])
    assert "+0.0200 ± nan" in report([2.02])
    assert "\n- split, seed 0: OSError: full\n" in report([2.02])


def test_the_text_is_the_same_every_time_and_its_parts_share_no_file():
    first, held_out, what = read_text(300_000)
    again, held_again, _ = read_text(300_000)
    assert torch.equal(first, again)
    assert torch.equal(held_out, held_again)
    assert "standard library" in what
    assert first.numel() + held_out.numel() >= 300_000
    assert bytes(held_out[:4000].tolist()) not in bytes(first.tolist())


@pytest.mark.slow
def test_the_command_trains_and_writes_its_report(tmp_path, monkeypatch):
    """One of the trainings in its process, and the others in this one."""
    (drive := tmp_path / "drive").mkdir()
    apart_run, alone = apart.run, threading.Lock()

    def run(module, job, work, timeout):
        if (job["state_format"], job["seed"]) == ("compact24", 1):
            return apart_run(module, job, work, timeout)
        with alone:
            recipe = Recipe(**job["recipe"])
            given = {key: value for key, value in job.items() if key != "recipe"}
            return [{"event": "trained", **train(work, recipe, **given)}], None

    monkeypatch.setattr(apart, "run", run)
    options = "--at-once 2 --layers 1 --width 16 --heads 2 --context 8 --batch 2 --steps 3 --seeds 2 --device cpu --text-megabytes 0.2"
    arguments = [str(drive), *options.split(), "--formats", "exact,compact24"]
    output = tmp_path / "new" / "formats"
    called = CliRunner().invoke(main, [*arguments, "--output", str(output)], catch_exceptions=False)
    assert called.exit_code == 0
    assert "| compact24 | 3." in called.output
    written = json.loads(output.with_suffix(".json").read_text())
    assert [(run["format"], run["seed"], len(run["losses"])) for run in written["trained"]] == [
        (name, seed, 3) for seed in (0, 1) for name in ("exact", "compact24")
    ]
    assert output.with_suffix(".md").read_text() in called.output
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [("--formats exact,fast", "'fast' is none of"), ("--width 100 --heads 3", "not a multiple")],
)
def test_a_training_that_is_impossible_is_refused(tmp_path, options, message):
    called = CliRunner().invoke(main, [str(tmp_path), *options.split()])
    assert called.exit_code == 2
    assert message in called.output
