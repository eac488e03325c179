from __future__ import annotations

import dataclasses
import functools
import json
import sys

import pytest
import torch
from click.testing import CliRunner

from sweeps.formats import quality
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


def test_bfloat16_copies_are_trained_and_give_their_values():
    def make(options, params):
        return torch.optim.AdamW(params, **options)

    start = torch.randn(50, generator=torch.Generator().manual_seed(0))
    seen, alone = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.bfloat16())
    idle = torch.nn.Parameter(start.clone())
    options = {"lr": 0.1}
    optimizer, reference = quality.in_bfloat16(make, options, [seen, idle]), make(options, [alone])
    for step in range(3):
        assert torch.equal(seen, alone.float())
        gradient = torch.randn(50, generator=torch.Generator().manual_seed(step + 1))
        seen.grad, alone.grad = gradient, gradient.bfloat16()
        optimizer.step()
        reference.step()
        assert seen.grad is None
    assert torch.equal(seen, alone.float())
    assert not torch.equal(alone, start.bfloat16())
    assert torch.equal(idle, start.bfloat16().float())


def test_the_quality_of_compact24_is_measured_on_bfloat16_weights(tmp_path, monkeypatch):
    names = {"float32": set(), "bfloat16": set()}
    made = quality.ours

    def noted(name, directory, kind, options, params):
        names[str(params[0].dtype).removeprefix("torch.")].add(name)
        return made(name, directory, kind, options, params)

    monkeypatch.setattr(quality, "ours", noted)
    report = tmp_path / "report.md"
    arguments = [str(tmp_path), "--bfloat16", "--only", "decay to", "--output", str(report)]
    monkeypatch.setattr(sys, "argv", ["quality", *arguments])
    quality.main()
    assert names == {"float32": set(), "bfloat16": {"exact", "compact", "compact24"}}
    head, _, row = report.read_text().splitlines()[-3:]
    assert head == "| case | seeds | exact, loss | compact | compact24 |"
    case, seeds, loss, *multiples = row.strip("| ").split(" | ")
    assert (case, seeds) == ("regression, AdamW, decay to zero", "1")
    assert 0 < float(loss) < 10
    assert all(0.9 < float(multiple) < quality.LIMIT for multiple in multiples)
    assert "with float32 weights compact24 equals compact" in report.read_text()


def test_the_case_of_small_steps_tells_masters_of_24_bits_from_none(tmp_path):
    [case] = [case for case in quality.cases() if case.name.endswith("steps of 1e-5")]

    def loss(name, **more):
        make = functools.partial(quality.ours, name, str(tmp_path), case.kind)

        def of(params):
            return quality.in_bfloat16(make, {**case.options, **more}, params)

        return quality.regression(of, 0, steps=1000, near=True)

    whole = loss("exact")
    assert whole < 0.8 * loss("exact", masters=False)
    assert loss("compact24") == pytest.approx(whole, rel=0.05)


def test_multiples_of_exacts_loss():
    assert quality.multiple([3.0], [2.0]) == "1.500"
    # differences of 1 and 3, whose mean has a standard error of 1
    assert quality.multiple([3.0, 7.0], [2.0, 4.0]) == "1.667 ± 0.333"
    assert quality.multiple([3.0, float("nan")], [2.0, 4.0]) == "nan"
    assert quality.multiple("UsageError", [2.0]) == "UsageError"
