"""Stages 1 and 2 with optimizer states on a drive give what the same run on stock DeepSpeed with
`device: "cpu"` gives, to the bit.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from checkpointing import Life
from launch import Case, differences, train
from test_checkpoint import on_cpu, run

SMALLEST = {"host_memory": "smallest"}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
OVERFLOWING = Case(
    dtype="fp16",
    overflow_step=2,
    steps=5,
    accumulation=2,
    clipping=0.5,
    groups=2,
    model="blocks",
    section=SMALLEST,
)
ACCUMULATING = Case(accumulation=3, clipping=0.3, groups=2, model="blocks", section=SMALLEST)
IN_EITHER = {
    "fp32": Case(dtype="fp32", clipping=1.0, evaluate=True, section=SMALLEST),
    "overflow": OVERFLOWING,
    "accumulation": ACCUMULATING,
    "accumulation-in-fp32": ACCUMULATING.but(groups=1, top=FP32_SUMS),
    "everything-fits": ACCUMULATING.but(section={"host_memory": 64_000_000}),
    "fragments": Case(loop="fragments", groups=2, model="blocks", section=SMALLEST),
    "gradients-set": Case(loop="clip", accumulation=2, model="blocks", section=SMALLEST),
    "resumed": Case(loop="resume", groups=2, model="blocks", steps=6, section=SMALLEST),
    "interrupted": Case(loop="interrupt", groups=2, model="blocks", section=SMALLEST),
    "default-dtype": ACCUMULATING.but(default_dtype="bfloat16"),
    "missing-gradients-last": ACCUMULATING.but(section={**SMALLEST, "missing_gradients": "last"}),
}
IN_STAGE_2 = {
    "sgd": Case(optimizer="sgd", section=SMALLEST),
    "momentum": Case(optimizer="momentum", groups=2, section=SMALLEST),
    "adagrad": Case(optimizer="adagrad", model="blocks", section=SMALLEST),
    "several-kinds-of-states": Case(
        optimizer="sign", model="blocks", section={"host_memory": "double"}
    ),
    "nadam": Case(optimizer="nadam", groups=2, model="blocks", section=SMALLEST),
    "round-robin": Case(model="blocks", section=SMALLEST, zero={"round_robin_gradients": True}),
    "overlapped": Case(model="blocks", section=SMALLEST, zero={"overlap_comm": True}),
    "unmanaged-accumulation": Case(
        model="blocks",
        loop="backward twice",
        section=SMALLEST,
        zero={"overlap_comm": False},
        top={"managed_gradient_accumulation": False},
    ),
    "frozen": Case(model="frozen", section=SMALLEST),
    "tied": Case(model="tied", section=SMALLEST),
    "checkpointed": Case(model="checkpointed", accumulation=2, section=SMALLEST),
}


# Stages 1 and 2 share the code that all other cases run.
IN_STAGE_1 = {name: IN_EITHER[name] for name in ("overflow", "accumulation", "everything-fits")}
SLOW = {
    *("sgd", "momentum", "nadam", "several-kinds-of-states", "tied", "checkpointed"),
    *("accumulation-in-fp32", "default-dtype", "missing-gradients-last"),
}


def in_stage(stage: int, cases: dict[str, Case]) -> list[Case]:
    return [
        case.but(name=f"{name} in stage {stage}", zero={**case.zero, "stage": stage})
        for name, case in cases.items()
    ]


EACH = [*in_stage(1, IN_STAGE_1), *in_stage(2, IN_EITHER | IN_STAGE_2)]
COMPARED = ("accumulation", "everything-fits")


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, tuple[Any, Any]]:
    """The results of those cases that the tests of this run are for."""
    here = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    wanted |= {f"{name} in stage {stage}" for stage in (1, 2) for name in COMPARED}
    cases = [case for case in EACH if case.name in wanted]
    ours, stock = (
        train(cases, tmp_path_factory.mktemp(name), ours=name == "ours", ranks=2)
        for name in ("ours", "stock")
    )
    return {case.name: (one, other) for case, one, other in zip(cases, ours, stock, strict=True)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case.name, marks=[pytest.mark.slow] * (case.name.partition(" ")[0] in SLOW))
        for case in EACH
    ],
)
def test_two_ranks_train_as_with_states_in_memory(results, name):
    ours, stock = results[name]
    assert "error" not in ours, ours
    assert "error" not in stock, stock
    assert not differences(ours, stock)


def test_less_memory_than_states_have_uses_the_drive_and_enough_does_not(results):
    for stage in (1, 2):
        moved, _ = results[f"accumulation in stage {stage}"]
        stayed, _ = results[f"everything-fits in stage {stage}"]
        assert moved["traffic"]["bytes_read"] > 0
        assert stayed["traffic"]["bytes_read"] == stayed["traffic"]["bytes_written"] == 0
        assert moved["stats"]["step"] == 3


REFUSED = {
    "overlap_step": ({"section": {"overlap_step": True}}, "overlap_step"),
    "elastic_checkpoint": ({"zero": {"elastic_checkpoint": True}}, "elastic_checkpoint"),
    "universal": ({"top": {"checkpoint": {"load_universal": True}}}, "load_universal"),
    "autocast": ({"dtype": "autocast"}, "torch_autocast"),
    "too little": ({"section": {"host_memory": 1000}}, "at least"),
    "parameters": ({"parameters": "nvme"}, "offload_param"),
}


def test_what_does_not_work_is_refused_before_training(tmp_path: Path):
    cases = [
        Case(name=name, **{**changes, "zero": {"stage": 2, **changes.get("zero", {})}})
        for name, (changes, _) in REFUSED.items()
    ]
    for result, (_, named) in zip(train(cases, tmp_path), REFUSED.values(), strict=True):
        assert result["error"] in ("UnsupportedError", "UsageError"), result
        assert re.search(named, result["message"]), result


@pytest.mark.parametrize("stage", [1, 2])
def test_lossless_compression_rounds_weights_alike_on_all_ranks(stage, tmp_path: Path):
    case = Case(
        zero={"stage": stage},
        loop="fragments",
        model="blocks",
        section={**SMALLEST, "state_format": "split"},
    )
    (ours,) = train([case], tmp_path, ranks=2)
    assert "error" not in ours, ours
    (other,) = ours["ranks"]
    assert ours["weights"] == other["weights"]


@pytest.mark.outside(
    program="DeepSpeed ZeRO-{stage}",
    reference='DeepSpeed with `"device": "cpu"`',
    steps="20, resumed after 10",
    ranks=2,
)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_checkpoints_are_exchanged_with_runs_in_memory(stage, tmp_path: Path):
    """20 steps, with a checkpoint in the middle, from which a new engine goes on."""
    case = Case(groups=2, model="blocks", zero={"stage": stage}, section=SMALLEST)
    ours, stock = str(tmp_path / "ours"), str(tmp_path / "stock")
    lives = [
        Life("ours", case, saves=[[10, ours]], weights=ours, looks=True),
        Life("stock", on_cpu(case), ours=False, saves=[[10, stock]]),
        Life("from ours", on_cpu(case), ours=False, first=10, load=ours),
        Life("from stock", case, first=10, load=stock),
        Life("ours again", case, first=10, load=ours),
    ]
    results = run([dataclasses.replace(life, last=20) for life in lives], tmp_path, ranks=2)
    assert results["ours"]["differ"] == []
    for result in results.values():
        assert result["end"] == results["stock"]["end"]
        losses = result["reported"]["losses"]
        assert losses == results["stock"]["reported"]["losses"][-len(losses) :]


CHAINED = [
    Case(
        name="round-robin",
        groups=2,
        model="blocks",
        zero={"stage": 2, "round_robin_gradients": True},
        section=SMALLEST,
    ),
    Case(name="frozen", model="frozen", zero={"stage": 1}, section=SMALLEST),
]


def pass_on(cases: list[Case], numbers: list[int], directory: Path) -> list[dict[str, Any]]:
    """The results of two resumed runs of the last of *numbers* of ranks, by name. Both start from a
    checkpoint of the first number of ranks. In the first run, all other numbers of ranks have loaded
    and saved it before.
    """

    def at(case: Case, number: int) -> str:
        return f"{directory}/{case.name}-{number}"

    lives = [Life(case.name, case, last=3, saves=[[2, at(case, 0)]]) for case in cases]
    run(lives, directory, ranks=numbers[0])
    for number, ranks in enumerate(numbers[1:-1]):
        lives = [
            Life(
                case.name,
                case,
                first=2,
                last=3,
                load=at(case, number),
                saves=[[2, at(case, number + 1)]],
            )
            for case in cases
        ]
        run(lives, directory, ranks=ranks)
    found = [
        run(
            [Life(case.name, case, first=2, load=at(case, number)) for case in cases],
            directory,
            ranks=numbers[-1],
        )
        for number in (len(numbers) - 2, 0)
    ]
    return [{case.name: each[case.name] for case in cases} for each in found]


@pytest.mark.releases
@pytest.mark.parametrize("numbers", [[1, 2, 1], pytest.param([1, 3, 4, 1], marks=pytest.mark.slow)])
def test_values_pass_through_other_numbers_of_ranks(numbers, tmp_path: Path):
    passed, direct = pass_on(CHAINED, numbers, tmp_path)
    for name, result in passed.items():
        assert result["begin"] == direct[name]["begin"], name
        assert result["end"] == direct[name]["end"], name


NUMBERS = (2, 3)
RESUMED = [
    Case(name="adamw", groups=2, model="blocks", zero={"stage": 1}, section=SMALLEST),
    Case(name="frozen", model="frozen", zero={"stage": 2}, section=SMALLEST),
    Case(name="momentum", optimizer="momentum", groups=2, zero={"stage": 2}, section=SMALLEST),
    Case(name="adagrad", optimizer="adagrad", zero={"stage": 1}, section=SMALLEST),
    Case(
        name="compressed",
        model="blocks",
        zero={"stage": 2},
        section={**SMALLEST, "state_format": "split"},
    ),
    Case(name="fp16", dtype="fp16", groups=2, zero={"stage": 2}, section=SMALLEST),
]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """For each number of ranks, the results of the whole run, and of runs from all checkpoints."""
    place = tmp_path_factory.mktemp("resumed")
    whole = {
        ranks: run(
            [
                Life(case.name, case, saves=[[2, f"{place}/{case.name}-{ranks}"]])
                for case in RESUMED
            ],
            place,
            ranks=ranks,
        )
        for ranks in NUMBERS
    }
    again = {
        ranks: run(
            [
                Life(
                    f"{case.name} of {by}",
                    case,
                    first=2,
                    last=4 if by == ranks else 2,  # of other numbers the values that are loaded
                    load=f"{place}/{case.name}-{by}",
                )
                for case in RESUMED
                for by in NUMBERS
            ],
            place,
            ranks=ranks,
        )
        for ranks in NUMBERS
    }
    return {ranks: (whole[ranks], again[ranks]) for ranks in NUMBERS}


@pytest.mark.outside(
    program="DeepSpeed ZeRO-1 or 2, {name}, resumed on another number of ranks",
    reference="weights and states as saved; the uninterrupted run on as many ranks",
    steps="4, resumed after 2",
    ranks="2 or 3, then {ranks}",
)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", NUMBERS)
@pytest.mark.parametrize("name", [case.name for case in RESUMED])
def test_another_number_of_ranks_goes_on_with_the_same_values(resumed, name, ranks):
    whole, again = resumed[ranks]
    assert again[f"{name} of {ranks}"]["end"] == whole[name]["end"]
    for by in NUMBERS:
        begin = again[f"{name} of {by}"]["begin"]
        assert begin["states"]
        assert begin == resumed[by][1][f"{name} of {by}"]["begin"], by
