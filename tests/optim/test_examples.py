"""Every script of `examples/plain_pytorch/` runs as its first lines say, and learns."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from processes import finished

pytestmark = pytest.mark.slow

GLOO_RANK = str(Path(__file__).parents[1] / "gloo_rank.py")
FOLDER = Path(__file__).parents[2] / "examples" / "plain_pytorch"
RANKS = {"ddp", "fsdp2", "fsdp2_in_backward", "tensor_parallel", "zero_redundancy"}
ARGUMENTS = {"compiled": ["aot_eager"]}  # what needs no compiler


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_example(tmp_path, name):
    script = FOLDER / f"{name}.py"
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", GLOO_RANK]
        if name in RANKS
        else []
    )
    assert (
        "torchrun --nproc_per_node 2" if name in RANKS else "python"
    ) + f" examples/plain_pytorch/{name}.py /local_nvme" in script.read_text()
    command = [
        sys.executable,
        "-W",
        "ignore",
        *launcher,
        str(script),
        str(tmp_path),
        *ARGUMENTS.get(name, []),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = finished(command, cwd=FOLDER.parents[1], env=environment)
    assert ran.returncode == 0, ran.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", ran.stdout)]
    assert len(losses) >= 4, ran.stdout
    assert min(losses[1:]) < losses[0]
    assert list(tmp_path.iterdir()) == []
