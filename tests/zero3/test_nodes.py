"""Two nodes, each with one rank: training and checkpoints, on a filesystem that they share and on a
directory of each node's own.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpointing import Life
from launch import Case, run_script
from nodes import Node, cluster

pytestmark = [pytest.mark.releases, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("checkpointing.py")
CASE = Case(name="both", parameters="nvme", states="nvme", persistence=100)
LOCAL = CASE.but(top={"checkpoint": {"use_node_local_storage": True}})
OFFLOADED = ("offload_param", "offload_optimizer")
# whose checkpoints DeepSpeed itself writes
PARAMETERS = LOCAL.but(states="cpu")


def run(
    lives: list[Life], directory: Path, on_nodes: list[Node] | None = None
) -> list[dict[str, dict[str, Any]]]:
    """The results of each rank, by the name of the life."""
    of_each = [dataclasses.asdict(life) for life in lives]
    ended = run_script(SCRIPT, directory, ranks=2, on_nodes=on_nodes, lives=of_each)
    return [{result["name"]: result for result in rank.results} for rank in ended]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def on_nodes(place: Path) -> Iterator[list[Node]]:
    with cluster(2, place, own=["local"]) as found:
        yield found


@pytest.fixture(scope="module")
def whole(place: Path) -> list[dict[str, Any]]:
    """What each rank comes to on one node, without a break."""
    return [rank["whole"] for rank in run([Life("whole", CASE)], place)]


@pytest.fixture(scope="module")
def saved(place: Path, on_nodes: list[Node]) -> list[dict[str, dict[str, Any]]]:
    """Runs on two nodes that save to both kinds of directory, and others that go on from there."""
    shared, local = place / "shared", place / "local"
    (place / "node0" / "local" / "drive").mkdir()
    here = {"nvme_path": str(local / "drive")}
    lives = [
        Life("no drive", CASE.but(zero_init=True, zero=dict.fromkeys(OFFLOADED, here))),
        Life("no drive, states", CASE.but(parameters="none", zero={OFFLOADED[1]: here})),
        Life("shared", CASE, saves=[[2, str(shared)]]),
        Life("shared, resumed", CASE, first=2, load=str(shared)),
        Life("local", LOCAL, saves=[[1, str(local / "saved")], [2, str(local / "saved")]]),
        Life("local, resumed", LOCAL, first=2, load=str(local / "saved")),
        Life("local, shared", LOCAL, saves=[[2, str(place / "both")]]),
        Life("local, shared, resumed", LOCAL, first=2, load=str(place / "both")),
        Life("parameters", PARAMETERS, saves=[[2, str(local / "parameters")]]),
        Life("parameters, resumed", PARAMETERS, first=2, load=str(local / "parameters")),
        Life("not shared", CASE, saves=[[2, str(local / "not shared")]]),
        Life("nothing there", CASE, load=str(local / "nothing")),
        Life("older", LOCAL, saves=[[1, str(local / "older")]]),
    ]
    return run(lives, place, on_nodes)


@pytest.mark.parametrize(
    "name",
    [
        f"{kind}{rest}"
        for kind in ("shared", "local", "local, shared", "parameters")
        for rest in ("", ", resumed")
    ],
)
def test_two_nodes_come_to_the_bits_of_one(
    name: str, saved: list[dict[str, dict[str, Any]]], whole: list[dict[str, Any]]
) -> None:
    for rank, reference in zip(saved, whole, strict=True):
        assert "error" not in rank[name], rank[name]
        assert rank[name]["end"] == reference["end"]


def test_every_node_has_its_own_files_and_names_them(
    place: Path, saved: list[dict[str, dict[str, Any]]]
) -> None:
    for node in range(2):
        local = place / f"node{node}" / "local" / "saved"
        assert not list(local.glob(".*"))
        assert (local / "latest").read_text() == "tag"
        assert sorted(path.name for path in (local / "tag").iterdir()) == [
            f"bf16_zero_pp_rank_{node}_mp_rank_00_optim_states.pt",
            "nvme_offload.json",
            f"zero_pp_rank_{node}_mp_rank_00_model_states.pt",
        ]
        # the first rank of each node would otherwise replace the files of the other
        both = {path.name for path in (place / "both" / "tag").iterdir()}
        assert f"bf16_zero_pp_rank_{node}_mp_rank_00_optim_states.pt" in both


def test_a_directory_that_is_not_shared_needs_the_setting(
    place: Path, saved: list[dict[str, dict[str, Any]]]
) -> None:
    for rank in saved:
        assert rank["not shared"]["error"] == "UsageError"
        assert "rank 1 of 2 cannot see" in rank["not shared"]["message"]
        assert '{"use_node_local_storage": true}' in rank["not shared"]["message"]
    assert not list(place.glob("node*/local/not shared/*"))


@pytest.mark.parametrize("name", ["no drive", "no drive, states"])
def test_a_drive_that_one_node_lacks_is_an_error_on_every_rank(
    name: str, saved: list[dict[str, dict[str, Any]]]
) -> None:
    (other, lacking) = (rank[name] for rank in saved)
    assert lacking["error"] == "UsageError"
    assert "local/drive does not exist" in lacking["message"]
    assert other["error"] == "OffloadError"
    assert lacking["message"] in other["message"]
    assert "because rank 1 failed" in other["message"]


def test_without_a_checkpoint_every_node_says_so(saved: list[dict[str, dict[str, Any]]]) -> None:
    assert [rank["nothing there"]["error"] for rank in saved] == 2 * ["FileNotFoundError"]


def test_nodes_that_find_different_checkpoints_load_none(
    place: Path, on_nodes: list[Node], saved: list[dict[str, dict[str, Any]]]
) -> None:
    """One of which is missing, unnamed, or of another save, on one node."""
    first, second = (place / f"node{node}" / "local" for node in range(2))
    for name in ("missing", "missing by tag", "unnamed", "of another save"):
        for node in (first, second):
            shutil.copytree(node / "saved", node / name)
    shutil.rmtree(second / "missing")
    shutil.rmtree(second / "missing by tag")
    (first / "unnamed" / "latest").unlink()
    shutil.rmtree(second / "of another save" / "tag")
    shutil.copytree(second / "older" / "tag", second / "of another save" / "tag")
    lives = [
        Life(name, LOCAL, load=str(place / "local" / name), load_arguments=arguments)
        for name, arguments in (
            ("missing", {}),
            ("missing by tag", {"tag": "tag"}),
            ("unnamed", {}),
            ("of another save", {"tag": "tag"}),
        )
    ]
    for rank in run(lives, place, on_nodes):
        for name, result in rank.items():
            assert result["error"] == "UsageError", name
            assert "rank 0: " in result["message"], name
            assert "rank 1: " in result["message"], name
