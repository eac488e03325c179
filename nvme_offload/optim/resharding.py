"""`reshard`: the states of this rank's parts of the parameters, assembled from the parts that other
ranks saved. A part is a box of its parameter. A state within one saved part is a view of it. Other
states have no memory, and `buckets.rows_of` assembles some of their rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError, UsageError
from ..optimizer_states.kept import is_kept, unpacked, whole_of
from ..optimizer_states.tree import replaced, tensors
from . import parts
from .buckets import Weight, rows_of
from .saved import told

Box = list[tuple[int, int]]  # the first element and the end in each dimension
Rows = Callable[[int, int], torch.Tensor]  # the values of rows of a box, from the first to the end


def reshard(trees: Sequence[Mapping[str, Any]], weights: Sequence[Weight]) -> dict[str, Any]:
    """A state dict of *weights* on this rank, assembled from *trees*, the state dicts of all saved
    ranks. States of 8 bits become float32: their blocks may be cut differently. Raises: UsageError,
    UnsupportedError.
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
        states[index] = _state(box, list(saved.values()))
        if not weights[number].fragments:  # these states stay in memory
            states[index] = replaced(
                states[index],
                {
                    id(value): rows_of(value, 0, len(value))
                    for value in tensors(states[index]).values()
                    if hasattr(value, "rows")
                },
            )
    kept = {key: value for tree in reversed(trees) for key, value in told(tree).items()}
    if (part := parts.part_of(weights)) is None:
        kept.pop("part", None)
    else:
        kept["part"] = part
    return {**trees[0], "state": states, "nvme_offload": kept}


def fitting(trees: Sequence[dict[str, Any]], weights: Sequence[Weight]) -> dict[str, Any]:
    """*trees* as a state dict of *weights*, resharded if that is necessary. Raises: as `reshard`."""
    return trees[0] if len(trees) == 1 and fits(trees[0], weights) else reshard(trees, weights)


def fits(tree: Mapping[str, Any], weights: Sequence[Weight]) -> bool:
    """Whether the state dict *tree* can be loaded without resharding."""
    if is_cut(tree):
        # `parts.check_part` refuses other parts.
        return not parts.is_in_order(weights) or bool(
            told(tree)["part"]["cuts"] == parts.cuts_of(weights)
        )
    return "part" in told(tree) or not parts.is_cut(weights)  # one process saves whole states


def is_cut(tree: Mapping[str, Any]) -> bool:
    """Whether the state dict *tree* has parts of parameters."""
    return bool(told(tree).get("part", {}).get("cuts"))


def _cuts_of(tree: Mapping[str, Any], weights: Sequence[Weight]) -> list[Any]:
    part = told(tree).get("part")
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


def _state(box: Box, saved: list[tuple[Box, Mapping[Any, Any]]]) -> Any:
    """The state of the part *box* of a parameter, assembled from *saved* parts."""
    if len({frozenset(state) for _, state in saved}) > 1:
        raise UsageError("the ranks saved different states of one parameter: load another save")
    state = {}
    for key, value in saved[0][1].items() if saved else ():
        forms = [(there, _form(other[key])) for there, other in saved]
        if all(form is not None and _is_of(there, form) for there, form in forms):
            name = "low" if is_kept(value) and "low" in value else ""
            whole = _put_together(box, [(there, other[key]) for there, other in saved])
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


def _is_packed(value: Any) -> bool:
    """Whether *value* is kept in 8 or 16 bits. The low bits of a master are loaded as they are."""
    return is_kept(value) and "low" not in value


def _rows_in(value: Any, first: int, stop: int) -> torch.Tensor:
    """Rows of the saved state *value*, in float32 if it is packed."""
    form = _form(value)
    if not _is_packed(value):
        return rows_of(form, first, stop)
    if form.is_contiguous():
        size = form[0].numel()
        return unpacked(value, first * size, stop * size).view(-1, *form.shape[1:])
    return unpacked(value, 0, form.numel()).as_strided(form.shape, form.stride())[first:stop]


def _put_together(box: Box, found: Sequence[tuple[Box, Any]]) -> torch.Tensor:
    """The state of *box*, assembled from states *found* in other boxes, which do not overlap."""
    if sum(_numel(_common(box, there)) for there, _ in found) != _numel(box):
        raise UsageError(
            "the ranks saved other parts of a parameter than they say: load another save"
        )
    packed = _is_packed(found[0][1])
    if len(found) == 1 and not packed:
        return _within(box, found[0][0], _form(found[0][1]))

    def rows(first: int, stop: int) -> torch.Tensor:
        start = box[0][0]
        wanted = [(start + first, start + stop), *box[1:]]
        whole = torch.empty([end - begin for begin, end in wanted], dtype=dtype)
        for there, value in found:
            both = _common(wanted, there)
            if _numel(both):
                (low, high), base = both[0], there[0][0]
                there = [(low, high), *there[1:]]
                values = _rows_in(value, low - base, high - base)
                _within(both, wanted, whole).copy_(_within(both, there, values))
        return whole

    dtype = torch.float32 if packed else _form(found[0][1]).dtype
    assembled = torch.empty([stop - start for start, stop in box], dtype=dtype, device="meta")
    assembled.rows = rows  # type: ignore[attr-defined]
    return assembled


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
