"""The doors of Hugging Face: the Trainer with a configuration full of "auto", `accelerate launch`,
and inference of a pretrained model from the drive.
"""

from __future__ import annotations

import ast
import json
import re

import pytest
from doors import (
    ACCELERATE,
    DEEPSPEED,
    EXAMPLES,
    TORCHRUN,
    configuration,
    moved,
    needs,
    place_with_drives,
    run_well,
)
from ports import free_port

pytestmark = [pytest.mark.deepspeed, needs("deepspeed", "transformers", "accelerate")]

SMALL = 5_000_000  # bytes of host memory: less than half of the model's
PROGRESS = {"nvme_wait_share", "nvme_gb_per_s", "nvme_read_gb", "nvme_written_gb"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return place_with_drives(tmp_path_factory)


def trainer(place, *options, ranks, accelerator):
    """Train four steps, or resume to the fourth. Returns the output and the Trainer's log."""
    config = configuration(
        "ds_config_auto.json", place / "drive", place, host_memory=SMALL // ranks
    )
    out = place / "trainer"
    command = [
        *TORCHRUN,
        f"--nproc-per-node={ranks}",
        "--master-port",
        str(free_port()),
        "train_transformers.py",
        "--deepspeed",
        config,
        "--output_dir",
        out,
    ]
    steps = ["--max_steps", "4", "--save_steps", "2", "--logging_steps", "1", "--report_to", "none"]
    (ended,) = run_well([*command, *steps, "--bf16", *options], accelerator=accelerator)
    history = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    return ended, [entry for entry in history if "loss" in entry]


def assert_the_trainer_resumes_and_shows_progress(place, **options):
    whole, history = trainer(place, **options)
    again, resumed = trainer(
        place, "--resume_from_checkpoint", place / "trainer" / "checkpoint-2", **options
    )
    # Not to the bit: DeepSpeed's Adam for the CPU multiplies up what corrects its bias, and takes a
    # power of it after a checkpoint.
    for key in ("loss", "grad_norm"):
        assert [entry[key] for entry in resumed] == pytest.approx(
            [entry[key] for entry in history], rel=1e-3
        )
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    for entry in history:
        assert entry.keys() >= PROGRESS
        assert entry["nvme_read_gb"] > 0
        assert entry["nvme_gb_per_s"] > 0
    # what the progress bar prints
    shown = [ast.literal_eval(line) for line in re.findall(r"\{'loss'.*?\}", whole.said)]
    assert [entry.keys() >= PROGRESS for entry in shown] == [True] * 4
    assert len(re.findall(r"nvme_offload: 4 steps in .* waiting for the drive", whole.said)) == 1
    assert len(re.findall(r"nvme_offload: 2 steps in .* waiting for the drive", again.said)) == 1


def test_the_trainer_resumes_and_shows_progress(place):
    assert_the_trainer_resumes_and_shows_progress(place, ranks=1, accelerator="cpu")


def assert_accelerate_trains(place, *, ranks, accelerator):
    """Four steps, and the model is saved to place / "model"."""
    config = configuration(
        "ds_config_auto.json", place / "drive", place, host_memory=SMALL // ranks
    )
    yaml = (
        (EXAMPLES / "accelerate.yaml")
        .read_text()
        .replace("ds_config_auto.json", str(config))
        .replace("num_processes: 2", f"num_processes: {ranks}")
    )
    (place / "accelerate.yaml").write_text(yaml)
    launch = [
        *ACCELERATE,
        "--config_file",
        place / "accelerate.yaml",
        "--main_process_port",
        str(free_port()),
    ]
    (ended,) = run_well(
        [*launch, "train_accelerate.py", "--steps", "4", "--out", place / "model"],
        accelerator=accelerator,
    )
    losses = [float(loss.rpartition(" ")[2]) for loss in ended.losses]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert min(moved(ended.said)) > 0


def test_accelerate_launch(place):
    """Two processes on the CPU: see `plain_gloo`."""
    assert_accelerate_trains(place, ranks=2, accelerator="cpu")


@pytest.mark.outside(
    program="`accelerate launch` with FSDP2: examples/train_accelerate_fsdp2.py",
    reference="`torch.optim.AdamW`: losses, 9 decimals",
    steps="4, resumed after 2",
    ranks=2,
)
@pytest.mark.slow
def test_accelerate_launch_with_fsdp2_trains_as_the_plain_optimizer_and_resumes(place):
    """Two processes on the CPU: see `plain_gloo`."""
    text = (EXAMPLES / "train_accelerate_fsdp2.py").read_text()
    made = re.search(r"NVMeOptimizer\(\n.*?\n    \)", text, re.DOTALL)
    plain = text.replace(made[0], "torch.optim.AdamW(model.parameters(), lr=1e-3)")
    plain = plain.replace("print(optimizer.optimizer.stats(), flush=True)", "pass")
    (place / "plain.py").write_text(plain)

    def train(script, *options):
        (ended,) = run_well(
            [
                *ACCELERATE,
                *("--config_file", "accelerate_fsdp2.yaml"),
                *("--main_process_port", str(free_port())),
                *(script, "--paths", place / "drive", *options),
            ],
            ACCELERATE_USE_CPU="true",
        )
        return ended

    expected = train(place / "plain.py", "--steps", "4").losses
    half = train("train_accelerate_fsdp2.py", "--steps", "2", "--save", place / "half")
    rest = train(
        "train_accelerate_fsdp2.py", "--steps", "4", "--first", "3", "--resume", place / "half"
    )
    assert [*half.losses, *rest.losses] == expected
    assert len(expected) == 4
    assert min(moved(rest.said)) > 0


def assert_generates_from_the_drive(place, *, accelerator):
    """The model in place / "model", with larger weights, generates the same words with and without
    the drive.
    """
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    # as large as weights of a trained model, so that it does not repeat one word
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(8)
    plain.save_pretrained(place / "louder")
    prompt = [5, 6, 7]
    expected = plain.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert len(set(expected[3:])) > 2
    assert sum(parameter.nbytes for parameter in plain.parameters()) > 4 * 600_000
    port = ["--master_port", str(free_port())]
    options = [
        "--model",
        place / "louder",
        "--nvme_path",
        place / "drive",
        "--host_memory",
        "600KB",
        "--prompt",
        *map(str, prompt),
    ]
    (ended,) = run_well(
        [*DEEPSPEED, "--num_gpus=1", *port, "zero_inference.py", *options], accelerator=accelerator
    )
    assert " ".join(map(str, expected)) in ended.said.splitlines()


def test_inference_from_the_drive(place):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)  # of 60 seeds, 4 give at most two words; this one gives five
    config = GPT2Config(
        vocab_size=100,
        n_positions=32,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(place / "model")
    assert_generates_from_the_drive(place, accelerator="cpu")
