"""Ways to write the state of a training to a file and to read it again, as sides of a comparison.

Written means on the drive to stay (fdatasync); read means that every byte is in memory: what only
maps its file has every page looked at.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nvme_offload import __version__
from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, allocate

from ..peers.page_cache import sync
from .plan import Setting
from .state import shapes

if TYPE_CHECKING:
    import torch

    State = dict[str, torch.Tensor]

_PAGE_BYTES = 4096


class Checkpoint(Protocol):
    """A side. The format of its files, for those that read what another wrote; *version*, which the
    report tells.
    """

    format: str
    version: str

    def save(self, state: State, path: Path, setting: Setting) -> None:
        """Write *state* to *path*, which does not exist, to stay. Raises: OffloadError, OSError."""

    def load(self, path: Path, nbytes: int, setting: Setting) -> State:
        """The state of about *nbytes* that is in *path*, all of it in memory. Raises: OffloadError,
        OSError.
        """


class Ours:
    """How this package writes the checkpoints of states that are on a drive: a file of torch.save,
    its tensors moved by the engine.
    """

    format = "ours"

    def __init__(self) -> None:
        from nvme_offload.io import archive

        self._archive = archive
        self.version = f"nvme-offload {__version__}"

    def save(self, state: State, path: Path, setting: Setting) -> None:
        """Write *state* to *path*."""

        @contextlib.contextmanager
        def lend() -> Iterator[State]:
            yield state

        part = self._archive.Part
        tree = {
            name: self._archive.offloaded([tensor.numel()], tensor.dtype, [part(lend, name, 0)])
            for name, tensor in state.items()
        }
        with self._engine(setting) as engine:
            self._archive.write(str(path), tree, engine)

    def load(self, path: Path, nbytes: int, setting: Setting) -> State:
        """Read *path*, every tensor at once, to memory on huge pages."""
        with self._engine(setting) as engine:
            stored = self._archive.read(str(path), engine)
            places = _placed({name: tensor.nbytes for name, tensor in stored.items()})
            memory = allocate(places.pop(None).stop)
            state, tickets = {}, []
            for name, tensor in stored.items():
                state[name] = _tensor(memory[places[name]], tensor.dtype)
                tickets += self._archive.fetch(tensor, 0, state[name])
            self._archive.wait_all(tickets)
        return state

    def _engine(self, setting: Setting) -> Engine:
        names = ("block_size", "queue_depth", "thread_count", "backend")
        return Engine(AioConfig(*(setting[name] for name in names), direct="auto"))


class FastFileWriter:
    """DeepSpeed's FastFileWriter under torch.save, with two buffers in turn, as its checkpoint
    engine uses it; what it wrote, torch.load reads.

    Raises: UnsupportedError where DeepSpeed, or what its ops are built with, is not there.
    """

    format = "fast"

    def __init__(self) -> None:
        from ..peers.deepspeed_op import DeepSpeedOp

        self._op = DeepSpeedOp(frozenset())
        self.version = self._op.version
        import deepspeed.io.fast_file_writer as module

        # The constructor loads another op, which DeepSpeed does not have for CPUs, and which
        # nothing but its older format asks for anything.
        if self._op.on_cpu:
            absent: Any = types.SimpleNamespace(
                load=lambda: types.SimpleNamespace(cast_to_byte_tensor=None)
            )
            module.UtilsBuilder = lambda: absent
        self._writer, self._config = module.FastFileWriter, module.FastFileWriterConfig
        self._buffer: Any = None

    def save(self, state: State, path: Path, setting: Setting) -> None:
        """Write *state* to *path*; the writer syncs."""
        import torch

        handle = self._op.handle(
            setting["block_size"], setting["queue_depth"], setting["thread_count"]
        )
        nbytes = setting["buffer_size"]
        if self._buffer is None or self._buffer.nbytes != nbytes:
            if self._buffer is not None:
                self._op.unlock(self._buffer)
            self._buffer = self._op.locked(nbytes)
        torch.serialization.set_crc32_options(setting.get("crc32", True))
        writer = self._writer(
            str(path),
            self._config(dnvme_handle=handle, pinned_tensor=torch.from_numpy(self._buffer)),
        )
        torch.save(state, writer)
        writer.close()

    def load(self, path: Path, nbytes: int, setting: Setting) -> State:
        """Read *path* with torch.load."""
        import torch

        return dict(torch.load(path))


class Torch:
    """torch.save and torch.load."""

    format = "torch"
    _maps = False

    def __init__(self) -> None:
        import torch

        self.version = f"torch {torch.__version__}"

    def save(self, state: State, path: Path, setting: Setting) -> None:
        """Write *state* to *path*."""
        import torch

        torch.serialization.set_crc32_options(setting.get("crc32", True))
        torch.save(state, path)
        sync(path)

    def load(self, path: Path, nbytes: int, setting: Setting) -> State:
        """Read *path*."""
        import torch

        return _looked_at(dict(torch.load(path, mmap=self._maps)))


class TorchMapped(Torch):
    """torch.load with mmap=True."""

    _maps = True


class SafeTensors:
    """safetensors.torch: save_file and load_file. Raises: UnsupportedError where it is not
    installed.
    """

    format = "safetensors"

    def __init__(self) -> None:
        try:
            import safetensors.torch
        except ImportError as error:
            raise UnsupportedError(f"safetensors cannot be loaded: {error}") from None
        self._module = safetensors.torch
        self.version = f"safetensors {importlib.metadata.version('safetensors')}"

    def save(self, state: State, path: Path, setting: Setting) -> None:
        """Write *state* to *path*."""
        self._module.save_file(state, path)
        sync(path)

    def load(self, path: Path, nbytes: int, setting: Setting) -> State:
        """Read *path*, which it maps."""
        return _looked_at(dict(self._module.load_file(path)))


class MemoryMap:
    """numpy.memmap: all tensors in one file without a header, each from a page on, at places that
    the program knows.
    """

    format = "memmap"

    def __init__(self) -> None:
        self.version = f"numpy {np.__version__}"

    def save(self, state: State, path: Path, setting: Setting) -> None:
        """Write *state* to *path*."""
        import torch

        places = _placed({name: tensor.nbytes for name, tensor in state.items()})
        mapped: Any = np.memmap(path, np.uint8, "w+", shape=(places.pop(None).stop,))
        for name, tensor in state.items():
            mapped[places[name]] = tensor.view(torch.uint8).numpy()
        mapped.flush()
        sync(path)

    def load(self, path: Path, nbytes: int, setting: Setting) -> State:
        """Map *path*."""
        mapped: Any = np.memmap(path, np.uint8, "c")
        found = shapes(nbytes)
        places = _placed({shape.name: shape.nbytes for shape in found})
        return _looked_at(
            {shape.name: _tensor(mapped[places[shape.name]], shape.dtype) for shape in found}
        )


_KINDS: dict[str, Callable[[], Checkpoint]] = {
    "ours": Ours,
    "fast": FastFileWriter,
    "torch": Torch,
    "torch-mapped": TorchMapped,
    "safetensors": SafeTensors,
    "memmap": MemoryMap,
}


def make(name: str) -> Checkpoint:
    """The side *name*. Raises: UsageError; UnsupportedError, with the reason, where it cannot be
    had on this machine.
    """
    if name not in _KINDS:
        raise UsageError(f"{name!r} writes no checkpoints; there are {', '.join(_KINDS)}")
    return _KINDS[name]()


def _looked_at(state: State) -> State:
    """*state*, with every page of it in memory."""
    import torch

    for tensor in state.values():
        flat = tensor.reshape(-1).view(torch.uint8).numpy()
        if flat.size:
            int(flat[::_PAGE_BYTES].max())
            int(flat[-1])
    return state


def _placed(sizes: Mapping[str, int]) -> dict[str | None, slice]:
    """Where each of *sizes* is, from a page on, one after the other; all of it under None."""
    places: dict[str | None, slice] = {}
    begin = 0
    for name, nbytes in sizes.items():
        places[name] = slice(begin, begin + nbytes)
        begin += -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
    return {**places, None: slice(0, begin)}


def _tensor(memory: Any, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
