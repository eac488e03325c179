"""Checkpoints of bundles: as the plain optimizer's `state_dict` has the states, and back, one bundle in memory at a time."""

from __future__ import annotations

import copy
import errno
import mmap
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import NoSpaceError, UsageError
from .bundles import Bundle, Piece, Weight, dense_strides, like, local
from .stand_ins import StateOnDrive, is_on_drive
from .update import MASTER, Updater

_ALIGNMENT = 64

State = dict[str, Any]


def collect(updater: Updater, bundles: Sequence[Bundle], weights: Sequence[Weight], directory: str) -> list[State]:
    """The state of each of *weights* as the plain optimizer has it, and its master where it has one.

    Large tensors are mapped from a file without a name in *directory*, so that they are page cache, which the kernel takes back when it needs to.
    Raises: NoSpaceError when the drive has no room for it; as `Updater.reading`.
    """
    places: dict[tuple[Weight, str], tuple[int, torch.dtype]] = {}
    end = 0
    for bundle in bundles:
        for piece in bundle.pieces:
            for key, dtype in travelling(bundle, piece).items():
                if (piece.weight, key) not in places:
                    places[piece.weight, key] = end, dtype
                    nbytes = local(piece.weight.parameter).numel() * dtype.itemsize
                    end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            file.truncate(end)
            for bundle in bundles:
                if bundle.layout is None:
                    continue
                with updater.reading(bundle) as (master, states):
                    for piece in bundle.pieces:
                        for key, dtype in travelling(bundle, piece).items():
                            flat = master if key == MASTER else states[key]
                            assert flat is not None
                            file.seek(places[piece.weight, key][0] + piece.start * dtype.itemsize)
                            content: Any = piece.flat_within(flat).view(torch.uint8).numpy()
                            file.write(content)
            file.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise NoSpaceError(
                error.errno, f"a state dict takes {end} bytes on the drive, beside the states", operation="write", path=directory, offset=0, nbytes=0, done=0
            ) from error
        mapped = mmap.mmap(file.fileno(), end) if end else b""

    def tensor(weight: Weight, key: str) -> torch.Tensor:
        offset, dtype = places[weight, key]
        shape, strides = local(weight.parameter).shape, form(weight, key, dtype).stride()
        flat = torch.frombuffer(mapped, dtype=dtype, count=shape.numel(), offset=offset) if shape.numel() else torch.empty(0, dtype=dtype)
        return like(weight.parameter, flat.as_strided(shape, strides))

    collected: dict[Weight, State] = {weight: {} for weight in weights}
    for weight in weights:
        collected[weight].update(copy.deepcopy(weight.states))
    for weight, key in places:
        collected[weight][key] = tensor(weight, key)
    return [collected[weight] for weight in weights]


def restore(updater: Updater, bundle: Bundle, given: Mapping[Weight, State], groups: Sequence[Mapping[str, Any]]) -> None:
    """Give *bundle* the states *given*, whose tensors may be mapped from a file.

    A weight that is not among them keeps its own states, and one that is, those that the drive has already.
    """
    sources: dict[Piece, State] = {}
    kept: dict[Piece, State] = {}
    keeping = [piece for piece in bundle.pieces if piece.weight not in given or any(map(is_on_drive, given[piece.weight].values()))]
    if bundle.layout is not None and keeping:
        with updater.reading(bundle) as (master, states):
            for piece in keeping:
                kept[piece] = {key: piece.within(states[key], strides).clone() for key, strides in piece.keys.items()}
                if master is not None:
                    kept[piece][MASTER] = piece.within(master).clone()
    dtypes: dict[str, torch.dtype] = {}
    for piece in bundle.pieces:
        sources[piece] = kept.get(piece, {})
        if piece.weight in given:
            state = given[piece.weight]
            parts = {key: value for key, value in state.items() if key == MASTER or stands_for_each(key, value, piece.weight)}
            sources[piece] = {key: kept[piece][_stand_in(value).key] if is_on_drive(value) else piece.of(local(value)) for key, value in parts.items()}
            piece.states = {key: _small(key, value, piece, groups[piece.group]) for key, value in state.items() if key not in parts}
            piece.keys = {key: dense_strides(value) for key, value in sources[piece].items() if key != MASTER}
            piece.stepped = bool(state)
        for key, value in sources[piece].items():
            if key != MASTER:
                dtypes[key] = bundle.traits.states.get(key, piece.shadow.dtype if value.is_floating_point() else value.dtype)
    bundle.inner = None
    if not any(sources.values()):
        bundle.layout = None  # the first update makes it
        return

    def fill(master: torch.Tensor | None, states: Mapping[str, torch.Tensor]) -> None:
        for piece, source in sources.items():
            for key, value in source.items():
                if key != MASTER:
                    piece.within(states[key], piece.keys[key]).copy_(value)
                elif master is not None:
                    piece.within(master).copy_(value)

    updater.store(bundle, dtypes, fill)
    for piece in bundle.pieces:
        piece.changes = piece.weight.changes


def check(state: Any, weight: Weight) -> None:
    """See that *state* can be one of *weight*. Raises: UsageError."""
    if not isinstance(state, Mapping):
        raise UsageError(f"the state of a parameter must be a dictionary, not {type(state).__name__}")
    own = local(weight.parameter).shape
    for value in filter(is_on_drive, state.values()):
        stand_in = _stand_in(value)
        if not stand_in.is_current or stand_in.shape != own:
            raise UsageError("a state that was moved before an update, or a part of one, cannot be put into state: put in a clone()")
        if stand_in.weight is not weight or stand_in.key not in {*weight.pieces[0].keys, MASTER}:
            raise UsageError("a state that another optimizer has on its drive cannot be put into state: load that one's state_dict()")
    for key, value in state.items():
        if (key == MASTER or key in weight.traits.states) and len(own) > 0 and (not torch.is_tensor(value) or local(value).shape != own):
            shape = list(local(value).shape) if torch.is_tensor(value) else type(value).__name__
            raise UsageError(
                f"the loaded {key!r} has the shape {shape} where the parameter has {list(own)} on this rank: load what the same model saved, "
                "cut over as many ranks in the same way, or load it through torch.distributed.checkpoint"
            )


def _stand_in(value: Any) -> StateOnDrive:
    stand_in = local(value)
    assert isinstance(stand_in, StateOnDrive)
    return stand_in


def steps(state: Mapping[str, Any]) -> int:
    """How many steps *state* is of; 0 where it does not tell."""
    count = state.get("step", 0)
    return int(count) if isinstance(count, int | float) or (torch.is_tensor(count) and count.numel() == 1) else 0


def stands_for_each(key: str, value: Any, weight: Weight) -> bool:
    """Whether *value* has an element for each of the parameter's; on whatever device it is."""
    return torch.is_tensor(value) and key != "step" and value.dim() > 0 and local(value).shape == local(weight.parameter).shape


def travelling(bundle: Bundle, piece: Piece) -> dict[str, torch.dtype]:
    """The states of *piece* that the value of *bundle* has, and the master, with their dtypes."""
    layout = bundle.layout
    if layout is None:
        return {}
    found = {key: slot.dtype for key, slot in layout.states.items() if key in piece.keys}
    return found | {MASTER: bundle.update_dtype} if layout.master is not None and piece.stepped else found


def form(weight: Weight, key: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory that is like the state *key* of the part of *weight* on this rank."""
    part, first = local(weight.parameter), weight.pieces[0]
    strides = first.keys.get(key, first.strides) if first.is_whole else dense_strides(part)
    return torch.empty_strided(part.shape, strides, dtype=dtype, device="meta")


def _small(key: str, value: Any, piece: Piece, group: Mapping[str, Any]) -> Any:
    """*value*, which stays in memory, as torch's optimizers load it. Source: torch.optim.Optimizer.load_state_dict."""
    if not torch.is_tensor(value):
        return copy.deepcopy(value)
    if key == "step" and not group.get("fused"):
        return value.clone()
    return value.to(piece.shadow.device, torch.float32 if key == "step" else piece.shadow.dtype if value.is_floating_point() else value.dtype, copy=True)
