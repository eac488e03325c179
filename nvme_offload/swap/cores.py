"""Threads for updates on the CPU, if a launcher has limited each process to one thread."""

from __future__ import annotations

import logging
import os

from ..hardware.machine import usable_cpus
from .tier import local_ranks

_log = logging.getLogger(__name__)


def launcher_chose_one_thread() -> bool:
    """Whether OMP_NUM_THREADS=1 is a launcher's default and not the user's choice.

    Source: torchrun sets it if several processes start without it, accelerate if
    `--num_cpu_threads_per_process` is not given. Both also set other environment variables.
    """
    return os.environ.get("OMP_NUM_THREADS") == "1" and any(
        name in os.environ for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
    )


def use_share_of_cores() -> None:
    """Make torch compute on this rank's share of the cores if a launcher chose one thread."""
    import torch

    share = len(usable_cpus()) // local_ranks()
    if launcher_chose_one_thread() and torch.get_num_threads() == 1 < share:
        torch.set_num_threads(share)
        _log.info(
            "updates compute on %d threads, this rank's share of the cores, instead of the launcher's OMP_NUM_THREADS=1",
            share,
        )
