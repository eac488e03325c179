"""Checkpoints of engines with offloaded parameters or optimizer states: `save_checkpoint` and
`load_checkpoint`, in DeepSpeed's format.

Each save is a generation, written as a `SharedDirectory`. A crash at any point leaves either the
previous checkpoint, even one with the same tag, or the new one. A failure is raised on every rank,
and training can continue. A load checks every byte against the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import glob
import logging
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    FROZEN_PARAM_FRAGMENTS,
    OPTIMIZER_STATE_DICT,
)

from ..errors import OffloadError, UnsupportedError, UsageError
from ..files import commit
from ..hardware.config import AioConfig
from ..io import archive, manifest
from ..io import engine as io
from ..io.manifest import Manifest, corrupt
from ..io.shared_directory import SharedDirectory
from . import compat, states
from .agreement import all_or_none, all_ranks, of_all_ranks
from .inference import Inference
from .param_swapper import is_offloaded
from .reader import CheckpointReader
from .settings import refuse_ineffective, refuse_memory_features, warn_of_mistakes
from .stage3 import Stage3

_SWAP_FILES = "offloaded_tensors"  # the directory that DeepSpeed copies swap files to
# suffixes of DeepSpeed's file names
_STATE_FILES = ("_model_states.pt", "_optim_states.pt")
# Our key in files of optimizer states; DeepSpeed reads only its own.
_GENERATION = "nvme_offload_generation"
_LOAD_ARGUMENTS = (
    "load_module_strict",
    "load_optimizer_states",
    "load_lr_scheduler_states",
    "load_module_only",
    "custom_load_fn",
)
# What torch.load raises for a truncated or damaged file.
_UNREADABLE = (
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
)

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def engine_methods(engine: type) -> dict[str, Callable[..., Any]]:
    """Replacements, by name, for the methods of the class *engine*, DeepSpeedEngine, that depend on
    offload.
    """
    original: Any = engine

    def _configure_optimizer(self: Any, *args: Any, **named: Any) -> None:
        def check() -> None:
            refuse_ineffective(self._config._param_dict)
            warn_of_mistakes(self._config._param_dict)
            refuse_memory_features(self._config._param_dict)

        if self.zero_optimization_partition_weights():
            all_or_none(check)  # the settings of one rank may differ
        else:
            check()
        before["_configure_optimizer"](self, *args, **named)

    def zero_nvme_offload_optimizer(self: Any) -> bool:
        # If True, DeepSpeed copies a directory of swap files into the checkpoint.
        if getattr(self.optimizer, "swaps_natively", False):
            return False
        offloads: bool = before["zero_nvme_offload_optimizer"](self)
        return offloads

    def save_checkpoint(
        self: Any,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        arguments = (save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)
        if not _streams(self):
            with _complete(self):
                saved: bool = before["save_checkpoint"](self, *arguments)
            if self.use_node_local_storage() and save_latest and isinstance(self.optimizer, Stage3):
                tag = str(f"global_step{self.global_steps}" if tag is None else tag)
                _name_latest(save_dir, tag, self.local_rank == 0)
            return saved
        return _save(self, before["save_checkpoint"], *arguments)

    def _save_checkpoint(self: Any, *args: Any, **named: Any) -> None:
        _attempt(self, lambda: before["_save_checkpoint"](self, *args, **named))

    def _save_zero_checkpoint(self: Any, *args: Any, **named: Any) -> None:
        _attempt(self, lambda: before["_save_zero_checkpoint"](self, *args, **named))

    def load_checkpoint(
        self: Any, load_dir: str, tag: str | None = None, *args: Any, **named: Any
    ) -> Any:
        if isinstance(self.optimizer, Stage3) and self.optimizer.swaps_natively:
            _everywhere(lambda: _refuse_swap_files(load_dir, tag))
        found = None
        if isinstance(self.optimizer, Stage3 | Inference) or _offloads(self):
            found = _agree_on_checkpoint(self, load_dir, tag)
        if found is None or not (_loads(self) or _offloads(self)):
            return before["load_checkpoint"](self, load_dir, tag, *args, **named)
        given = dict(zip(_LOAD_ARGUMENTS, args, strict=False)) | named
        _verify(self, Path(load_dir, found).resolve())

        def opened() -> _Opened | None:
            if not _loads(self) and _takes_weights_alone(self, given):
                return None  # DeepSpeed loads whole weights on any number of ranks
            return _open(self, load_dir, found, given)

        def begin() -> None:
            before_begin = _engine_of(self)
            self.optimizer.begin_load()
            if _engine_of(self) is not before_begin:  # an interrupted store gets a new I/O engine
                self.nvme_offload_loading = opened()

        self.nvme_offload_loading = _everywhere(opened)
        try:
            if not isinstance(self.optimizer, Inference):
                _everywhere(begin)
                # the next micro-batch is the first of its step
                self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
            return before["load_checkpoint"](self, load_dir, found, *args, **named)
        finally:
            self.nvme_offload_loading = None

    def _load_checkpoint(self: Any, load_dir: str, tag: str, *args: Any, **named: Any) -> Any:
        opened: _Opened | None = getattr(self, "nvme_offload_loading", None)
        if opened is None:
            return before["_load_checkpoint"](self, load_dir, tag, *args, **named)
        given = dict(zip(_LOAD_ARGUMENTS, args, strict=False)) | named

        def load(**changed: Any) -> Any:
            return before["_load_checkpoint"](self, load_dir, tag, **given | changed)

        return _everywhere(lambda: _load_module(self, load, opened, given))

    def _get_all_ckpt_names(self: Any, checkpoints_path: str, tag: str) -> list[str]:
        names: list[str] = before["_get_all_ckpt_names"](self, checkpoints_path, tag)
        if names or not (_loads(self) or _offloads(self)):
            return names
        # Fewer ranks saved it. Rank 0's file has everything that is not partitioned.
        pattern = compat.model_states_path(self, checkpoints_path, tag, 0, mp_placeholder="*")
        if not (names := sorted(glob.glob(pattern))):  # noqa: PTH207 - as DeepSpeed does
            raise UsageError(
                f"{Path(checkpoints_path, str(tag))} has no checkpoint of this stage of ZeRO: there is no {Path(pattern).name}"
            )
        return names

    def _load_zero_checkpoint(
        self: Any, load_dir: str, tag: str, load_optimizer_states: bool = True
    ) -> bool:
        opened: _Opened | None = getattr(self, "nvme_offload_loading", None)
        if opened is None:
            return bool(before["_load_zero_checkpoint"](self, load_dir, tag, load_optimizer_states))
        if isinstance(self.optimizer, Inference):
            return False  # it has no states

        def load() -> None:
            self.optimizer.load(
                opened.values, load_optimizer_states, bool(self.zero_load_from_fp32_weights())
            )

        self.optimizer.resumes = True
        try:
            _everywhere(load)
        finally:
            self.optimizer.resumes = False
        return True

    def _get_zero_param_shapes(self: Any) -> Any:
        with (
            states.in_users_groups(self.optimizer)
            if isinstance(self.optimizer, Stage3)
            else contextlib.nullcontext()
        ):
            return before["_get_zero_param_shapes"](self)

    def _get_param_fragment_func(self: Any, param: Any) -> torch.Tensor:
        if not is_offloaded(param):
            fragment: torch.Tensor = before["_get_param_fragment_func"](self, param)
            return fragment
        if not isinstance(self.checkpoint_engine, _Generation):
            partition: torch.Tensor = param.nvme_swapper.partition(param)
            return partition
        param.nvme_swapper.swap_in([param], async_op=True)
        return archive.offloaded(
            [param.ds_tensor.ds_numel],
            param.ds_tensor.dtype,
            [archive.Part(_provider(param), "", 0)],
        )

    def load_module_state_dict(
        self: Any, checkpoint: dict[str, Any], *args: Any, **named: Any
    ) -> None:
        if hasattr(self, "nvme_offload_loading"):  # see `_load_module`
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: None}
        before["load_module_state_dict"](self, checkpoint, *args, **named)

    methods = {
        name: method
        for name, method in locals().items()
        if callable(method) and name not in ("engine", "original")
    }
    before = {name: getattr(original, name) for name in methods}
    return methods


class _Generation:
    """Replaces *original*, the TorchCheckpointEngine of *engine*, during a save: the checkpoint
    *tag* appears complete, or not at all.
    """

    def __init__(self, engine: Any, original: Any, save_dir: str, tag: str) -> None:
        self.original = original
        self.failure: Exception | None = None
        self._optimizer = engine.optimizer
        self._has_states = False
        self._step = int(engine.global_steps)
        self._io = _engine_of(engine)
        # the target of a link is replaced, not the link
        place = Path(save_dir, tag).resolve()
        if Path(save_dir).resolve() not in place.parents:
            raise UsageError(
                f"a tag must name a directory below that of the checkpoints, not {tag!r}"
            )
        self.directory = SharedDirectory(
            place,
            all_ranks(),
            self._io,
            is_ours=_is_ours,
            title=f"the checkpoint {tag}",
            hint='if every node is to keep its own files, set "checkpoint": {"use_node_local_storage": true} in the DeepSpeed configuration; '
            "otherwise give a directory on a filesystem that all nodes share",
            first_of_node=engine.local_rank == 0 if engine.use_node_local_storage() else None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory. The temporary directory stands in for the tag's, and exists already."""
        if Path(path).resolve() != self.directory.place:
            os.makedirs(path, exist_ok=exist_ok)  # noqa: PTH103 - as DeepSpeed does

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file of the checkpoint into the temporary directory."""

        def write(aside: str) -> list[archive.Piece]:
            nonlocal state_dict
            if OPTIMIZER_STATE_DICT in state_dict:
                self._optimizer.require_complete(state_dict)
                state_dict = {**state_dict, _GENERATION: self.directory.generation}
                self._has_states = True
            if archive.has_offloaded(state_dict):
                summed = self.directory.checksum == "xxh3"
                return archive.write(aside, state_dict, self._io, summed)
            self.original.save(state_dict, aside)
            with self._io.open(aside, "rw") as file:
                file.sync()
            return []

        self.directory.write(str(Path(path).resolve().relative_to(self.directory.place)), write)

    def commit(self, info: Any) -> bool:
        """Publish the checkpoint if every rank has written all of its files. Raises: the first
        rank's error, on every rank.
        """
        if self.failure is None and not self._has_states:
            self.failure = _lacking(self._optimizer)
        self.directory.publish(self.failure, self._step)
        committed: bool = self.original.commit(info)
        return committed


class _Complete:
    """Replaces *original*, any checkpoint engine of DeepSpeed, while *optimizer* is saved, and
    refuses to write a file that lacks states.
    """

    def __init__(self, original: Any, optimizer: Any) -> None:
        self._original = original
        self._optimizer = optimizer
        self._has_states = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def save(self, state_dict: Any, path: str) -> Any:
        """Write a file of the checkpoint."""
        if OPTIMIZER_STATE_DICT in state_dict:
            self._optimizer.require_complete(state_dict)
            self._has_states = True
        return self._original.save(state_dict, path)

    def commit(self, info: Any) -> Any:
        """Commit the checkpoint, after all files are written."""
        if not self._has_states and (failure := _lacking(self._optimizer)) is not None:
            raise failure
        return self._original.commit(info)


def _lacking(optimizer: Any) -> OffloadError | None:
    """The error of a checkpoint without states of *optimizer*; None if there is no error."""
    try:
        optimizer.require_complete({})
    except OffloadError as failure:
        return failure
    return None


class _Reader:
    """Replaces *original*, the TorchCheckpointEngine of an engine, during a load. *read* returns
    the contents of a file.
    """

    def __init__(self, original: Any, read: Callable[[str], Any]) -> None:
        self._original = original
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """The contents of *path*."""
        try:
            return self._read(path)
        except FileNotFoundError as error:
            raise corrupt(Path(path), "it cannot be found") from error
        except (*_UNREADABLE, OSError) as error:
            # EINVAL: a damaged file made torch seek before its start.
            if isinstance(error, OSError) and (
                isinstance(error, OffloadError) or error.errno != errno.EINVAL
            ):
                raise
            raise corrupt(
                Path(path), f"torch cannot read it: {' '.join(str(error).split())[:200]}"
            ) from error


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
    original = engine.checkpoint_engine
    generation = _Generation(engine, original, save_dir, tag)
    engine.optimizer.leaves_states_offloaded = True
    try:
        generation.directory.begin()
        engine.checkpoint_engine = generation
        save(engine, save_dir, tag, client_state, False, exclude_frozen)
    finally:
        engine.optimizer.leaves_states_offloaded = False
        engine.checkpoint_engine = original
        generation.directory.discard()
    if save_latest:
        _name_latest(save_dir, tag, generation.directory.publishes)
    return True


def _name_latest(save_dir: str, tag: str, here: bool) -> None:
    """Write *tag* to the file `latest` in *save_dir*, on the ranks with *here*. Raises: the first
    rank's error, on every rank.
    """
    latest = Path(save_dir) / "latest"

    def write() -> None:
        try:
            if here:
                # DeepSpeed truncates the file first, so a crash would leave it empty.
                commit.write_file(latest, tag, mode=None)
        except OSError as error:
            raise archive.as_failure(error, latest) from error

    all_ranks().together(write, f"the checkpoint {tag} was not saved")


def _has_states(directory: Path) -> bool:
    try:
        return any(entry.name.endswith(_STATE_FILES) for entry in directory.iterdir())
    except OSError:
        return False


def _is_ours(name: str) -> bool:
    return name == _SWAP_FILES or name.endswith((".partial", *_STATE_FILES))


def _agree_on_checkpoint(engine: Any, load_dir: str, tag: str | None) -> str | None:
    """The tag of the checkpoint to load; None if *tag* is None and there is no `latest`. Raises:
    UsageError, on every rank, if the ranks do not find the same checkpoint.
    """
    latest = Path(load_dir) / (
        "latest_universal" if engine.load_universal_checkpoint() else "latest"
    )
    name = tag if tag is None else str(tag)
    found = "no checkpoint"

    def read_latest() -> None:
        nonlocal name
        if name is None and latest.is_file():
            name = _latest(latest)

    def recover() -> None:
        if name is not None and (engine.global_rank == 0 or engine.use_node_local_storage()):
            commit.recover_directory(Path(load_dir, name).resolve())

    def look() -> None:
        nonlocal found
        if name is None:
            return
        place = Path(load_dir, name).resolve()
        if _has_states(place):
            saved = Manifest.read(place)
            found = name if saved is None else f"{name} (save {saved.generation[:8]})"
        elif tag is None and _loads(engine):
            raise corrupt(latest, "it names no checkpoint in its directory")

    for action in (read_latest, recover, look):
        _everywhere(action)
    everywhere = of_all_ranks(found)
    if len(set(everywhere)) > 1:
        seen = ", ".join(f"rank {rank}: {what}" for rank, what in enumerate(everywhere))
        raise UsageError(
            f"the ranks find different checkpoints in {load_dir} ({seen}): load by its tag a checkpoint that every node has"
        )
    return name


def _everywhere(action: Callable[[], _Result]) -> _Result:
    """Run *action* on every rank and return its result once every rank has succeeded.

    Raises: the error, on every rank; if several ranks failed, the first one's.
    """
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


def _verify(engine: Any, place: Path) -> None:
    """Check the bytes of a checkpoint against its manifest, or, if it has none, against the
    checksums that torch.save wrote. Raises: the error of any rank, on every rank.
    """
    rank, ranks = engine.global_rank, dist.get_world_size()

    def check() -> None:
        found = Manifest.read(place)
        if found is None:
            files = [*sorted(place.glob("*_states.pt")), *sorted(place.glob("zero/**/*.pt"))]
            for number, path in enumerate(files):
                if number % ranks == rank or engine.use_node_local_storage():
                    manifest.verify_archive(path)
            return
        local = engine.use_node_local_storage() and found.ranks != ranks
        for number, entry in enumerate(found.files):
            if local and not (place / entry.name).exists():
                raise UsageError(
                    f"{place} lacks {entry.name}, which rank {entry.rank} of {found.ranks} saved on its node: to load it on another number of ranks, "
                    "copy the files of all nodes to each node"
                )
            if local or rank == (entry.rank if found.ranks == ranks else number % ranks):
                manifest.verify(place, entry, _engine_of(engine), found.checksum)

    _everywhere(check)


def _loads(engine: Any) -> bool:
    """Whether this package, and not DeepSpeed alone, loads the weights of checkpoints."""
    return isinstance(engine.optimizer, Inference) or (
        isinstance(engine.optimizer, Stage3) and engine.optimizer.has_offloaded_states
    )


def _offloads(engine: Any) -> bool:
    """Whether optimizer states, or the parameters that they belong to, are offloaded."""
    return bool(getattr(engine.optimizer, "has_offloaded_states", False))


def _takes_weights_alone(engine: Any, given: Mapping[str, Any]) -> bool:
    """Whether `load_checkpoint` with the arguments *given* loads no optimizer states."""
    return (
        isinstance(engine.optimizer, Inference)
        or given.get("load_module_only", False)
        or not given.get("load_optimizer_states", True)
    )


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A checkpoint that was checked and is about to be loaded.

    Attributes
    ----------
    values
        The reader of the checkpoint.
    tree
        The contents of one rank's file of model states, in memory.
    read
        A function that returns the contents of any other file of model states in the same form.
    weights
        The parameters whose weights are loaded separately from states, by name: frozen ones, all,
        or under ZeRO-1 and ZeRO-2, where DeepSpeed loads them, none.
    alone
        Whether all weights are loaded this way, and no states.
    """

    values: CheckpointReader
    tree: Mapping[str, Any]
    read: Callable[[str], Any]
    weights: Mapping[str, Any]
    alone: bool


def _open(engine: Any, load_dir: str, tag: str, given: Mapping[str, Any]) -> _Opened:
    """Open a checkpoint and check that it belongs to *engine*'s model. Raises: UsageError,
    UnsupportedError, CorruptionError, before anything is changed.
    """
    universal, strict = engine.load_universal_checkpoint(), given.get("load_module_strict", True)
    with_states, flat = not _takes_weights_alone(engine, given), not _loads(engine)
    alone = not with_states and not engine.has_moe_layers
    if alone and given.get("custom_load_fn") is not None:
        raise UnsupportedError(
            "custom_load_fn would need all weights in memory at the same time: leave it out, or load the optimizer states, too"
        )

    def model_states(rank: int) -> str:
        return compat.model_states_path(engine, load_dir, tag, rank)

    optimizer, original = engine.optimizer, engine.checkpoint_engine
    rank = dist.get_rank(group=optimizer.dp_process_group)
    engine._get_all_ckpt_names(load_dir, tag)  # raises if there is no such checkpoint
    in_memory: Callable[[str], Any]
    in_file: Callable[[str], Any]
    if original is None or compat.writes_archives(original):  # None: the engine has no optimizer
        keep = ("module", FROZEN_PARAM_FRAGMENTS) if flat else (FROZEN_PARAM_FRAGMENTS,)
        in_memory = functools.cache(functools.partial(archive.read_mapped, keep=keep))
        in_file = functools.partial(_read_states, engine=_engine_of(engine))
    else:
        _streams(engine)  # warns
        in_memory = in_file = functools.cache(functools.partial(original.load, map_location="cpu"))
    own, read = model_states(rank), _Reader(original, in_file).load
    tree = _Reader(original, in_memory).load(
        own if Path(own).exists() and not universal else model_states(0)
    )
    values = (
        CheckpointReader.of_flat_groups(tree, own, read, optimizer.nccl_start_alignment_factor)
        if flat
        else CheckpointReader.of_directory(
            tree, model_states, read, Path(load_dir, tag, "zero") if universal else None
        )
    )
    same_parts = tree["mp_world_size"] == engine.mp_world_size
    if not same_parts and not universal:
        raise UnsupportedError(
            f"{Path(load_dir, tag)} is of {tree['mp_world_size']} ranks of tensor parallelism, and the engine has {engine.mp_world_size}: convert it with "
            "DeepSpeed's ds_to_universal"
        )
    if engine.has_moe_layers and not universal and isinstance(optimizer, Stage3):
        # Experts are partitioned over a subset of the ranks, which the files do not record.
        if values.ranks != (ranks := dist.get_world_size(group=optimizer.dp_process_group)):
            raise UnsupportedError(
                f"{Path(load_dir, tag)} has experts, {values.ranks} ranks saved it, and {ranks} load it: load it on as many ranks"
            )
        values.take_rank(states.of_state_dict(optimizer, values.optimizer(rank)), rank)
    weights = {} if flat else {name: param for param, name in engine.param_names.items()}
    if not alone or (universal and isinstance(optimizer, Stage3)):
        # A universal checkpoint keeps the files of model states as they were saved.
        has_frozen = same_parts and tree.get(FROZEN_PARAM_FRAGMENTS)
        weights = {
            name: param
            for name, param in weights.items()
            if has_frozen and not compat.is_trained(param)
        }
    weights = values.match(weights, strict)
    if not isinstance(optimizer, Inference) and (universal or not alone):
        # A custom_load_fn may load weights of other names.
        by_name = strict and not (flat and given.get("custom_load_fn"))
        states.check(optimizer, values, by_name, with_states)
    return _Opened(values, tree, in_memory, weights, alone)


def _load_module(
    engine: Any, load: Callable[..., Any], opened: _Opened, given: Mapping[str, Any]
) -> Any:
    """Load the parts of a checkpoint other than optimizer states. DeepSpeed's method *load*, which
    takes changes of the arguments *given*, loads buffers and counters. Frozen weights, and all
    weights if no states are loaded, are loaded here.

    Without states, DeepSpeed would gather all weights of the tag "latest" in memory. From a
    universal checkpoint it loads neither buffers nor frozen weights.
    """
    optimizer, tree = engine.optimizer, opened.tree
    with _reading(engine, opened.read), _without_refresh(optimizer):
        # Without states DeepSpeed would gather all weights here.
        result = load(**({"load_optimizer_states": True} if opened.alone else {}))
    if engine.load_universal_checkpoint() and tree["mp_world_size"] == engine.mp_world_size:
        engine.load_module_state_dict(
            checkpoint=tree,
            strict=given.get("load_module_strict", True),
            custom_load_fn=given.get("custom_load_fn"),
        )
    if isinstance(optimizer, Inference):
        optimizer.partition_all_parameters()
    elif opened.alone:
        optimizer.partly_changed = True
    opened.values.load_weights(
        opened.weights,
        isinstance(optimizer, Stage3) and optimizer.rounds_half_away_from_zero,
    )
    return result


@contextlib.contextmanager
def _without_refresh(optimizer: Any) -> Iterator[None]:
    """Context in which DeepSpeed does not refresh master weights from parameters: it would do so
    before the parameters are loaded.
    """
    optimizer.refresh_fp32_params = lambda: None
    try:
        yield
    finally:
        del optimizer.refresh_fp32_params


def _latest(path: Path) -> str:
    """The tag in the file *path*. Raises: CorruptionError; OSError."""
    try:
        tag = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or "\0" in tag or path.parent.resolve() not in (path.parent / tag).resolve().parents:
        raise corrupt(path, "it names no checkpoint in its directory")
    return tag


def _read_states(path: str, engine: io.Engine) -> Any:
    """`archive.read` for a file that belongs to the manifest in its directory. Raises:
    CorruptionError.
    """
    tree = archive.read(path, engine)
    generation = tree.get(_GENERATION) if isinstance(tree, dict) else None
    if generation is not None:
        found = Manifest.read(Path(path).parent)
        if found is None:
            raise corrupt(
                Path(path).with_name(manifest.NAME),
                "it is missing, so the checksums cannot be checked",
            )
        if found.generation != generation:
            raise corrupt(Path(path), f"it belongs to another save than {manifest.NAME} beside it")
    return tree


def _attempt(engine: Any, save: Callable[[], None]) -> None:
    """Record a failure, and leave it to be raised when the ranks agree. They make collective calls
    before that, in which the others would wait for this rank.
    """
    generation = engine.checkpoint_engine
    if not isinstance(generation, _Generation):
        save()
    elif generation.failure is None:
        try:
            save()
        except Exception as error:
            generation.failure = archive.as_failure(error, generation.directory.place)


@contextlib.contextmanager
def _complete(engine: Any) -> Iterator[None]:
    """Context in which no file that lacks states is saved."""
    original = engine.checkpoint_engine
    if _offloads(engine):
        engine.checkpoint_engine = _Complete(original, engine.optimizer)
    try:
        yield
    finally:
        engine.checkpoint_engine = original


@contextlib.contextmanager
def _reading(engine: Any, read: Callable[[str], Any]) -> Iterator[None]:
    original = engine.checkpoint_engine
    engine.checkpoint_engine = _Reader(original, read)
    try:
        yield
    finally:
        engine.checkpoint_engine = original


def _streams(engine: Any) -> bool:
    """Whether states are offloaded and DeepSpeed would use plain torch.save and torch.load."""
    if not _offloads(engine):
        return False
    checkpoint_engine = engine.checkpoint_engine
    if compat.writes_archives(checkpoint_engine):
        return True
    if not getattr(engine, "_warned_of_checkpoint_memory", False):
        engine._warned_of_checkpoint_memory = True
        _log.warning(
            "checkpoints are written by %s, which needs all states of a rank in memory at once; "
            'without "checkpoint" and "datastates" in the DeepSpeed configuration they are streamed from the drive',
            type(checkpoint_engine).__name__,
        )
    return False


def _refuse_swap_files(load_dir: str, tag: str | None) -> None:
    latest = Path(load_dir) / "latest"
    if tag is None and latest.is_file():
        tag = _latest(latest)
    if tag is not None and (Path(load_dir) / str(tag) / _SWAP_FILES).is_dir():
        raise UnsupportedError(
            f'{Path(load_dir) / str(tag)} was saved with the optimizer in DeepSpeed\'s own swap files (its directory "{_SWAP_FILES}"), which lack '
            "moments and steps and fit only the run that made them; to go on from its weights, load it with "
            '"nvme_offload": {"swappers": "deepspeed"}, write them with engine.save_16bit_model, and start from those'
        )


def _provider(param: Any) -> archive.Provider:
    @contextlib.contextmanager
    def lend() -> Iterator[dict[str, torch.Tensor]]:
        yield {"": param.nvme_swapper.partition(param)}

    return lend


def _engine_of(engine: Any) -> io.Engine:
    """The I/O engine of *engine*'s tier. Engines without a tier share one I/O engine."""
    tier = getattr(engine.optimizer, "tier", None)
    found: io.Engine = _io_engine() if tier is None else tier.store.engine
    return found


@functools.cache
def _io_engine() -> io.Engine:
    return io.Engine(AioConfig(backend="posix", direct="auto"))
