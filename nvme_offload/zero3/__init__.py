"""DeepSpeed ZeRO-3 on this package: `enable()` before `deepspeed.initialize` or `zero.Init`;
`disable()` restores DeepSpeed.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, cast

from ..errors import UsageError
from . import contract
from .replacing import Replacements

if TYPE_CHECKING:
    from .step_stats import StepStats

OLDEST_DEEPSPEED, NEWEST_DEEPSPEED = contract.OLDEST, contract.NEWEST  # that are tested
is_too_old, is_too_new = contract.is_too_old, contract.is_too_new

_log = logging.getLogger("nvme_offload")  # the whole package's logger: memory and drives log too
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("[%(asctime)s] nvme_offload: %(message)s"))

_replaced = Replacements()


def enable() -> None:
    """Make DeepSpeed offload to drives through this package, in this process.

    Call it before `deepspeed.initialize` and `zero.Init`. A second call does nothing. Engines that
    exist already are not changed.

    Raises
    ------
    UnsupportedError
        DeepSpeed is not installed, is older than `OLDEST_DEEPSPEED`, or lacks a name that is used
        (`zero3.contract`). Nothing is replaced then.

    Notes
    -----
    This package's `async_io` op replaces DeepSpeed's, so DeepSpeed does not compile its own. It
    compiles other ops, such as CPU Adam, at their first use; a line of the log says so. Parameters
    and optimizer states with "device": "nvme" go through this package's swappers, unless the
    section "nvme_offload" of the configuration has "swappers": "deepspeed".

    Rank 0 logs the choices made and the time that steps take at level INFO, to stderr if the
    program has not configured logging.
    """
    if _replaced:
        return
    # All ranks would log the same lines.
    _log.setLevel(logging.INFO if _is_first_rank() else logging.WARNING)
    if not logging.getLogger().handlers:
        _log.addHandler(_handler)
    try:
        contract.check()
    except BaseException:
        _be_quiet()
        raise
    # All but `op` register functions in place of DeepSpeed's.
    from . import checkpoint, compiling, op, overlap, settings, stages, update_device  # noqa: F401

    op.install()
    _replaced.put_functions()


def disable() -> None:
    """Restore DeepSpeed as it was before `enable`.

    Engines that exist keep this package's parts and keep working. A second call does nothing.
    """
    if not _replaced:
        return
    from . import op

    _replaced.restore()
    op.remove()
    _be_quiet()


def _be_quiet() -> None:
    _log.removeHandler(_handler)
    _log.setLevel(logging.NOTSET)


def stats(engine: Any) -> StepStats:
    """The time and the drive transfers of an engine's last step.

    Parameters
    ----------
    engine
        A DeepSpeed engine, or a wrapper with its optimizer as `optimizer`. Without an optimizer a
        step is a forward pass.

    Returns
    -------
    StepStats
        The statistics of the last step. Later steps do not update them.

    Raises
    ------
    UsageError
        The engine has neither parameters nor optimizer states on a drive behind this package, or
        has made no step yet.
    """
    from .step_stats import last_step

    last = last_step(engine)
    if last is None:
        raise UsageError("this engine has made no step yet")
    return cast("StepStats", last)


def _is_first_rank() -> bool:
    """Whether this is rank 0, according to the environment that launchers set. Lightning's launcher
    sets only the rank on this machine.
    """
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"
