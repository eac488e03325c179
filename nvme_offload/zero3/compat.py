"""Hides the differences between the releases of DeepSpeed: the other modules are written for the
newest one. `contract` lists the names that they use.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contract import numbers, parameters, sets

if TYPE_CHECKING:
    import torch


def stage3() -> Any:
    """DeepSpeed's ZeRO-3 optimizer, as a base class."""
    import torch
    from deepspeed import comm as dist
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as base

    substitutes: dict[str, Any] = {
        "_get_param_partition_rank": lambda self, param: dist.get_rank(group=self.dp_process_group),
        "_zero3_partition_group_metadata": lambda self: None,
        "master_weights_and_grads_dtype": torch.float32,
        "param_names": _parameter_names,
    }
    missing = {
        name: value
        for name, value in substitutes.items()
        if not hasattr(base, name) and not sets(base, name)
    }
    if "param" not in parameters(base.load_hp_checkpoint_state):
        missing["load_hp_checkpoint_state"] = lambda self, folder, key, param=None: (
            base.load_hp_checkpoint_state(self, folder, key)
        )
    return type(base.__name__, (base,), missing) if missing else base


@property  # type: ignore[misc]  # set on the class that stage3 makes
def _parameter_names(self: Any) -> dict[Any, str]:
    return {param: name for name, param in self.module.named_parameters()}


def at_accumulation_boundary(stage3: Any) -> bool:
    """Whether the micro-batch is the last of its step: an attribute in older releases."""
    boundary = stage3.is_gradient_accumulation_boundary
    return bool(boundary() if callable(boundary) else boundary)


def drop_references(module: Any) -> None:
    """Drop DeepSpeed's references to the *module* of a destroyed engine and to its submodules, whose
    hooks refer to the engine: the modules of a forward pass, and the cache of a method.
    """
    zero = "deepspeed.runtime.zero"
    stack = importlib.import_module(f"{zero}.parameter_offload").FWD_MODULE_STACK
    inside = set(map(id, module.modules()))
    # Another thread may be in a forward pass, which puts modules there.
    for one in [one for one in stack if id(one) in inside]:
        stack.remove(one)
    coordinator = importlib.import_module(f"{zero}.partitioned_param_coordinator")
    cached = vars(coordinator.PartitionedParameterCoordinator).get(
        "_PartitionedParameterCoordinator__params_to_release"
    )
    decorated = [cell.cell_contents for cell in getattr(cached, "__closure__", None) or ()]
    for function in (cached, *decorated):
        if hasattr(function, "cache_clear"):
            function.cache_clear()  # shared by all engines, and filled again on use


def end_backward(stage3: Any) -> None:
    """Discard the gradients that a backward pass left behind when an exception ended it."""
    for bucket in stage3.ipg_buckets.values() if hasattr(stage3, "ipg_buckets") else ():
        bucket.params.clear()
        getattr(bucket, "grads", []).clear()  # of stages 1 and 2
        bucket.elements = 0
    for name in ("params_in_ipg_bucket", "grads_in_ipg_bucket"):
        getattr(stage3, name, []).clear()
    if "elements_in_ipg_bucket" in vars(stage3):  # elsewhere it is computed
        stage3.elements_in_ipg_bucket = 0
    reduced = stage3.params_already_reduced  # a list in stages 1 and 2
    for identifier in range(len(reduced)) if isinstance(reduced, list) else reduced:
        reduced[identifier] = False
    if hasattr(stage3, "_backward_active_depth"):
        # Nesting depth: without the reset, the next pass would not count as the outermost one.
        stage3._backward_active_depth = 0


def lacks_reductions(stage3: Any) -> bool:
    """Whether a backward pass has gradients that it did not reduce."""
    buckets = stage3.ipg_buckets.values() if hasattr(stage3, "ipg_buckets") else ()
    return any(bucket.params for bucket in buckets) or bool(
        getattr(stage3, "params_in_ipg_bucket", ())
    )


def sums_on_accelerator(optimizer: Any, group: int) -> bool:
    """Whether stage 1 or 2 sums gradients of *group* on the accelerator, as newer releases do."""
    return bool(
        hasattr(optimizer, "_use_compact_grad_partition_buffer")
        and optimizer._use_compact_grad_partition_buffer(group)
    )


def lists_by_sub_group(stage3: Any) -> list[str]:
    """The attributes that are lists with an item for each sub-group. Not all releases have them."""
    return [
        name
        for name in ("sub_group_process_groups", "sub_group_partition_counts")
        if hasattr(stage3, name)
    ]


def keeps_powers_for_a_step() -> bool:
    """Whether CPU Adam uses the same powers of its betas for every sub-group of a step."""
    return numbers(importlib.import_module("deepspeed").__version__) >= (0, 19, 4)


def norm_dtype() -> torch.dtype:
    """The dtype in which DeepSpeed computes norms of gradients. Older releases use float64."""
    import torch

    utils = importlib.import_module("deepspeed.runtime.zero.utils")
    dtype: torch.dtype = getattr(utils, "get_norm_dtype", lambda: torch.float64)()
    return dtype


def is_trained(param: Any) -> bool:
    """Whether *param* belongs to the optimizer: in newer releases only if it has elements."""
    asked = getattr(
        importlib.import_module("deepspeed.runtime.utils"), "is_optimized_parameter", None
    )
    return bool(param.requires_grad if asked is None else asked(param))


def writes_archives(checkpoint_engine: Any) -> bool:
    """Whether *checkpoint_engine* uses plain torch.save and torch.load."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    return type(checkpoint_engine) is TorchCheckpointEngine and getattr(
        checkpoint_engine, "zipfile_serialization", True
    )


def model_states_path(
    engine: Any, directory: str, tag: str | None, rank: int, mp_placeholder: str | None = None
) -> str:
    """The file of *rank*'s model states. Older releases can only name this rank's file."""
    own = Path(engine._get_ckpt_name(directory, tag, mp_placeholder=mp_placeholder))
    return str(own.with_name(re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", own.name)))
