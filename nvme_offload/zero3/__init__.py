"""DeepSpeed ZeRO-3 on this package: `enable()` before `deepspeed.initialize` or `zero.Init`, and
`disable()` to put DeepSpeed back as it was.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import compat

if TYPE_CHECKING:
    from .step_stats import StepStats

OLDEST_DEEPSPEED, NEWEST_DEEPSPEED = compat.OLDEST, compat.NEWEST  # that were tried
is_too_old, is_too_new = compat.is_too_old, compat.is_too_new

_log = logging.getLogger("nvme_offload")  # also what is below this speaks: memory, drives
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("[%(asctime)s] nvme_offload: %(message)s"))

# object, attribute and DeepSpeed's own value, in the order of replacement
_replaced: list[tuple[Any, str, Any]] = []
_disabled = False  # by `disable`, after which a configuration alone enables nothing


def enable() -> None:
    """Have DeepSpeed offload to drives through this package, in this process, from now on; a second
    call does nothing.

    Its `async_io` op becomes this package's, so that this one is not compiled. (DeepSpeed still
    compiles others at their first use, such as its CPU Adam; a line of the log says so.)
    Parameters and optimizer states with `"device": "nvme"` go through this package's swappers,
    unless the section "nvme_offload" of the configuration says `"swappers": "deepspeed"`. Engines
    that exist already keep what they have. What is chosen and what steps spend is logged, to stderr
    where the program has set up no logging. Raises: UnsupportedError when DeepSpeed is not
    installed, is older than `OLDEST_DEEPSPEED`, or lacks any name that is used (`zero3.compat`);
    nothing is replaced then.
    """
    if _replaced:
        return
    # all ranks choose and spend alike
    _log.setLevel(logging.INFO if _is_first_rank() else logging.WARNING)
    if not logging.getLogger().handlers:
        _log.addHandler(_handler)
    try:
        compat.check()
    except BaseException:
        _be_quiet()
        raise
    import deepspeed.runtime.engine as engine
    import deepspeed.runtime.zero.partition_parameters as partition_parameters
    import deepspeed.runtime.zero.stage3 as stage3
    from deepspeed.ops.op_builder.builder import OpBuilder

    from . import checkpoint, compiling, op, precision
    from .inference import Inference
    from .param_swapper import parameter_swapper
    from .stage3 import Stage3

    op.install()
    _replace(OpBuilder, "jit_load", compiling.announced(OpBuilder.jit_load))
    _replace(stage3, "DeepSpeedZeroOptimizer_Stage3", Stage3)
    _replace(engine, "DeepSpeedZeRoOffload", Inference)
    _replace(
        partition_parameters,
        "AsyncPartitionedParameterSwapper",
        parameter_swapper(partition_parameters.AsyncPartitionedParameterSwapper),
    )
    for name, method in checkpoint.engine_methods(engine.DeepSpeedEngine).items():
        _replace(engine.DeepSpeedEngine, name, method)
    _replace(
        engine.DeepSpeedEngine,
        "_do_sanity_check",
        precision.explained(engine.DeepSpeedEngine._do_sanity_check),
    )


def disable() -> None:
    """Put DeepSpeed back as it was before `enable`. Engines that exist keep what they have, and go
    on working. From now on a configuration with the section "nvme_offload" enables nothing by
    itself, see `nvme_offload.autoload`; `enable` does.
    """
    global _disabled
    _disabled = True
    if not _replaced:
        return
    from . import op

    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)
    op.remove()
    _be_quiet()


def _enable_unless_disabled() -> None:
    if not _disabled:
        enable()


def _be_quiet() -> None:
    _log.removeHandler(_handler)
    _log.setLevel(logging.NOTSET)


def stats(engine: Any) -> StepStats:
    """What the last step of the DeepSpeed *engine* spent where; without an optimizer, what its last
    forward pass did.

    Raises: UsageError when the engine has neither parameters nor optimizer states on a drive behind
    this package, or has made no step.
    """
    from .step_stats import clock_of

    last = clock_of(engine).last
    if last is None:
        raise UsageError("this engine has made no step yet")
    return last


def _is_first_rank() -> bool:
    """Whether this is rank 0, as far as the launcher has said it by now: Lightning's own tells only
    which one of this machine.
    """
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)
