"""Makes DeepSpeed use `Stages1And2` if the optimizer states of stage 1 or 2 are on a drive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from ..errors import UnsupportedError, UsageError
from .settings import Settings
from .stage_1_and_2 import Stages1And2

# The configuration of the engine that is being made. DeepSpeed does not pass it to its optimizer.
_ds_config: ContextVar[Mapping[str, Any] | None] = ContextVar("ds_config", default=None)


def explained(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """`DeepSpeedEngine._do_sanity_check` with a clear message if the CPU lacks fp16 instructions."""

    @functools.wraps(check)
    def explaining(engine: Any) -> None:
        try:
            check(engine)
        except ValueError as error:
            if "is not supported on your device" not in str(error):
                raise
            raise UsageError(
                f'{error} Without a GPU, DeepSpeed trains in fp16 only on processors with AVX512-FP16: enable "bf16" in place of "fp16", or train on '
                "a GPU; `nvme-offload doctor` says what is here"
            ) from error

    return explaining


def configured(configure: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`DeepSpeedEngine._configure_zero_optimizer`, which may make a `Stages1And2`."""

    @functools.wraps(configure)
    def configuring(engine: Any, optimizer: Any) -> Any:
        ds_config = engine._config._param_dict
        if type(optimizer).__name__ == "NVMeOptimizer":
            raise UnsupportedError(
                'NVMeOptimizer does not work with DeepSpeed\'s ZeRO: pass the optimizer that it wraps, and set "device": "nvme" in "offload_optimizer"'
            )
        if not offloads(ds_config):
            return configure(engine, optimizer)
        _require_supported(engine, optimizer, ds_config)
        token = _ds_config.set(ds_config)
        try:
            made = configure(engine, optimizer)
        finally:
            _ds_config.reset(token)
        made.watch(engine.module)
        return made

    return configuring


def class_for(base: type) -> Callable[..., Any]:
    """Makes a `Stages1And2` for engines that `configured` selects, and a *base* for others."""

    def make(*args: Any, **named: Any) -> Any:
        ds_config = _ds_config.get()
        return base(*args, **named) if ds_config is None else Stages1And2(ds_config, *args, **named)

    return make


def offloads_like_cpu(offloads_to_cpu: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """`DeepSpeedEngine.zero_cpu_offload`, which is also true with states on a drive. Otherwise
    DeepSpeed would use another class in stage 1, which offloads nothing.
    """

    @functools.wraps(offloads_to_cpu)
    def asking(engine: Any) -> bool:
        return offloads(engine._config._param_dict) or offloads_to_cpu(engine)

    return asking


def offloads(ds_config: Mapping[str, Any]) -> bool:
    """Whether stage 1 or 2 of *ds_config* has optimizer states on a drive."""
    zero = ds_config.get("zero_optimization") or {}
    section = zero.get("offload_optimizer") or {}
    return zero.get("stage", 0) in (1, 2) and section.get("device") == "nvme"


def _require_supported(engine: Any, optimizer: Any, ds_config: Mapping[str, Any]) -> None:
    """Refuse features that stages 1 and 2 do not support."""
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
