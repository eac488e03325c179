from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner

from sweeps.formats.__main__ import main
from sweeps.formats.report import Results, render, smoothed, verdict
from sweeps.formats.stress import Stressed
from sweeps.formats.text import read_text
from sweeps.formats.trainer import Trained


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small here, and where cores are busy threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def results(compact: list[float]) -> Results:
    exact = [2.00, 2.02, 1.98]
    finals = {"exact": exact, "compact": compact}
    runs = [
        Trained(name, seed, 1000, 12000, [5.0, final], final)
        for name, losses in finals.items()
        for seed, final in enumerate(losses)
    ]
    return Results({"date": "today"}, "a text", runs, [])


@pytest.mark.parametrize(
    ("compact", "within"),
    [([2.09, 1.98, 1.96], True), ([2.03, 2.03, 2.03], False), ([1.9, 1.95, 2.0], False)],
)
def test_the_mean_may_be_none_that_no_seed_makes(compact, within):
    found = verdict(results(compact), "compact")
    assert found.exact == [2.00, 2.02, 1.98]
    assert found.mean == pytest.approx(sum(compact) / 3 - 2)
    assert found.within is within
    assert (": within the seeds'" in render(results(compact), None)) is within


def test_the_mean_of_differences_is_given_with_its_standard_error():
    # of 0.01, 0.03 and 0.02
    assert "differs by +0.0200 ± 0.0058 in the mean" in render(results([2.01, 2.05, 2.00]), None)
    assert "+0.0200 ± inf" in render(
        dataclasses.replace(
            results([2.02]), trained=[run for run in results([2.02]).trained if run.seed == 0]
        ),
        None,
    )


def test_the_report_names_what_went_out_of_bounds():
    good = Stressed("1e6", "exact", 1.2, True, 8.0)
    made = dataclasses.replace(
        results([2.0] * 3),
        stressed=[good, dataclasses.replace(good, format="compact", largest_step=9.0)],
    )
    report = render(made, "curves.png")
    assert "FAILED: compact, 1e6" in report
    assert "| 1e6 | compact | 9.000 | yes | NO |" in report
    assert (
        "| compact | 12.000 | 2.0000 | 2.0000 | 2.0000 | 2.0000 | 0.0000 | +0.0000 ± 0.0115 |"
        in report
    )
    assert "(curves.png)" in report
    assert not dataclasses.replace(good, finite=False).held


def test_losses_are_smoothed_by_their_means():
    assert smoothed([1.0, 3.0, 5.0, 7.0, 100.0], 2) == [2, 6, 100]


def test_the_text_is_the_same_every_time_and_its_parts_share_no_file():
    first, held_out, what = read_text(300_000)
    again, held_again, _ = read_text(300_000)
    assert torch.equal(first, again)
    assert torch.equal(held_out, held_again)
    assert "standard library" in what
    assert first.numel() + held_out.numel() >= 300_000
    assert bytes(held_out[:4000].tolist()) not in bytes(first.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_the_command_trains_and_writes_its_report(tmp_path, at_once):
    options = f"--at-once {at_once} --layers 1 --width 16 --heads 2 --context 8 --batch 2 --steps 3 --seeds 2 --device cpu --text-megabytes 0.2 --no-stress"
    called = CliRunner().invoke(
        main,
        [
            *options.split(),
            "--formats",
            "exact,split,compact24",
            "--output",
            str(tmp_path / "new" / "formats"),
        ],
        catch_exceptions=False,
    )
    assert called.exit_code == 0
    assert "| split | 10." in called.output
    assert "| compact24 | 3." in called.output
    written = json.loads((tmp_path / "new" / "formats.json").read_text())
    assert [(run["format"], run["seed"], len(run["losses"])) for run in written["trained"]] == [
        (name, seed, 3) for seed in (0, 1) for name in ("exact", "split", "compact24")
    ]
    assert "formats.png" in (tmp_path / "new" / "formats.md").read_text()
    assert (tmp_path / "new" / "formats.png").read_bytes().startswith(b"\x89PNG")
    again = [
        "--again",
        str(tmp_path / "new" / "formats.json"),
        "--output",
        str(tmp_path / "formats"),
    ]
    assert CliRunner().invoke(main, again, catch_exceptions=False).stdout == called.stdout
    assert json.loads((tmp_path / "formats.json").read_text()) == written


@pytest.mark.parametrize(
    ("options", "message"),
    [("--formats exact,fast", "'fast' is none of"), ("--width 100 --heads 3", "not a multiple")],
)
def test_what_cannot_be_trained_is_refused(options, message):
    called = CliRunner().invoke(main, options.split())
    assert called.exit_code == 2
    assert message in called.output
