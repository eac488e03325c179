"""The doors of docs/trainers.md: trainers whose scripts have no line of ours, and the Trainer without
DeepSpeed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from doors import (
    ACCELERATE,
    DEEPSPEED,
    EXAMPLES,
    configuration,
    needs,
    place_with_drives,
    run_well,
)
from ports import free_port

SMALL = 5_000_000  # bytes of host memory: less than half of the model's
RUN = ["-m", "nvme_offload.commands", "run", "--"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return place_with_drives(tmp_path_factory)


def without_our_lines(name: str, to: Path) -> Path:
    """The example *name* as it is where this package is not known."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    path = to / name
    path.write_text(re.sub(r"^( *).*nvme_offload.*$", r"\1pass", text, flags=re.MULTILINE))
    return path


@pytest.mark.deepspeed
@needs("deepspeed", "transformers", "accelerate")
def test_run_starts_accelerate_without_a_change_to_the_script(place):
    config = configuration("ds_config_auto.json", place / "drive", place, host_memory=SMALL)
    yaml = (EXAMPLES / "accelerate.yaml").read_text()
    yaml = yaml.replace("ds_config_auto.json", str(config)).replace(
        "num_processes: 2", "num_processes: 1"
    )
    (place / "accelerate.yaml").write_text(yaml)
    script = without_our_lines("train_accelerate.py", place)
    launch = [ACCELERATE[0], *RUN, *ACCELERATE, "--config_file", place / "accelerate.yaml"]
    command = [*launch, "--main_process_port", str(free_port()), script, "--steps", "4"]
    (ours,) = run_well(command, forks=False)
    assert "host memory for offload" in ours.said
    losses = [float(loss.rpartition(" ")[2]) for loss in ours.losses]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.deepspeed
@needs("deepspeed")
def test_run_starts_the_deepspeed_launcher(place):
    config = configuration("ds_config.json", place / "drive", place, host_memory=SMALL)
    without = json.loads(config.read_text())
    without.pop("nvme_offload")
    plain = place / "without_section.json"
    plain.write_text(json.dumps({**without, "steps_per_print": 1}))
    script = without_our_lines("train_deepspeed.py", place)
    launch = [*DEEPSPEED[1:], "--num_gpus=1", "--master_port", str(free_port())]
    command = [DEEPSPEED[0], *RUN, DEEPSPEED[0], *launch, script, "--deepspeed", plain]
    (ended,) = run_well(command, forks=False)
    assert "host memory for offload" in ended.said
    assert re.search(r"nvme_offload: step 1: .* waited .* for the drive", ended.said)


STEPS = ["--max_steps", "4", "--save_steps", "2", "--logging_steps", "1", "--report_to", "none"]


@pytest.mark.outside(
    program="the Trainer of transformers: examples/trainers/hf_trainer.py",
    reference="the uninterrupted run",
    steps="4, resumed after 2",
    ranks=1,
)
@needs("transformers", "accelerate")
def test_the_trainer_without_deepspeed_resumes_bit_for_bit(place):
    out = place / "trainer"
    command = [
        DEEPSPEED[0],
        "trainers/hf_trainer.py",
        *("--nvme_path", place / "drive", "--host_memory", "2MB", "--use_cpu"),
        *("--output_dir", out, *STEPS),
    ]
    (whole,) = run_well(command)
    weights = (out / "model.safetensors").read_bytes()
    states = torch.load(out / "checkpoint-4" / "optimizer.pt")
    (again,) = run_well([*command, "--resume_from_checkpoint", out / "checkpoint-2"])
    assert (out / "model.safetensors").read_bytes() == weights
    resumed = torch.load(out / "checkpoint-4" / "optimizer.pt")
    assert resumed["state"].keys() == states["state"].keys() != set()
    for index, state in states["state"].items():
        for key, value in state.items():
            assert torch.equal(resumed["state"][index][key], value), (index, key)
    history = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    for entry in history:
        if "loss" in entry and entry["step"] > 1:  # the first step makes the states
            assert entry["nvme_read_gb"] > 0
            assert entry["nvme_offload/total_written_gb"] > 0
    assert len(re.findall(r"'nvme_offload/step_seconds'", whole.said + again.said)) == 4 + 2


@needs("transformers", "accelerate", "tensorboard")
def test_tensorboard_has_the_numbers(place):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = place / "tensorboard"
    steps = ["--max_steps", "2", "--logging_steps", "1", "--report_to", "tensorboard"]
    command = [
        DEEPSPEED[0],
        "trainers/hf_trainer.py",
        *("--nvme_path", place / "drive", "--host_memory", "2MB", "--use_cpu"),
        *("--output_dir", out, *steps),
    ]
    run_well(command, TENSORBOARD_LOGGING_DIR=str(out / "log"))
    events = EventAccumulator(str(out / "log"))
    events.Reload()
    values = [event.value for event in events.Scalars("train/nvme_offload/total_written_gb")]
    assert len(values) == 2
    assert 0 < values[0] < values[1]
