"""A checkpoint after a loss of power at any moment is the last one or the new one, and the new one
once `save_checkpoint` has returned.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from checkpointing import Life
from launch import Case, finish, start

from nvme_offload.files import commit
from nvme_offload.io.engine import Engine
from nvme_offload.io.manifest import Manifest, verify

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from recorded_drive import FILESYSTEMS, recorded, seen_after_loss

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("checkpointing.py")
CASE = Case(name="states", states="nvme", persistence=100)


@pytest.mark.parametrize("kind", FILESYSTEMS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_whole_checkpoint_is_found(
    ranks: int, kind: str, mount_namespace: None, tmp_path: Path
) -> None:
    with recorded(tmp_path / "drive", kind) as drive, Engine() as engine:

        def judge(found: Path) -> str:
            commit.recover_directory(found / "tag")
            latest = found / "latest"
            assert not latest.exists() or latest.read_text() == "tag"
            if not (found / "tag").exists():
                assert not latest.exists()
                return "none"
            manifest = Manifest.read(found / "tag")
            assert manifest is not None
            assert len(manifest.files) == 2 * ranks
            for entry in manifest.files:
                verify(found / "tag", entry, engine, manifest.checksum)
            return f"{manifest.step}{' named' if latest.exists() else ''}"

        os.sync()
        begin = drive.now()
        life = Life("whole", CASE, saves=[[1, str(drive.place)], [2, str(drive.place)]])
        with start(
            [], tmp_path, script=SCRIPT, ranks=ranks, lives=[dataclasses.asdict(life)]
        ) as processes:
            ended = [finish(process, 300) for process in processes]
        end = drive.now()
        assert [rank.status for rank in ended] == [0] * ranks, ended[0].complaints
        least, others = seen_after_loss(drive, begin, end, judge)
        assert judge(drive.place) == "2 named"
    turns = [
        state for number, state in enumerate(least) if number == 0 or state != least[number - 1]
    ]
    assert turns == ["none", "1", "1 named", "2 named"]
    assert set(others) <= set(turns)
    assert len(others) >= {"ext4": 20, "xfs": 10}[kind]  # which flushes less often
