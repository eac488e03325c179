"""`Settings`: the section "nvme_offload" of a ds_config, the settings in DeepSpeed's own sections that
concern offload to drives, and the tier that they describe.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..errors import OffloadError, UnsupportedError, UsageError
from ..hardware.config import BACKENDS, AioConfig
from ..hardware.machine import physical_bytes
from ..swap import live
from ..swap.tier import Tier, engine_config, memory_size
from ..units import format_bytes
from .replacing import replaces

SECTION = "nvme_offload"
# The keys of the section "aio", and their names in `AioConfig`. DeepSpeed reads
# intra_op_parallelism; its documentation says thread_count.
_AIO_KEYS = {
    **{
        key: key
        for key in ("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count")
    },
    "intra_op_parallelism": "thread_count",
}
# Features of DeepSpeed that need states, or parameters, in memory. If these are in a tier, the
# features would find no tensors, or contents that they did not write.
_STATES_IN_MEMORY = (
    ("zero_optimization", "zenflow"),
    ("zero_optimization", "offload_optimizer", "super_offload"),
    ("checkpoint", "writer"),
    ("compile", "deepcompile"),
)
_PARAMETERS_IN_MEMORY = (
    ("zero_optimization", "zero_hpz_partition_size"),
    ("zero_optimization", "zero_quantized_nontrainable_weights"),
)
_OFFLOADS = ("offload_param", "offload_optimizer")  # sections of "zero_optimization"
# Keys that need this package's swappers, with the value that DeepSpeed's swappers have.
_NATIVE = {
    "state_format": "exact",
    "missing_gradients": "last",
    "overlap_step": False,
    "update_device": "auto",
    "step_in_backward": False,
}
# Keys that have no effect if states are in memory, with the value that describes states in memory.
# `overlap` reports "overlap_step" and "step_in_backward".
_OF_STATES = {key: _NATIVE[key] for key in ("state_format", "missing_gradients", "update_device")}
# Other keys that DeepSpeed's swappers ignore.
_NEED_NATIVE = {"host_memory", "backend", "paths", "weights", "checksum"}
# Keys of the section that DeepSpeed and other tools do not use in any section.
_OWN_KEYS = {"swappers", "host_memory", *_NATIVE}
# From this similarity on, an unknown key counts as misspelled.
_LIKENESS = 0.8

_log = logging.getLogger(__name__)
_warned: set[str] = set()
_tiers: weakref.WeakValueDictionary[tuple[Settings, AioConfig, tuple[str, ...]], Tier] = (
    weakref.WeakValueDictionary()
)
_lock = threading.RLock()
# Tiers whose steps belong to a training in progress.
trained: weakref.WeakSet[Tier] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Settings:
    """The section "nvme_offload" of a ds_config. Every key is optional.

    Attributes
    ----------
    swappers : {"native", "deepspeed"}
        "native" for this package's swappers, "deepspeed" for DeepSpeed's own on this package's op.
    host_memory : int or "auto"
        Bytes of host memory that a rank may hold for parameters, gradients and optimizer states,
        pinned or cached. "auto" takes as much of the available memory as the model needs.
    backend : str
        The engine's backend, as in `AioConfig`.
    paths : tuple of str
        Directories on the drives, instead of nvme_path. Large tensors are striped over them.
    weights : tuple of float
        The share of each path, in any unit; equal by default.
    checksum : bool
        Whether every byte read from a drive is checked against the byte that was written.
    state_format : {"exact", "split", "compact", "compact24"}
        How master weights and optimizer states are kept (`nvme_offload.optimizer_states`). With
        Adam and bfloat16 parameters, bytes for each parameter: "exact" 12; "split" 10, without the
        bits that the parameter has; "compact" 4, with states rounded to 8 bits; "compact24" 3, with
        masters rounded to 24 bits.
    missing_gradients : {"zero", "last"}
        The gradient of a parameter that gets none in a step: "zero", or "last" for the gradient of
        its last step, as in DeepSpeed.
    overlap_step
        Whether `step` returns before the updates, which are made during the next forward pass.
    update_device : {"auto", "gpu", "cpu"}
        Where the optimizer updates run in ZeRO-3. "auto" uses the GPU if there is one, with the
        optimizer and the bits of a run without offload; "cpu" has the bits of "device": "cpu".
    step_in_backward
        Whether ZeRO-3 updates a sub-group in the last backward pass of a step, as soon as its
        gradients are reduced, with the learning rate at that time. The update consumes the
        gradients. Not with clipping, fp16, parameters on a drive, or *overlap_step*.
    """

    swappers: Literal["native", "deepspeed"] = "native"
    host_memory: int | Literal["auto"] = "auto"
    backend: str = "libaio"
    paths: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    checksum: bool = False
    state_format: Literal["exact", "split", "compact", "compact24"] = "exact"
    missing_gradients: Literal["zero", "last"] = "zero"
    overlap_step: bool = False
    update_device: Literal["auto", "gpu", "cpu"] = "auto"
    step_in_backward: bool = False

    @classmethod
    def of(cls, ds_config: Mapping[str, Any]) -> Settings:
        """Read the section of a ds_config.

        Parameters
        ----------
        ds_config : mapping
            DeepSpeed's configuration.

        Returns
        -------
        Settings
            The defaults if there is no section.

        Raises
        ------
        UsageError
            A key is unknown, or a value invalid; the message names the key and the possible values.
        """
        section = ds_config.get(SECTION, {})
        if not isinstance(section, Mapping):
            raise UsageError(
                f'"{SECTION}" in the DeepSpeed configuration must be a section, {{...}}, not {section!r}'
            )
        known = {field.name for field in dataclasses.fields(cls)}
        for key in section:
            if key not in known:
                raise UsageError(
                    f'"{SECTION}" in the DeepSpeed configuration has the key {key!r}; the keys are {", ".join(sorted(known))}'
                )
        values = dict(section)
        for key, possible in _POSSIBLE.items():
            _require(values, key, possible)
        for key, theirs in _NATIVE.items():
            if values.get("swappers") == "deepspeed" and values.get(key, theirs) != theirs:
                raise UsageError(
                    f'"{key}" in "{SECTION}" needs this package\'s swappers: leave "swappers" out'
                )
        if "host_memory" in values:
            values["host_memory"] = _host_memory(values["host_memory"])
        if "paths" in values:
            values["paths"] = _strings(values["paths"])
        if "weights" in values:
            if not values.get("paths"):
                raise UsageError(
                    f'"weights" in "{SECTION}" are the shares of "paths", and there are none: name the directories, or leave "weights" out'
                )
            values["weights"] = _weights(values["weights"], len(values["paths"]))
        return cls(**values)


_POSSIBLE = {
    "backend": BACKENDS,
    **{
        key: (True, False) if kind is bool else get_args(kind)
        for key, kind in get_type_hints(Settings).items()
        if kind is bool or get_origin(kind) is Literal
    },
}


@replaces("deepspeed.runtime.config:DeepSpeedConfig")
def _initialize_params(parse: Callable[..., None], config: Any, param_dict: Any) -> None:
    try:
        check(param_dict)
    except OffloadError as refusal:
        # Launchers mix the tracebacks of all ranks, and prefix their lines.
        _log.error("the configuration is refused", exc_info=(type(refusal), refusal, None))
        raise
    parse(config, param_dict)


def check(ds_config: Mapping[str, Any]) -> None:
    """Refuse settings that would have no effect, and features that do not work with offload. Warn,
    once each, of likely mistakes that DeepSpeed accepts silently. Raises: UsageError,
    UnsupportedError.
    """
    _question_names(ds_config)
    _aio_section(ds_config)
    _refuse_stage(ds_config)
    for line in _config_warnings(ds_config):
        _warn_once(line)
    _refuse_memory_features(ds_config)


def _question_names(ds_config: Mapping[str, Any]) -> None:
    """Refuse keys of the section "nvme_offload" at the top level, and offloads to a drive outside of
    "zero_optimization". Warn, once each, of keys and sections that were probably meant for "nvme_offload".
    Raises: UsageError.
    """
    for key in _OWN_KEYS.intersection(ds_config):
        raise UsageError(
            f'"{key}" has no effect at the top level of the DeepSpeed configuration: move it to the section "{SECTION}"'
        )
    for key in sorted((_NEED_NATIVE - _OWN_KEYS).intersection(ds_config)):
        _warn_once(
            f'"{key}" at the top level of the DeepSpeed configuration is no setting of nvme_offload: if it is meant as one, move it to the section "{SECTION}"'
        )
    for key in filter(functools.partial(_is_taken_for_ours, ds_config), ds_config):
        _warn_once(
            f'nothing reads {key!r} in the DeepSpeed configuration: is it "{SECTION}", misspelt?'
        )
    for key, section in (("", ds_config), *ds_config.items()):
        for name in _OFFLOADS:
            if key != "zero_optimization" and _value(section, (name, "device")) == "nvme":
                place = f'in "{key}"' if key else "at the top level of the DeepSpeed configuration"
                raise UsageError(
                    f'"{name}" with "device": "nvme" has no effect {place}: move it to the section "zero_optimization"'
                )


def _is_taken_for_ours(ds_config: Mapping[str, Any], key: str) -> bool:
    section = ds_config[key]
    # `_config_warnings` has a better line about "aio"; DeepSpeed refuses unknown keys in the other
    if key in (SECTION, "aio", "zero_optimization"):
        return False
    if isinstance(section, Mapping) and not _OWN_KEYS.isdisjoint(section):
        return True
    return SECTION not in ds_config and (
        "nvme" in key.lower() or bool(difflib.get_close_matches(SECTION, [key], cutoff=_LIKENESS))
    )


def zero_stage(ds_config: Mapping[str, Any]) -> int | None:
    """The stage of ZeRO in *ds_config*, which DeepSpeed accepts as a number or a string. None if
    there is no section, or DeepSpeed will refuse the stage.
    """
    zero = ds_config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return None
    try:
        return int(zero.get("stage", 0))
    except (TypeError, ValueError):
        return None


def _refuse_stage(ds_config: Mapping[str, Any]) -> None:
    stage = zero_stage(ds_config)
    of_deepspeed = _value(ds_config, (SECTION, "swappers")) == "deepspeed"
    for name in _OFFLOADS:
        device = _value(ds_config, ("zero_optimization", name, "device"))
        stages = (3,) if name == "offload_param" or of_deepspeed else (1, 2, 3)
        if device == "nvme" and stage in {0, 1, 2}.difference(stages):
            raise UnsupportedError(
                f'"{name}" has "device": "nvme", and with "stage": {stage} DeepSpeed keeps everything in memory: set "stage": {" or ".join(map(str, stages))}'
                f"{', or leave swappers out' if of_deepspeed and stage else ''}, or train without DeepSpeed, "
                'with nvme_offload.NVMeOptimizer; "device": "cpu" is what DeepSpeed does now'
            )


def _refuse_memory_features(ds_config: Mapping[str, Any]) -> None:
    if not nvme_paths(ds_config) or Settings.of(ds_config).swappers == "deepspeed":
        return
    for keys in _STATES_IN_MEMORY:
        if _value(ds_config, keys):
            raise UnsupportedError(
                f'"{keys[-1]}" in "{keys[-2]}" works with states in memory only: leave it out, or give both offloads "device": "cpu"'
            )
    if _value(ds_config, ("zero_optimization", "offload_param", "device")) != "nvme":
        return
    for keys in _PARAMETERS_IN_MEMORY:
        if int(_value(ds_config, keys) or 0) > (keys[-1] == "zero_hpz_partition_size"):
            raise UnsupportedError(
                f'"{keys[-1]}" in "{keys[-2]}" works with parameters in memory only: leave it out, or give "offload_param" "device": "cpu"'
            )


def _config_warnings(ds_config: Mapping[str, Any]) -> Iterator[str]:
    if SECTION in ds_config and not nvme_paths(ds_config):
        yield f'"{SECTION}" in the DeepSpeed configuration has no effect: neither "offload_param" nor "offload_optimizer" has "device": "nvme"'
    given = ds_config.get(SECTION)
    section = given if isinstance(given, Mapping) else {}  # `Settings.of` refuses others
    if section.get("swappers") == "deepspeed":
        if unused := sorted(_NEED_NATIVE.intersection(section)):
            yield f'{", ".join(map(repr, unused))} in "{SECTION}" has no effect on DeepSpeed\'s own swappers ("swappers"): leave one of the two out'
    elif (
        nvme_paths(ds_config)
        and _value(ds_config, ("zero_optimization", "offload_optimizer", "device")) != "nvme"
    ):
        for key, without in _OF_STATES.items():
            if section.get(key, without) != without:
                yield f'"{key}" in "{SECTION}" has no effect: "offload_optimizer" does not have "device": "nvme"'
    # DeepSpeed accepts use_gds. ds_nvme_tune prints num_threads, which nothing reads.
    aio = _aio_section(ds_config) or {}
    if unread := [key for key in aio if key not in _AIO_KEYS and key != "use_gds"]:
        yield f'nothing reads {", ".join(map(repr, unread))} in the section "aio": is it misspelt?'
    if aio.get("use_gds"):
        yield '"use_gds" in the section "aio" has no effect: all transfers go through host memory'
    memory = Settings.of(ds_config).host_memory
    total = physical_bytes()
    if memory != "auto" and memory > total:
        yield f'"host_memory" of {format_bytes(memory)} is more than the {format_bytes(total)} of this machine: is that intended?'


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning("%s", message)


def _value(ds_config: Any, keys: Iterable[str]) -> Any:
    found: Any = ds_config
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def nvme_paths(ds_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The absolute paths of sections with "device": "nvme", each once. Raises: UsageError."""
    paths = []
    for name in _OFFLOADS:
        where = ("zero_optimization", name)
        if _value(ds_config, (*where, "device")) == "nvme":
            if not (path := _value(ds_config, (*where, "nvme_path"))):
                raise UsageError(
                    f'"{name}" in the DeepSpeed configuration has "device": "nvme" and no "nvme_path": name a directory on the drive'
                )
            if not isinstance(path, str | Path):
                raise UsageError(
                    f'"nvme_path" of "{name}" is one directory, not {path!r}: list several drives in "paths" of "nvme_offload"'
                )
            paths.append(str(path))
    return tuple(dict.fromkeys(_absolute(paths)))


def aio_config(ds_config: Mapping[str, Any], settings: Settings, path: str) -> AioConfig:
    """The engine's settings: the section "aio". Without it, the settings that `nvme-sweep` chose for
    the drive of *path*, or the defaults. Raises: UsageError naming a wrong key.
    """
    aio = _aio_section(ds_config)
    if aio is None:
        return engine_config(path, settings.backend)
    return AioConfig(
        **{ours: aio[key] for key, ours in _AIO_KEYS.items() if key in aio},
        backend=settings.backend,
        direct="auto",
    )


def tier_of(ds_config: Mapping[str, Any]) -> Tier:
    """The tier of *ds_config*, made on first use. Parameters and optimizer states with equal settings
    share one, so that one budget covers both. Raises: as `Tier`; UsageError naming a wrong key.
    """
    settings = Settings.of(ds_config)
    paths = settings.paths or nvme_paths(ds_config)
    key = (settings, aio := aio_config(ds_config, settings, paths[0]), paths)
    with _lock:
        tier = _tiers.get(key)
        if tier is None:
            if "aio" in ds_config:
                _log.info('the section "aio" has the settings of the engine')
            tier = _tiers[key] = Tier(
                paths,
                aio,
                host_memory=settings.host_memory,
                weights=settings.weights,
                checksum=settings.checksum,
            )
    live.watch(tier)
    return tier


def _aio_section(ds_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    aio = ds_config.get("aio")
    if aio is None or isinstance(aio, Mapping):
        return aio
    raise UsageError(
        f'"aio" in the DeepSpeed configuration must be a section, {{...}}, not {aio!r}'
    )


def _absolute(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(str(Path(path).expanduser().resolve()) for path in paths)


def _require(values: Mapping[str, Any], key: str, possible: tuple[Any, ...]) -> None:
    if key in values and not any(
        values[key] is value or (isinstance(value, str) and values[key] == value)
        for value in possible
    ):
        raise UsageError(
            f'"{key}" in "{SECTION}" must be one of {", ".join(map(_as_json, possible))}, not {values[key]!r}'
        )


def _as_json(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, f'"{value}"')


def _host_memory(value: Any) -> int | Literal["auto"]:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON may have 8e9
    return memory_size(value, f'"host_memory" in "{SECTION}"')


def _strings(value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple) and bool(value)
    if not (is_list and all(isinstance(path, str) for path in value)):
        raise UsageError(
            f'"paths" in "{SECTION}" must be a list of directories, ["/local_nvme0", "/local_nvme1"], not {value!r}'
        )
    return _absolute(value)


def _weights(value: Any, paths: int) -> tuple[float, ...]:
    numbers = isinstance(value, list | tuple) and all(
        isinstance(item, int | float) and not isinstance(item, bool) and item > 0 for item in value
    )
    if not numbers or len(value) != paths:
        raise UsageError(
            f'"weights" in "{SECTION}" must have a number above 0 for each of the {paths} "paths", not {value!r}'
        )
    return tuple(map(float, value))
