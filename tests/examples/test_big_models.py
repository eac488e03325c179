"""`examples/big_models/train.py` on its smallest model: every way to update, compared with states
in memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doors import needs
from patience import PATIENCE

pytestmark = needs("transformers")

GLOO_RANK = str(Path(__file__).parents[1] / "gloo_rank.py")
SCRIPT = Path(__file__).parents[2] / "examples" / "big_models" / "train.py"
SMALL = "--model tiny --batch 2 --sequence 64 --steps 6 --deterministic"


def trained(directory, *options, ranks=1, left=()):
    """The results that a run of the script prints at its end."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        GLOO_RANK,
    ]
    command = [
        *(sys.executable, "-W", "ignore", *(launcher if ranks > 1 else ())),
        *(str(SCRIPT), *SMALL.split()),
        *("--drive", str(directory), "--host-memory", "1MB", *options),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert sorted(directory.iterdir()) == sorted(left)
    assert not any(list(drive.iterdir()) for drive in left)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    found = {}
    for clip in ("0", "0.5", "1000"):
        found[clip] = trained(
            tmp_path_factory.mktemp("memory"), "--reference", "--update", "after", "--clip", clip
        )
    assert found["0"]["losses"] != found["0.5"]["losses"]
    return found


@pytest.mark.parametrize(
    ("update", "clip"),
    [
        ("after", "0"),
        ("after", "0.5"),
        ("in-backward", "0"),
        ("under-forward", "0"),
        ("under-forward", "0.5"),
        ("both", "0"),
        ("in-backward", "0.5"),
        ("in-backward", "1000"),
        ("both", "0.5"),
    ],
)
def test_exact_has_the_losses_of_states_in_memory(tmp_path, in_memory, update, clip):
    found = trained(tmp_path, "--format", "exact", "--update", update, "--clip", clip)
    assert found["losses"] == in_memory[clip]["losses"]
    assert found["steps_clipped"] == in_memory[clip]["steps_clipped"]
    assert (found["steps_clipped"] > 0) == (clip == "0.5")


def test_two_ranks_with_a_directory_each_have_the_losses_of_states_in_memory(tmp_path):
    drives = [tmp_path / "one", tmp_path / "other"]
    for drive in drives:
        drive.mkdir()
    both = {"ranks": 2, "left": drives}
    clip = ("--clip", "0.5")
    off = trained(tmp_path, "--reference", "--update", "after", *clip, **both)
    for update in ("in-backward", "under-forward", "both"):
        how = ("--drive", *map(str, drives), "--format", "exact", "--update", update)
        on = trained(tmp_path, *how, *clip, **both)
        assert on["losses"] == off["losses"]
        assert on["steps_clipped"] == off["steps_clipped"] > 0
        assert on["gpus"] == 2


@pytest.mark.parametrize(("state_format", "ranks"), [("exact", 1), ("compact24", 2)])
def test_a_resumed_run_has_the_losses_of_one_that_went_on(tmp_path, state_format, ranks):
    drive, saved = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    how = ("--drive", str(drive), "--format", state_format)
    straight = trained(drive, *how, ranks=ranks)
    trained(drive, *how, "--steps", "4", "--save", str(saved), ranks=ranks)
    resumed = trained(drive, *how, "--steps", "2", "--resume", str(saved), ranks=ranks)
    assert resumed["losses"] == straight["losses"][4:]


@pytest.mark.parametrize("state_format", ["split", "compact", "compact24"])
def test_other_formats_train_alike(tmp_path, in_memory, state_format):
    found = trained(tmp_path, "--format", state_format)
    losses, reference = (
        [float.fromhex(loss) for loss in one["losses"]] for one in (found, in_memory["0"])
    )
    assert losses == pytest.approx(reference, abs=0.05)
