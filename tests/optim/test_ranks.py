"""`NVMeOptimizer` on two ranks: DDP, `ZeroRedundancyOptimizer`, FSDP2, tensor parallelism,
distributed checkpoints. See `ranks.py`, `ranks_in_backward.py`, `ranks_overlap.py`,
`ranks_accumulate.py`, `ranks_outside.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from ports import free_port

sys.path.append(str(Path(__file__).parents[1] / "zero3"))
import forked


def cases_of(script: str) -> list[str]:
    """The names of the functions that *script* calls on all ranks."""
    text = Path(__file__).with_name(script).read_text(encoding="utf-8")
    return re.findall(r"^@case\ndef (\w+)", text, re.MULTILINE)


OUTSIDE = {
    "accelerate_fsdp2": "Accelerate with FSDP2",
    "accelerate_fsdp2_overlapped": "Accelerate with FSDP2, `overlap_step`",
    "accelerate_fsdp2_in_backward": "Accelerate with FSDP2, updates in backward",
    "accelerate_fsdp2_provisional": "Accelerate with FSDP2, provisional updates in backward",
    "fabric_ddp": "Fabric with DDP",
    "fsdp1": "FSDP1",
    "fsdp1_original_parameters": "FSDP1, `use_orig_params`",
    "trainer_with_ddp": "the Trainer of transformers with DDP",
    "trainer_with_fsdp2": "the Trainer of transformers with FSDP2: updates after backward, in "
    "backward, and provisional with clipping",
}
SHORTER = {
    "ddp": ("DDP", 3),
    "zero_redundancy": ("`ZeroRedundancyOptimizer`", "6, resumed after 3"),
    "fsdp2": ("FSDP2", "6, resumed after 3"),
    "distributed_checkpoint": ("FSDP2, `torch.distributed.checkpoint`", "6, resumed after 3"),
    "tensor_parallel": ("tensor parallelism", 3),
}


def anew(arguments, **options):
    """A new interpreter, as CUDA does not work after a fork."""
    return subprocess.Popen([sys.executable, "-W", "ignore", *arguments], **options)


def results_of_ranks(script, device, directory, ranks=2):
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        "OMP_NUM_THREADS": "1",
    }
    begin = anew
    if device == "cpu" and "LD_PRELOAD" not in os.environ:
        begin, environment["DS_ACCELERATOR"] = forked.start, "cpu"
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(ranks):
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
            process = begin(
                [str(Path(__file__).with_name(script)), device, str(directory)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=Path(__file__).parents[2],
                stdout=files[0],
                stderr=files[1],
            )
            stack.callback(process.kill)
            started.append((process, files))
        statuses = [process.wait(PATIENCE) for process, _ in started]
        for file in (file for _, files in started for file in files):
            file.seek(0)
        assert statuses == ranks * [0], "".join(files[1].read() for _, files in started)
        return json.loads(started[0][1][0].read().splitlines()[-1])


SCRIPTS = (
    *("ranks.py", "ranks_in_backward.py", "ranks_overlap.py", "ranks_accumulate.py"),
    "ranks_outside.py",
)


def cases() -> Iterator[Any]:
    """Each script with each of its cases; programs of other projects have the marker `outside`."""
    with_plain = functools.partial(pytest.mark.outside, reference="`torch.optim.AdamW`", ranks=2)
    for script in SCRIPTS:
        for name in cases_of(script):
            marks = []
            if script == "ranks_outside.py":
                marks = [with_plain(program=OUTSIDE[name], steps="20, resumed after 10")]
            elif script == "ranks.py" and name in SHORTER:
                program, steps = SHORTER[name]
                marks = [with_plain(program=program, steps=steps)]
            yield pytest.param(script, name, marks=marks)


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """A function from a script to its results; each script runs once."""
    return functools.cache(
        lambda script: results_of_ranks(script, "cpu", tmp_path_factory.mktemp("drive"))
    )


@pytest.mark.slow
@pytest.mark.parametrize(("script", "case"), list(cases()))
def test_two_ranks(results_of, script, case):
    assert results_of(script)[case] == []
