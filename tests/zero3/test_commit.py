"""A checkpoint is the last one or the new one whenever its ranks are killed, and a changed one is
refused with the file's name.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpointing import Life
from launch import Case, run_script

from nvme_offload.files import commit
from nvme_offload.io import manifest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("checkpointing.py")
CASE = Case(name="states", states="nvme", persistence=100)
OVERLAPPED = CASE.but(parameters="nvme", section={"overlap_step": True})
TAG = {"tag": "tag"}  # which "latest" names a moment later
KillPoints = Callable[[Path], tuple[dict[str, str], Path]]


def run(lives: list[Life], directory: Path, ranks: int = 1) -> dict[str, dict[str, Any]]:
    """Rank 0's report of each life."""
    of_each = [dataclasses.asdict(life) for life in lives]
    first, *_ = run_script(SCRIPT, directory, ranks=ranks, lives=of_each)
    return {result.pop("name"): result for result in first.results}


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("ranks", "case"),
    [pytest.param(1, CASE, marks=pytest.mark.releases), (2, CASE), (1, OVERLAPPED)],
)
def test_a_kill_at_any_call_of_any_rank_leaves_one_whole_checkpoint(
    ranks: int, case: Case, tmp_path: Path, kill_points: KillPoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    environment, images = kill_points(place)
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        whole = run(
            [Life("whole", case, saves=[[1, str(place)], [2, str(place)]], looks=case is CASE)],
            tmp_path,
            ranks,
        )["whole"]
    assert whole["differ"] == []
    found = [*sorted(image for image in images.iterdir() if image.is_dir()), place]
    assert len(found) > 50, "the calls were not seen"
    states: list[dict[str, bytes]] = []
    turns: list[Path] = []  # the last copy with each state, and the first
    named = []
    for image in found:
        commit.recover_directory(image / "tag")
        state = contents(image / "tag")
        latest = image / "latest"
        named.append(latest.read_text() if latest.exists() else "")
        assert not named[-1] or state
        if not states or state != states[-1]:
            turns += [found[max(found.index(image) - 1, 0)], image] if states else []
            states.append(state)
    assert [len(state) for state in states] == [0, 1 + 2 * ranks, 1 + 2 * ranks], (
        "more than nothing, the first and the second"
    )
    assert states[2] == contents(place / "tag")
    assert set(named) == {"", "tag"}
    lives = [
        Life(image.name, case, first=step, load=str(image), load_arguments=TAG)
        for image, step in zip(turns[1:], (1, 1, 2), strict=True)
    ]
    again = Life(
        "again", case, first=1, load=str(turns[2]), load_arguments=TAG, saves=[[2, str(turns[2])]]
    )
    loaded = run([*lives, again], tmp_path, ranks)
    for name, result in loaded.items():
        assert "error" not in result, result
        assert result["end"] == whole["end"], name
    assert [result["client_state"] for result in loaded.values()] == [1, 1, 2, 1]
    assert sorted(path.name for path in turns[2].iterdir() if path.name.startswith(".")) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and something of its user's in the directory of its tag from before it was
    saved over.
    """
    place = tmp_path_factory.mktemp("saved")
    (place / "tag").mkdir()
    (place / "tag" / "notes.txt").write_text("mine")
    (place / "tag" / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_text(
        "of a run with more ranks"
    )
    # the first is of a killed save
    for name, file in (
        (".other.partial", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        (".mine.partial", "notes.txt"),
    ):
        (place / name).mkdir()
        (place / name / file).touch()
    result = run([Life("saved", CASE, last=2, saves=[[1, str(place)]])], place)["saved"]
    assert "error" not in result, result
    assert [path.name for path in place.iterdir() if path.name.startswith(".")] == [".mine.partial"]
    assert sorted(path.name for path in (place / "tag").iterdir()) == [
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "notes.txt",
        "nvme_offload.json",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
    ]
    return place


def test_what_is_not_as_it_was_written_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    states, model = (
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
    )
    lives, expected = [], {}

    def damaged(name: str, file: str, damage: Callable[[Path], Any]) -> None:
        copy = tmp_path / name
        shutil.copytree(saved, copy)
        damage(copy / "tag" / file)
        lives.append(Life(name, CASE, first=1, load=str(copy)))
        expected[name] = file

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1000])

    for file in (states, model):
        damaged(f"flipped {file}", file, flip)
        damaged(f"cut {file}", file, cut)
        damaged(f"missing {file}", file, Path.unlink)
    damaged("flipped manifest", manifest.NAME, flip)
    damaged("missing manifest", manifest.NAME, Path.unlink)

    def without_manifest(
        path: Path,
    ) -> None:  # as of an earlier version: only torch checks the file
        cut(path)
        path.with_name(manifest.NAME).unlink()

    damaged("cut, of an earlier version", states, without_manifest)
    results = run(lives, tmp_path)
    for name, file in expected.items():
        assert results[name].get("error") == "CorruptionError", (name, results[name])
        assert file in results[name]["message"]
