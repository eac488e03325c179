"""The scripts of `examples/` on GPUs, by the commands that their users type: as many ranks as there
are GPUs, two at most.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from doors import (
    DEEPSPEED,
    TORCHRUN,
    configuration,
    moved,
    needs,
    place_with_drives,
    run_well,
)
from ports import free_port
from test_deepspeed_doors import assert_same_losses
from test_lightning_doors import assert_trained, assert_weights_predict
from test_transformers_doors import (
    assert_accelerate_trains,
    assert_generates_from_the_drive,
    assert_the_trainer_resumes_and_shows_progress,
)

pytestmark = pytest.mark.deepspeed
RANKS = min(torch.cuda.device_count(), 2)
SMALL = 12_000_000 // max(RANKS, 1)
ON_GPU = {"accelerator": "cuda"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return place_with_drives(tmp_path_factory)


def script(config, steps, *options):
    return ["train_deepspeed.py", "--deepspeed", config, "--steps", str(steps), *options]


def test_the_launchers_of_deepspeed_and_torch(place):
    one = configuration("ds_config.json", place / "drive", place, host_memory=SMALL)
    several = configuration(
        "ds_config_several_drives.json", place / "drive", place, host_memory=SMALL
    )
    torchrun = [*TORCHRUN, f"--nproc-per-node={RANKS}", "--master-port", str(free_port())]
    (whole,) = run_well(
        [*DEEPSPEED, f"--num_gpus={RANKS}", "--master_port", str(free_port()), *script(one, 4)],
        **ON_GPU,
    )
    (half,) = run_well([*torchrun, *script(one, 2, "--checkpoint", place / "saved")], **ON_GPU)
    (rest,) = run_well([*torchrun, *script(several, 4, "--checkpoint", place / "saved")], **ON_GPU)
    assert len(whole.losses) == 4
    assert_same_losses(half.losses + rest.losses, whole.losses)
    assert min(min(moved(each.said)) for each in (whole, half, rest)) > 0


@needs("lightning")
def test_lightning_by_arguments_of_the_strategy(place):
    out = place / "arguments"
    command = [
        sys.executable,
        "train_lightning.py",
        "--nvme_path",
        place / "drive",
        "--host_memory",
        "2000000",
        "--out",
        out,
    ]
    (ended,) = run_well(command, **ON_GPU, CUDA_VISIBLE_DEVICES="0")
    assert_trained(out, ended.said)
    assert_weights_predict(out)


@needs("lightning")
def test_lightning_by_the_environment_on_every_gpu(place):
    config = configuration(
        "ds_config.json",
        place / "drive",
        place,
        host_memory=2_000_000 // max(torch.cuda.device_count(), 1),
    )
    out = place / "environment"
    (ended,) = run_well(
        [sys.executable, "train_lightning.py", "--out", out],
        **ON_GPU,
        PL_DEEPSPEED_CONFIG_PATH=str(config),
    )
    assert_trained(out, ended.said)
    assert (out / "weights.pt").is_file()


@needs("transformers", "accelerate")
def test_the_trainer(place):
    assert_the_trainer_resumes_and_shows_progress(place, ranks=RANKS, **ON_GPU)


@needs("transformers", "accelerate")
def test_accelerate_and_inference(place):
    assert_accelerate_trains(place, ranks=RANKS, **ON_GPU)
    assert_generates_from_the_drive(place, **ON_GPU)
