"""DeepSpeed ZeRO-3 on this package: `enable()` before `deepspeed.initialize` or `zero.Init`, and `disable()` to put DeepSpeed back as it was."""

from __future__ import annotations

import importlib
import logging
import os
import re
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from .step_stats import StepStats

OLDEST_DEEPSPEED = "0.19.8"  # that this was read against

_log = logging.getLogger("nvme_offload")  # also what is below this speaks: memory, drives
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("[%(asctime)s] nvme_offload: %(message)s"))

_replaced: list[tuple[Any, str, Any]] = []  # object, attribute and DeepSpeed's own value, in the order of replacement


def enable() -> None:
    """Have DeepSpeed offload to drives through this package, in this process, from now on; a second call does nothing.

    Its `async_io` op becomes this package's, so that nothing is compiled at the first step. Parameters and optimizer states with `"device": "nvme"`
    go through this package's swappers, unless the section "nvme_offload" of the configuration says `"swappers": "deepspeed"`. Engines that exist
    already keep what they have. What is chosen and what steps spend is logged, to stderr where the program has set up no logging.
    Raises: UnsupportedError when DeepSpeed is not installed, or is older than `OLDEST_DEEPSPEED`, or lacks what is replaced.
    """
    if _replaced:
        return
    try:
        import deepspeed
        import deepspeed.runtime.engine as engine
    except ImportError as error:
        raise UnsupportedError(f"DeepSpeed is not installed here: {error}; pip install deepspeed") from None
    if is_too_old(deepspeed.__version__):
        raise UnsupportedError(f"zero3 needs DeepSpeed {OLDEST_DEEPSPEED} or newer, and this is {deepspeed.__version__}: pip install --upgrade deepspeed")
    try:
        importlib.import_module("deepspeed.runtime.superoffload.superoffload_stage3")  # now, so that its base class is DeepSpeed's own
        import deepspeed.runtime.zero.partition_parameters as partition_parameters
        import deepspeed.runtime.zero.stage3 as stage3
    except ImportError as error:
        raise UnsupportedError(
            f"DeepSpeed {deepspeed.__version__} lacks what {OLDEST_DEEPSPEED} has: {error}; pip install deepspeed=={OLDEST_DEEPSPEED}"
        ) from None
    from . import checkpoint, op, precision
    from .inference import Inference
    from .param_swapper import parameter_swapper
    from .stage3 import Stage3

    _log.setLevel(logging.INFO if _is_first_rank() else logging.WARNING)  # all ranks choose and spend alike
    if not logging.getLogger().handlers:
        _log.addHandler(_handler)
    op.install()
    _replace(stage3, "DeepSpeedZeroOptimizer_Stage3", Stage3)
    _replace(engine, "DeepSpeedZeRoOffload", Inference)
    _replace(partition_parameters, "AsyncPartitionedParameterSwapper", parameter_swapper(partition_parameters.AsyncPartitionedParameterSwapper))
    for name, method in checkpoint.engine_methods(engine.DeepSpeedEngine).items():
        _replace(engine.DeepSpeedEngine, name, method)
    _replace(engine.DeepSpeedEngine, "_do_sanity_check", precision.explained(engine.DeepSpeedEngine._do_sanity_check))


def disable() -> None:
    """Put DeepSpeed back as it was before `enable`. Engines that exist keep what they have, and go on working."""
    if not _replaced:
        return
    from . import op

    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)
    op.remove()
    _log.removeHandler(_handler)
    _log.setLevel(logging.NOTSET)


def stats(engine: Any) -> StepStats:
    """What the last step of the DeepSpeed *engine* spent where; without an optimizer, what its last forward pass did.

    Raises: UsageError when the engine has neither parameters nor optimizer states on a drive behind this package, or has made no step.
    """
    from .step_stats import clock_of

    last = clock_of(engine).last
    if last is None:
        raise UsageError("this engine has made no step yet")
    return last


def is_too_old(version: str) -> bool:
    """Whether `enable` refuses a DeepSpeed of this *version*."""
    return _numbers(version) < _numbers(OLDEST_DEEPSPEED)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3]]


def _is_first_rank() -> bool:
    """Whether this is rank 0, as far as the launcher has said it by now: Lightning's own tells only which one of this machine."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def _replace(owner: Any, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        disable()
        raise UnsupportedError(f"this version of DeepSpeed has no {name} in {owner.__name__}; {OLDEST_DEEPSPEED} has")
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)
