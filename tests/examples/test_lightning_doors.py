"""`examples/train_lightning.py`, the strategy configured in each of its ways; without a GPU as
`lightning_on_cpu` says.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from doors import EXAMPLES, configuration, needs, place_with_drives, run_well

pytestmark = [pytest.mark.deepspeed, needs("deepspeed", "lightning")]

SCRIPT = [sys.executable, Path(__file__).with_name("lightning_on_cpu.py")]
SMALL = 2_000_000  # bytes of host memory: less than half of the model's


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return place_with_drives(tmp_path_factory)


def logged(out, version):
    """What the logger wrote: each metric by step."""
    with (out / "lightning_logs" / f"version_{version}" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        name: [float(row[name]) for row in rows if row.get(name)]
        for name in rows[0]
        if name not in ("step", "epoch")
    }


def assert_trained(out, said):
    first, second = logged(out, 0), logged(out, 1)
    assert len(first["loss"]) == len(second["loss"]) == 4
    assert second["loss"][-1] < first["loss"][0]
    for metrics in (first, second):
        assert min(metrics["nvme_read_gb"]) > 0
        assert (
            len(metrics["nvme_wait_share"])
            == len(metrics["nvme_gb_per_s"])
            == len(metrics["nvme_written_gb"])
            == 4
        )
    assert "nvme_wait_share" in said  # in the progress bar
    assert len(re.findall(r"nvme_offload: 4 steps in .* waiting for the drive", said)) == 2


def assert_weights_predict(out):
    """The one file of weights, in fp32 and without Lightning and DeepSpeed, gives what was
    predicted and tested with parameters on the drive.
    """
    weights = torch.load(out / "weights.pt")["state_dict"]
    layers = torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.LayerNorm(256), torch.nn.Linear(256, 256), torch.nn.GELU())
            for _ in range(6)
        ),
        torch.nn.Linear(256, 256),
    )
    layers.load_state_dict({name.removeprefix("layers."): value for name, value in weights.items()})
    data = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = layers(data)
    torch.testing.assert_close(
        torch.cat(torch.load(out / "predicted.pt")).float(), expected, rtol=0.02, atol=0.02
    )
    tested = logged(out, 1)["test_loss"]
    assert tested == pytest.approx([torch.nn.functional.mse_loss(expected, data).item()], rel=0.02)


def test_by_arguments_of_the_strategy(place):
    out = place / "arguments"
    (ended,) = run_well(
        [*SCRIPT, "--nvme_path", place / "drive", "--host_memory", str(SMALL), "--out", out]
    )
    assert_trained(out, ended.said)
    assert_weights_predict(out)


IN_THE_OTHER_WAYS = """
import argparse, json, os, sys
sys.path += sys.argv[2:]
import train_lightning
path = sys.argv[1]
by_path, by_dict = (
    train_lightning.strategy(argparse.Namespace(nvme_path=None, config=config))
    for config in (path, json.load(open(path)))
)
os.environ["PL_DEEPSPEED_CONFIG_PATH"] = path
by_variable = train_lightning.strategy(argparse.Namespace(nvme_path=None, config=None))
print("configs", json.dumps([one.config for one in (by_path, by_dict, by_variable)]))

import torch
from lightning.pytorch import LightningModule, Trainer
from nvme_offload import zero3
from nvme_offload.zero3.lightning import LightningProgress
from lightning_on_cpu import CpuInTheNameOfCuda

class MadeInTheConstructor(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    def predict_step(self, batch):
        return self.layers(batch)

zero3.enable()
trainer = Trainer(strategy=by_variable, accelerator=CpuInTheNameOfCuda(), devices=1, precision="bf16-true", logger=False, callbacks=[LightningProgress()])
(predicted,) = trainer.predict(MadeInTheConstructor(), torch.utils.data.DataLoader(torch.ones(4, 512), batch_size=4))
print("predicted", predicted.shape, zero3.stats(trainer.model))
"""


def test_by_a_path_a_dict_and_the_environment_and_layers_that_are_made_in_the_constructor(place):
    config = configuration("ds_config.json", place / "drive", place, host_memory=SMALL)
    folders = (Path(__file__).parent, EXAMPLES)
    (ended,) = run_well([sys.executable, "-c", IN_THE_OTHER_WAYS, config, *folders])
    (reported,) = re.findall(r"^configs (.*)$", ended.said, re.MULTILINE)
    assert json.loads(reported) == [json.loads(config.read_text())] * 3
    assert "predicted torch.Size([4, 512]) step 1:" in ended.said
    # which the strategy does not hand on
    assert set(re.findall(r"host memory for offload: .* of at most (\S+ \S+);", ended.said)) == {
        "1.91 MiB"
    }
    assert len(re.findall(r"nvme_offload: 1 steps in .* waiting for the drive", ended.said)) == 1


def test_progress_under_the_framework_s_older_name():
    code = "import pytorch_lightning as pl; from nvme_offload.zero3.lightning import LightningProgress as P; print('is one', issubclass(P, pl.Callback))"
    (ended,) = run_well([sys.executable, "-c", code])
    assert "is one True" in ended.said
