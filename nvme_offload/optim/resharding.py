"""`reshard`: the states of this rank's parts of the parameters, assembled from the parts that other
ranks saved.

A part is a box of its parameter: FSDP2 and tensor parallelism cut dimensions into chunks. A state
that lies within one saved part is a view of it. Other states are assembled in a mapped file without
a name: they use page cache, which the kernel can write back and reclaim.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import IOFailure, UnsupportedError, UsageError
from ..optimizer_states.kept import is_kept, unpacked, whole_of
from ..optimizer_states.tree import tensors
from . import parts
from .buckets import Weight

_ALIGNMENT = 64
_FILE_BYTES = 64 << 20  # each file keeps a descriptor open
_UNPACKED_AT_ONCE = 1 << 20  # elements

Box = list[tuple[int, int]]  # the first element and the end in each dimension
Part = tuple[Box, torch.Tensor]


def reshard(
    trees: Sequence[Mapping[str, Any]], weights: Sequence[Weight], directory: str
) -> dict[str, Any]:
    """A state dict of *weights* on this rank, assembled from *trees*, the state dicts of all saved
    ranks.

    States of 8 bits become float32: their blocks may be cut differently. Assembled states are in a
    file in *directory*. Raises: UsageError, UnsupportedError; IOFailure.
    """
    cuts = [_cuts_of(tree, weights) for tree in trees]
    own = parts.cuts_of(weights)
    if not (parts.is_in_order(weights) and all(map(_ascends, zip(*cuts, strict=False)))):
        raise UnsupportedError(
            "the ranks of a mesh are not in ascending order, so only as many ranks with the same mesh can load these states: for others, save and load "
            "by torch.distributed.checkpoint"
        )
    indices = [number for group in trees[0]["param_groups"] for number in group["params"]]
    states = {}
    file = _MappedFile(directory)
    for number, index in enumerate(indices[: len(own)]):
        box = _box_of(*own[number])
        saved: dict[str, tuple[Box, Mapping[Any, Any]]] = {}
        for cut, tree in zip(cuts, trees, strict=True):
            if number >= len(cut) or cut[number][0] != own[number][0]:
                raise UsageError(
                    f"the states are of a parameter of shape {cut[number][0] if number < len(cut) else None}, and the optimizer has one of shape "
                    f"{own[number][0]}: load the states of the same model"
                )
            there = _box_of(*cut[number])
            if _numel(_common(box, there)):
                saved.setdefault(str(there), (there, tree["state"].get(index, {})))
        states[index] = _state(box, list(saved.values()), file)
    told = {**trees[0]["nvme_offload"], "part": parts.part_of(weights)}
    if any(tree["nvme_offload"].get("wide") for tree in trees):
        told["wide"] = True
    if told["part"] is None:
        del told["part"]
    return {**trees[0], "state": states, "nvme_offload": told}


def fits(tree: Mapping[str, Any], weights: Sequence[Weight]) -> bool:
    """Whether the state dict *tree* can be loaded without resharding."""
    if is_cut(tree):
        # `parts.check_part` refuses other parts.
        return not parts.is_in_order(weights) or bool(
            tree["nvme_offload"]["part"]["cuts"] == parts.cuts_of(weights)
        )
    # One process saves whole states; an earlier version did not say which part it saved.
    says = "part" in tree.get("nvme_offload", {})
    return says or not parts.is_cut(weights) or not _is_whole(tree, weights)


def is_cut(tree: Mapping[str, Any]) -> bool:
    """Whether the state dict *tree* has parts of parameters."""
    return bool(tree.get("nvme_offload", {}).get("part", {}).get("cuts"))


def _is_whole(tree: Mapping[str, Any], weights: Sequence[Weight]) -> bool:
    """Whether *tree* has states of whole parameters, where the parameters are cut here."""
    indices = [number for group in tree["param_groups"] for number in group["params"]]
    found = [
        _form(value).shape == weight.parameter.shape
        for weight, index in zip(weights, indices, strict=False)
        for value in tree["state"].get(index, {}).values()
        if _form(value) is not None and _form(value).dim()
    ]
    return bool(found) and all(found)


def _cuts_of(tree: Mapping[str, Any], weights: Sequence[Weight]) -> list[Any]:
    part = tree.get("nvme_offload", {}).get("part")
    whole = [[list(weight.parameter.shape), []] for weight in weights]
    return whole if part is None else list(part["cuts"])


def _ascends(cuts: Sequence[Any]) -> bool:
    """Whether the parts of one parameter ascend with the saved ranks."""
    for dimension in zip(*(dimensions for _, dimensions in cuts), strict=False):
        places = list(dict.fromkeys(place for _, place, _ in dimension))
        if places != sorted(places):
            return False
    return True


def _box_of(shape: Sequence[int], dimensions: Sequence[tuple[int, int, str]]) -> Box:
    """The part of a parameter of *shape* that `parts.cuts_of` describes by *dimensions*."""
    box = [(0, size) for size in shape]
    for ranks, place, placement in dimensions:
        found = re.fullmatch(r"S\((\d+)\)", placement)
        if found is None:
            raise UnsupportedError(
                f"a parameter of shape {list(shape)} is cut as {placement}, which only as many ranks with the same mesh can load: for others, save and "
                "load by torch.distributed.checkpoint"
            )
        start, stop = box[int(found[1])]
        length = -(-(stop - start) // ranks)  # as torch.chunk
        first = min(start + place * length, stop)
        box[int(found[1])] = first, min(first + length, stop)
    return box


def _state(box: Box, saved: list[tuple[Box, Mapping[Any, Any]]], file: _MappedFile) -> Any:
    """The state of the part *box* of a parameter, assembled from the *saved* states of other
    parts.
    """
    if len({frozenset(state) for _, state in saved}) > 1:
        raise UsageError("the ranks saved different states of one parameter: load another save")
    state = {}
    for key, value in saved[0][1].items() if saved else ():
        forms = [(there, _form(other[key])) for there, other in saved]
        if all(form is not None and _is_of(there, form) for there, form in forms):
            name = "low" if is_kept(value) and "low" in value else ""
            found = [(there, _plain(other[key], file)) for there, other in saved]
            whole = _put_together(box, found, file)
            state[key] = {**value, name: whole} if name else whole
        elif any(tensor.dim() for tensor in tensors({key: value}).values()):
            raise UnsupportedError(
                f"the state {key!r} is not elementwise, so other parts of parameters have no share of it: load it on as many ranks as saved it"
            )
        else:
            state[key] = value
    return state


def _form(value: Any) -> Any:
    """The tensor that has the shape of the state *value*; None if it is not a tensor."""
    if is_kept(value):
        return whole_of(value)
    return value if torch.is_tensor(value) else None


def _is_of(box: Box, form: torch.Tensor) -> bool:
    return form.dim() > 0 and list(form.shape) == [stop - start for start, stop in box]


def _plain(value: Any, file: _MappedFile) -> torch.Tensor:
    """The state *value* as a plain tensor: in float32 if it is kept in 8 or 16 bits. Other states,
    and the low bits of a master, are returned unchanged.
    """
    if not is_kept(value) or "low" in value:
        plain: torch.Tensor = _form(value)
        return plain
    form = whole_of(value)
    flat = file.tensor([form.numel()], torch.float32)
    for start in range(0, form.numel(), _UNPACKED_AT_ONCE):
        stop = min(start + _UNPACKED_AT_ONCE, form.numel())
        flat[start:stop] = unpacked(value, start, stop)
    return flat.as_strided(form.shape, form.stride())


def _put_together(box: Box, found: Sequence[Part], file: _MappedFile) -> torch.Tensor:
    """The values of *box*, assembled from values *found* in other boxes, which do not overlap."""
    common = [(_common(box, there), there, values) for there, values in found]
    if sum(_numel(both) for both, _, _ in common) != _numel(box):
        raise UsageError(
            "the ranks saved other parts of a parameter than they say: load another save"
        )
    if len(common) == 1:
        return _within(*common[0])
    whole = file.tensor([stop - start for start, stop in box], found[0][1].dtype)
    for both, there, values in common:
        _within(both, box, whole).copy_(_within(both, there, values))
    return whole


def _within(part: Box, box: Box, values: torch.Tensor) -> torch.Tensor:
    """The *part* of the *values* of *box*."""
    return values[
        tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(part, box, strict=True)
        )
    ]


def _common(one: Box, other: Box) -> Box:
    return [
        (max(a, c), max(min(b, d), max(a, c))) for (a, b), (c, d) in zip(one, other, strict=True)
    ]


def _numel(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


class _MappedFile:
    """Tensors in mapped files without names in *directory*."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._mapped: mmap.mmap | None = None
        self._used = 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor. Raises: IOFailure if the drive has no room for it."""
        numel = math.prod(shape)
        nbytes = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self._mapped is None or self._used + nbytes > len(self._mapped):
            self._mapped, self._used = self._map(max(nbytes, _FILE_BYTES)), 0
        flat = torch.frombuffer(self._mapped, dtype=dtype, count=numel, offset=self._used)
        self._used += nbytes
        return flat.view(list(shape))

    def _map(self, nbytes: int) -> mmap.mmap:
        with tempfile.TemporaryFile(dir=self._directory) as file:
            try:
                # Otherwise a full drive would end the process when a page is written.
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise IOFailure.of(error, operation="preallocate", path=self._directory) from error
            return mmap.mmap(file.fileno(), nbytes)
