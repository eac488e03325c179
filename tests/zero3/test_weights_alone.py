"""What a checkpoint of two ranks gives on any number of ranks: everything, or the weights without
optimizer states, also in engines without an optimizer.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpointing import Life
from launch import Case
from test_checkpoint import Results, on_cpu, run

pytestmark = pytest.mark.releases
CASE = Case(
    name="trained",
    model="frozen",
    parameters="nvme",
    states="nvme",
    zero_init=True,
    groups=2,
    sub_group_size=1000,
    persistence=50,
)
MEMORY = CASE.but(parameters="none")
PACKED = CASE.but(section={"state_format": "split"})
READING = CASE.but(optimizer="none", states="none", groups=1)
ALONE = {"load_optimizer_states": False}
WAYS: dict[str, tuple[Case, dict[str, Any]]] = {
    "module only": (CASE, {"load_module_only": True}),
    "without states": (CASE, ALONE),
    "neither": (CASE, {**ALONE, "load_module_only": True, "load_lr_scheduler_states": False}),
    "packed": (PACKED, ALONE),
    "parameters in memory": (MEMORY, {"load_module_only": True}),
    "states in memory": (CASE.but(states="cpu"), ALONE),
    "without optimizer": (READING, {}),
    "without optimizer, module only": (READING, {"load_module_only": True}),
    "without optimizer, in memory": (READING.but(parameters="none"), {}),
    "without optimizer, on cpu": (READING.but(parameters="cpu"), ALONE),
}
ADAGRAD = CASE.but(optimizer="adagrad", model="blocks", groups=1)  # keeps none of Adam's states
SIGN = CASE.but(optimizer="sign", model="blocks", groups=1)  # keeps one of two
# How runs go on with all states: the case, and the directory that it loads.
RESUMED = {
    "as saved": (CASE, "second"),
    "of DeepSpeed": (CASE, "stock"),
    "packed": (PACKED, "packed"),
    "parameters in memory": (MEMORY, "second"),
    "other sub-groups": (CASE.but(sub_group_size=300), "second"),
    "adagrad": (ADAGRAD, "adagrad"),
    "sign": (SIGN, "sign"),
}
UNIVERSAL = CASE.but(top={"checkpoint": {"load_universal": True}})
UNIVERSAL_READING = READING.but(top=UNIVERSAL.top)
# With more ranks than saved it, one rank has no file; with fewer, a rank reads several.
RANKS = (1, pytest.param(3, marks=pytest.mark.slow))


def has_universal() -> bool:
    import deepspeed

    from nvme_offload.zero3 import contract

    # Older releases convert only the first sub-group.
    return contract.numbers(deepspeed.__version__) >= (0, 18)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def saved(place: Path) -> Results:
    """Runs on two ranks, and the weights that they save before steps 1 and 2."""
    first, second, stock = (str(place / name) for name in ("first", "second", "stock"))
    lives = [
        Life("trained", CASE, saves=[[1, first], [2, second]]),
        Life("older", CASE, first=1, last=1, load=first),
        Life("latest", CASE, first=2, last=2, load=second),
        Life("stock", on_cpu(CASE), ours=False, saves=[[2, stock]]),
        Life("packed", PACKED, saves=[[2, str(place / "packed")]]),
        Life("packed again", PACKED, first=2, last=2, load=str(place / "packed")),
    ]
    for name, case in (("adagrad", ADAGRAD), ("sign", SIGN)):
        target = str(place / name)
        lives.append(Life(name, case, saves=[[2, target]]))
        lives.append(Life(f"{name} again", case, first=2, last=2, load=target))
    results = run(lives, place, ranks=2)
    shutil.copytree(place / "first" / "tag", place / "second" / "older")
    for name, changed in (("damaged", "second"), ("missing", "stock"), ("no ranks", "stock")):
        shutil.copytree(place / changed, place / name)
    (path,) = (place / "damaged" / "tag").glob("*zero_pp_rank_1_*_optim_states.pt")
    flip_a_bit(path)
    next((place / "missing" / "tag").glob("*zero_pp_rank_1_*_optim_states.pt")).unlink()
    for path in (place / "no ranks" / "tag").iterdir():
        path.unlink()
    if has_universal():
        directories = (second, str(place / "adagrad"), str(place / "sign"))
        run([Life(f"convert {it}", CASE, last=0, universal=it) for it in directories], place)
        shutil.copytree(second, place / "universal damaged")
        folders = sorted((place / "universal damaged" / "universal" / "zero").iterdir())
        flip_a_bit(next(path for path in folders if path.is_dir()) / "exp_avg.pt")
    return results


@pytest.fixture(scope="module", params=RANKS)
def loaded(request: pytest.FixtureRequest, place: Path, saved: Results) -> Results:
    """Engines on some number of ranks that load these."""
    latest, ranks = str(place / "second"), request.param
    lives = [
        Life(
            name,
            case,
            first=2,
            last=3,
            load=str(place / "packed") if name == "packed" else latest,
            load_arguments=arguments,
        )
        for name, (case, arguments) in WAYS.items()
    ]
    lives += [
        Life(f"older {number}", case, first=1, last=1, load=latest, load_arguments=arguments)
        for number, (case, arguments) in enumerate(
            [(CASE, {"tag": "older", **ALONE}), (READING, {"tag": "older"})]
        )
    ]
    stock = str(place / "stock")
    lives += [
        Life(f"resumed {name}", case, first=2, last=3, load=str(place / directory))
        for name, (case, directory) in RESUMED.items()
    ]
    lives += [
        Life(f"refused {name} with states", CASE.but(**changes), load=str(place / directory))
        for name, changes, directory in (
            ("damaged", {}, "damaged"),
            ("missing", {}, "missing"),
            ("model", {"model": "odd"}, "second"),
            ("groups", {"groups": 1}, "second"),
        )
    ]
    lives += [
        Life("of DeepSpeed", CASE, first=2, last=2, load=stock, load_arguments=ALONE),
        *(
            Life(f"refused {name}{kind}", case, load=str(place / name), load_arguments=ALONE)
            for name in ("damaged", "missing", "no ranks")
            for kind, case in (("", CASE), (", without optimizer", READING))
        ),
        Life("refused model", CASE.but(model="odd"), load=latest, load_arguments=ALONE),
        Life(
            "refused function",
            CASE,
            load=latest,
            load_arguments={**ALONE, "custom_load_fn": "a function"},
        ),
    ]
    if has_universal():
        lives += [
            Life("universal", UNIVERSAL, first=2, last=3, load=latest),
            Life("universal alone", UNIVERSAL, first=2, load=latest, load_arguments=ALONE),
            Life("universal reading", UNIVERSAL_READING, first=2, load=latest),
            Life("refused groups", UNIVERSAL.but(groups=1), load=latest),
            Life("refused byte", UNIVERSAL, load=str(place / "universal damaged")),
        ]
        lives += [
            Life(
                f"universal {name}",
                case.but(top=UNIVERSAL.top),
                first=2,
                last=3,
                load=str(place / name),
            )
            for name, case in (("adagrad", ADAGRAD), ("sign", SIGN))
        ]
    return run(lives, place, ranks=ranks)


@pytest.mark.parametrize("name", WAYS)
def test_the_weights_are_those_that_were_saved(name: str, saved: Results, loaded: Results) -> None:
    reference = saved["packed again" if name == "packed" else "latest"]
    assert loaded[name]["begin"]["weights"] == reference["begin"]["weights"]
    assert loaded[name]["client_state"] == 2


@pytest.mark.outside(
    program="DeepSpeed ZeRO-3, {name}, resumed on another number of ranks",
    reference="weights and states as saved",
    steps="2, then 1",
    ranks="2, then {loaded}",
)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_with_its_states(name: str, saved: Results, loaded: Results) -> None:
    reference = {"packed": "packed again", "adagrad": "adagrad again", "sign": "sign again"}
    found = loaded[f"resumed {name}"]
    assert found["begin"] == saved[reference.get(name, "latest")]["begin"]
    assert found["end"]["weights"] != found["begin"]["weights"]
    assert found["client_state"] == 2


@pytest.mark.parametrize("name", ["older 0", "older 1"])
def test_the_tag_that_is_asked_for_is_loaded(name: str, saved: Results, loaded: Results) -> None:
    assert loaded[name]["begin"]["weights"] == saved["older"]["begin"]["weights"]


def test_a_checkpoint_of_deepspeed_is_loaded(saved: Results, loaded: Results) -> None:
    assert loaded["of DeepSpeed"]["begin"]["weights"] == saved["latest"]["begin"]["weights"]


def test_training_goes_on_from_the_weights(loaded: Results) -> None:
    for name in ("module only", "without states", "neither", "parameters in memory"):
        assert loaded[name]["end"] == loaded["states in memory"]["end"]
        assert loaded[name]["end"]["weights"] != loaded[name]["begin"]["weights"]


@pytest.mark.parametrize("name", ["adagrad", "sign"])
def test_a_universal_checkpoint_has_states_of_others_than_adam(
    name: str, saved: Results, loaded: Results
) -> None:
    if not has_universal():
        pytest.skip("this release of DeepSpeed converts only the first sub-group")
    assert loaded[f"universal {name}"]["begin"] == saved[f"{name} again"]["begin"]
    assert loaded[f"universal {name}"]["end"] == loaded[f"resumed {name}"]["end"]


@pytest.mark.parametrize("name", ["universal", "universal alone", "universal reading"])
def test_a_universal_checkpoint_has_all_weights(name: str, saved: Results, loaded: Results) -> None:
    if not has_universal():
        pytest.skip("this release of DeepSpeed converts only the first sub-group")
    reference = saved["latest"]["begin"]
    assert loaded[name]["begin"]["weights"] == reference["weights"]
    if name == "universal":
        assert loaded[name]["begin"] == reference
        assert loaded[name]["rates"] == saved["latest"]["rates"]


def test_what_cannot_be_loaded_is_refused_on_every_rank(loaded: Results) -> None:
    wanted = {
        "damaged": ("CorruptionError", "checksum"),
        "missing": ("CorruptionError", "cannot be found"),
        "no ranks": ("CorruptionError", "names no checkpoint"),
        "model": ("UsageError", "the checkpoint lacks"),
        "function": ("UnsupportedError", "custom_load_fn"),
    }
    wanted |= {
        f"{name}, without optimizer": wanted[name] for name in ("damaged", "missing", "no ranks")
    }
    groups = ("UsageError", "has 2 parameter groups, and the optimizer has 1")
    wanted |= {
        "damaged with states": wanted["damaged"],
        "missing with states": wanted["missing"],
        "model with states": ("UsageError", "another model"),
        "groups with states": groups,
    }
    if has_universal():
        wanted |= {"groups": groups, "byte": ("CorruptionError", "checksums")}
    for name, (error, message) in wanted.items():
        result = loaded[f"refused {name}"]
        for rank in (result, *result["ranks"]):
            assert rank["error"] == error, name
            assert message in rank["message"], name
