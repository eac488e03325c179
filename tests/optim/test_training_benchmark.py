"""`python -m sweeps.training` in plain PyTorch, on two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import finished

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PLAN = """
steps = 4
settling_steps = 2
rounds = 1
fio_bytes = 0
timeout_seconds = 1200
baseline = "memory"
model = { hidden = 64, blocks = 4 }

[ds_config]
optimizer = { type = "AdamW", params = { lr = 1e-3 } }
"""
VARIANTS = {
    "memory": ("{}", "plain"),
    "exact": ('{ state_format = "exact", host_memory = "HOST" }', "plain"),
}


def test_exact_states_on_the_drive_give_the_bits_of_states_in_memory(tmp_path):
    (drive := tmp_path / "drive").mkdir()
    plan = tmp_path / "plan.toml"
    plan.write_text(
        PLAN
        + "".join(
            f'[[variant]]\nname = "{name}"\ntitle = "{name}"\nplain = {plain.replace("HOST", "500KB")}\nbits = "{bits}"\n'
            for name, (plain, bits) in VARIANTS.items()
        )
    )
    command = [sys.executable, "-m", "sweeps.training", str(drive), "--plan", str(plan)]
    ran = finished([*command, "--ranks", "2", "--output", str(tmp_path / "report")], cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    runs = {
        run["variant"]: run for run in json.loads((tmp_path / "report.json").read_text())["runs"]
    }
    assert [runs[name]["error"] for name in VARIANTS] == [None] * 2
    for field in ("losses", "weights"):
        assert runs["exact"][field] == runs["memory"][field]
    assert len(set(runs["exact"]["losses"])) == 4
    assert "are equal bit for bit: memory, exact." in ran.stdout
    moved = {
        name: sum(phase["written_bytes"] for phase in run["phases"] if phase["name"] == "optimizer")
        for name, run in runs.items()
    }
    assert moved["memory"] == 0 < moved["exact"]
    assert list(drive.iterdir()) == []
