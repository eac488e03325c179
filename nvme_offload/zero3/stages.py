"""Makes DeepSpeed use this package's optimizers, `Stage3` and `Stages1And2`, and `Inference`, which
takes the place of the optimizer in a ZeRO-3 engine without one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from ..errors import UnsupportedError, UsageError
from . import compat
from .agreement import all_or_none
from .param_swapper import move_partitions, require_budget, return_to_device, swappers_of
from .replacing import ENGINE, Replacements, replaces
from .settings import SECTION, Settings, nvme_paths, trained, zero_stage
from .stage3 import Stage3
from .stage_1_and_2 import Stages1And2
from .step_stats import StepClock


class Inference(DeepSpeedZeRoOffload):  # type: ignore[misc]  # untyped
    """DeepSpeed's class, with each forward pass of the whole module counted as one step, in which
    parameters stream from a drive.
    """

    def __init__(
        self,
        whole: Mapping[str, Any],
        module: torch.nn.Module,
        timers: Any,
        ds_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """*whole*: the configuration, in place of *ds_config*, which may lack sections."""
        super().__init__(module, timers, whole, *args, **kwargs)
        self._tiers = [swapper.tier for swapper in swappers_of(module)]
        try:
            all_or_none(lambda: require_budget(module))
        except BaseException:
            super().destroy()
            raise
        self.clock = StepClock(self._tiers[0]) if self._tiers else None
        self.tier = next(iter(self._tiers), None)
        trained.difference_update(self._tiers)
        self._depth = 0
        self.forward_hooks.append(module.register_forward_pre_hook(self._begin_pass, prepend=True))
        self.forward_hooks.append(module.register_forward_hook(self._end_pass, always_call=True))

    def destroy(self) -> None:
        """Drop the hooks, as the base class does, and DeepSpeed's references to the module."""
        super().destroy()
        compat.drop_references(self.module)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin_pass(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1 and self.clock is not None:
            self.clock.begin()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end_pass(self, *_: Any) -> None:
        # DeepSpeed sees a Lightning step as a forward pass in which the module calls itself.
        self._depth -= 1
        if self._depth == 0 and self.clock is not None:
            self.clock.end()
            for tier in self._tiers:
                if tier.swapper.learned and tier not in trained:
                    # Otherwise the swapper would keep prefetching in the order of an earlier
                    # training.
                    tier.swapper.step()

    def _restore_from_bit16_weights(self) -> None:
        """Do nothing: there are no master weights. DeepSpeed calls this method after a load."""


@replaces(ENGINE)
def _do_sanity_check(original: Callable[[Any], None], engine: Any) -> None:
    """Refuse fp16 on a CPU without fp16 instructions with a clear message."""
    try:
        original(engine)
    except ValueError as error:
        if "is not supported on your device" not in str(error):
            raise
        raise UsageError(
            f'{error} Without a GPU, DeepSpeed trains in fp16 only on processors with AVX512-FP16: enable "bf16" in place of "fp16", or train on '
            "a GPU; `nvme-offload doctor` says what is here"
        ) from error


@replaces(ENGINE)
def _configure_zero_optimizer(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    ds_config, module = _whole(engine._config._param_dict, engine.module), engine.module
    if type(optimizer).__name__ == "NVMeOptimizer":
        raise UnsupportedError(
            'NVMeOptimizer does not work with DeepSpeed\'s ZeRO: pass the optimizer that it wraps, and set "device": "nvme" in "offload_optimizer"'
        )
    replaced = Replacements()
    of_engine = importlib.import_module("deepspeed.runtime.engine")
    if offloads(ds_config):
        _require_supported(engine, optimizer, ds_config)
        make = functools.partial(Stages1And2, ds_config)
        replaced.put(of_engine, "DeepSpeedZeroOptimizer", make)
    if is_stage_3 := engine.zero_optimization_partition_weights():
        return_to_device(module)
        move_partitions(module, ds_config)
        make = functools.partial(Inference, ds_config)
        replaced.put(of_engine, "DeepSpeedZeRoOffload", make)
        if nvme_paths(ds_config) and Settings.of(ds_config).swappers == "native":
            of_stage_3 = importlib.import_module("deepspeed.runtime.zero.stage3")
            make = functools.partial(Stage3, ds_config)
            replaced.put(of_stage_3, "DeepSpeedZeroOptimizer_Stage3", make)
    try:
        made = original(engine, optimizer)
    except BaseException:
        if is_stage_3:
            compat.drop_references(module)
        raise
    finally:
        replaced.restore()
    if isinstance(made, Stages1And2):
        made.watch(module)
    return made


def _whole(ds_config: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
    """*ds_config* with the sections that Lightning's strategy does not pass to `test` and `predict`."""
    config = getattr(getattr(getattr(module, "_trainer", None), "strategy", None), "config", None)
    left_out = config if isinstance(config, Mapping) else {}
    return {**{key: left_out[key] for key in ("aio", SECTION) if key in left_out}, **ds_config}


@replaces(ENGINE)
def zero_cpu_offload(original: Callable[[Any], bool], engine: Any) -> bool:
    """Whether DeepSpeed's optimizer for offload is used: in stage 1 it would use another one."""
    return offloads(engine._config._param_dict) or original(engine)


def offloads(ds_config: Mapping[str, Any]) -> bool:
    """Whether stage 1 or 2 of *ds_config* has optimizer states on a drive."""
    if zero_stage(ds_config) not in (1, 2):
        return False
    section = ds_config["zero_optimization"].get("offload_optimizer") or {}
    return bool(section.get("device") == "nvme")


def _require_supported(engine: Any, optimizer: Any, ds_config: Mapping[str, Any]) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    autocast = ds_config.get("torch_autocast") or {}
    zero, settings = ds_config["zero_optimization"], Settings.of(ds_config)
    refused = {
        '"overlap_step"': settings.overlap_step,
        '"step_in_backward"': settings.step_in_backward,
        '"update_device": "gpu"': settings.update_device == "gpu",
        "DeepSpeed's MoE layers": engine.has_moe_layers,
        "the pipeline engine": engine.pipeline_parallelism,
        '"load_universal"': engine.load_universal_checkpoint(),
        "Muon": type(optimizer).__name__.startswith("Muon"),
        '"elastic_checkpoint"': zero.get("elastic_checkpoint"),
        '"fp16_master_weights_and_grads"': engine.fp16_master_weights_and_gradients(),
        '"bf16_master_weights_and_grads"': (
            hasattr(engine, "bf16_master_weights_and_gradients")
            and engine.bf16_master_weights_and_gradients()
        ),
        '"torch_autocast" in float16': (
            autocast.get("enabled") and str(autocast.get("dtype")).rpartition(".")[2] == "float16"
        ),
        "a model of several dtypes": len({param.dtype for param in params}) > 1,
    }
    for what, is_on in refused.items():
        if is_on:
            raise UnsupportedError(
                f'{what} does not work with optimizer states of stage 1 or 2 on a drive: leave it out, or set "device": "cpu" in "offload_optimizer"'
            )
