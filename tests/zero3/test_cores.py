"""Threads of ranks that have the same cores: by OpenMP's rules each would take them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

pytestmark = pytest.mark.deepspeed
pytest.importorskip("deepspeed")

from ports import free_port  # noqa: E402

from nvme_offload.zero3.agreement import cores_for_each  # noqa: E402

CORES = sorted(os.sched_getaffinity(0))
# argument 1: what DeepSpeed is given; writes the number of threads before and after
SCRIPT = """
import sys, json, torch
before = torch.get_num_threads()
import deepspeed
from nvme_offload import zero3
zero3.enable()
model = torch.nn.Linear(64, 64)
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=json.loads(sys.argv[1]))
print(json.dumps([before, torch.get_num_threads()]))
# torch's threads of a group that is left can end the process with an error
deepspeed.comm.destroy_process_group()
"""


def threads(
    tmp_path: Path,
    ranks: int,
    omp: int | None,
    nvme: bool = True,
    launcher: str = "",
    parameters: bool = False,
) -> tuple[list[list[int]], str]:
    """The threads of each rank before and after DeepSpeed was given a model, and rank 0's log; all
    ranks have the first two cores.
    """
    section = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if nvme:
        section["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    if parameters:
        section["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": section,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    environment = {
        key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "RANK")
    } | {
        **({launcher: "no"} if launcher else {}),
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        **({} if omp is None else {"OMP_NUM_THREADS": str(omp)}),
    }
    bound = ["taskset", "--cpu-list", ",".join(map(str, CORES[:2]))]

    def begin(rank: int) -> subprocess.Popen[str]:
        with (tmp_path / f"{rank}.log").open("w") as log:
            return subprocess.Popen(
                [*bound, sys.executable, "-c", SCRIPT, json.dumps(config)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    processes = [begin(rank) for rank in range(ranks)]
    reported = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    texts = [(tmp_path / f"{rank}.log").read_text() for rank in range(ranks)]
    assert [process.returncode for process in processes] == [0] * ranks, texts
    return [json.loads(lines.splitlines()[-1]) for lines in reported], texts[0]


@pytest.mark.parametrize(
    ("mine", "ranks", "share"),
    [
        ({0, 1, 2, 3}, [{0, 1, 2, 3}], 4),
        ({0, 1, 2, 3}, [{0, 1, 2, 3}] * 2, 2),
        ({0, 1}, [{0, 1}, {2, 3}], 2),  # bound to separate cores
        ({0, 1, 2}, [{0, 1, 2}] * 2, 1),
        ({0}, [{0}] * 3, 1),
        (set(range(6)), [set(range(6)), {4, 5}, {5}], 4),  # 4 and 1/2 and 1/3
        (set(range(30)), [set(range(30))] * 3, 10),  # thirds add up to a whole number
    ],
)
def test_a_core_of_several_ranks_counts_in_parts(mine, ranks, share):
    assert cores_for_each(mine, ranks) == share


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("ranks", "omp", "after", "message"),
    [
        (2, None, 1, "updates compute on 1 threads in each rank, its share of the cores"),
        (2, 2, 2, "its share of the cores is 1: ranks wait for each other's threads"),
        (1, 1, 1, "its share of the cores is 2: where they are slow, set OMP_NUM_THREADS=2"),
        (1, None, 2, ""),
    ],
)
def test_each_rank_has_threads_for_its_share_of_the_cores(tmp_path, ranks, omp, after, message):
    counts, log = threads(tmp_path, ranks, omp)
    assert counts == [[omp or 2, after]] * ranks
    assert message in log
    assert ("the cores" in log) == bool(message)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"])
def test_one_thread_of_a_launcher_becomes_the_share(tmp_path, launcher):
    counts, log = threads(tmp_path, 1, 1, launcher=launcher)
    assert counts == [[1, 2]]
    assert "updates compute on 2 threads in each rank, its share of the cores" in log
    assert "set OMP_NUM_THREADS" not in log


def test_a_model_made_outside_of_zero_init_gets_a_line(tmp_path):
    _, log = threads(tmp_path, 1, None, parameters=True)
    # 64 x 64 weights and 64 biases, in bfloat16
    assert "8.12 KiB of parameters were made outside of zero.Init" in log
    _, log = threads(tmp_path, 1, None)
    assert "outside of zero.Init" not in log


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_without_states_on_a_drive_threads_stay(tmp_path):
    counts, log = threads(tmp_path, 2, None, nvme=False)
    assert counts == [[2, 2]] * 2
    assert "the cores" not in log
