"""The doors of Hugging Face: the Trainer with a configuration full of "auto", `accelerate launch`, and inference of a pretrained model from the drive."""

from __future__ import annotations

import ast
import json
import re

import pytest
from doors import ACCELERATE, DEEPSPEED, EXAMPLES, TORCHRUN, configuration, free_port, moved, needs, run_well

pytestmark = [pytest.mark.deepspeed, needs("deepspeed", "transformers", "accelerate")]

SMALL = 5_000_000  # bytes of host memory: less than half of what the model has
PROGRESS = {"nvme_wait_share", "nvme_gb_per_s", "nvme_read_gb", "nvme_written_gb"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("doors")


def trainer(place, out, steps, *options):
    config = configuration("ds_config_auto.json", place / "drive", place, host_memory=SMALL)
    command = [*TORCHRUN, "--nproc-per-node=1", "--master-port", str(free_port()), "train_transformers.py", "--deepspeed", config, "--output_dir", out]
    # The CPU has no kernels that Trainer's choice of 16 bit wants to see announced; lr_scheduler_type: or the rate would depend on max_steps.
    options = ["--use_cpu", "--bf16", "--lr_scheduler_type", "constant", "--logging_steps", "1", "--report_to", "none", *options]
    (ended,) = run_well([*command, "--max_steps", str(steps), *options])
    history = json.loads((out / f"checkpoint-{steps}" / "trainer_state.json").read_text())["log_history"]
    return ended, [entry for entry in history if "loss" in entry]


def test_the_trainer_resumes_and_shows_progress(place):
    whole, history = trainer(place, place / "whole", 4, "--save_steps", "2")
    again, resumed = trainer(place, place / "whole", 4, "--save_steps", "2", "--resume_from_checkpoint", place / "whole" / "checkpoint-2")
    # Not to the bit: DeepSpeed's Adam for the CPU multiplies up what corrects its bias, and takes a power of it after a checkpoint.
    for key in ("loss", "grad_norm"):
        assert [entry[key] for entry in resumed] == pytest.approx([entry[key] for entry in history], rel=1e-3)
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    for entry in history:
        assert entry.keys() >= PROGRESS
        assert entry["nvme_read_gb"] > 0
        assert entry["nvme_gb_per_s"] > 0
    shown = [ast.literal_eval(line) for line in re.findall(r"\{'loss'.*?\}", whole.said)]  # what the progress bar prints
    assert [entry.keys() >= PROGRESS for entry in shown] == [True] * 4
    assert len(re.findall(r"nvme_offload: 4 steps in .* waiting for the drive", whole.said)) == 1
    assert len(re.findall(r"nvme_offload: 2 steps in .* waiting for the drive", again.said)) == 1


@pytest.fixture(scope="module")
def launched(place):
    """Four steps under `accelerate launch`, of one process: without a GPU, Accelerate takes each of several for the only one."""
    config = configuration("ds_config_auto.json", place / "drive", place, host_memory=SMALL)
    yaml = (EXAMPLES / "accelerate.yaml").read_text().replace("ds_config_auto.json", str(config)).replace("num_processes: 2", "num_processes: 1")
    (place / "accelerate.yaml").write_text(yaml)
    port = ["--main_process_port", str(free_port())]
    (ended,) = run_well([*ACCELERATE, "--config_file", place / "accelerate.yaml", *port, "train_accelerate.py", "--steps", "4", "--out", place / "model"])
    return ended


def test_accelerate_launch(launched):
    losses = [float(loss.rpartition(" ")[2]) for loss in launched.losses]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert min(moved(launched.said)) > 0


def test_inference_from_the_drive(place, launched):
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    with torch.no_grad():  # as large as those of a model that has learned something, so that not one word follows every other
        for parameter in plain.parameters():
            parameter.mul_(8)
    plain.save_pretrained(place / "louder")
    prompt = [5, 6, 7]
    expected = plain.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert len(set(expected[3:])) > 2
    assert sum(parameter.nbytes for parameter in plain.parameters()) > 4 * 600_000
    port = ["--master_port", str(free_port())]
    options = ["--model", place / "louder", "--nvme_path", place / "drive", "--host_memory", "600KB", "--prompt", *map(str, prompt)]
    (ended,) = run_well([*DEEPSPEED, "--num_gpus=1", *port, "zero_inference.py", *options])
    assert " ".join(map(str, expected)) in ended.said.splitlines()
