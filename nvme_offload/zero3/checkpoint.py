"""Checkpoints of an engine whose parameters or optimizer states are in a tier: `save_checkpoint` and `load_checkpoint`, in DeepSpeed's own format.

Every rank writes its files aside, has them on the drive to stay, agrees with the others that all have, and then renames them; so that what goes
wrong before leaves the last checkpoint, also one of the same name, whole. What does go wrong is raised on every rank, and training can go on.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS

from .. import engine as io
from ..errors import IOFailure, NoSpaceError, OffloadError, UnsupportedError
from . import archive, compat, states
from .param_swapper import ParameterSwapper
from .settings import question, refuse_what_wants_memory
from .stage3 import Stage3

_SWAP_FILES = "offloaded_tensors"  # the directory of them that DeepSpeed makes beside a checkpoint
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_BYTES = 1 << 20  # a drive with less is full: DeepSpeed and torch do not always tell why they could not write

_log = logging.getLogger(__name__)


def engine_methods(engine: type) -> dict[str, Callable[..., Any]]:
    """The methods of *engine*, the class DeepSpeedEngine, that have to know of tiers, by name."""
    original: Any = engine

    def _configure_optimizer(self: Any, *args: Any, **named: Any) -> None:
        question(self._config._param_dict)
        refuse_what_wants_memory(self._config._param_dict)
        before["_configure_optimizer"](self, *args, **named)

    def zero_nvme_offload_optimizer(self: Any) -> bool:
        # True has the engine copy a directory of swap files beside the checkpoint.
        if isinstance(self.optimizer, Stage3) and self.optimizer.swaps_natively:
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
            saved: bool = before["save_checkpoint"](self, *arguments)
            return saved
        return _save(self, before["save_checkpoint"], *arguments)

    def _save_checkpoint(self: Any, *args: Any, **named: Any) -> None:
        _attempt(self, lambda: before["_save_checkpoint"](self, *args, **named))

    def _save_zero_checkpoint(self: Any, *args: Any, **named: Any) -> None:
        def save() -> None:
            with _complete(self):
                before["_save_zero_checkpoint"](self, *args, **named)

        _attempt(self, save)

    def load_checkpoint(self: Any, load_dir: str, tag: str | None = None, *args: Any, **named: Any) -> Any:
        if isinstance(self.optimizer, Stage3) and self.optimizer.swaps_natively:
            _refuse_swap_files(load_dir, tag)
        if isinstance(self.optimizer, Stage3) and self.optimizer.holds_states_away:
            self.optimizer.begin_load()
            self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()  # the next micro-batch is the first of a step
        return before["load_checkpoint"](self, load_dir, tag, *args, **named)

    def _load_checkpoint(self: Any, *args: Any, **named: Any) -> Any:
        frozen = _streams(self) and any(_is_away(param) for param in _frozen(self))
        with _reading(self, lambda path: archive.read_mapped(path, FROZEN_PARAM_FRAGMENTS)) if frozen else contextlib.nullcontext():
            return before["_load_checkpoint"](self, *args, **named)

    def _load_zero_checkpoint(self: Any, *args: Any, **named: Any) -> bool:
        streams = _streams(self) and not self.load_universal_checkpoint()
        with _reading(self, functools.partial(archive.read, engine=_engine_of(self))) if streams else contextlib.nullcontext():
            loaded: bool = before["_load_zero_checkpoint"](self, *args, **named)
            return loaded

    def _get_zero_param_shapes(self: Any) -> Any:
        with states.in_users_groups(self.optimizer) if isinstance(self.optimizer, Stage3) else contextlib.nullcontext():
            return before["_get_zero_param_shapes"](self)

    def _get_param_fragment_func(self: Any, param: Any) -> torch.Tensor:
        if not _is_away(param):
            fragment: torch.Tensor = before["_get_param_fragment_func"](self, param)
            return fragment
        if not isinstance(self.checkpoint_engine, _Aside):
            partition: torch.Tensor = param.nvme_swapper.partition(param)
            return partition
        param.nvme_swapper.swap_in([param], async_op=True)
        return archive.away(param.ds_tensor.ds_numel, param.ds_tensor.dtype, [archive.Part(_loan(param), "", 0)])

    def load_module_state_dict(self: Any, checkpoint: dict[str, Any], *args: Any, **named: Any) -> None:
        frozen = checkpoint.get(FROZEN_PARAM_FRAGMENTS) or {}
        if any(_is_away(param) for param in _frozen(self)):
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: None}
            _load_frozen(self, frozen)
        before["load_module_state_dict"](self, checkpoint, *args, **named)

    methods = {name: method for name, method in locals().items() if callable(method) and name not in ("engine", "original")}
    before = {name: getattr(original, name) for name in methods}
    return methods


class _Aside:
    """Stands for *original*, the TorchCheckpointEngine of *engine*, while a checkpoint is saved: files appear when every rank has all of its own."""

    def __init__(self, engine: Any, original: Any, place: Path) -> None:
        self.original = original
        self.place = place
        self.failure: Exception | None = None
        self._device = engine.device
        self._io = _engine_of(engine)
        self._files: list[tuple[Path, Path]] = []  # written aside, and where they belong

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Write the file aside."""
        final = Path(path)
        aside = final.with_name(f".{final.name}.partial")
        aside.unlink(missing_ok=True)  # of a save that was killed
        self._files.append((aside, final))
        try:
            if archive.has_away(state_dict):
                archive.write(str(aside), state_dict, self._io)
            else:
                self.original.save(state_dict, str(aside))
                with self._io.open(aside, "rw") as file:
                    file.sync()
        except (RuntimeError, OSError) as error:
            raise _typed(error, final) from error

    def commit(self, info: Any) -> bool:
        """Let the files appear, if every rank has written all of its own. Raises: what went wrong."""
        if _any_rank(self.failure is not None, self._device):
            raise self.failure or OffloadError(f"the checkpoint {compat.tag_of(info)} was not saved, because another rank could not: it says why")
        folders = set()
        for aside, final in self._files:
            aside.replace(final)
            folders |= {final.parent, final.parent.parent}
        self._files.clear()
        for folder in folders:
            _sync_folder(folder)
        committed: bool = self.original.commit(info)
        return committed

    def discard(self) -> None:
        """Delete what did not appear."""
        for aside, _ in self._files:
            aside.unlink(missing_ok=True)


class _Complete:
    """Stands for *original*, any checkpoint engine of DeepSpeed's, while the states of *stage3* are saved: files that lack some are not written."""

    def __init__(self, original: Any, stage3: Stage3) -> None:
        self._original = original
        self._stage3 = stage3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def save(self, state_dict: Any, path: str) -> Any:
        """Write the file."""
        states.require_complete(self._stage3, state_dict)
        return self._original.save(state_dict, path)


class _Reader:
    """Stands for *original*, the TorchCheckpointEngine of an engine, while a checkpoint is loaded: *read* has the contents of a file."""

    def __init__(self, original: Any, read: Callable[[str], Any]) -> None:
        self._original = original
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """The contents of the file."""
        return self._read(path)


def _save(engine: Any, save: Callable[..., Any], save_dir: str, tag: str | None, client_state: Any, save_latest: bool, exclude_frozen: bool) -> bool:
    tag = str(f"global_step{engine.global_steps}" if tag is None else tag)
    original = engine.checkpoint_engine
    engine.checkpoint_engine = aside = _Aside(engine, original, Path(save_dir))
    engine.optimizer.leaves_states_away = True
    try:
        save(engine, save_dir, tag, client_state, False, exclude_frozen)
    finally:
        engine.optimizer.leaves_states_away = False
        engine.checkpoint_engine = original
        aside.discard()
    if engine.global_rank == 0:  # of a checkpoint of this name, by DeepSpeed's own swappers, that is no more
        shutil.rmtree(Path(save_dir) / tag / _SWAP_FILES, ignore_errors=True)
    if save_latest:
        try:
            if engine.global_rank == 0:
                _point_to(Path(save_dir), tag)
        finally:
            dist.barrier()
    return True


def _point_to(save_dir: Path, tag: str) -> None:
    """Have the file "latest" name *tag*; DeepSpeed empties it first, so that a crash leaves no name at all."""
    aside = save_dir / ".latest.partial"
    try:
        with aside.open("w") as file:
            file.write(tag)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(save_dir / "latest")
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise _typed(error, save_dir / "latest") from error
    _sync_folder(save_dir)


def _attempt(engine: Any, save: Callable[[], None]) -> None:
    """Keep a failure until the ranks agree on it: they have more to do together, and one that is missing there would have the others wait for it."""
    aside = engine.checkpoint_engine
    if not isinstance(aside, _Aside):
        save()
    elif aside.failure is None:
        try:
            save()
        except Exception as error:
            aside.failure = _typed(error, aside.place)


@contextlib.contextmanager
def _complete(engine: Any) -> Iterator[None]:
    """Meanwhile nothing is saved that lacks states."""
    original = engine.checkpoint_engine
    if isinstance(engine.optimizer, Stage3) and engine.optimizer.holds_states_away:
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
    """Whether states are away, and DeepSpeed would use the plain torch.save and torch.load."""
    if not (isinstance(engine.optimizer, Stage3) and engine.optimizer.holds_states_away):
        return False
    checkpoint_engine = engine.checkpoint_engine
    if compat.writes_archives(checkpoint_engine):
        return True
    if not getattr(engine, "told_of_checkpoint_memory", False):
        engine.told_of_checkpoint_memory = True
        _log.warning(
            "checkpoints are written by %s, which wants the states of a rank in memory all at once; "
            'without "checkpoint" and "datastates" in the DeepSpeed configuration they are written from the drive',
            type(checkpoint_engine).__name__,
        )
    return False


def _refuse_swap_files(load_dir: str, tag: str | None) -> None:
    latest = Path(load_dir) / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    if tag is not None and (Path(load_dir) / str(tag) / _SWAP_FILES).is_dir():
        raise UnsupportedError(
            f'{Path(load_dir) / str(tag)} was saved with the optimizer in DeepSpeed\'s own swap files (its directory "{_SWAP_FILES}"), which lack '
            "moments and steps and fit only the run that made them; to go on from its weights, load it with "
            '"nvme_offload": {"swappers": "deepspeed"}, write them with engine.save_16bit_model, and start from those'
        )


def _load_frozen(engine: Any, fragments: dict[str, torch.Tensor]) -> None:
    for param in _frozen(engine) if fragments else ():
        fragment = fragments[engine.param_names[param]]
        if not _is_away(param):
            (param.ds_tensor if hasattr(param, "ds_id") else param).data.copy_(fragment.data)
            continue
        param.ds_tensor.data = fragment.data.to(param.ds_tensor.dtype)
        param.nvme_swapper.swap_out_and_release([param])


def _frozen(engine: Any) -> Iterator[Any]:
    return (param for param in engine.module.parameters() if not compat.is_trained(param))


def _loan(param: Any) -> archive.Loan:
    @contextlib.contextmanager
    def lend() -> Iterator[dict[str, torch.Tensor]]:
        yield {"": param.nvme_swapper.partition(param)}

    return lend


def _is_away(param: Any) -> bool:
    return isinstance(getattr(param, "nvme_swapper", None), ParameterSwapper) and param.nvme_swapper.is_away(param)


def _engine_of(engine: Any) -> io.Engine:
    """The engine of the tier that *engine* uses."""
    found: io.Engine = engine.optimizer.tier.store.engine
    return found


def _any_rank(mine: bool, device: Any) -> bool:
    flag = torch.tensor([int(mine)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _typed(error: Exception, path: Path) -> Exception:
    """*error* as one of this package's, where it is about a file."""
    if isinstance(error, OffloadError) or not isinstance(error, RuntimeError | OSError):
        return error
    folder = next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())
    status = os.statvfs(folder)
    code = (getattr(error, "errno", None) or errno.EIO) if isinstance(error, OSError) else None
    full = code in _FULL or status.f_bavail * status.f_frsize < _FULL_BYTES
    fields: dict[str, Any] = {"operation": "write", "path": str(path), "offset": 0, "nbytes": 0, "done": 0}
    if full:
        return NoSpaceError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; the checkpoint before it is untouched", **fields)
    return error if code is None else IOFailure(code, os.strerror(code), **fields)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
