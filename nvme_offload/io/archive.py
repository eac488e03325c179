"""Writes and reads files of `torch.save` piece by piece with the engine: a tensor in a file need
not be in memory, nor be in one piece.

An *offloaded* tensor has no memory. It names its parts and how each is brought to memory for a
moment. torch.load reads the file like any other, also with mmap. Only its zip checksums are
missing.

Source: torch.serialization.skip_data, torch.utils.serialization.config for the alignment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import pickle
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..errors import IOFailure, NoSpaceError, OffloadError, known
from ..hardware.drive import filesystem_space
from ..hardware.machine import release_heap
from ..units import format_bytes
from .engine import Engine, File, Ticket

_ALIGNMENT_BYTES = 4096  # of each tensor in the file, for O_DIRECT
# Below this a drive counts as full: DeepSpeed and torch do not always say why a write failed.
_FULL_BYTES = 1 << 20
PIECE_BYTES = 4 << 20  # the most that one checksum covers

_LIBC = ctypes.CDLL(None)

# Context that has some tensors in memory, by key.
Provider = Callable[[], AbstractContextManager[Mapping[Any, torch.Tensor]]]


class Piece(NamedTuple):
    """*nbytes* of a file from *offset*, and their checksum."""

    offset: int
    nbytes: int
    checksum: int


class Part(NamedTuple):
    """The tensor that *provider* has under *key*: the elements from *start* of a larger one, in
    memory order.
    """

    provider: Provider
    key: Any
    start: int


def offloaded(
    shape: Sequence[int],
    dtype: torch.dtype,
    parts: Sequence[Part],
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """A tensor without memory, which consists of *parts*. Its *strides* leave no gaps."""
    with _fake_mode():
        tensor = (
            torch.empty(shape, dtype=dtype, device="cpu")
            if strides is None
            else torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        )
    tensor.parts = tuple(parts)  # type: ignore[attr-defined]
    return tensor


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """One for all: to make it takes ten times as long as a tensor."""
    return FakeTensorMode()


def has_offloaded(tree: Any) -> bool:
    """Whether a tensor in *tree* is offloaded."""
    return any(True for _ in _offloaded(tree))


def gather(tree: Any) -> Any:
    """*tree* with every tensor in memory."""
    gathered = {
        id(tensor): torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        for tensor in _offloaded(tree)
    }
    for provider, wanted in _by_provider(
        (gathered[id(tensor)], tensor.parts) for tensor in _offloaded(tree)
    ).items():
        with provider() as values:
            for key, tensor, start in wanted:
                part = values[key].flatten()
                tensor.as_strided((part.numel(),), (1,), start).copy_(part)
    return _replaced(tree, gathered)


def write(path: str, tree: Any, engine: Engine, summed: bool = False) -> list[Piece]:
    """Write *tree*, in which tensors may be offloaded, to a new file *path* as torch.save would.
    Returns the pieces that the *engine* wrote, with checksums if *summed*.

    The file is on the drive, synced, when this returns. After an exception it is unusable, and the
    caller deletes it. Raises: NoSpaceError before anything but the layout is written; IOFailure.
    """
    storages, tensors = _lay_out(path, tree)
    parts = {tensor.untyped_storage()._cdata: (tensor.dtype, tensor.parts) for tensor in tensors}
    reader: Any = torch._C.PyTorchFileReader(path)
    places: list[tuple[Any, tuple[Part, ...]]] = []
    resident: list[tuple[torch.UntypedStorage, int]] = []
    for key, storage in storages.items():
        offset = reader.get_record_offset(f"data/{key}")
        if storage._cdata in parts:
            dtype, of = parts[storage._cdata]
            places.append(((offset, dtype.itemsize), of))
        elif storage.nbytes():
            resident.append((storage, offset))
    del reader
    written: list[tuple[int, Ticket]] = []
    with _opened(path, engine) as file:

        def start(offset: int, tensor: torch.Tensor) -> Iterator[Ticket]:
            step = PIECE_BYTES // tensor.itemsize
            for begin in range(0, tensor.numel(), step):
                at, piece = offset + begin * tensor.itemsize, tensor[begin : begin + step]
                written.append((at, engine.write(piece, file, at, checksum=summed)))
                yield written[-1][1]

        for storage, offset in resident:
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            wait_all(start(offset, flat.cpu()))
        for provider, wanted in _by_provider(places).items():
            with provider() as values:
                wait_all(
                    ticket
                    for key, (offset, itemsize), begin in wanted
                    for ticket in start(offset + begin * itemsize, values[key].flatten())
                )
        file.sync()
    return [
        Piece(at, ticket.nbytes, ticket.checksum)
        for at, ticket in written
        if ticket.checksum is not None
    ]


def read(path: str, engine: Engine) -> Any:
    """What torch.load would return for *path*, with its tensors left in the file: `fetch` and
    `whole` read them. Tensors that are attributes of objects are in memory. Raises: what torch.load
    raises; IOFailure, TruncatedError.
    """
    if not zipfile.is_zipfile(path):
        return torch.load(path, map_location="cpu", weights_only=False)
    with FakeTensorMode():
        tree = torch.load(path, map_location="cpu", weights_only=False)
    stored = _Stored(engine, engine.open(path, "r"))
    for leaf in _leaves(tree):
        if isinstance(leaf, FakeTensor):
            leaf.stored = stored  # type: ignore[attr-defined]
        for name, attribute in list(getattr(leaf, "__dict__", {}).items()):
            if isinstance(attribute, FakeTensor):
                attribute.stored = stored  # type: ignore[attr-defined]
                setattr(leaf, name, whole(attribute))
    return tree


def read_mapped(path: str, keep: Sequence[str]) -> Any:
    """What torch.load returns for *path*, a mapping; the values of the keys *keep* take memory on
    access.
    """
    if not zipfile.is_zipfile(path):
        return torch.load(path, map_location="cpu", weights_only=False)
    try:
        tree = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except RuntimeError:  # the kernel refuses a mapping larger than memory (vm.overcommit_memory)
        return torch.load(path, map_location="cpu", weights_only=False)
    rest = {key: value for key, value in tree.items() if key not in keep}
    copies = {id(leaf): leaf.clone() for leaf in _leaves(rest) if isinstance(leaf, torch.Tensor)}
    return {**tree, **{key: _replaced(value, copies) for key, value in rest.items()}}


class MappedFiles:
    """Files of torch.save that are mapped, and read as their tensors are. Nothing may write to the
    tensors. Pages that were read count as memory of this process until `drop` is called. A context
    manager.

    Source: madvise(2), proc_pid_maps(5).
    """

    def __init__(self) -> None:
        self._ranges: set[tuple[int, int]] = set()  # the first address and the end

    def load(self, path: Path, weights_only: bool) -> Any:
        """The contents of *path*. Raises: as torch.load."""
        before = _mapped_ranges(path)
        tree = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        self._ranges |= _mapped_ranges(path) - before
        return tree

    def drop(self) -> None:
        """Return memory to the kernel: all pages of the files, which the next access maps again,
        and free memory of malloc, which keeps blocks of up to 32 MiB and fragments them.
        """
        for start, end in self._ranges:
            _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
        release_heap()

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranges.clear()  # the mapping of a file ends with its last tensor


def _mapped_ranges(path: Path) -> set[tuple[int, int]]:
    """The addresses at which this process maps the file *path*."""
    name = os.path.realpath(path)
    ranges = set()
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        fields = line.split(maxsplit=5)
        if fields[-1] == os.fsencode(name):
            start, _, end = fields[0].partition(b"-")
            ranges.add((int(start, 16), int(end, 16)))
    return ranges


def fetch(tensor: torch.Tensor, start: int, into: torch.Tensor) -> list[Ticket]:
    """Start reading elements of *tensor*, from *start*, into *into*. Wait for the tickets
    (`wait_all`).

    Shapes: *tensor*, in a file or in memory, has one dimension; *into* is contiguous. Raises:
    IOFailure, TruncatedError, also from the tickets.
    """
    if not hasattr(tensor, "stored"):
        into.copy_(tensor.detach()[start : start + into.numel()])
        return []
    if tensor.dtype == into.dtype and into.is_cpu:
        return [tensor.stored.read(into, tensor, start + int(tensor.storage_offset()))]
    staging = torch.empty(into.numel(), dtype=tensor.dtype, device="cpu")
    wait_all(fetch(tensor, start, staging))
    into.copy_(staging)
    return []


def whole(tree: Any) -> Any:
    """*tree* with every tensor that is in a file read into memory."""
    return _replaced(
        tree, {id(leaf): _read(leaf) for leaf in _leaves(tree) if hasattr(leaf, "stored")}
    )


def _read(value: Any) -> torch.Tensor:
    numel = value.untyped_storage().nbytes() // value.dtype.itemsize
    buffer = torch.empty(numel, dtype=value.dtype, device="cpu")
    value.stored.read(buffer, value, 0).wait()
    return buffer.as_strided(value.shape, value.stride(), value.storage_offset()).clone()


class _Stored(NamedTuple):
    engine: Engine
    file: File

    def read(self, into: torch.Tensor, tensor: torch.Tensor, start: int) -> Ticket:
        """Start reading elements of the storage that *tensor* is a view of."""
        offset = known(tensor.untyped_storage()._checkpoint_offset)
        return self.engine.read(into, self.file, offset + start * tensor.dtype.itemsize)


def wait_all(tickets: Iterable[Ticket]) -> None:
    """Wait for all *tickets*, which an iterator may start one by one. None is left in flight, even
    if starting one raises. Raises: the first failure, once all are finished.
    """
    started: list[Ticket] = []
    failure: BaseException | None = None
    try:
        for ticket in tickets:
            started.append(ticket)
    except BaseException as error:
        failure = error
    for ticket in started:
        try:
            ticket.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def as_failure(error: Exception, path: Path) -> Exception:
    """*error*, raised while *path* was written, as an `nvme_offload.errors` class if it is about
    the file.
    """
    if isinstance(error, OffloadError) or not isinstance(error, RuntimeError | OSError):
        return error
    folder = next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())
    status = filesystem_space(folder)
    code = (error.errno or errno.EIO) if isinstance(error, OSError) else None
    if status.f_bavail * status.f_frsize < _FULL_BYTES:
        code = errno.ENOSPC
    if code is None:
        return error
    reason = f"{os.strerror(code)}; the previous checkpoint is unchanged"
    return IOFailure(code, reason, operation="write", path=str(path))


def _opened(path: str, engine: Engine) -> File:
    """The file *path*, with all of its blocks. Raises: NoSpaceError with the bytes that it takes."""
    nbytes = Path(path).stat().st_size
    try:
        return engine.open(path, "rw", size=nbytes)
    except NoSpaceError as error:
        reason = f"{error.strerror}; the file takes {format_bytes(nbytes)}"
        raise IOFailure.of(
            OSError(error.errno, reason), operation="preallocate", path=path
        ) from error


def _lay_out(path: str, tree: Any) -> tuple[dict[str, torch.UntypedStorage], list[Any]]:
    """Write *path* with space for the bytes of all tensors. Returns the storages, by torch's names
    in the file, and the offloaded tensors.
    """
    storages: dict[str, torch.UntypedStorage] = {}
    tensors: list[Any] = []

    class Pickler(pickle.Pickler):
        # torch.save subclasses this, with the method that names storages.
        def __init_subclass__(cls) -> None:
            name_storage = cls.persistent_id

            def persistent_id(self: Any, item: Any) -> Any:
                if _is_offloaded(item):
                    tensors.append(item)
                name = name_storage(self, item)
                if name is not None:
                    storages[name[2]] = (
                        item._untyped_storage if isinstance(item, torch.TypedStorage) else item
                    )
                return name

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    module = types.SimpleNamespace(__name__="pickle", Pickler=Pickler)
    with (
        _alignment(),
        torch.serialization.skip_data(materialize_fake_tensors=True),
    ):
        torch.save(tree, path, pickle_module=module)
    return storages, tensors


def _alignment() -> AbstractContextManager[Any]:
    """Context in which torch aligns tensors in a file for O_DIRECT. Torch 2.6 has 64 bytes and no
    choice: there the ends of tensors go through the page cache.
    """
    try:
        from torch.utils.serialization import config
    except ImportError:
        return contextlib.nullcontext()
    patched: Any = config
    if not hasattr(patched.save, "storage_alignment"):
        return contextlib.nullcontext()
    made: AbstractContextManager[Any] = patched.patch({"save.storage_alignment": _ALIGNMENT_BYTES})
    return made


def _by_provider(places: Any) -> dict[Provider, list[tuple[Any, Any, int]]]:
    """For each provider, in the order of first use: the key, the place of the whole tensor, and the
    first element in it.
    """
    found: dict[Provider, list[tuple[Any, Any, int]]] = {}
    for place, parts in places:
        for part in parts:
            found.setdefault(part.provider, []).append((part.key, place, part.start))
    return found


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def _offloaded(tree: Any) -> Iterator[Any]:
    return filter(_is_offloaded, _leaves(tree))


def _is_offloaded(value: Any) -> bool:
    return isinstance(value, FakeTensor) and hasattr(value, "parts")


def _replaced(tree: Any, by_id: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return by_id[id(tree)].requires_grad_(tree.requires_grad) if id(tree) in by_id else tree
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, _replaced(value, by_id)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_replaced(value, by_id) for value in tree)
    return tree
