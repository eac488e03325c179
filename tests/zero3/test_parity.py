"""Training with parameters and optimizer states on a drive gives what the same run on stock
DeepSpeed with `device: "cpu"` gives, to the bit.

Compared are losses, gradient norms, loss scales, skipped steps, the 16-bit weights, the fp32 master
weights, every state of the optimizer, and the results of the fragment functions. `parity.py` tries
many more combinations.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launch import Case, differences, train

SMALLEST = {"host_memory": "smallest"}
ROOM = {"host_memory": 700_000}  # for a sub-group, not for all
IN_BACKWARD = {"host_memory": "smallest", "step_in_backward": True}
LAST = {**SMALLEST, "missing_gradients": "last"}
Results = dict[str, tuple[dict[str, Any], dict[str, Any]]]

CASES = {
    "plain": Case(),
    "fp32": Case(dtype="fp32", clipping=1.0),
    "fp16-overflow": Case(
        dtype="fp16",
        overflow_step=2,
        steps=5,
        accumulation=3,
        clipping=0.5,
        groups=2,
        model="blocks",
        section=SMALLEST,
    ),
    "small-sub-groups": Case(sub_group_size=100, section=SMALLEST),
    "one-element-first": Case(model="gain", parameters="nvme", sub_group_size=1),
    "one-element-first-states-cpu": Case(
        model="gain", parameters="nvme", states="cpu", sub_group_size=1, persistence=100
    ),
    "1000-before-2048x2048": Case(model="misaligned", section=SMALLEST),
    "both-on-the-drive": Case(
        model="blocks", parameters="nvme", section=SMALLEST, steps=4, evaluate=True
    ),
    "parameters-on-the-drive": Case(
        parameters="nvme", states="cpu", model="embedding", section=SMALLEST
    ),
    # frozen in some steps
    "parameters-alone-dropped": Case(
        model="dropped", parameters="nvme", states="none", sub_group_size=5000, steps=5
    ),
    "parameters-alone-fp16": Case(
        parameters="nvme",
        states="none",
        dtype="fp16",
        overflow_step=1,
        model="blocks",
        steps=4,
        section=SMALLEST,
    ),
    "parameters-in-memory": Case(parameters="cpu", groups=2, clipping=1.0),
    "no-budget-to-speak-of": Case(model="embedding", parameters="nvme", section=SMALLEST),
    "everything-fits": Case(
        model="embedding", parameters="nvme", section={"host_memory": 64_000_000}
    ),
    "zero-init": Case(model="blocks", parameters="nvme", zero_init=True, section=SMALLEST),
    "persistent-parameters": Case(parameters="nvme", persistence=100),
    "tied": Case(model="tied", parameters="nvme", section=SMALLEST),
    "frozen": Case(model="frozen", parameters="nvme", section=SMALLEST),
    "large-and-frozen": Case(
        model="frozen embedding", parameters="nvme", zero_init=True, section=SMALLEST
    ),
    "adapted": Case(model="adapted", parameters="nvme", zero_init=True, section=SMALLEST),
    "checkpointed": Case(model="checkpointed", parameters="nvme", accumulation=2),
    "checkpointed-reentrant": Case(model="reentrant", parameters="nvme"),
    "checkpointed-selectively": Case(
        model="selective",
        parameters="nvme",
        zero={"stage3_max_live_parameters": 5000, "stage3_prefetch_bucket_size": 3000},
        section=SMALLEST,
    ),
    "momentum": Case(optimizer="momentum", model="blocks", section=SMALLEST),
    "no-states": Case(optimizer="sgd"),
    "initialized-states": Case(optimizer="adagrad"),
    "states-of-every-kind": Case(
        optimizer="sign", model="blocks", steps=4, section={"host_memory": "double"}
    ),
    "scalar-states": Case(optimizer="nadam", model="blocks", groups=2, section=SMALLEST),
    "counts-of-the-optimizer": Case(
        optimizer="counting", model="blocks", loop="count", steps=4, section=SMALLEST
    ),
    "counts-of-the-optimizer-saved": Case(
        optimizer="counting",
        model="blocks",
        loop="count and save",
        steps=5,
        zero={"stage3_gather_16bit_weights_on_model_save": True},
        section=SMALLEST,
    ),
    "gradients-in-fp32": Case(
        top={"data_types": {"grad_accum_dtype": "fp32"}},
        accumulation=2,
        model="blocks",
        section=SMALLEST,
    ),
    "checksums": Case(model="blocks", parameters="nvme", section={**SMALLEST, "checksum": True}),
    "posix": Case(model="blocks", parameters="nvme", section={**SMALLEST, "backend": "posix"}),
    "inference-mode": Case(
        loop="infer", model="blocks", parameters="nvme", section=SMALLEST, steps=4
    ),
    "inference-mode-states": Case(loop="infer", model="blocks", persistence=100, steps=4),
    "fragments": Case(fragments=True, model="blocks", clipping=1.0, section=SMALLEST, steps=4),
    "fragments-fp16": Case(
        fragments=True, dtype="fp16", overflow_step=2, accumulation=2, parameters="nvme", steps=4
    ),
    "two-engines": Case(engines=2, parameters="nvme", model="blocks"),
    "two-engines-in-one-budget": Case(
        engines=2, parameters="nvme", model="blocks", section={"host_memory": 500_000}
    ),
    "made-again": Case(lives=2, parameters="nvme"),
    "inference": Case(
        optimizer="none", states="none", parameters="nvme", model="blocks", section=SMALLEST
    ),
    "documented-keys": Case(
        parameters="nvme",
        zero={
            "offload_param": {
                "buffer_count": 5,
                "buffer_size": 1000,
                "max_in_cpu": 100,
                "pin_memory": True,
            },
            "offload_optimizer": {
                "buffer_count": 4,
                "pipeline_read": True,
                "pipeline_write": True,
                "fast_init": True,
                "pin_memory": True,
            },
        },
    ),
    "two-contexts": Case(program="two contexts", parameters="nvme", section=ROOM),
    "two-contexts-sub-groups": Case(
        program="two contexts", parameters="nvme", sub_group_size=5000, section=ROOM
    ),
    "two-contexts-states-cpu": Case(
        program="two contexts", parameters="nvme", states="cpu", section=ROOM
    ),
    "two-contexts-persistent": Case(
        program="two contexts", parameters="nvme", persistence=1_000_000, section=ROOM
    ),
    "two-contexts-last": Case(
        program="two contexts", parameters="nvme", section={**ROOM, "missing_gradients": "last"}
    ),
    "states-back": Case(program="states back", parameters="nvme", section=ROOM),
    "states-back-persistent": Case(
        program="states back", parameters="nvme", persistence=100, section=ROOM
    ),
    "states-back-overlap": Case(
        program="states back",
        parameters="nvme",
        persistence=100,
        section={**ROOM, "overlap_step": True},
    ),
    "states-back-cpu": Case(
        program="states back", parameters="nvme", states="cpu", persistence=100, section=ROOM
    ),
    "reference-follows": Case(program="two engines", parameters="nvme", section=ROOM),
    "through-another-engine": Case(program="through another", parameters="nvme", section=ROOM),
    "changed-without-a-rank": Case(
        program="changed without a rank", parameters="nvme", section=ROOM
    ),
    "changed-without-a-rank-persistent": Case(
        program="changed without a rank", parameters="nvme", persistence=1_000_000, section=ROOM
    ),
    "changed-without-a-rank-overlap": Case(
        program="changed without a rank",
        parameters="nvme",
        section={**ROOM, "overlap_step": True},
    ),
    "moved": Case(program="moved", parameters="nvme", section=ROOM),
    "moved-persistent": Case(
        program="moved", parameters="nvme", persistence=1_000_000, section=ROOM
    ),
    "moved-states-cpu": Case(program="moved", parameters="nvme", states="cpu", section=ROOM),
    "quantized": Case(
        program="quantized", optimizer="none", dtype="fp16", parameters="nvme", section=ROOM
    ),
    "thawed": Case(program="thawed", parameters="nvme", section=ROOM),
    "thawed-parameters-in-memory": Case(program="thawed", section=ROOM),
    "exchanged": Case(program="exchanged", parameters="nvme", section=ROOM),
    "inference-first": Case(program="inference first", parameters="nvme", section=ROOM),
    "in-backward": Case(
        model="blocks", sub_group_size=5000, steps=4, evaluate=True, section=IN_BACKWARD
    ),
    "in-backward-groups": Case(
        model="blocks",
        sub_group_size=5000,
        steps=4,
        groups=2,
        accumulation=2,
        section={**IN_BACKWARD, "host_memory": "double"},
    ),
    "in-backward-tied": Case(model="tied", sub_group_size=2000, section=IN_BACKWARD),
    "in-backward-frozen": Case(model="frozen", sub_group_size=1000, section=IN_BACKWARD),
    "in-backward-checkpointed": Case(
        model="checkpointed", parameters="cpu", sub_group_size=2000, section=IN_BACKWARD
    ),
    "in-backward-reentrant": Case(model="reentrant", sub_group_size=2000, section=IN_BACKWARD),
    "in-backward-fp32": Case(
        dtype="fp32", optimizer="momentum", sub_group_size=500, section=IN_BACKWARD
    ),
    # Where DeepSpeed has the gradient of an earlier step applied again, for parameters that have
    # none; also where it is scaled, and where it is infinite.
    "last-gradients": Case(
        model="dropped", parameters="nvme", sub_group_size=5000, steps=8, section=LAST
    ),
    "last-gradients-clipped": Case(
        model="dropped",
        sub_group_size=9000,
        steps=8,
        clipping=0.05,
        accumulation=2,
        groups=2,
        section=LAST,
    ),
    "last-gradients-fp16": Case(
        model="dropped",
        dtype="fp16",
        overflow_step=2,
        steps=9,
        accumulation=3,
        sub_group_size=5000,
        clipping=0.5,
        section=LAST,
    ),
    "last-gradients-fp32": Case(
        model="dropped", dtype="fp32", optimizer="momentum", steps=8, section=LAST
    ),
    "last-gradients-sometimes": Case(model="sometimes", accumulation=2, steps=5, section=LAST),
    "last-gradients-fragments": Case(
        model="dropped", fragments=True, steps=6, clipping=0.1, accumulation=2, section=LAST
    ),
    "last-gradients-in-memory": Case(
        model="dropped", steps=8, accumulation=2, section={"missing_gradients": "last"}
    ),
}
# Where the drive must have been used, or the test shows nothing; of most other models the smallest
# budget, which is rounded up to pages, holds all.
STREAMED = {
    name
    for name, case in CASES.items()
    if case.model in ("blocks", "misaligned") and case.section.get("host_memory") == "smallest"
}

ON_TWO_RANKS = {
    "plain": Case(),
    "overflow": Case(
        dtype="fp16",
        overflow_step=1,
        accumulation=3,
        clipping=1.0,
        groups=2,
        model="blocks",
        parameters="nvme",
        section=SMALLEST,
    ),
    "one-element-sub-groups": Case(sub_group_size=1, parameters="nvme"),
    "fragments": Case(fragments=True, model="blocks", section=SMALLEST),
    "counts": CASES["counts-of-the-optimizer"].but(parameters="nvme"),
    "inference": Case(optimizer="none", states="none", parameters="nvme"),
    "last-gradients": CASES["last-gradients-fp16"],
    "one-element-first": Case(model="gain", parameters="nvme", sub_group_size=1),
    "two-contexts": CASES["two-contexts"],
    "changed-without-a-rank": CASES["changed-without-a-rank"],
    "reference-follows": CASES["reference-follows"],
    "moved": CASES["moved"],
    "in-backward": CASES["in-backward-groups"],
}

CPU_ADAM = {
    "plain": Case(optimizer="cpu_adam", model="blocks", steps=4),
    "streamed": Case(
        optimizer="cpu_adam",
        model="blocks",
        parameters="nvme",
        clipping=1.0,
        groups=2,
        steps=4,
        section=SMALLEST,
    ),
    "sub-groups": Case(optimizer="cpu_adam", sub_group_size=500, steps=4),
    "in-backward": Case(
        optimizer="cpu_adam", model="blocks", sub_group_size=5000, steps=4, section=IN_BACKWARD
    ),
}

# What one release of DeepSpeed does otherwise than another: offload of either kind and of both,
# hooks of modules, gradients, fragments, fp16, zero.Init.
BY_RELEASE = (
    "plain",
    "fp16-overflow",
    "both-on-the-drive",
    "parameters-on-the-drive",
    "zero-init",
    "persistent-parameters",
    "frozen",
    "checkpointed-reentrant",
    "gradients-in-fp32",
    "fragments-fp16",
    "inference",
    "documented-keys",
    "one-element-first",
    "two-contexts",
    "reference-follows",
    "moved",
    "last-gradients-fp16",
)
# Variations of other cases.
SLOW = {
    *(name for name in CASES if name.endswith(("-persistent", "-overlap", "-cpu", "-in-memory"))),
    *("small-sub-groups", "parameters-alone-fp16", "large-and-frozen", "checkpointed"),
    *("no-states", "initialized-states", "counts-of-the-optimizer-saved", "posix", "fragments"),
    *("two-engines", "two-contexts-sub-groups", "two-contexts-last", "in-backward-tied"),
    *("in-backward-frozen", "in-backward-checkpointed", "in-backward-fp32"),
    *("quantized", "1000-before-2048x2048", "last-gradients-fragments", "inference-mode"),
    *("momentum", "scalar-states", "checksums", "last-gradients", "in-backward-groups"),
    *("last-gradients-clipped", "last-gradients-fp32", "last-gradients-sometimes"),
} - {"parameters-in-memory"}
EACH = [
    pytest.param(
        name,
        marks=[
            *([pytest.mark.releases] if name in BY_RELEASE else []),
            *([pytest.mark.slow] if name in SLOW else []),
        ],
    )
    for name in CASES
]


def pairs(cases: dict[str, Case], directory: Path, ranks: int = 1) -> Results:
    """The results of *cases* on this package and on stock DeepSpeed; concurrently, each in its own
    processes.
    """
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(train, list(cases.values()), directory, ranks=ranks)
        reference = pool.submit(train, list(cases.values()), directory, ranks=ranks, ours=False)
        return dict(zip(cases, zip(mine.result(), reference.result(), strict=True), strict=True))


@pytest.fixture(scope="module")
def once(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[..., Results]:
    """`pairs`, for each set of cases once, of those that the tests of this run are for."""
    found: dict[tuple[str, ...], Results] = {}
    here = (
        item
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    )
    wanted = {item.callspec.params.get("name") for item in here} | {"everything-fits"}

    def results(cases: dict[str, Case], ranks: int = 1) -> Results:
        key = (*cases, str(ranks))
        if key not in found:
            found[key] = pairs(
                {name: case for name, case in cases.items() if name in wanted},
                tmp_path_factory.mktemp("drive"),
                ranks,
            )
        return found[key]

    return results


def moved(result: dict[str, Any]) -> int:
    traffic: dict[str, int] = result["traffic"]
    return traffic["bytes_read"] + traffic["bytes_written"]


@pytest.mark.processor
@pytest.mark.parametrize("name", EACH)
def test_one_rank(once, name):
    mine, reference = once(CASES)[name]
    assert differences(mine, reference) == []
    assert mine.get("left", 0) == 0  # a program of others does not destroy its engine
    assert not (name in STREAMED and moved(mine) == 0)
    traffic, allowed = mine["traffic"], mine["host_memory"]
    assert all(
        peak <= memory for peak, memory in zip(traffic["peaks"], traffic["memory"], strict=True)
    )
    assert not isinstance(allowed, int) or max(traffic["memory"]) < allowed + 4096  # whole pages
    # one refusal names the bytes that suffice for everything
    assert len(mine["refusals"]) <= 1


@pytest.mark.parametrize("name", ["both-on-the-drive", "parameters-on-the-drive", "inference"])
def test_the_last_step_is_reported_whatever_is_on_the_drive(once, name):
    stats = once(CASES)[name][0]["stats"]
    assert stats["step"] == CASES[name].steps
    assert stats["bytes_read"] > 0
    assert stats["waited_seconds"] < stats["seconds"]
    assert (stats["update_seconds"] > 0) == (name != "inference")
    assert once(CASES)["everything-fits"][0]["stats"]["bytes_read"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks(once, name):
    assert differences(*once(ON_TWO_RANKS, ranks=2)[name]) == []


@pytest.mark.slow  # compiles that Adam
@pytest.mark.processor
@pytest.mark.parametrize("name", CPU_ADAM)
def test_cpu_adam_of_deepspeed(cpu_adam, once, name):
    assert differences(*once(CPU_ADAM)[name]) == []


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overflow_step", [None, 2])
def test_autocast_in_fp16_scales_the_loss_once_per_step(tmp_path, ranks, overflow_step):
    # DeepSpeed keeps autocast on in the process, so it is not a case among others.
    case = Case(
        dtype="autocast",
        model="blocks",
        loop="count",
        steps=6,
        clipping=1.0,
        overflow_step=overflow_step,
        section=SMALLEST,
    )
    mine, reference = pairs({"": case}, tmp_path, ranks)[""]
    assert differences(mine, reference) == []


@pytest.mark.slow
def test_what_gets_a_gradient_from_an_early_micro_batch_only_is_updated_by_it(tmp_path):
    # Not compared with "cpu": there DeepSpeed leaves it out and applies the gradient of an earlier
    # step; without offload it is right.
    case = Case(model="sometimes", accumulation=2, steps=4, section=SMALLEST)
    (mine,), (reference,) = (
        train([case], tmp_path),
        train([case.but(states="none")], tmp_path, ours=False),
    )
    for key in ("losses", "weights", "masters", "states"):
        assert mine[key] == reference[key]


@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_undefined_elements_behind_a_parameter_change_nothing(tmp_path, parameters):
    case = Case(program="padded", parameters=parameters, section={"host_memory": 160_000})
    (result,) = train([case], tmp_path, ranks=2)
    assert "error" not in result, result
