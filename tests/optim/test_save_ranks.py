"""`NVMeOptimizer.save` and `load` on several ranks. See `ranks_save.py`, `ranks_save_twice.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_ranks import cases_of, results_of_ranks

from nvme_offload.files import commit
from nvme_offload.io import manifest
from nvme_offload.io.engine import Engine
from nvme_offload.io.manifest import Manifest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    return results_of_ranks("ranks_save.py", "cpu", tmp_path_factory.mktemp("drive"), ranks=4)


SAVED, WHOLE = "weights and states as saved", "the uninterrupted run"
RESUMED = {
    "another_number_of_ranks": ("FSDP2, `save` and `load`", SAVED, 3, "4, then 2, 4 and 1"),
    "shards_of_another_mesh": ("FSDP2 over tensor parallelism, another mesh", SAVED, 3, 4),
    "ddp": ("DDP, `save` and `load`", WHOLE, "6, resumed after 3", 4),
    "zero_redundancy": (
        "`ZeroRedundancyOptimizer`, `save` and `load`",
        WHOLE,
        "6, resumed after 3",
        4,
    ),
}
COLUMNS = ("program", "reference", "steps", "ranks")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=pytest.mark.outside(**dict(zip(COLUMNS, RESUMED[case], strict=True)))
            if case in RESUMED
            else (),
        )
        for case in cases_of("ranks_save.py")
    ],
)
def test_four_ranks(reported, case):
    assert reported[case] == []


def test_a_kill_at_any_call_of_any_rank_leaves_one_whole_save(
    tmp_path: Path,
    kill_points: Callable[[Path], tuple[dict[str, str], Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, drive = tmp_path / "place", tmp_path / "drive"
    place.mkdir()
    drive.mkdir()
    environment, images = kill_points(place)
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        assert results_of_ranks("ranks_save_twice.py", "cpu", drive) == {"saved_twice": []}
    found = [*sorted(image for image in images.iterdir() if image.is_dir()), place]
    assert len(found) > 30, "the calls were not seen"
    steps: list[int] = []
    with Engine() as engine:
        for image in found:
            commit.recover_directory(image / "saved")
            if not (image / "saved").exists():
                assert steps == []
                continue
            saved = Manifest.read(image / "saved")
            assert saved is not None
            assert [entry.name for entry in saved.files] == ["rank0.pt", "rank1.pt"]
            if saved.step not in steps:
                steps.append(saved.step)
                for entry in saved.files:
                    manifest.verify(image / "saved", entry, engine, saved.checksum)
            assert saved.step == steps[-1]
    assert steps == [3, 6]
    assert [entry.name for entry in place.iterdir()] == ["saved"]
