"""Checkpoints of engines with offloaded parameters or optimizer states: `save_checkpoint` and
`load_checkpoint`, in DeepSpeed's format.

Each save is a generation, written as a `SharedDirectory`. A crash at any point leaves either the
previous checkpoint, even one with the same tag, or the new one. A failure is raised on every rank,
and training can continue. A load checks every byte against the manifest.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS

from ..device.modes import outside_of_all_modes
from ..errors import UsageError
from ..files import commit
from ..io import archive
from ..io.ranks import Ranks
from . import compat, states
from .agreement import everywhere
from .checkpoint_engines import (
    Complete,
    Generation,
    engine_of,
    loads,
    offloads,
    streams,
)
from .checkpoint_load import (
    Opened,
    agree_on_checkpoint,
    load_module,
    open_checkpoint,
    takes_weights_alone,
    verify,
)
from .param_swapper import is_offloaded
from .replacing import ENGINE, replaced, replaces
from .stage3 import Stage3
from .stages import Inference

_LOAD_ARGUMENTS = (
    "load_module_strict",
    "load_optimizer_states",
    "load_lr_scheduler_states",
    "load_module_only",
    "custom_load_fn",
)

_Method = Callable[..., Any]


@replaces(ENGINE)
def zero_nvme_offload_optimizer(original: _Method, engine: Any) -> bool:
    """Whether DeepSpeed copies a directory of swap files into the checkpoint."""
    if getattr(engine.optimizer, "swaps_natively", False):
        return False
    copies: bool = original(engine)
    return copies


@replaces(ENGINE)
@outside_of_all_modes()
def save_checkpoint(
    original: _Method,
    engine: Any,
    save_dir: str,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Save a checkpoint. If states are offloaded, it appears complete or not at all."""
    arguments = (save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)
    if not streams(engine):
        writer = engine.checkpoint_engine
        if offloads(engine):
            writer = Complete(writer, engine.optimizer)
        with replaced(engine, checkpoint_engine=writer):
            saved: bool = original(engine, *arguments)
        if (
            engine.use_node_local_storage()
            and save_latest
            and engine.zero_optimization_partition_weights()
        ):
            tag = str(f"global_step{engine.global_steps}" if tag is None else tag)
            _name_latest(save_dir, tag, engine.local_rank == 0)
        return saved
    return _save(engine, original, *arguments)


@replaces(ENGINE, "_save_checkpoint")
@replaces(ENGINE, "_save_zero_checkpoint")
def _attempt(original: _Method, engine: Any, *args: Any, **named: Any) -> None:
    """Leave a failure to be raised when the ranks agree: they make collective calls before."""
    generation = engine.checkpoint_engine
    if not isinstance(generation, Generation):
        original(engine, *args, **named)
    elif generation.failure is None:
        try:
            original(engine, *args, **named)
        except Exception as error:
            generation.failure = archive.as_failure(error, generation.directory.place)


@replaces(ENGINE)
@outside_of_all_modes()
def load_checkpoint(
    original: _Method, engine: Any, load_dir: str, tag: str | None = None, *args: Any, **named: Any
) -> Any:
    """Load the checkpoint that all ranks find, after its bytes have been checked."""
    found = None
    if engine.zero_optimization_partition_weights() or offloads(engine):
        found = agree_on_checkpoint(engine, load_dir, tag)
    if found is None or not (loads(engine) or offloads(engine)):
        return original(engine, load_dir, tag, *args, **named)
    given = dict(zip(_LOAD_ARGUMENTS, args, strict=False)) | named
    verify(engine, Path(load_dir, found).resolve())

    def opened() -> Opened | None:
        if not loads(engine) and takes_weights_alone(engine, given):
            return None  # DeepSpeed loads whole weights on any number of ranks
        return open_checkpoint(engine, load_dir, found, given)

    def begin() -> None:
        before_begin = engine_of(engine)
        engine.optimizer.begin_load()
        if engine_of(engine) is not before_begin:  # an interrupted store gets a new I/O engine
            engine.nvme_offload_loading = opened()

    engine.nvme_offload_loading = everywhere(opened)
    try:
        if not isinstance(engine.optimizer, Inference):
            everywhere(begin)
            # the next micro-batch is the first of its step
            engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
        return original(engine, load_dir, found, *args, **named)
    finally:
        engine.nvme_offload_loading = None


@replaces(ENGINE)
def _load_checkpoint(
    original: _Method, engine: Any, load_dir: str, tag: str, *args: Any, **named: Any
) -> Any:
    opened: Opened | None = getattr(engine, "nvme_offload_loading", None)
    if opened is None:
        return original(engine, load_dir, tag, *args, **named)
    given = dict(zip(_LOAD_ARGUMENTS, args, strict=False)) | named

    def load(**changed: Any) -> Any:
        return original(engine, load_dir, tag, **given | changed)

    return everywhere(lambda: load_module(engine, load, opened, given))


@replaces(ENGINE)
def _get_all_ckpt_names(
    original: _Method, engine: Any, checkpoints_path: str, tag: str
) -> list[str]:
    names: list[str] = original(engine, checkpoints_path, tag)
    if names or not (loads(engine) or offloads(engine)):
        return names
    # Fewer ranks saved it. Rank 0's file has everything that is not partitioned.
    pattern = compat.model_states_path(engine, checkpoints_path, tag, 0, mp_placeholder="*")
    if not (names := sorted(glob.glob(pattern))):  # noqa: PTH207 - as DeepSpeed does
        raise UsageError(
            f"{Path(checkpoints_path, str(tag))} has no checkpoint of this stage of ZeRO: there is no {Path(pattern).name}"
        )
    return names


@replaces(ENGINE)
def _load_zero_checkpoint(
    original: _Method, engine: Any, load_dir: str, tag: str, load_optimizer_states: bool = True
) -> bool:
    opened: Opened | None = getattr(engine, "nvme_offload_loading", None)
    if opened is None:
        return bool(original(engine, load_dir, tag, load_optimizer_states))
    if isinstance(engine.optimizer, Inference):
        return False  # it has no states

    def load() -> None:
        engine.optimizer.load(
            opened.values, load_optimizer_states, bool(engine.zero_load_from_fp32_weights())
        )

    engine.optimizer.resumes = True
    try:
        everywhere(load)
    finally:
        engine.optimizer.resumes = False
    return True


@replaces(ENGINE)
def _get_zero_param_shapes(original: _Method, engine: Any) -> Any:
    with (
        states.in_users_groups(engine.optimizer)
        if isinstance(engine.optimizer, Stage3)
        else contextlib.nullcontext()
    ):
        return original(engine)


@replaces(ENGINE)
def _get_param_fragment_func(original: _Method, engine: Any, param: Any) -> torch.Tensor:
    if not is_offloaded(param):
        fragment: torch.Tensor = original(engine, param)
        return fragment
    if not isinstance(engine.checkpoint_engine, Generation):
        partition: torch.Tensor = param.nvme_swapper.partition(param)
        return partition
    param.nvme_swapper.swap_in([param], async_op=True)
    return archive.offloaded(
        [param.ds_tensor.ds_numel],
        param.ds_tensor.dtype,
        [archive.Part(_provider(param), "", 0)],
    )


@replaces(ENGINE)
def load_module_state_dict(
    original: _Method, engine: Any, checkpoint: dict[str, Any], *args: Any, **named: Any
) -> None:
    """Load the module, but not frozen weights: `load_module` does that."""
    if hasattr(engine, "nvme_offload_loading"):  # see `load_module`
        checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: None}
    original(engine, checkpoint, *args, **named)


def _save(
    engine: Any,
    save: Callable[..., Any],
    save_dir: str,
    tag: str | None,
    client_state: Any,
    save_latest: bool,
    exclude_frozen: bool,
) -> bool:
    tag = str(f"global_step{engine.global_steps}" if tag is None else tag)
    generation = Generation(engine, engine.checkpoint_engine, save_dir, tag)
    engine.optimizer.leaves_states_offloaded = True
    try:
        generation.directory.begin()
        with replaced(engine, checkpoint_engine=generation):
            save(engine, save_dir, tag, client_state, False, exclude_frozen)
    finally:
        engine.optimizer.leaves_states_offloaded = False
        generation.directory.discard()
    if save_latest:
        _name_latest(save_dir, tag, generation.directory.publishes)
    return True


def _name_latest(save_dir: str, tag: str, here: bool) -> None:
    """Write *tag* to the file `latest` in *save_dir*, on the ranks with *here*."""
    latest = Path(save_dir) / "latest"

    def write() -> None:
        try:
            if here:
                # DeepSpeed truncates the file first, so a crash would leave it empty.
                commit.write_file(latest, tag, mode=None)
        except OSError as error:
            raise archive.as_failure(error, latest) from error

    Ranks.of_group().together(write, f"the checkpoint {tag} was not saved")


def _provider(param: Any) -> archive.Provider:
    @contextlib.contextmanager
    def lend() -> Iterator[dict[str, torch.Tensor]]:
        yield {"": param.nvme_swapper.partition(param)}

    return lend
