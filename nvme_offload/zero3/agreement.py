"""What the ranks agree on before training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence, Set
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist

from ..errors import OffloadError
from ..hardware.machine import usable_cpus
from ..io.ranks import Ranks
from ..swap.cores import launcher_chose_one_thread

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


def of_all_ranks(value: Any) -> list[Any]:
    """The *value* of every rank. It must be picklable."""
    return Ranks.of_group().gather(value)


def least(number: int) -> int:
    """The minimum of *number* over all ranks, so that all ranks compute the same plan."""
    smallest: int = min(of_all_ranks(number))
    return smallest


def all_or_none(action: Callable[[], None], group: Any = None) -> None:
    """Run *action* on every rank of *group*, or of the training: the others would wait in collective
    calls for a rank that has failed. Raises: the error; on ranks that have succeeded, an error that
    names the rank.
    """
    Ranks.of_group(group).together(action, "this rank cannot train")


def everywhere(action: Callable[[], _Result]) -> _Result:
    """The result of *action* once all ranks have it. Raises: the first failed rank's error."""
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    named = failure is None or isinstance(failure, OffloadError | OSError)  # can be pickled
    failures = of_all_ranks(
        failure if named else OffloadError(f"{type(failure).__name__}: {failure}")
    )
    first = next((rank for rank, found in enumerate(failures) if found is not None), None)
    if first is None:
        return result
    if failure is not None and (not named or first == dist.get_rank()):
        raise failure
    raise failures[first] from failure


def share_cores() -> None:
    """Make this rank's updates compute on its share of the cores: OpenMP's threads spin while they
    wait, so ranks with more threads than cores make steps take many times as long. A value of
    OMP_NUM_THREADS that the user chose is kept; a launcher's default of 1 is replaced.

    Source: DeepSpeed's launcher sets the variable with --bind_cores_to_rank alone.
    """
    here, cores = _machine(), usable_cpus()
    ranks: list[tuple[str, Set[int]]] = of_all_ranks((here, cores))
    share = cores_for_each(cores, [theirs for machine, theirs in ranks if machine == here])
    threads, wish = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    by_launcher = launcher_chose_one_thread()
    changes = threads < share if by_launcher else wish is None and threads > share
    if changes:
        torch.set_num_threads(share)
    if dist.get_rank() != 0:
        return
    if changes:
        _log.info("updates compute on %d threads in each rank, its share of the cores", share)
    elif threads > share:
        _log.warning(
            "updates compute on %d threads in each rank, and its share of the cores is %d: ranks wait for each other's threads; set OMP_NUM_THREADS=%d",
            threads,
            share,
            share,
        )
    elif wish is not None and 2 * threads <= share:
        _log.warning(
            "OMP_NUM_THREADS=%s, so updates compute on %d threads in each rank, and its share of the cores is %d: where they are slow, set OMP_NUM_THREADS=%d",
            wish,
            threads,
            share,
            share,
        )


def _machine() -> str:
    """An identifier that is equal on all ranks of this machine and different on other machines."""
    try:
        return _BOOT.read_text()
    except OSError:  # some sandboxes do not expose the file
        return os.uname().nodename


def cores_for_each(mine: Set[int], ranks: Sequence[Set[int]]) -> int:
    """This rank's share of its cores *mine*, at least 1. *ranks* has the cores of every rank on the
    machine, including this one; a core that n ranks have counts 1/n for each rank.
    """
    return max(int(sum(Fraction(1, sum(core in each for each in ranks)) for core in mine)), 1)
