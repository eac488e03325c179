"""How many ranks share a machine, from the environment variables that each launcher sets."""

from __future__ import annotations

import pytest

from nvme_offload.swap import tier

NAMES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
    "WORLD_SIZE",
)


@pytest.mark.parametrize(
    ("environment", "gpus", "ranks"),
    [
        pytest.param({}, 8, 1, id="no launcher"),
        pytest.param({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16"}, 8, 4, id="torchrun"),
        pytest.param({"LOCAL_SIZE": "2", "WORLD_SIZE": "2"}, 8, 2, id="deepspeed"),
        pytest.param({"OMPI_COMM_WORLD_LOCAL_SIZE": "3", "WORLD_SIZE": "6"}, 8, 3, id="mpirun"),
        pytest.param({"WORLD_SIZE": "2"}, 8, 2, id="lightning on one machine"),
        pytest.param({"WORLD_SIZE": "16"}, 8, 8, id="lightning on two machines"),
        pytest.param({"WORLD_SIZE": "2"}, 0, 2, id="lightning without a GPU"),
        pytest.param(
            {"WORLD_SIZE": "16", "SLURM_NTASKS_PER_NODE": "8"},
            1,
            8,
            id="lightning in Slurm, where each sees its own GPU",
        ),
        pytest.param(
            {"SLURM_NTASKS_PER_NODE": "8"}, 8, 1, id="one process in an allocation of Slurm"
        ),
    ],
)
def test_what_launchers_tell(monkeypatch, environment, gpus, ranks):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tier, "gpu_count", lambda: gpus)
    assert tier.local_ranks() == ranks
