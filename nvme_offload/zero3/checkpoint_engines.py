"""Objects that replace DeepSpeed's checkpoint engine while a checkpoint is saved or loaded."""

from __future__ import annotations

import errno
import functools
import logging
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT

from ..errors import OffloadError, UsageError
from ..hardware.config import AioConfig
from ..io import archive
from ..io import engine as io
from ..io.manifest import corrupt
from ..io.ranks import Ranks
from ..io.shared_directory import SharedDirectory
from . import compat
from .stage3 import Stage3
from .stages import Inference
from .tiered import Tiered

SWAP_FILES = "offloaded_tensors"  # the directory that DeepSpeed copies swap files to
# suffixes of DeepSpeed's file names
STATE_FILES = ("_model_states.pt", "_optim_states.pt")
# Our key in files of optimizer states; DeepSpeed reads only its own.
GENERATION = "nvme_offload_generation"
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


def loads(engine: Any) -> bool:
    """Whether this package, and not DeepSpeed alone, loads the weights of checkpoints."""
    return isinstance(engine.optimizer, Inference | Stage3)


def offloads(engine: Any) -> bool:
    """Whether optimizer states, or the parameters that they belong to, are offloaded."""
    return isinstance(engine.optimizer, Tiered)


def streams(engine: Any) -> bool:
    """Whether states are offloaded and DeepSpeed would use plain torch.save and torch.load."""
    if not offloads(engine):
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


class _Instead:
    """Replaces *original*, a checkpoint engine of DeepSpeed."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class Complete(_Instead):
    """Replaces *original* while *optimizer* is saved, and refuses to write a file that lacks states."""

    def __init__(self, original: Any, optimizer: Any) -> None:
        super().__init__(original)
        self._optimizer = optimizer
        self._has_states = False

    def save(self, state_dict: Any, path: str) -> Any:
        """Write a file of the checkpoint."""
        self._check(state_dict)
        return self.original.save(state_dict, path)

    def commit(self, info: Any) -> Any:
        """Commit the checkpoint, after all files are written."""
        self._check_all()
        return self.original.commit(info)

    def _check(self, state_dict: Any) -> bool:
        """Whether a file has states, which must be complete."""
        if OPTIMIZER_STATE_DICT not in state_dict:
            return False
        self._optimizer.require_complete(state_dict)
        self._has_states = True
        return True

    def _check_all(self) -> None:
        if not self._has_states:
            self._optimizer.require_complete({})


class Generation(Complete):
    """Replaces *original* during a save: the checkpoint *tag* appears complete, or not at all."""

    def __init__(self, engine: Any, original: Any, save_dir: str, tag: str) -> None:
        super().__init__(original, engine.optimizer)
        self.failure: Exception | None = None
        self._step = int(engine.global_steps)
        self._io = engine_of(engine)
        # the target of a link is replaced, not the link
        place = Path(save_dir, tag).resolve()
        if Path(save_dir).resolve() not in place.parents:
            raise UsageError(
                f"a tag must name a directory below that of the checkpoints, not {tag!r}"
            )
        self.directory = SharedDirectory(
            place,
            Ranks.of_group(),
            self._io,
            is_ours=_is_ours,
            title=f"the checkpoint {tag}",
            hint='if every node is to keep its own files, set "checkpoint": {"use_node_local_storage": true} in the DeepSpeed configuration; '
            "otherwise give a directory on a filesystem that all nodes share",
            first_of_node=engine.local_rank == 0 if engine.use_node_local_storage() else None,
        )

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory, unless it is the tag's, for which a temporary directory stands in."""
        if Path(path).resolve() != self.directory.place:
            os.makedirs(path, exist_ok=exist_ok)  # noqa: PTH103 - as DeepSpeed does

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file of the checkpoint into the temporary directory."""

        def write(aside: str) -> list[archive.Piece]:
            nonlocal state_dict
            if self._check(state_dict):
                state_dict = {**state_dict, GENERATION: self.directory.generation}
            if archive.has_offloaded(state_dict):
                summed = self.directory.checksum == "xxh3"
                return archive.write(aside, state_dict, self._io, summed)
            self.original.save(state_dict, aside)
            with self._io.open(aside, "rw") as file:
                file.sync()
            return []

        self.directory.write(str(Path(path).resolve().relative_to(self.directory.place)), write)

    def commit(self, info: Any) -> bool:
        """Publish the checkpoint if every rank has written all of its files."""
        if self.failure is None:
            try:
                self._check_all()
            except OffloadError as failure:
                self.failure = failure
        self.directory.publish(self.failure, self._step)
        committed: bool = self.original.commit(info)
        return committed


class Reader(_Instead):
    """Replaces TorchCheckpointEngine *original* during a load: *read* returns a file's contents."""

    def __init__(self, original: Any, read: Callable[[str], Any]) -> None:
        super().__init__(original)
        self._read = read

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


def _is_ours(name: str) -> bool:
    return name == SWAP_FILES or name.endswith((".partial", *STATE_FILES))


def engine_of(engine: Any) -> io.Engine:
    """The I/O engine of *engine*'s tier. Engines without a tier share one I/O engine."""
    tier = getattr(engine.optimizer, "tier", None)
    found: io.Engine = _io_engine() if tier is None else tier.store.engine
    return found


@functools.cache
def _io_engine() -> io.Engine:
    return io.Engine(AioConfig(backend="posix", direct="auto"))
