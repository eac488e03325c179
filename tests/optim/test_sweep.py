"""`python -m sweeps.optimizer`: one small run, and what its report says of given figures."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from sweeps.optimizer.report import Drive, Results, Run, as_json, render  # noqa: E402
from sweeps.optimizer.shapes import gpt_shapes  # noqa: E402


@pytest.mark.parametrize("parameters", [10**5, 10**7, 4 * 10**8, 16 * 10**8, 7 * 10**9])
def test_shapes_come_to_about_what_is_asked_for(parameters):
    elements = sum(math.prod(shape) for shape in gpt_shapes(parameters))
    assert 0.7 * parameters < elements <= max(parameters, 140_000)


def run(variant, number, seconds, moved=(0, 0), drive=None, error=None, peak=1e9):
    step = {
        "seconds": seconds,
        "cpu_seconds": 1.0,
        "read_bytes": moved[0],
        "written_bytes": moved[1],
        "waited_seconds": seconds / 2,
    }
    step |= {"busy_seconds": 0.75 * seconds, "planning_seconds": 0.125}
    done = {
        "elements": 10**9,
        "host_before_bytes": 5e8,
        "host_peak_bytes": peak,
        "device_before_bytes": 4e9,
        "device_peak_bytes": 5e9,
        "checksum": "0x1p+0",
    }
    return Run(
        variant,
        number,
        [step, step] if error is None else [],
        done if error is None else {},
        drive,
        error,
    )


def test_the_report_says_what_was_measured():
    drive = Drive(3e9, 3e9, 3e9, 2.8e9)
    runs = [
        *(run("exact", number, 9.0, (12e9, 12e9), drive) for number in range(2)),
        *(run("compact", number, 4.0 + number, (4e9, 4e9), drive, peak=2e9) for number in range(2)),
        *(run("deepspeed", number, 16.0, (16e9, 16e9), drive, peak=4e9) for number in range(2)),
        *(run("memory", number, 0.5) for number in range(2)),
        run("split", 0, 0, error="killed | by the kernel"),
    ]
    results = Results({"drive": "a fast one"}, "4.4 GB", 2, runs, [drive], ["A note."])
    text = render(results)
    assert (
        '| NVMeOptimizer, "exact" | floor / time | >= 0.9 | 0.89 [0.89 to 0.89] | missed |' in text
    )
    assert (
        '| NVMeOptimizer, "compact" | time of a step / DeepSpeed\'s | <= 0.3 | 0.28 [0.25 to 0.31] | met? |'
        in text
    )
    assert (
        '| NVMeOptimizer, "compact" | peak host memory / DeepSpeed\'s | <= 1 | 0.50 [0.50 to 0.50] | met |'
        in text
    )
    assert (
        '| NVMeOptimizer, "exact" | 9.00 [9.00 to 9.00] | 0.56 [0.56 to 0.56] | 18.00 [18.00 to 18.00] | 12.00 + 12.00 | 12.0 + 12.0 | 8.00 |'
        in text
    )
    assert '| NVMeOptimizer, "compact" | 2.00 | 1.50 | 5.00 | 1.00 |' in text
    # waited; the drive busy; CPU, and of planning
    assert "| 4.50 [4.50 to 4.50] | 0.75 | 1.0 | 0.125 |" in text
    assert "killed \\| by the kernel" in text
    assert "A note." in text
    assert "FSDP2 shards the parameters over 2 ranks" in text
    assert "mixed 3.00 [3.00 to 3.00] GB/s" in text
    assert "blocks in flight: 2.80 [2.80 to 2.80] GB/s" in text
    # of what fio allows, and of what the engine alone does
    assert "| 8.00 | 0.89 [0.89 to 0.89] | 0.95 [0.95 to 0.95] |" in text
    assert json.loads(json.dumps(as_json(results)))["speeds"] == [
        {"read": 3e9, "write": 3e9, "mixed": 3e9, "engine": 2.8e9}
    ]
    assert [one["floor"] for one in json.loads(json.dumps(as_json(results)))["runs"]][:1] == [8.0]


def test_without_fio_and_deepspeed_there_is_no_word_of_them():
    text = render(Results({}, "4.4 GB", 1, [run("exact", 0, 9.0, (12e9, 12e9))], [], []))
    assert "DeepSpeed" not in text
    assert "fio" not in text


@pytest.mark.deepspeed
def test_a_small_run_compared_with_deepspeed(deepspeeds_op, tmp_path):
    size = [
        "--parameters",
        "3e6",
        "--host-memory",
        "12MB",
        "--rounds",
        "1",
        "--steps",
        "4",
        "--fio-size",
        "0",
    ]
    options = [
        *size,
        "--variants",
        "compact,deepspeed",
        "--timeout",
        str(PATIENCE),
        "--output",
        str(tmp_path / "report"),
    ]
    command = [sys.executable, "-m", "sweeps.optimizer", str(tmp_path), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    ours, theirs = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert (ours["error"], theirs["error"]) == (None, None)
    assert ours["done"]["elements"] == theirs["done"]["elements"]
    # of 12; some writes end later
    assert min(step["written_bytes"] for step in theirs["steps"]) >= 8 * theirs["done"]["elements"]
    assert "time of a step / DeepSpeed's" in ran.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_small_run(tmp_path, ranks):
    options = f"--ranks {ranks} --parameters 1e5 --host-memory 800KB --rounds 1 --steps 4 --fio-size 4MB --variants exact,memory".split()
    command = [
        sys.executable,
        "-m",
        "sweeps.optimizer",
        str(tmp_path),
        *options,
        "--output",
        str(tmp_path / "report"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert "round 1, exact" in ran.stderr
    assert ran.stdout.strip() == (tmp_path / "report.md").read_text().strip()
    told = json.loads((tmp_path / "report.json").read_text())
    exact, memory = told["runs"]
    assert (exact["error"], memory["error"]) == (None, None)
    assert exact["done"]["checksum"] == memory["done"]["checksum"]
    assert "have the same sum, bit for bit" in ran.stdout
    assert exact["steps"][0]["written_bytes"] < 16 * exact["done"]["elements"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]


def test_a_variant_that_there_is_not(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "sweeps.optimizer", str(tmp_path), "--variants", "tiny"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert ran.returncode == 2
    assert "'tiny' is none of exact, split, compact, deepspeed, memory" in ran.stderr


def test_the_tensors_of_a_model(tmp_path):
    pytest.importorskip("transformers", reason="the models are made by transformers")
    from sweeps.models import config_of, tensors

    (tmp_path / "config.json").write_text(
        json.dumps({**config_of("llama3-8b"), "num_hidden_layers": 2})
    )
    options = f"--model {tmp_path} --width 64 --host-memory 800KB --rounds 1 --steps 4 --fio-size 0 --variants compact".split()
    command = [
        sys.executable,
        "-m",
        "sweeps.optimizer",
        str(tmp_path),
        *options,
        "--output",
        str(tmp_path / "report"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    found = tensors(config_of(str(tmp_path), 64))
    (only,) = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert (only["error"], only["done"]["elements"]) == (
        None,
        sum(tensor.elements for tensor in found),
    )
    assert f"width 64: {len(found)} tensors" in ran.stdout
