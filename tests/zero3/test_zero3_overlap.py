"""`"overlap_step"`: the updates of a step run under the next forward pass, with the same bits, and
no reader sees a weight or a state from before them.

No update is made before a caller waits for one, unless a test says otherwise: a read without a wait
would see the old value.
"""

from __future__ import annotations

import dataclasses
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from covering import covering
from launch import Case, differences, run_script, train

SCRIPT = Path(__file__).with_name("overlapping.py")
SMALLEST = {"host_memory": "smallest"}
STREAMED = Case(model="blocks", sub_group_size=5000, section=SMALLEST, steps=5)
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}

CASES = {
    "plain": Case(steps=5, sub_group_size=700),
    "one-sub-group": Case(steps=4),
    "always-clipped": STREAMED.but(clipping=0.01),
    "never-clipped": STREAMED.but(clipping=1e6, parameters="cpu"),
    "sometimes-clipped": STREAMED.but(clipping=0.3, parameters="nvme", steps=8),
    "fp32": STREAMED.but(dtype="fp32", clipping=0.3),
    "fp16-overflow": STREAMED.but(
        dtype="fp16", overflow_step=3, steps=7, accumulation=3, clipping=0.5, groups=2
    ),
    "fp16-parameters": STREAMED.but(dtype="fp16", overflow_step=2, steps=6, parameters="nvme"),
    "accumulation": STREAMED.but(accumulation=3, parameters="nvme"),
    "groups": STREAMED.but(groups=2, parameters="nvme"),
    "evaluation": STREAMED.but(evaluate=True, parameters="nvme"),
    "evaluation-cpu": STREAMED.but(evaluate=True, parameters="cpu"),
    "gathered": STREAMED.but(loop="gather", parameters="nvme"),
    "gathered-cpu": STREAMED.but(loop="gather", parameters="cpu"),
    "saved": STREAMED.but(loop="save", parameters="nvme", steps=7, zero=GATHER),
    "saved-cpu": STREAMED.but(loop="save", parameters="cpu", steps=7, zero=GATHER),
    "scheduled": STREAMED.but(loop="schedule", clipping=0.5, steps=6),
    "scheduled-fp16": STREAMED.but(loop="schedule", dtype="fp16", steps=6),
    "init": STREAMED.but(loop="enter", parameters="nvme"),
    "fragments": STREAMED.but(fragments=True, clipping=1.0, parameters="nvme"),
    "frozen": STREAMED.but(model="frozen", sub_group_size=500, parameters="nvme"),
    "tied": STREAMED.but(model="tied", sub_group_size=500, parameters="nvme"),
    "checkpointed": STREAMED.but(
        model="reentrant", sub_group_size=1000, accumulation=2, parameters="nvme"
    ),
    "persistent": STREAMED.but(model="odd", sub_group_size=500, persistence=80, parameters="nvme"),
    "all-persistent": STREAMED.but(persistence=10**6, evaluate=True, clipping=0.3),
    "persistent-gathered": STREAMED.but(loop="gather", persistence=200, parameters="nvme"),
    "persistent-saved": STREAMED.but(
        loop="save", persistence=200, parameters="cpu", steps=7, zero=GATHER
    ),
    "persistent-fp16": STREAMED.but(
        dtype="fp16", overflow_step=3, steps=7, persistence=200, groups=2, accumulation=2
    ),
    "split": STREAMED.but(parameters="nvme", section={**SMALLEST, "state_format": "split"}),
    "split-gathered": STREAMED.but(
        loop="gather", parameters="nvme", section={**SMALLEST, "state_format": "split"}
    ),
    "compact": STREAMED.but(section={**SMALLEST, "state_format": "compact"}),
    "last-gradients": Case(
        model="dropped",
        parameters="nvme",
        sub_group_size=9000,
        accumulation=2,
        clipping=0.05,
        steps=8,
        section={**SMALLEST, "missing_gradients": "last"},
    ),
    "momentum": STREAMED.but(optimizer="momentum"),
    "no-states": STREAMED.but(optimizer="sgd"),
    "initialized-states": STREAMED.but(optimizer="adagrad"),
    "two-engines-in-one-budget": Case(
        engines=2,
        parameters="nvme",
        model="blocks",
        sub_group_size=9000,
        steps=4,
        section={"host_memory": 500_000},
    ),
    "made-again": STREAMED.but(lives=2, parameters="nvme", steps=3),
}
BY_RELEASE = {
    "plain",
    "sometimes-clipped",
    "fp16-overflow",
    "evaluation",
    "gathered-cpu",
    "saved",
    "scheduled",
    "scheduled-fp16",
    "init",
    "fragments",
    "persistent",
    "split",
    "last-gradients",
    "two-engines-in-one-budget",
}
QUICK = {"plain", "sometimes-clipped", "fp16-overflow", "evaluation", "saved", "persistent"}
# at the speed of the machine, not when they are awaited
AT_ONCE = ("plain", "accumulation", "evaluation", "fp16-overflow", "split", "gathered")
# all updates are made in `step`
LEFT_OUT = {
    "no-states-on-a-drive": Case(parameters="nvme", states="cpu"),
    "unknown-optimizer": Case(optimizer="sign", steps=4),
}
ON_TWO_RANKS = ("all-persistent", "persistent-fp16", "sometimes-clipped", "gathered")


def overlapped(case: Case) -> Case:
    return case.but(section={**case.section, "overlap_step": True})


def both(
    cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory, **request: Any
) -> dict[str, Any]:
    """The results of *cases* with overlap_step, and without."""
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(
            train,
            list(map(overlapped, cases.values())),
            tmp_path_factory.mktemp("drive"),
            late=request.pop("late", True),
            **request,
        )
        reference = pool.submit(
            train, list(cases.values()), tmp_path_factory.mktemp("drive"), **request
        )
        return dict(zip(cases, zip(mine.result(), reference.result(), strict=True), strict=True))


@pytest.fixture(scope="module")
def late(tmp_path_factory, request):
    """The results of those cases that the tests of this run are for."""
    wanted = {
        item.callspec.params.get("name")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    return both(
        {name: case for name, case in (CASES | LEFT_OUT).items() if name in wanted},
        tmp_path_factory,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.releases] if name in BY_RELEASE else []),
                *([pytest.mark.slow] if name not in QUICK else []),
            ],
        )
        for name in CASES
    ],
)
def test_bits_are_those_without(late, name):
    mine, reference = late[name]
    assert differences(mine, reference) == []
    assert mine["left"] == 0
    case = CASES[name]
    skipped = case.overflow_step is not None
    at_once = 3 if case.loop == "save" else 1  # the first, and the first after each load
    expected = (case.steps - skipped - at_once) * case.engines
    # of several lives, the last is reported
    assert mine["traffic"]["overlapped"] == expected


@pytest.mark.parametrize("name", LEFT_OUT)
def test_where_it_is_left_out_bits_are_the_same(late, name):
    mine, reference = late[name]
    assert differences(mine, reference) == []
    assert mine["traffic"]["overlapped"] == 0


@pytest.mark.slow
def test_bits_are_the_same_at_any_speed(tmp_path_factory):
    results = both({name: CASES[name] for name in AT_ONCE}, tmp_path_factory, late=False)
    for name, (mine, reference) in results.items():
        assert differences(mine, reference) == [], name
        assert mine["traffic"]["overlapped"] > 1


def test_updates_on_a_gpu_know_the_parameters_that_were_frozen_in_the_step(tmp_path_factory):
    """With "missing_gradients": "last", those have no gradient on a GPU; others have their last one."""
    section = {"host_memory": "64MB", "missing_gradients": "last"}
    case = Case(name="thaw", model="blocks", loop="thaw", steps=6, section=section)
    ((mine, reference),) = both({"thaw": case}, tmp_path_factory, virtual_gpu=True).values()
    assert differences(mine, reference) == []
    assert mine["traffic"]["overlapped"] == case.steps - 1


@pytest.mark.slow
def test_two_ranks(tmp_path_factory):
    results = both({name: CASES[name] for name in ON_TWO_RANKS}, tmp_path_factory, ranks=2)
    for name, (late, reference) in results.items():
        assert differences(late, reference) == [], name
        assert late["traffic"]["overlapped"] > 1
    # at the speed of the machine
    mine = [overlapped(CASES["sometimes-clipped"])]
    (found,) = train(mine, tmp_path_factory.mktemp("drive"), ranks=2)
    assert differences(found, results["sometimes-clipped"][1]) == []


@pytest.mark.slow  # compiles that Adam
def test_cpu_adam_of_deepspeed(cpu_adam, tmp_path_factory):
    cases = {
        "plain": STREAMED.but(optimizer="cpu_adam", parameters="nvme"),
        "groups": STREAMED.but(optimizer="cpu_adam", groups=2, clipping=0.5, steps=7),
        "scheduled": STREAMED.but(optimizer="cpu_adam", loop="schedule", steps=7),
    }
    for name, (mine, reference) in both(cases, tmp_path_factory).items():
        assert differences(mine, reference) == [], name
        assert mine["traffic"]["overlapped"] == cases[name].steps - 1


def run(directory: Path, what: str, case: Case, **request: Any) -> dict[str, Any]:
    case = dataclasses.asdict(overlapped(case))
    (ended,) = run_script(SCRIPT, directory, case=case, what=what, **request)
    (result,) = ended.results
    return {**result, "complaints": ended.complaints}


# each parameter in a separate sub-group, and none fetched before it is needed
ALONE = Case(
    model="blocks",
    sub_group_size=1,
    zero={"stage3_prefetch_bucket_size": 0},
    section=SMALLEST,
)


@covering(persistence=[0, 10**6], parameters=["none", "cpu", "nvme"])
def test_a_layer_waits_for_its_own_updates_alone(tmp_path, parameters, persistence):
    result = run(tmp_path, "gate", ALONE.but(parameters=parameters, persistence=persistence))
    assert result["made after step"] == []
    # the updates of layer 0 when it is called, and so on
    assert result["made at layers"] == result["layers"]
    assert result["after the backward pass"] == result["all"]
    assert result["order"] == result["all"]


@covering(
    pairs=False,
    parameters=["none", "cpu", "nvme"],
    sizes=[("blocks", 5000), ("32 layers", 200), ("32 layers", 1)],
)
def test_what_is_gathered_ahead_waits_for_no_more_than_a_bucket(tmp_path, sizes, parameters):
    """DeepSpeed gathers a bucket ahead before every module, whatever is ahead already: before the
    first layer, all of a small model. Nor is anything gathered for a backward pass, which may not
    follow.
    """
    model, bucket = sizes
    case = ALONE.but(
        model=model, parameters=parameters, zero={"stage3_prefetch_bucket_size": bucket}
    )
    result = run(tmp_path, "gate", case)
    elements = result["elements"]
    ahead = [
        sum(elements[index] for index in set(made) - set(needed))
        for made, needed in zip(result["made at layers"], result["layers"], strict=True)
    ]
    # whichever layer it is; from the drive parameters are read ahead otherwise
    assert min(ahead[:-1]) > 0 or parameters == "nvme"
    assert max(ahead) < bucket + max(elements)
    assert sum(elements) > 3 * bucket
    assert result["after the backward pass"] == result["all"]
    assert result["left in flight"] == 0


def test_a_read_of_a_weight_waits_for_its_own_update(tmp_path):
    result = run(tmp_path, "look", ALONE.but(parameters="nvme"))
    assert result["gathered"] == result["all"][:6]  # in the model's order
    assert result["then"] == [5]
    for name in ("shapes", "saved", "fragment", "state", "zero.Init", "OnDevice", "destroyed"):
        assert result[name] == result["all"], name


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_updates_may_be_made_in_the_midst_of_any_call(tmp_path, parameters):
    """The user configured one sub-group, which is cut for host memory."""
    section = {"host_memory": "smallest"}
    case = Case(model="blocks", parameters=parameters, persistence=80, section=section)
    assert run(tmp_path, "amid", case, attempts=5)["differing"] == []


@pytest.mark.slow
def test_updates_may_be_made_in_the_midst_of_calls_of_another_engine(tmp_path):
    """On two ranks, which are at different calls then, and with one budget for all engines."""
    case = Case(model="blocks", parameters="nvme", persistence=80, section={"host_memory": 700_000})
    fields = dataclasses.asdict(overlapped(case))
    request = {"what": "amid", "neighbour": True, "attempts": 2}
    ended = run_script(SCRIPT, tmp_path, case=fields, ranks=2, **request)
    assert [rank.results for rank in ended] == [[{"differing": []}]] * 2


@covering(model=["32 layers", "dropped"], bucket=[0, 200, 10**6])
def test_updates_keep_their_order_whatever_is_gathered_together_and_what_rests(
    tmp_path, model, bucket
):
    """In another order than the last, values planned for prefetch would be read twice."""
    case = ALONE.but(model=model, steps=6, zero={"stage3_prefetch_bucket_size": bucket})
    result = run(tmp_path, "order", case)
    assert result["orders"] == 5 * [result["all"]]


@pytest.mark.slow
@covering(pairs=False, bucket=[0, 20_000], evaluate=[False, True])
def test_whatever_turns_updates_and_a_forward_pass_take_nothing_is_read_twice(
    tmp_path, evaluate, bucket
):
    """Both use values on the drive, interleaved differently in each step."""
    case = Case(
        model="wide",
        parameters="nvme",
        sub_group_size=1,
        steps=12,
        evaluate=evaluate,
        zero={"stage3_prefetch_bucket_size": bucket},
        section={"host_memory": 600_000},
    )
    result = run(tmp_path, "reads", case)
    settled = {name: statistics.mean(result[name][4:]) for name in ("with", "without")}
    # 1.5 to 2 times as much where the turns are learned; a step's updates may go on in the next
    assert 0 < settled["with"] <= 1.05 * settled["without"], result


def test_a_read_during_an_update_waits_for_it_where_memory_is_full(tmp_path):
    case = Case(model="frozen", parameters="nvme", sub_group_size=500, steps=4)
    result = run(tmp_path, "beside", case)
    assert result["room"] == [True, 0]  # and no update is over
    assert result["full"] == [True, 1]
    (whole,) = train([case], tmp_path)
    for key in ("weights", "masters", "states"):
        assert {f"0.0.{name}": value for name, value in result["end"][key].items()} == whole[key]


@pytest.mark.parametrize("reported", ["step", "forward"])
def test_an_error_of_the_drive_names_the_step_and_a_load_goes_on(tmp_path, reported):
    result = run(tmp_path, "fault", ALONE.but(parameters="nvme"), reported=reported)
    assert result["error"] == "IOFailure"
    if "notes" in result:
        assert result["notes"] == ["in the updates of step 3"]
    assert set(result["then"].values()) == {"OffloadError"}
    assert result["end"] == result["whole"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 6])  # values prefetched in vain are read again
def test_whichever_transfer_fails_a_load_goes_on_with_the_same_bits(tmp_path, count):
    case = STREAMED.but(parameters="nvme", clipping=0.3)
    result = run(tmp_path, "broken", case, count=count)
    assert result["differing"] == []
    reported = result["reported"]
    # a transfer that fails alone is mostly made again; which one it is differs from run to run
    assert set(reported) <= {"an update", "IOFailure", "early"}
    assert reported["early"] < result["lives"] / 2
    assert count == 1 or reported["an update"] + reported["IOFailure"] > 0


def test_an_error_no_caller_received_is_raised_by_destroy(tmp_path):
    result = run(tmp_path, "destroy", ALONE.but(parameters="nvme"))
    assert result["error"] == "IOFailure"


def test_a_process_that_ends_leaves_the_updates(tmp_path):
    assert run(tmp_path, "end", ALONE.but(parameters="nvme"))["made"] == []


def test_a_schedulers_and_a_hooked_optimizer(tmp_path):
    result = run(tmp_path, "optimizers", ALONE)
    assert result["scheduled"] == 1
    assert result["hooked"] == result["replaced"] == 0
    assert result["hooked after a step"] == 0
    assert "overlap_step is left out: hooks are called" in result["complaints"]
    assert (
        "overlap_step is left out: the method step of this AdamW was replaced"
        in (result["complaints"])
    )


# none gathered ahead, and all
@pytest.mark.slow
@pytest.mark.parametrize(("parameters", "bucket"), [("nvme", 0), ("none", 10**6)])
def test_what_a_step_costs_grows_with_the_sub_groups_and_no_faster(tmp_path, parameters, bucket):
    # the first step comes before the order of use is known; waits make a step's lines vary by 3 %
    lines = []
    for layers in (16, 32, 64):
        place = tmp_path / str(layers)
        place.mkdir()
        case = ALONE.but(
            model=f"{layers} layers",
            parameters=parameters,
            zero={"stage3_prefetch_bucket_size": bucket},
        )
        result = run(place, "growth", case)
        assert result["sub-groups"] == layers
        first, *rest = result["lines"]
        lines.append(
            [
                count
                for of in ("ahead", "all")
                for count in (first[of], min(step[of] for step in rest))
            ]
        )
    # twice the sub-groups that are added: 2.0 to 2.1 times the lines, where it were 4 for a square
    for sixteen, thirty_two, sixty_four in zip(*lines, strict=True):
        assert sixty_four - thirty_two <= 2.4 * (thirty_two - sixteen), lines
    assert min(lines[0]) > 0
