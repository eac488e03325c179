"""Libraries that save a training state to a file and load it, as sides of a comparison.

A save ends with fdatasync. A load ends when every byte is in memory: sides that map the file touch
every page.
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
    """A side. Sides with the same *format* read each other's files. *version* is for the report."""

    format: str
    version: str

    def save(self, state: State, path: Path, setting: Setting) -> None:
        """Write *state* to the new file *path* and sync it. Raises: OffloadError, OSError."""

    def load(self, path: Path, nbytes: int, setting: Setting) -> State:
        """Load the state of *nbytes* in *path* into memory. Raises: OffloadError, OSError."""


class Ours:
    """This package's checkpoints: a file in the format of torch.save, whose tensors the engine
    moves.
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
        """Read all tensors of *path* concurrently into memory on huge pages."""
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
    """DeepSpeed's FastFileWriter under torch.save, with two alternating buffers, as its checkpoint
    engine uses it. torch.load reads its files.

    Raises: UnsupportedError where DeepSpeed, or a compiler or library for its op, is not installed.
    """

    format = "fast"

    def __init__(self) -> None:
        from ..peers.deepspeed_op import DeepSpeedOp

        self._op = DeepSpeedOp()
        self.version = self._op.version
        import deepspeed.io.fast_file_writer as module

        # The constructor loads an op that DeepSpeed lacks on CPUs and that only its older format
        # calls: replace it by a stub.
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

        return _touched(dict(torch.load(path, mmap=self._maps)))


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
        """Read *path*, which load_file maps."""
        return _touched(dict(self._module.load_file(path)))


class MemoryMap:
    """numpy.memmap: page-aligned tensors in one file without a header, at known offsets."""

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
        return _touched(
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
    """Make the side *name*. Raises: UsageError; UnsupportedError, with the reason, where this
    machine lacks something it needs.
    """
    if name not in _KINDS:
        raise UsageError(f"{name!r} does not save checkpoints; choose from {', '.join(_KINDS)}")
    return _KINDS[name]()


def _touched(state: State) -> State:
    """*state*, with every page in memory."""
    import torch

    for tensor in state.values():
        flat = tensor.reshape(-1).view(torch.uint8).numpy()
        if flat.size:
            int(flat[::_PAGE_BYTES].max())
            int(flat[-1])
    return state


def _placed(sizes: Mapping[str, int]) -> dict[str | None, slice]:
    """Page-aligned consecutive slices for *sizes*; their union under None."""
    places: dict[str | None, slice] = {}
    begin = 0
    for name, nbytes in sizes.items():
        places[name] = slice(begin, begin + nbytes)
        begin += -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
    return {**places, None: slice(0, begin)}


def _tensor(memory: Any, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
