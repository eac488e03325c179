from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from nvme_offload.errors import UsageError
from sweeps.apart import last_words
from sweeps.floor import Speeds, floor_seconds
from sweeps.meter import Memory, parse_io, parse_status
from sweeps.report import spread
from sweeps.training.plan import Plan, merged, read_plan
from sweeps.training.report import Figures, Results, as_json, reached, render, unequal
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

[[target]]
variant = "mine"
measure = "update"
against = "stock"
most = 0.65

[[target]]
variant = "mine"
measure = "optimizer_floor"
least = 0.9
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
            "after_bytes": peak - 1,
        }
        figures |= {
            "busy_seconds": seconds / 2,
            "planning_seconds": 1e-3 if moved else 0.0,
            "uses": 20 if moved else 0,
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
        events.append(
            {"event": "step", "number": step, "loss": loss, "ended": clock, "stats": None}
        )
    if error is None:
        events.append({"event": "done", "versions": ["torch 2"]})
        events.append({"event": "weights", "digest": "00ff"})
    made = assemble(variant, number, error, events)
    made.drive = Speeds(4e9, 4e9, 2e9)
    return made


def results(directory: Path, runs: list[Run]) -> Results:
    return Results(
        {"kernel": "Linux 6"},
        plan_of(directory),
        runs,
        [Speeds(4e9, 4e9, 2e9)],
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


def test_merged_leaves_both_as_they_were() -> None:
    common, special = {"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}, "c": {"z": 5}}
    assert merged(common, special) == {"a": {"x": 1, "y": 4}, "b": 3, "c": {"z": 5}}
    assert (common, special) == ({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}, "c": {"z": 5}})


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (PLAN.replace("steps = 3", "step = 3", 1), "'step' is none of"),
        (PLAN.replace("settling_steps = 1", "settling_steps = 3"), "settling"),
        (PLAN.replace('baseline = "stock"', 'baseline = "base"'), "'base' is none of"),
        (PLAN.replace('measure = "update"', 'measure = "updates"'), "'updates' is none of"),
        (PLAN.replace("least = 0.9", ""), "either most or least"),
        (PLAN.replace('title = "ours"', ""), "title"),
        (PLAN.replace('name = "none"', 'name = "mine"'), "same name"),
        (PLAN.replace("hidden", "hid"), "hid"),
        (
            PLAN.replace("hidden = 16, blocks = 2", 'name = "gpt2", blocks = 2, hidden = 16'),
            "either hidden and blocks, or a name",
        ),
        (PLAN.replace("blocks = 2", "blocks = 2, width = 8"), "narrow form"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_reason(tmp_path: Path, broken: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_of(tmp_path, broken)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_that_come_with_it_can_be_read(path: Path) -> None:
    plan = read_plan(path)
    assert plan.named(plan.baseline).drives
    assert plan.targets


def test_a_plan_narrowed_keeps_what_is_left_whole(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan.narrowed(None) == plan
    narrow = plan.narrowed(["mine"], rounds=7, steps=1)
    assert (narrow.rounds, narrow.steps, narrow.settling_steps) == (7, 1, 0)
    assert ([variant.name for variant in narrow.variants], narrow.baseline) == (["mine"], "mine")
    assert [target.measure for target in narrow.targets] == ["optimizer_floor"]
    with pytest.raises(UsageError, match="'other' is none of"):
        plan.narrowed(["other"])


def test_measures_of_a_run() -> None:
    found = run("mine", 0, 1.25)
    assert found.measure("optimizer", 1) == pytest.approx(1.25)
    assert found.measure("update", 1) == pytest.approx(1.75)
    assert found.measure("step", 1) == pytest.approx(1.85)
    assert found.measure("peak", 1) == 9_000_000_000
    assert found.measure("settled_peak", 1) == 3_000_000_000
    assert found.peak_bytes("backward") == 2_000_000_000
    assert found.moved(("forward", "optimizer"), 1) == (10**9, 10**9)
    assert found.measure("optimizer_floor", 1) == pytest.approx(0.8)
    assert found.measure("forward_floor", 1) is None  # nothing was moved


def test_a_run_that_failed_has_no_figures_that_it_did_not_come_to() -> None:
    found = run("stock", 0, 1.0, losses=(), error="RuntimeError: buffers")
    assert [
        found.measure(name, 1) for name in ("optimizer", "update", "step", "peak", "settled_peak")
    ] == [None] * 5
    assert found.peak_bytes() == 9_000_000_000


def test_the_floor_is_the_slowest_way() -> None:
    drive = Speeds(2.0, 4.0, 3.0)
    assert floor_seconds(12, 0, drive) == 6
    assert floor_seconds(0, 12, drive) == 4  # not 3: both at once is faster than either may be
    assert floor_seconds(12, 12, drive) == 8


def test_ratios_are_of_the_same_round() -> None:
    mine = [run("mine", 0, 1.0), run("mine", 1, 2.0), run("mine", 2, 9.0)]
    stock = [run("stock", 1, 4.0), run("stock", 0, 4.0)]
    figures = Figures([*mine, *stock], 1)
    assert spread(figures.ratios("mine", "stock", "optimizer")) == pytest.approx((0.25, 0.375, 0.5))
    assert figures.ratios("mine", "none", "optimizer").empty


def test_targets(tmp_path: Path) -> None:
    shown = results(tmp_path, [run("stock", 0, 3.0), run("mine", 0, 1.25)])
    assert [
        found and round(found.median, 3)
        for found in (reached(shown, target) for target in shown.plan.targets)
    ] == [0.5, 0.8]
    text = render(shown)
    assert (
        "| ours | backward + optimizer | over DeepSpeed | <= 0.65 | 0.50 [0.50 to 0.50] | met |"
        in text
    )
    assert (
        "| ours | optimizer phase: floor / time | compared with fio | >= 0.9 | 0.80 [0.80 to 0.80] | missed |"
        in text
    )


def test_each_phase_has_what_the_drive_and_the_planner_did(tmp_path: Path) -> None:
    text = render(results(tmp_path, [run("stock", 0, 3.0), run("mine", 0, 1.25)]))
    assert "| ours | optimizer | 1.25 | 0.50 | 1.60 | 0.80 [0.80 to 0.80] | 0.001 | 50 |" in text
    assert "| ours | forward | 0.1 | 0.50 | 0.00 |  | 0.000 |  |" in text
    assert "| no offload | forward |" not in text


def test_a_model_by_name_has_all_of_its_tensors(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        PLAN.replace(
            "{ hidden = 16, blocks = 2 }",
            '{ name = "llama2-7b", width = 16, batch = 2, tokens = 8 }',
        ),
    )
    assert plan.model.title == "the 291 tensors of llama2-7b at width 16, a batch of 2 x 8 tokens"
    assert plan.model.config is not None
    assert plan.model.config["num_hidden_layers"] == 32
    assert plan.model.parameters > 32 * 4 * 16 * 16


def test_unequal_losses_or_weights_are_named(tmp_path: Path) -> None:
    equal = [run("stock", 0, 1.0), run("mine", 0, 1.0), run("none", 0, 1.0, losses=("0x0p+0",) * 3)]
    assert unequal(results(tmp_path, equal)) == []
    assert "are equal bit for bit: DeepSpeed, ours." in render(results(tmp_path, equal))
    other = run("mine", 1, 1.0, losses=("0x1.8p+0", "0x1.4p+0", "0x1.3p+0"))
    assert unequal(results(tmp_path, [*equal, other])) == ["mine"]
    weights = dataclasses.replace(run("mine", 1, 1.0), weights="0000")
    assert unequal(results(tmp_path, [*equal, weights])) == ["mine"]
    assert "**Losses or weights differ**" in render(results(tmp_path, [*equal, weights]))


def test_failures_are_told_and_the_rest_stands(tmp_path: Path) -> None:
    failed = run("stock", 0, 1.0, losses=("0x1.8p+0",), error="RuntimeError: a | b (exit status 1)")
    shown = results(tmp_path, [failed, run("mine", 0, 1.0)])
    text = render(shown)
    assert "| DeepSpeed | after 1 step | 9.00 | RuntimeError: a \\| b (exit status 1) |" in text
    assert "not measured" in text
    assert unequal(shown) == []


def test_json_has_every_run(tmp_path: Path) -> None:
    document = json.loads(
        json.dumps(as_json(results(tmp_path, [run("stock", 0, 1.0), run("mine", 0, 1.0)])))
    )
    assert [entry["variant"] for entry in document["runs"]] == ["stock", "mine"]
    assert document["runs"][1]["measures"]["optimizer"] == pytest.approx(1.0)
    assert document["runs"][1]["phases"][0]["name"] == "init"


def test_status_of_a_process() -> None:
    text = "Name:\tpython\nVmHWM:\t  20 kB\nVmRSS:\t  10 kB\n"
    assert parse_status(text) == Memory(10240, 20480)
    assert parse_status("Name:\tpython\nState:\tZ (zombie)\n") is None


def test_io_of_a_process() -> None:
    assert parse_io("rchar: 1\nwchar: 2\nread_bytes: 4096\nwrite_bytes: 8192\n") == (4096, 8192)


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
        ("", "it said nothing"),
    ],
)
def test_last_words(log: str, said: str) -> None:
    assert last_words(log) == said
