from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvme_offload.errors import UsageError
from sweeps.apart import last_error
from sweeps.floor import Beside, Speeds, floor_seconds
from sweeps.training.plan import Plan, read_plan
from sweeps.training.report import Results, render, unequal
from sweeps.training.runs import Run, assemble

PLANS = sorted((Path(__file__).parents[2] / "sweeps" / "plans").glob("training*.toml"))

PLAN = """
steps = 3
settling_steps = 1
rounds = 2
fio_bytes = "1GiB"
timeout_seconds = 60
baseline = "stock"
model = { hidden = 16, blocks = 2 }

[ds_config]
bf16 = { enabled = true }
zero_optimization = { stage = 3 }
aio = { queue_depth = 4 }

[[variant]]
name = "stock"
title = "DeepSpeed"
ds_config.zero_optimization.offload_optimizer = { device = "nvme", buffer_count = 14 }

[[variant]]
name = "mine"
title = "ours"
ours = true
ds_config.zero_optimization.offload_optimizer = { device = "nvme" }
ds_config.nvme_offload.host_memory = "1GB"

[[variant]]
name = "none"
title = "no offload"
bits = ""
"""


def plan_of(directory: Path, text: str = PLAN) -> Plan:
    path = directory / "plan.toml"
    path.write_text(text)
    return read_plan(path)


def run(
    variant: str,
    number: int,
    optimizer: float,
    losses: tuple[str, ...] = ("0x1.8p+0", "0x1.4p+0", "0x1.2p+0"),
    error: str | None = None,
) -> Run:
    """Three steps, of which the first takes ten times as long; 1 GB each way in the optimizer."""
    events: list[dict[str, Any]] = []
    clock = 100.0

    def phase(name: str, step: int | None, seconds: float, peak: int, moved: int = 0) -> None:
        nonlocal clock
        figures = {
            "cpu_seconds": 0.5,
            "read_bytes": moved,
            "written_bytes": moved,
            "peak_bytes": peak,
        }
        events.append(
            {
                "event": "phase",
                "name": name,
                "step": step,
                "began": clock,
                "ended": clock + seconds,
                **figures,
            }
        )
        clock += seconds

    phase("init", None, 5.0, 9_000_000_000)
    for step, loss in enumerate(losses):
        slow = 10.0 if step == 0 else 1.0
        phase("forward", step, 0.1 * slow, 1_000_000_000)
        phase("backward", step, 0.5 * slow, 2_000_000_000)
        phase("optimizer", step, optimizer * slow, 3_000_000_000, 10**9)
        events.append({"event": "step", "number": step, "loss": loss, "ended": clock})
    if error is None:
        events.append({"event": "done", "versions": ["torch 2"]})
        events.append({"event": "weights", "digest": "00ff"})
    made = assemble(variant, number, error, events)
    made.drive = Speeds(1.5e9, 1.5e9, 1e9, 1e9)
    return made


def results(directory: Path, runs: list[Run]) -> Results:
    return Results(
        {"kernel": "Linux 6"},
        plan_of(directory),
        runs,
        [Speeds(1.5e9, 1.5e9, 1e9, 1e9)],
        ["Shared machine."],
    )


def test_a_variant_is_the_common_configuration_and_what_it_says_otherwise(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    config = plan.named("mine").ds_config_at("/drive")
    assert config == {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/drive"},
        },
        "aio": {"queue_depth": 4},
        "nvme_offload": {"host_memory": "1GB"},
    }
    assert [variant.drives for variant in plan.variants] == [True, True, False]
    # the plan stays as it was
    assert "nvme_path" not in plan.named("mine").ds_config["zero_optimization"]["offload_optimizer"]
    assert (plan.aio.block_size, plan.aio.queue_depth) == (1 << 20, 4)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (PLAN.replace("steps = 3", "step = 3", 1), "'step' is none of"),
        (PLAN.replace("settling_steps = 1", "settling_steps = 3"), "settling"),
        (PLAN.replace('baseline = "stock"', 'baseline = "base"'), "'base' is none of"),
        (PLAN.replace('title = "ours"', ""), "title"),
        (PLAN.replace('name = "none"', 'name = "mine"'), "same name"),
        (PLAN.replace("hidden", "hid"), "hid"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_reason(tmp_path: Path, broken: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_of(tmp_path, broken)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_that_come_with_it_can_be_read(path: Path) -> None:
    plan = read_plan(path)
    assert plan.named(plan.baseline).drives


def test_a_plan_narrowed_keeps_what_is_left_whole(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan.narrowed(None) == plan
    narrow = plan.narrowed(["mine"], rounds=7, steps=1)
    assert (narrow.rounds, narrow.steps, narrow.settling_steps) == (7, 1, 0)
    assert ([variant.name for variant in narrow.variants], narrow.baseline) == (["mine"], "mine")
    with pytest.raises(UsageError, match="'other' is none of"):
        plan.narrowed(["other"])


def test_measures_of_a_run() -> None:
    found = run("mine", 0, 1.25)
    figures = found.figures(1)
    assert figures["optimizer"] == pytest.approx(1.25)
    assert figures["update"] == pytest.approx(1.75)
    assert figures["step"] == pytest.approx(1.85)
    assert figures["peak"] == 9_000_000_000
    assert found.moved(("forward", "optimizer"), 1) == (10**9, 10**9)
    assert figures["optimizer_floor"] == pytest.approx(0.8)
    assert math.isnan(figures["forward_floor"])  # nothing was moved


def test_a_run_that_failed_has_no_figures_that_it_did_not_come_to() -> None:
    found = run("stock", 0, 1.0, losses=(), error="RuntimeError: buffers")
    figures = found.figures(1)
    for name in ("optimizer", "update", "step", "peak"):
        assert math.isnan(figures[name])
    assert found.peak_bytes() == 9_000_000_000


def test_the_floor_is_the_fastest_way() -> None:
    drive = Speeds(2.0, 4.0, 1.0, 2.0)
    assert floor_seconds(12, 0, drive) == 6
    assert floor_seconds(0, 12, drive) == 3
    assert floor_seconds(12, 12, drive) == 9  # 6 concurrently, and half of the reads alone
    assert floor_seconds(6, 12, Speeds(2.0, 4.0, 2.0, 1.0)) == 5.25
    # one direction after the other
    assert floor_seconds(12, 12, Speeds(2.0, 4.0, 0.5, 0.5)) == 9


def test_a_run_has_the_mean_speed_before_and_after_it() -> None:
    measured = [Speeds(float(each), 1.0, 1.0, 1.0) for each in (2, 4, 8)]
    drive: Any = SimpleNamespace(measure=iter(measured).__next__)
    speeds: list[Speeds] = []
    beside = Beside(drive, speeds)
    beside.begin()
    assert [beside.end(), beside.end()] == [Speeds(3.0, 1.0, 1.0, 1.0), Speeds(6.0, 1.0, 1.0, 1.0)]
    assert speeds == measured
    without = Beside(None, speeds)
    without.begin()
    assert without.end() is None


def test_unequal_losses_or_weights_are_named(tmp_path: Path) -> None:
    equal = [run("stock", 0, 1.0), run("mine", 0, 1.0), run("none", 0, 1.0, losses=("0x0p+0",) * 3)]
    assert unequal(results(tmp_path, equal)) == []
    assert "are equal bit for bit: DeepSpeed, ours." in render(results(tmp_path, equal))
    other = run("mine", 1, 1.0, losses=("0x1.8p+0", "0x1.4p+0", "0x1.3p+0"))
    assert unequal(results(tmp_path, [*equal, other])) == ["mine"]
    weights = dataclasses.replace(run("mine", 1, 1.0), weights="0000")
    assert unequal(results(tmp_path, [*equal, weights])) == ["mine"]
    assert "**Losses or weights differ**" in render(results(tmp_path, [*equal, weights]))


def test_failures_are_reported_and_the_rest_stands(tmp_path: Path) -> None:
    failed = run("stock", 0, 1.0, losses=("0x1.8p+0",), error="RuntimeError: a | b (exit status 1)")
    shown = results(tmp_path, [failed, run("mine", 0, 1.0)])
    text = render(shown)
    assert "| DeepSpeed | after 1 step | 9.00 | RuntimeError: a \\| b (exit status 1) |" in text
    assert unequal(shown) == []


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            'loading\nTraceback (most recent call last):\n  File "x", line 1\n    f()\nRuntimeError: no room\nException ignored in: <f>\n',
            "RuntimeError: no room",
        ),
        (
            '[rank0]: Traceback (most recent call last):\n[rank0]:   File "x"\n[rank0]:     f()\n[rank0]: AssertionError: no buffers\n',
            "AssertionError: no buffers",
        ),
        ("loading\nfree(): invalid pointer\n", "free(): invalid pointer"),
        ("", "it printed nothing"),
    ],
)
def test_last_words(log: str, said: str) -> None:
    assert last_error(log) == said
