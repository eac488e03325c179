"""Threads of ranks that have the same cores: by OpenMP's rules each would take them all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.deepspeed
pytest.importorskip("deepspeed")

from launch import finish, start  # noqa: E402

from nvme_offload.zero3.agreement import cores_for_each  # noqa: E402

CORES = sorted(os.sched_getaffinity(0))
SCRIPT = Path(__file__).with_name("sharing_cores.py")


def scenario(directory: Path, devices: dict[str, str], **environment: str) -> dict[str, Any]:
    """DeepSpeed with *devices* of parameters and states, in a process with variables."""
    section: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    for part, device in devices.items():
        section[f"offload_{part}"] = {"device": device, "nvme_path": str(directory)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": section,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    return {"config": config, "environment": environment}


def threads(
    directory: Path, ranks: int, scenarios: list[dict[str, Any]]
) -> list[tuple[list[list[int]], str]]:
    """The threads of each rank before and after DeepSpeed was given a model, and rank 0's log, by
    scenario.
    """
    request: dict[str, Any] = {"scenarios": scenarios, "cores": CORES[:2]}
    with start([], directory, script=SCRIPT, ranks=ranks, **request) as processes:
        ended = [finish(process) for process in processes]
    for rank in ended:
        assert rank.status == 0, rank.complaints
    by_scenario = zip(*(rank.results for rank in ended), strict=True)
    return [
        ([counts for *counts, _ in of_ranks], "\n".join(of_ranks[0][2])) for of_ranks in by_scenario
    ]


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


STATES = {"optimizer": "nvme"}


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_two_ranks_have_threads_for_their_share_of_the_cores(tmp_path):
    scenarios = [
        scenario(tmp_path, STATES),
        scenario(tmp_path, STATES, OMP_NUM_THREADS="2"),
        scenario(tmp_path, {}),
    ]
    shared, asked, in_memory = threads(tmp_path, 2, scenarios)
    assert shared[0] == [[2, 1]] * 2
    assert "updates compute on 1 threads in each rank, its share of the cores" in shared[1]
    assert asked[0] == [[2, 2]] * 2
    assert "its share of the cores is 1: ranks wait for each other's threads" in asked[1]
    assert in_memory[0] == [[2, 2]] * 2
    assert "the cores" not in in_memory[1]


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_one_rank_has_threads_for_all_cores_or_for_as_many_as_are_asked_for(tmp_path):
    launchers = [
        scenario(tmp_path, STATES, OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="no"),
        scenario(tmp_path, STATES, OMP_NUM_THREADS="1", ACCELERATE_MIXED_PRECISION="no"),
    ]
    plain = [scenario(tmp_path, STATES), scenario(tmp_path, STATES, OMP_NUM_THREADS="1")]
    plain, asked, *launched = threads(tmp_path, 1, [*plain, *launchers])
    assert plain[0] == [[2, 2]]
    assert "the cores" not in plain[1]
    assert asked[0] == [[1, 1]]
    message = "its share of the cores is 2: where they are slow, set OMP_NUM_THREADS=2"
    assert message in asked[1]
    for counts, log in launched:
        assert counts == [[1, 2]]
        assert "updates compute on 2 threads in each rank, its share of the cores" in log
        assert "set OMP_NUM_THREADS" not in log


def test_a_model_made_outside_of_zero_init_gets_a_line(tmp_path):
    devices = ({**STATES, "param": "nvme"}, STATES)
    (_, told), (_, log) = threads(tmp_path, 1, [scenario(tmp_path, each) for each in devices])
    # 64 x 64 weights and 64 biases, in bfloat16
    assert "8.12 KiB of parameters were made outside of zero.Init" in told
    assert "outside of zero.Init" not in log
