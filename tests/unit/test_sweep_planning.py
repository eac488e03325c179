"""`python -m sweeps.planning`: the models' tensors, the uses of their steps, the least that can be
moved, and one small run.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

pytest.importorskip("transformers", reason="the models are made by transformers")

from nvme_offload.errors import UsageError  # noqa: E402
from sweeps.models import CONFIGS, config_of, narrowed, split_experts, tensors  # noqa: E402
from sweeps.planning.__main__ import main  # noqa: E402
from sweeps.planning.uses import Event, groups_of, made, rounds, step  # noqa: E402

# As the models' own pages have them.
KNOWN = {
    "gpt2": (148, 124_439_808),
    "llama2-7b": (291, 6_738_415_616),
    "llama3-70b": (723, 70_553_706_496),
    "qwen3-moe": (531, 30_532_122_624),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_model_has_its_own_tensors(name: str) -> None:
    found = tensors(config_of(name))
    assert (len(found), sum(tensor.elements for tensor in found)) == KNOWN[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_small_width_form_has_all_tensors(name: str) -> None:
    whole, small = tensors(config_of(name)), tensors(config_of(name, 64))
    assert [tensor.name for tensor in small] == [tensor.name for tensor in whole]
    assert [len(tensor.shape) for tensor in small] == [len(tensor.shape) for tensor in whole]
    assert sum(tensor.elements for tensor in small) < 4e7


def test_a_config_json_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                **config_of("llama2-7b", 64),
                "num_hidden_layers": 3,
                "architectures": ["LlamaForCausalLM"],
            }
        )
    )
    for place in (tmp_path, tmp_path / "config.json"):
        assert len(tensors(config_of(str(place)))) == 3 * 9 + 3
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match='has no "model_type"'):
        config_of(str(tmp_path))
    with pytest.raises(UsageError, match="is none of gpt2"):
        config_of("llama9")
    for width in (0, 12, 8192):
        with pytest.raises(UsageError, match="multiple of 8"):
            narrowed(CONFIGS["llama2-7b"], width)


def test_experts_are_values_of_their_own() -> None:
    config = config_of("qwen3-moe", 64)
    split = list(split_experts(tensors(config), 128))
    assert sum(tensor.elements for tensor, _ in split) == sum(
        tensor.elements for tensor in tensors(config)
    )
    assert len({expert for _, expert in split if expert}) == 48 * 128
    groups = groups_of(split, 0)
    assert all(len(group.tensors) == 2 for group in groups if group.expert)
    events = step(groups, 0.25, random.Random(1))
    touched = {
        event.name
        for event in events
        if event.phase == "update" and event.verb == "change" and ".experts." in event.name
    }
    assert len(touched) == 48 * 32 * 2
    assert touched != {
        event.name
        for event in step(groups, 0.25, random.Random(2))
        if event.phase == "update" and event.verb == "change"
    }


def test_a_step_uses_everything_and_leaves_what_was_there() -> None:
    groups = groups_of([(tensor, None) for tensor in tensors(config_of("llama2-7b", 64))], 0)
    there = {event.name for event in made(groups)}
    in_use: set[str] = set()
    parameters = sum(len(group.tensors) for group in groups)
    for event in (events := step(groups, 1.0, random.Random(0))):
        if event.verb in ("create", "need"):
            assert (event.name in there) == (event.verb == "need")
            in_use.add(event.name)
            there.add(event.name)
        else:
            in_use.remove(event.name)
            there -= {event.name} if event.verb == "drop" else set()
    assert not in_use
    assert there == {event.name for event in made(groups)}
    assert sum(event.verb in ("create", "need") for event in events) == 5 * parameters + len(groups)


def test_the_least_that_can_be_moved() -> None:
    pytest.importorskip("scipy", reason="the linear program is solved by scipy")
    from sweeps.planning.least import least_bytes

    def period(end: str, count: int) -> list[Event]:
        return [
            Event(verb, str(number), 100, "") for number in range(count) for verb in ("need", end)
        ]  # type: ignore[arg-type]

    assert least_bytes(period("release", 8), 800) == pytest.approx(0)
    # Of the others there is room for two whenever one is in use; each is read as far as it was not
    # kept.
    assert least_bytes(period("release", 8), 300) == pytest.approx(100 * (8 - 8 * 2 / 7))
    assert least_bytes(period("change", 8), 300) == pytest.approx(200 * (8 - 8 * 2 / 7))
    dropped = [
        Event("create", "g", 100, ""),
        Event("change", "g", 100, ""),
        *period("release", 1),
        Event("need", "g", 100, ""),
        Event("drop", "g", 100, ""),
    ]
    assert least_bytes(dropped, 200) == pytest.approx(0)
    assert least_bytes(dropped, 100) == pytest.approx(300)  # out and in, and the other one in
    with pytest.raises(ValueError, match="does not fit"):
        least_bytes(dropped, 99)


def test_rounds() -> None:
    begin, one = rounds(300, there_and_back=True, changed=True)
    assert [event.name for event in one[::2]] == [
        *map(str, range(300)),
        *map(str, reversed(range(300))),
    ]
    assert {event.nbytes for event in begin} == {event.nbytes for event in one}
    assert {event.verb for event in one} == {"need", "change"}


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**config_of("llama2-7b"), "num_hidden_layers": 2})
    )
    drive = ["--timed", "--read", "0.5", "--write", "0.5"]
    shapes = ["--models", str(tmp_path), "--width", "64", "--rounds", "16", "--steps", "1"]
    ran = CliRunner().invoke(
        main, [*shapes, *drive, "--output", str(tmp_path / "out")], catch_exceptions=False
    )
    assert ran.exit_code == 0
    model, *others = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert [one["title"] for one in others] == [
        f"16 values, {order}"
        for order in ("cyclic", "cyclic, changed", "there and back", "there and back, changed")
    ]
    assert model["read_bytes"] > model["held_bytes"] - model["memory_bytes"]
    assert others[0]["written_bytes"] == 0 < others[1]["written_bytes"]
    assert all(one["seconds"] > 0 < one["floor_seconds"] for one in [model, *others])
    assert f"| {tmp_path}, width 64 |" in ran.output
