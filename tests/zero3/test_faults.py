"""Training on a drive that fails, that is too small or too slow to name, with settings that cannot
work; and DeepSpeed before `enable` and after `disable`.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launch import Case, differences, run, run_script, train

from nvme_offload.errors import NoSpaceError

SMALLEST = {"host_memory": "smallest"}
STREAMED = Case(model="blocks", parameters="nvme", section=SMALLEST, steps=4)

EAGAIN, EIO, ENOSPC = 11, 5, 28
ALWAYS = 1 << 40

# first transfer, number of transfers, kind of fault, its value; `Engine` numbers
# transfers from 0.
TRANSIENT = {
    "busy": [[at, 1, "FAIL", EAGAIN] for at in range(0, 400, 3)],
    "short": [[at, 1, "CUT", 4096] for at in range(0, 400, 2)],
    "short-and-odd": [[at, 1, "CUT", 1001] for at in range(1, 400, 5)],
    "refused": [[at, 1, "REFUSE", EAGAIN] for at in range(0, 400, 4)],
    "late": [[at, 1, "DELAY", 3] for at in range(0, 400, 2)],
}


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """The result of each of `TRANSIENT`, and under "undisturbed" stock DeepSpeed's; two concurrent
    processes.
    """
    requests = {
        "undisturbed": {"ours": False},
        **{name: {"faults": faults} for name, faults in TRANSIENT.items()},
    }
    with ThreadPoolExecutor(2) as pool:
        under_way = {
            name: pool.submit(train, [STREAMED], tmp_path_factory.mktemp("drive"), **request)
            for name, request in requests.items()
        }
        return {name: training.result()[0] for name, training in under_way.items()}


@pytest.mark.slow
@pytest.mark.parametrize("faults", TRANSIENT)
def test_what_passes_leaves_no_trace(disturbed, faults):
    result = disturbed[faults]
    assert differences(result, disturbed["undisturbed"]) == []
    assert result["traffic"]["bytes_read"] > 0
    assert result["traffic"]["retries"] > 0 or faults in ("late", "refused")


@pytest.mark.slow
# At the first transfer, which is a write, and in the midst of a step.
@pytest.mark.parametrize(
    ("first", "error", "kind"), [(0, ENOSPC, "NoSpaceError"), (60, EIO, "IOFailure")]
)
def test_what_stays_is_an_error_of_its_type_on_every_rank(tmp_path, first, error, kind):
    """No rank waits for the 30 minutes of gloo's timeout."""
    ranks = run([STREAMED], tmp_path, ranks=2, faults=[[first, ALWAYS, "FAIL", error]])
    results = [result for rank in ranks for result in rank.results]
    assert len(results) == 2, [rank.complaints for rank in ranks]
    # 1 where a second transfer had failed by then, which no caller waits for
    assert {rank.status for rank in ranks} <= {0, 1}
    assert kind in [result["error"] for result in results]
    # the slower rank may hear from the other's end before it comes to its own failure
    for result in results:
        assert (result["error"], str(tmp_path) in result["message"]) in [
            (kind, True),
            ("RuntimeError", False),
        ], result


@pytest.mark.slow
def test_one_rank_that_fails_does_not_leave_the_other_waiting(tmp_path):
    well, broken = run(
        [STREAMED],
        tmp_path,
        ranks=2,
        faulty_rank=1,
        faults=[[60, ALWAYS, "FAIL", EIO]],
    )
    assert [result["error"] for result in broken.results] == ["IOFailure"], broken.complaints
    assert well.status is not None


def test_a_budget_that_is_too_small_is_refused_with_the_one_that_will_do(tmp_path):
    case = Case(model="blocks", section={"host_memory": 1000})
    (refused,) = train([case], tmp_path)
    assert refused["error"] == "UsageError"
    assert (
        '"host_memory" of 1000 bytes cannot hold the optimizer states of the largest parameter'
        in refused["message"]
    )
    enough = int(refused["message"].split("at least ")[1].split()[0])
    accepted, refused = train(
        [case.but(section={"host_memory": enough}), case.but(section={"host_memory": enough - 1})],
        tmp_path,
    )
    assert "error" not in accepted
    assert accepted["traffic"]["bytes_read"] > 0
    assert refused["error"] == "UsageError"


def test_a_drive_that_is_too_small_is_refused_before_the_first_step(mounted):
    with tempfile.TemporaryDirectory(dir=mounted("ext4-full")) as place:  # 16 MiB
        (result,) = train([Case(model="misaligned", section=SMALLEST)], Path(place))
    assert result["error"] == NoSpaceError.__name__
    assert "training needs 84" in result["message"]
    assert '"paths"' in result["message"]


WRONG_SECTIONS = [
    (
        {"host_mem": "1GB"},
        "has the key 'host_mem'; the keys are backend, checksum, host_memory, missing_gradients, ",
    ),
    ({"swappers": "fast"}, '"swappers" in "nvme_offload" must be one of "native", "deepspeed"'),
]


def test_a_wrong_section_is_refused(tmp_path):
    cases = [
        (case.but(section=section), said)
        for section, said in WRONG_SECTIONS
        for case in (Case(), Case(parameters="nvme", zero_init=True))
    ]
    for result, (case, said) in zip(
        train([case for case, _ in cases], tmp_path), cases, strict=True
    ):
        assert result["error"] == "UsageError", case
        assert said in result["message"]


@pytest.mark.slow
def test_deepspeeds_own_swappers_work_on_this_packages_op(tmp_path):
    # Each large parameter its own sub-group: with a small one ahead of a large one in it, DeepSpeed
    # reads gradients that it never wrote.
    case = Case(
        section={"swappers": "deepspeed"},
        model="misaligned",
        steps=2,
        sub_group_size=1,
        zero={"offload_optimizer": {"buffer_count": 8}},
    )
    (result,), (reference,) = (
        train([case], tmp_path),
        train([case.but(zero={})], tmp_path, ours=False),
    )
    assert differences(result, reference) == []
    assert result["traffic"]["memory"] == []  # no tier of ours
    assert list(tmp_path.rglob("*.swp")) != []


BEFORE_AND_AFTER = """
import sys
import deepspeed
import deepspeed.runtime.superoffload.superoffload_stage3
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import engine
from deepspeed.runtime.zero import partition_parameters, stage3
from nvme_offload import zero3

def attributes():
    "Everything in every module of DeepSpeed and in its classes, by place, as it is bound now."
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "deepspeed" and module is not None:
            for key, value in vars(module).items():
                found[name, key] = value
                if isinstance(value, type) and value.__module__.startswith("deepspeed"):
                    found |= {(name, key, inner): bound for inner, bound in vars(value).items() if inner not in ("__annotations__", "__abstractmethods__")}
    found["loaded ops"] = tuple(sorted((key, id(value)) for key, value in OpBuilder._loaded_ops.items()))
    found["pin memory"] = getattr(sys, "_deepspeed_pin_memory_op_module", None)
    found["compatible ops"] = tuple(sorted(deepspeed.ops.__compatible_ops__.items()))
    return found

def changed(before, after):
    return sorted(str(key) for key in before.keys() | after.keys() if key not in before or key not in after
                  or not (before[key] is after[key] or isinstance(before[key], tuple) and before[key] == after[key]))

zero3.enable(); zero3.disable()  # imports the modules that it patches
deepspeed.ops.__compatible_ops__  # made when first asked for
before = attributes()
zero3.enable()
once = attributes()
zero3.enable()
assert changed(once, attributes()) == [], changed(once, attributes())
replaced = changed(before, once)
assert any("_configure_zero_optimizer" in name for name in replaced) and any("AsyncPartitionedParameterSwapper" in name for name in replaced), replaced
assert "loaded ops" in replaced, replaced
zero3.disable()
assert changed(before, attributes()) == [], changed(before, attributes())
zero3.disable()
assert changed(before, attributes()) == [], changed(before, attributes())
"""


def test_disable_puts_deepspeed_back_as_it_was_and_enable_twice_is_enable_once(tmp_path):
    script = tmp_path / "before_and_after.py"
    script.write_text(BEFORE_AND_AFTER)
    run_script(script, tmp_path)


def test_where_deepspeed_refuses_fp16_it_says_what_to_do(tmp_path):
    (result,) = train([Case(dtype="fp16")], tmp_path, fp16=False)
    assert result["error"] == "UsageError"  # which is a ValueError, as DeepSpeed's is
    assert result["message"].startswith("Type fp16 is not supported on your device. ")
    assert 'enable "bf16" in place of "fp16"' in result["message"]
