"""`python -m sweeps.systems` on the smallest model, without a GPU: systems that need none, in one
process and in two, and the message about a system that cannot run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import pytest
from doors import needs
from processes import finished

pytestmark = needs("transformers", "deepspeed")

ROOT = Path(__file__).parents[2]
# each way to make a model and its optimizer once
TRAINED = {
    1: (
        *("offload-compact", "zero3-both", "zero-infinity"),
        *("cpu-offload-policy", "cpu-offload-policy-compact"),
    ),
    2: ("compact", "zero3", "cpu-offload-policy"),
}


@pytest.mark.parametrize("gpus", TRAINED)
def test_every_system_trains_the_same_model(tmp_path, gpus, request):
    trained = TRAINED[gpus]
    if "zero-infinity" in trained:
        request.getfixturevalue("deepspeeds_op")
    (drive := tmp_path / "drive").mkdir()
    ran = finished(
        [
            *(forked.PYTHON, "-m", "sweeps.systems", str(drive)),
            *("--model", "tiny", "--batch", "2", "--sequence", "64", "--steps", "3"),
            *("--gpus", str(gpus), "--host-memory", "20MB", "--output", str(tmp_path / "report")),
            *("--systems", ",".join((*trained, "megatrain")), "--fio-bytes", "0"),
        ],
        cwd=ROOT,
        env=forked.launching({**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}),
    )
    assert ran.returncode == 0, ran.stderr
    assert not any(drive.iterdir())
    runs = {
        one["system"]: one
        for one in json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["systems"]
    }
    losses = {
        name: [event["loss"] for event in runs[name]["events"] if event["event"] == "step"]
        for name in trained
    }
    assert [runs[name]["error"] for name in trained] == [None] * len(trained)
    assert all(len(found) == 3 for found in losses.values())
    for name in trained[gpus - 1 :]:  # with several FSDP2 makes the weights of the first, in parts
        assert losses[name] == pytest.approx(losses["cpu-offload-policy"], abs=1e-3)
    assert runs["megatrain"]["error"]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text == ran.stdout.removesuffix("\n")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(trained) + 1
    assert f"tiny on {gpus} GPU" in text
    assert "\n- MegaTrain: " in text
