"""Checkpoints with states on a drive, against the run that was not interrupted, to the bit: other
processes, devices, cuts, ranks, drives and tools.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import Life
from launch import Case, Rank, each_by_itself, finish, start
from patience import PATIENCE

from nvme_offload.zero3 import contract

pytestmark = pytest.mark.releases
SCRIPT = Path(__file__).with_name("checkpointing.py")
SMALL = {"host_memory": 400_000}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
PARTS = ("weights", "masters", "states", "scalars")

CASES = {
    case.name: case
    for case in (
        Case(name="states", states="nvme", persistence=100),
        Case(
            name="both",
            model="frozen",
            parameters="nvme",
            states="nvme",
            zero_init=True,
            persistence=50,
        ),
        Case(name="parameters", parameters="nvme", states="cpu", zero_init=True),
        Case(name="fp16", dtype="fp16", overflow_step=1, clipping=0.5),
        Case(name="groups", model="blocks", groups=2, sub_group_size=9000, section=SMALL),
        Case(name="small", model="blocks", parameters="nvme", section=SMALL),
        Case(name="adagrad", optimizer="adagrad", sub_group_size=500),
        Case(name="sign", optimizer="sign", model="blocks", sub_group_size=9000),
    )
}
TOOLS = ("both", "parameters", "groups")
TO_CPU = ("states", "both", "parameters", "fp16", "groups", "sign")
FROM_CPU = ("states", "both", "groups")


class Results(dict[str, dict[str, Any]]):
    """Rank 0's report of each life, by name. A failed life fails only the test that uses it; lives
    that must be refused have tests.
    """

    def __getitem__(self, name: str) -> dict[str, Any]:
        result = super().__getitem__(name)
        assert "error" not in result or name.startswith("refused"), (
            f"{name}: {result['error']}: {result['message']}"
        )
        return result


def on_cpu(case: Case) -> Case:
    """*case* as DeepSpeed itself offloads it: to memory."""
    return case.but(
        parameters="cpu" if case.parameters == "nvme" else case.parameters, states="cpu"
    )


def run(lives: list[Life], directory: Path, ranks: int = 1, timeout: float = PATIENCE) -> Results:
    """Rank 0's report of each life."""

    def begin(rest: Sequence[Life]) -> list[Rank]:
        with start(
            [],
            directory,
            script=SCRIPT,
            ranks=ranks,
            lives=[dataclasses.asdict(life) for life in rest],
        ) as processes:
            return [finish(process, timeout) for process in processes]

    return Results(zip([life.name for life in lives], each_by_itself(lives, begin), strict=True))


def run_at_once(parts: list[list[Life]], directory: Path) -> Results:
    """`run`, of each part in a separate process."""
    with ThreadPoolExecutor(len(parts)) as pool:
        return Results(
            item
            for results in pool.map(lambda lives: run(lives, directory), parts)
            for item in results.items()
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def whole(place: Path) -> Results:
    """Runs that were not interrupted, and saved to one tag before step 1 and again before
    step 2.
    """
    lives = []
    for name, case in CASES.items():
        target = str(place / name)
        tools: dict[str, Any] = {}
        if name in TOOLS:
            tools = {"weights": target, "model": f"{target}/16bit", "looks": True}
        lives.append(Life(name, case.but(zero=GATHER), saves=[[1, target], [2, target]], **tools))
    for name in FROM_CPU:
        target = str(place / f"{name} cpu")
        lives.append(Life(f"{name} cpu", on_cpu(CASES[name]), ours=False, saves=[[2, target]]))
    return run_at_once([lives[::2], lives[1::2]], place)


@pytest.fixture(scope="module")
def resumed(place: Path, whole: Results) -> Results:
    """Runs in another process, from those checkpoints."""
    import deepspeed

    lives = [Life(name, case, first=2, load=str(place / name)) for name, case in CASES.items()]
    lives += [
        Life(f"{name} cut", CASES[name].but(sub_group_size=size), first=2, load=str(place / name))
        for name, size in CUTS
    ]
    lives += [
        Life(f"{name} from cpu", CASES[name], first=2, load=str(place / f"{name} cpu"))
        for name in FROM_CPU
    ]
    universal = CASES["groups"]
    # whose tool looks at the first sub-group alone
    if contract.numbers(deepspeed.__version__) < (0, 18):
        universal = universal.but(groups=1, sub_group_size=1_000_000_000)
    target = str(place / "universal")
    converted = universal.but(top={"checkpoint": {"load_universal": True}})
    by_universal = [
        Life("universal whole", universal, saves=[[2, target]]),
        Life("universal", converted, first=2, load=target, universal=target),
    ]
    lives += [
        Life(
            "weights only",
            CASES["both"],
            first=2,
            load=str(place / "both"),
            load_arguments={"load_optimizer_states": False},
        )
    ]
    with contextlib.suppress(FileNotFoundError):  # that life failed, and so will this one
        shutil.copytree(place / "states", place / "stock")
        (place / "stock" / "tag" / "offloaded_tensors").mkdir()
    lives += [Life("refused swap files", CASES["states"], load=str(place / "stock"))]
    lives += [
        Life(
            "refused model",
            CASES["states"].but(model="blocks"),
            load=str(place / "states"),
            load_arguments={"load_module_strict": False},
        )
    ]
    lives += [
        Life(f"{name} to cpu", on_cpu(CASES[name]), ours=False, first=2, load=str(place / name))
        for name in TO_CPU
    ]
    lives += [
        Life(
            "weights only to cpu",
            on_cpu(CASES["both"]),
            ours=False,
            first=2,
            load=str(place / "both"),
            load_arguments={"load_optimizer_states": False},
        )
    ]
    return run_at_once([lives[::2], [*lives[1::2], *by_universal]], place)


CUTS = (("groups", 100_000), ("adagrad", 100_000), ("sign", 700))


def assert_resumed(
    result: dict[str, Any], reference: dict[str, Any], but: tuple[str, ...] = ()
) -> None:
    """*result* went on from a checkpoint of *reference* before step 2, and both are the same from
    there to the end.
    """
    assert result["client_state"] == 2
    assert result["end"] == reference["end"]
    for key, values in result["reported"].items():
        tail = reference["reported"][key]
        assert key in but or values == tail[len(tail) - len(values) :], key
    assert result["reported"]["losses"]
    assert result["global_steps"] == reference["global_steps"]
    assert result["rates"] == reference["rates"]


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_in_another_process_as_if_it_had_not_ended(
    name: str, whole: Results, resumed: Results
) -> None:
    assert_resumed(resumed[name], whole[name])


@pytest.mark.parametrize("name", TO_CPU)
def test_deepspeed_goes_on_with_the_states_in_memory(
    name: str, whole: Results, resumed: Results
) -> None:
    assert_resumed(resumed[f"{name} to cpu"], whole[name])


@pytest.mark.parametrize("name", FROM_CPU)
def test_a_run_with_the_states_in_memory_goes_on_with_a_drive(
    name: str, whole: Results, resumed: Results
) -> None:
    assert_resumed(resumed[f"{name} from cpu"], whole[f"{name} cpu"])


@pytest.mark.parametrize("name", [name for name, _ in CUTS])
def test_a_run_goes_on_with_another_sub_group_size(
    name: str, whole: Results, resumed: Results
) -> None:
    # which are summed by sub-group
    assert_resumed(resumed[f"{name} cut"], whole[name], but=("norms",))


@pytest.mark.parametrize("name", TOOLS)
def test_saving_changes_nothing_and_deepspeeds_tools_find_the_weights(
    name: str, whole: Results
) -> None:
    assert whole[name]["differ"] == []
    assert whole[name]["16bit"] == whole[name]["end"]["weights"]


def test_what_counts_steps_goes_on_in_another_process(tmp_path: Path) -> None:
    # each in its own process: DeepSpeed keeps autocast on
    counting: dict[str, dict[str, Any]] = {
        "counting": {"optimizer": "counting", "section": {"host_memory": "smallest"}},
    }
    if contract.numbers(version("deepspeed")) >= (0, 17, 6):  # older ones have no "torch_autocast"
        counting["autocast"] = {"dtype": "autocast", "loop": "count"}
    for name, changes in counting.items():
        case, target = Case(model="blocks", **changes), str(tmp_path / name)
        whole = run([Life("", case, saves=[[2, target]])], tmp_path)[""]
        resumed = run([Life("", case, first=2, load=target)], tmp_path)[""]
        assert resumed["reported"]["losses"] == whole["reported"]["losses"][2:], name
        assert resumed["reported"]["observed"] == whole["reported"]["observed"][2:], name
        assert name != "autocast" or len(set(whole["reported"]["observed"])) > 1


# The betas change up to step 4, and stay from then on.
CYCLE = {
    "type": "OneCycle",
    "params": {
        "cycle_min_lr": 1e-3,
        "cycle_max_lr": 1e-2,
        "cycle_first_step_size": 2,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.95,
    },
}
ADAM = Case(name="cpu_adam", optimizer="cpu_adam")
ADAMS = {
    "one": ADAM,
    "sub-groups": ADAM.but(sub_group_size=500),
    "groups": ADAM.but(groups=2, accumulation=2),
    "cycle": ADAM.but(top={"scheduler": CYCLE}),
    "overlap": ADAM.but(model="blocks", section={**SMALL, "overlap_step": True}),
    "parameters": ADAM.but(parameters="nvme", states="cpu", zero_init=True),
    "overflow": ADAM.but(dtype="fp16", overflow_step=2),
}


@pytest.mark.slow  # compiles that Adam
@pytest.mark.processor
def test_deepspeeds_adam_goes_on_as_if_it_had_not_ended(cpu_adam: None, place: Path) -> None:
    # It multiplies powers of its betas in every step, and would take them by `pow` after a load: with
    # 0.999 these differ at step 6, the first after one load and the last before another, with 0.9 at
    # step 9.
    lives = []
    for name, case in ADAMS.items():
        first, second, third = (str(place / f"adam {name} {number}") for number in (1, 2, 3))
        lives += [
            Life(f"{name}, whole", case, last=11, saves=[[5, first], [6, third]]),
            Life(f"{name}, resumed", case, first=5, last=11, load=first, saves=[[8, second]]),
        ]
        if name in ("one", "overlap"):  # no step is made otherwise after a second load
            lives.append(Life(f"{name}, again", case, first=8, last=11, load=second))
            lives.append(Life(f"{name}, later", case, first=6, last=11, load=third))
    universal = ADAM.but(top={"checkpoint": {"load_universal": True}})
    target = str(place / "adam one 1")
    lives.append(Life("one, universal", universal, first=5, last=11, load=target, universal=target))
    results = run(lives, place)
    for life in lives:
        name = life.name.partition(",")[0]
        whole = results[f"{name}, whole"]
        assert results[life.name]["end"] == whole["end"], life.name
        assert whole["end"]["scalars"], life.name
    cpu = Life("cpu", on_cpu(ADAM), ours=False, last=11)
    assert run([cpu], place)["cpu"]["end"] == results["one, whole"]["end"]


def test_a_universal_checkpoint_is_loaded(resumed: Results) -> None:
    assert resumed["universal"]["end"] == resumed["universal whole"]["end"]
    assert resumed["universal"]["rates"] == resumed["universal whole"]["rates"]


def test_weights_are_loaded_without_states_as_deepspeed_does(resumed: Results) -> None:
    assert resumed["weights only"]["begin"] == resumed["weights only to cpu"]["begin"]
    assert resumed["weights only"]["end"] == resumed["weights only to cpu"]["end"]


def test_what_cannot_be_loaded_is_refused_with_a_reason(resumed: Results) -> None:
    assert resumed["refused swap files"]["error"] == "UnsupportedError"
    assert "save_16bit_model" in resumed["refused swap files"]["message"]
    assert resumed["refused model"]["error"] in ("UsageError", "RuntimeError")


def test_a_save_that_would_lack_states_is_refused_whatever_they_are_missing_from(
    place: Path,
) -> None:
    case = CASES["groups"]
    lives = [
        Life("breaking", case, saves=[[2, str(place / "breaking")]], breaking=True),
        Life("whole", case),
    ]
    results = run(lives, place)
    found = results["breaking"]["breaking"]
    for way, said in found["reported"].items():
        assert re.fullmatch(
            r"OffloadError: the checkpoint would have \d+ of \d+ master weights and \d+ of \d+ optimizer states, so it was not saved.*",
            said,
        ), way
    assert len(found["reported"]) == 20
    assert found["untouched"]
    assert found["shown"] == []
    assert results["breaking"]["end"] == results["whole"]["end"]


def test_the_file_is_one_of_torch_save(place: Path, whole: Results) -> None:
    (path,) = (place / "states" / "tag").glob("*_optim_states.pt")
    for tree in (
        torch.load(path, weights_only=False),
        torch.load(path, weights_only=False, mmap=True),
    ):
        state = tree["optimizer_state_dict"]
        (master,) = state["fp32_flat_groups"]
        assert master.shape == state["optimizer_state_dict"]["state"][0]["exp_avg"].shape
        assert float(state["optimizer_state_dict"]["state"][0]["step"]) == 2
        assert torch.isfinite(master).all()
        assert master.abs().sum() > 0
    assert not list((place / "states").rglob("*.partial"))


@pytest.mark.slow
def test_saving_and_loading_take_no_memory_but_the_budget(place: Path) -> None:
    # of 200 MB
    case = Case(name="wide", model="wide", section={"host_memory": 80_000_000}, zero_init=True)
    target = str(place / "wide")
    results = run(
        [
            Life("saved", case, last=1, saves=[[0, target]]),
            Life("loaded", case, last=0, load=target),
        ],
        place,
    )
    assert results["loaded"]["begin"] == results["saved"]["begin"]
    # a sub-group has 17 MB
    assert max(results["saved"]["saving"], results["loaded"]["loading"]) < 20_000_000


@pytest.mark.slow
def test_loading_on_another_number_of_ranks_takes_no_memory_but_the_budget(place: Path) -> None:
    case = Case(name="wide", model="wide", section={"host_memory": 80_000_000}, zero_init=True)
    target = str(place / "wide by two")
    run([Life("saved", case, last=2, saves=[[1, target]])], place, ranks=2)
    loaded = run([Life("loaded", case, first=1, last=1, load=target)], place)["loaded"]
    assert loaded["begin"]["states"]
    assert loaded["loading"] < 20_000_000


@pytest.mark.slow
def test_two_ranks(place: Path) -> None:
    target = str(place / "two")
    case = CASES["both"].but(name="two", sub_group_size=1000, clipping=0.3)
    lives = [
        Life("two", case, saves=[[2, target]], weights=target, failing=True, looks=True),
        Life("cut", case.but(sub_group_size=1_000_000), first=2, load=target),
        Life("to cpu", on_cpu(case), ours=False, first=2, load=target),
    ]
    results = run(lives, place, ranks=2)
    assert results["two"]["differ"] == []
    assert results["two"]["failing"]["error"] == "OffloadError"
    assert "was not saved, because rank" in results["two"]["failing"]["message"]
    assert results["two"]["failing"]["untouched"]
    assert_resumed(results["to cpu"], results["two"])
    assert results["cut"]["begin"] == results["to cpu"]["begin"]


def test_a_full_drive_leaves_the_last_checkpoint_and_training_goes_on(
    place: Path, whole: Results, mounted: Callable[[str], Path]
) -> None:
    target = mounted("ext4-full") / "checkpoints"
    target.mkdir()
    result = run([Life("full", CASES["groups"], full=str(target))], place)["full"]
    assert result["full"]["error"] == "NoSpaceError", result["full"]
    assert result["full"]["untouched"]
    assert result["end"] == whole["groups"]["end"]
