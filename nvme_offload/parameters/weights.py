"""Reads and writes the weights of a model in the format of safetensors, one tensor at a time.

Source: https://github.com/huggingface/safetensors#format, and the index of transformers.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError, UsageError
from ..files import commit
from ..io import archive
from ..io.engine import Engine, File, Ticket
from . import conversions

FILE_BYTES = 5_000_000_000  # the most that a file has, unless one tensor is larger
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The names of all files of weights.
_WRITTEN = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


# A tensor of the files, or a tensor that a conversion makes of several.
Source = str | conversions.Made


class Entry(NamedTuple):
    """A tensor to write: its form, and a function that returns it in host memory."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    values: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Saved(NamedTuple):
    """A tensor in *file*, whose bytes begin at *offset*."""

    file: File
    offset: int
    shape: list[int]
    dtype: torch.dtype


class SavedWeights:
    """The tensors in *path*, a file of safetensors or a directory of them, read by *engine* past the
    page cache. Raises: UsageError, UnsupportedError, IOFailure.
    """

    def __init__(self, path: str | os.PathLike[str], engine: Engine) -> None:
        place = Path(path)
        commit.recover_directory(place.resolve())
        files = _files_in(place) if place.is_dir() else [place]
        lacking = [file.name for file in files if not file.is_file()]
        if not files or lacking:
            what = f"lacks {lacking[0]}" if len(files) > 1 else "has no file of safetensors"
            raise UsageError(f"{place} {what}: give a file, or its directory")
        self._place = place
        self._engine = engine
        self._tensors: dict[str, _Saved] = {}
        self._convert = conversions.Tensors(self._read_saved)
        self._open_files = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            for file in files:
                source = opened.enter_context(engine.open(file.resolve()))  # perhaps a link
                self._tensors.update(_tensors_in(file, source))
            self._open_files = opened.pop_all()

    def __enter__(self) -> SavedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def read(self, source: Source) -> torch.Tensor:
        """The tensor *source*. Raises: as `Ticket.wait`."""
        return self._convert(source)

    def _read_saved(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        targets: dict[Source, torch.Tensor] = {}
        for name in names:
            saved = self._tensors[name]
            targets[name] = torch.empty(saved.shape, dtype=saved.dtype)
        self.read_into(targets)
        return {name: targets[name] for name in names}

    def read_into(self, targets: Mapping[Source, torch.Tensor]) -> None:
        """Read tensors, in parallel, each into contiguous memory of its shape. Raises: as
        `Ticket.wait`.
        """
        others: dict[Source, torch.Tensor] = {}

        def start() -> Iterator[Ticket]:
            for source, target in targets.items():
                saved = self._tensors[source] if isinstance(source, str) else None
                if saved is None or target.dtype != saved.dtype:
                    others[source] = target
                elif target.nbytes:
                    yield self._engine.read(target, saved.file, saved.offset)

        archive.wait_all(start())
        for source, target in others.items():
            target.copy_(self.read(source))

    def sources_of(self, model: torch.nn.Module) -> dict[torch.Tensor, Source]:
        """The tensor here for each parameter of *model* and each buffer of its state dict. Raises:
        UsageError if one is missing, or has another shape; UnsupportedError if it is quantized.
        """
        forms = {
            name: torch.empty(one.shape, dtype=one.dtype, device="meta")
            for name, one in self._tensors.items()
        }
        parts = conversions.loaded(model, dict(_saved_tensors(model)), forms)
        found: dict[torch.Tensor, str] = {}
        missing: dict[torch.Tensor, str] = {}
        for name, tensor in _saved_tensors(model):
            if name in parts:
                found.setdefault(tensor, name)
            else:
                missing.setdefault(tensor, name)
        for tensor, name in missing.items():
            if tensor not in found:  # a tied parameter may be there by another name
                cure = "give the weights of this model"
                if name.startswith("base_model.model."):  # of peft
                    cure = "call get_peft_model after parameters"
                raise UsageError(f"{self._place} does not have {name}: {cure}")
        for tensor, name in found.items():
            source, form = parts[name]
            if form.shape != tensor.shape:
                raise UsageError(
                    f"{name} has the shape {list(form.shape)} in {self._place}, and {list(tensor.shape)} in the model: give the weights of this model"
                )
            for one in [source] if isinstance(source, str) else source.group.sources:
                dtype = self._tensors[one].dtype
                if dtype != tensor.dtype and _is_quantized(dtype, tensor.dtype):
                    raise UnsupportedError(
                        f"{one} in {self._place} has the dtype {_CODES[dtype]}, and {tensor.dtype} in the model: dequantize the checkpoint first"
                    )
        return {tensor: parts[name].source for tensor, name in found.items()}


def _is_quantized(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values in *saved* need factors to become values in *wanted*."""
    return (saved.itemsize == 1 and saved.is_floating_point) or (
        wanted.is_floating_point and not saved.is_floating_point
    )


def save(
    model: torch.nn.Module, path: Path, values_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Write the state dict of *model* to the directory *path*, which appears with its whole contents,
    in place of an earlier save. Other files in it are kept. *values_of*: a tensor of the model, in
    host memory. Raises: OSError.
    """
    path = path.resolve()
    if (left := commit.recover_directory(path)) is not None:
        commit.remove(left)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    tensors: dict[torch.Tensor, str] = {}
    for name, tensor in _saved_tensors(model):
        tensors.setdefault(tensor, name)
    inside = {name: tensor for tensor, name in tensors.items()}
    convert = conversions.Tensors(lambda names: {name: values_of(inside[name]) for name in names})
    entries = [
        Entry(name, part.form.shape, part.form.dtype, functools.partial(convert, part.source))
        for name, part in conversions.stored(model, inside).items()
    ]
    files = _divide(entries)
    with commit.partial_directory(path) as partial:
        for file, group in files.items():
            _write(partial / file, group)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
                "weight_map": {e.name: file for file, group in files.items() for e in group},
            }
            (partial / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        for config in ("config", "generation_config"):
            saving = getattr(getattr(model, config, None), "save_pretrained", None)
            if saving is not None:
                saving(partial)
        if path.is_dir():
            commit.keep_others(path, partial, _WRITTEN)
        commit.sync_tree(partial)
        replaced = commit.publish_directory(partial, path, over=True)
    if replaced is not None:
        commit.remove(replaced)


def _saved_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The names in a state dict, with the parameters and buffers themselves."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield before + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield before + name, buffer


def _divide(entries: Sequence[Entry]) -> Mapping[str, list[Entry]]:
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    count = len(groups)
    return {
        f"model-{number:05}-of-{count:05}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _write(path: Path, entries: Sequence[Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Larger items first: the format asks for aligned tensors without gaps.
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    for entry in ordered:
        if entry.dtype not in _CODES:
            raise UnsupportedError(
                f"safetensors has no tensors of {entry.dtype}: save the state_dict()"
            )
        header[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in ordered:
            file.write(_bytes_of(entry.values()))  # no name keeps one tensor while the next is made


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _files_in(directory: Path) -> list[Path]:
    """The files of the checkpoint in *directory*, which may have a second one in another form."""
    index = directory / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return sorted(directory / name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{index} is not an index of safetensors: copy it again") from None
    single = directory / _SINGLE
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def _tensors_in(path: Path, file: File) -> dict[str, _Saved]:
    """The tensors of *file*, opened from *path*, by name. Raises: UsageError, UnsupportedError."""
    damaged = UsageError(f"{path} is not a whole file of safetensors: copy it again")
    with path.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        begin = 8 + size
        if begin > file.size:
            raise damaged
        text = opened.read(size)
    found: dict[str, _Saved] = {}
    try:
        for name, entry in json.loads(text).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise UnsupportedError(
                    f"{name} in {path} has the dtype {entry['dtype']}: convert it to a dtype of torch"
                )
            dtype, shape = _DTYPES[entry["dtype"]], list(map(int, entry["shape"]))
            first, last = map(int, entry["data_offsets"])
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            if min([*shape, first], default=0) < 0 or last - first != nbytes:
                raise damaged
            if begin + last > file.size:
                raise damaged
            found[name] = _Saved(file, begin + first, shape, dtype)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged from None
    return found
