"""Checkpoints of bundles: as the plain optimizer's `state_dict` has the states, and back, one bundle in memory at a time."""

from __future__ import annotations

import errno
import mmap
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import IOFailure, UsageError
from ..optimizer_states.tree import Key, replaced, tensors, travels
from .bundles import Bundle, Piece, Weight, dense_strides, like, local
from .stand_ins import StateOnDrive, is_on_drive
from .update import MASTER, Find, Updater

_ALIGNMENT = 64

State = dict[Any, Any]


def collect(updater: Updater, bundles: Sequence[Bundle], weights: Sequence[Weight], directory: str) -> list[State]:
    """The state of each of *weights* as the plain optimizer has it, and its master where it has one.

    Large tensors are mapped from a file without a name in *directory*, so that they are page cache, which the kernel takes back when it needs to.
    Raises: IOFailure when the drive has no room for it; as `Updater.reading`.
    """
    places: dict[tuple[Weight, Key], tuple[int, torch.Tensor]] = {}
    end = 0
    for bundle in bundles:
        for piece in bundle.pieces:
            for key, form in forms(piece).items():
                if (piece.weight, key) not in places:
                    places[piece.weight, key] = end, form
                    end += -(-form.numel() * form.itemsize // _ALIGNMENT) * _ALIGNMENT
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            file.truncate(end)
            for bundle in bundles:
                if bundle.layout is None:
                    continue
                with updater.reading(bundle) as find:
                    for piece in bundle.pieces:
                        for key in forms(piece):
                            values = find(piece, key)
                            if key in piece.rest and piece is not piece.weight.pieces[0]:
                                continue  # the same for all
                            file.seek(places[piece.weight, key][0] + (0 if key in piece.rest else piece.start * values.itemsize))
                            content: Any = in_a_row(values).view(torch.uint8).numpy()
                            file.write(content)
            file.flush()
        except OSError as error:
            reason = f"{error.strerror}; a state dict takes {end} bytes on the drive, beside the states"
            raise IOFailure(error.errno or errno.EIO, reason, operation="write", path=str(directory), offset=0, nbytes=0, done=0) from error
        mapped = mmap.mmap(file.fileno(), end) if end else b""

    def tensor(weight: Weight, key: Key) -> torch.Tensor:
        offset, form = places[weight, key]
        flat = torch.frombuffer(mapped, dtype=form.dtype, count=form.numel(), offset=offset) if form.numel() else torch.empty(0, dtype=form.dtype)
        whole = flat.as_strided(form.shape, form.stride())
        return whole if weight.pieces and key in weight.pieces[0].rest else like(weight.parameter, whole)

    collected: dict[Weight, dict[Key, torch.Tensor]] = {weight: {} for weight in weights}
    for weight, key in places:
        collected[weight][key] = tensor(weight, key)
    return [in_place_of_leaves(weight, there, lambda small: small.clone()) for weight, there in collected.items()]


def in_place_of_leaves(weight: Weight, there: Mapping[Key, torch.Tensor], small: Callable[[torch.Tensor], torch.Tensor]) -> State:
    """The state of *weight* with what is *there* in place of what travels, the master too, and of every other tensor what *small* makes of it."""
    state = next((piece.states for piece in weight.pieces if piece.states), {})
    others = {id(value): there[key] if key in there else small(value) for key, value in tensors(state).items()}
    whole = replaced(state, others)
    return {**whole, MASTER: there[MASTER]} if MASTER in there else whole


def restore(updater: Updater, bundle: Bundle, given: Mapping[Weight, State], groups: Sequence[Mapping[str, Any]]) -> None:
    """Give *bundle* the states *given*, whose tensors may be mapped from a file.

    A weight that is not among them keeps its own states, and one that is, those that the drive has already.
    """
    sources: dict[Piece, State] = {}
    kept: dict[Piece, State] = {}
    keeping = [piece for piece in bundle.pieces if piece.weight not in given or any(map(is_on_drive, tensors(given[piece.weight]).values()))]
    if bundle.layout is not None and keeping:
        has_master = bundle.layout.master is not None
        with updater.reading(bundle) as find:
            for piece in keeping:
                kept[piece] = {key: find(piece, key).clone() for key in [*piece.leaves, *([MASTER] if has_master else [])]}
    for piece in bundle.pieces:
        sources[piece] = kept.get(piece, {})
        if piece.weight in given:
            sources[piece] = _given(piece, given[piece.weight], kept.get(piece, {}), groups[piece.group])
    bundle.inner = None
    if not any(sources.values()):
        bundle.layout, bundle.rest_bytes = None, 0  # the first update makes it
        return

    def fill(find: Find) -> None:
        for piece, source in sources.items():
            for key, value in source.items():
                if key != MASTER or has_masters:
                    find(piece, key).copy_(value)

    has_masters = bundle.update_dtype != bundle.dtype
    leaves = {
        piece: {key: torch.empty_like(value, dtype=piece.leaves[key].dtype, device="meta") for key, value in source.items() if key != MASTER}
        for piece, source in sources.items()
    }
    updater.store(bundle, leaves, fill, groups)
    for piece in bundle.pieces:
        piece.changes = piece.weight.changes


def _given(piece: Piece, state: State, kept: Mapping[Key, torch.Tensor], group: Mapping[str, Any]) -> dict[Key, torch.Tensor]:
    """Let *piece* have its part of *state*; the values of what travels, some of which the drive has *kept*."""
    values: dict[Key, torch.Tensor] = {}
    others: dict[int, torch.Tensor] = {}
    piece.leaves = {}
    own = local(piece.weight.parameter).shape
    for key, value in tensors(state).items():
        part = local(value)
        if key == MASTER or is_on_drive(value) or travels(key, part, own):
            values[key] = kept[_stand_in(value).key] if is_on_drive(value) else piece.of(part) if part.shape == own else part
            if key != MASTER:
                piece.leaves[key] = others[id(value)] = torch.empty(0, dtype=_kept_dtype(key, part, piece), device=piece.shadow.device)
        else:
            others[id(value)] = _small(key, value, piece, group)
    piece.states = replaced({key: value for key, value in state.items() if key != MASTER}, others)
    piece.stepped = bool(state)
    return values


def _kept_dtype(key: Key, value: torch.Tensor, piece: Piece) -> torch.dtype:
    """That a loaded state is kept in: the optimizer's own, and that of masters where the plain optimizer has 16 bits."""
    narrow = value.dtype == piece.bundle.dtype != piece.shadow.dtype
    return piece.bundle.traits.states.get(key, piece.shadow.dtype if narrow else value.dtype)


def check(state: Any, weight: Weight) -> None:
    """See that *state* can be one of *weight*. Raises: UsageError."""
    if not isinstance(state, Mapping):
        raise UsageError(f"the state of a parameter must be a dictionary, not {type(state).__name__}")
    own = local(weight.parameter).shape
    found = tensors(state)
    for value in filter(is_on_drive, found.values()):
        stand_in = _stand_in(value)
        whole = forms(stand_in.weight.pieces[0]).get(stand_in.key)
        if not stand_in.is_current or (whole is not None and stand_in.shape != whole.shape):
            raise UsageError("a state that was moved before an update, or a part of one, cannot be put into state: put in a clone()")
        if stand_in.weight is not weight or stand_in.key not in {*weight.pieces[0].leaves, MASTER}:
            raise UsageError("a state that another optimizer has on its drive cannot be put into state: load that one's state_dict()")
    for key, value in {**state, **found}.items():
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


def forms(piece: Piece) -> dict[Key, torch.Tensor]:
    """Tensors without memory that are like the states of the whole parameter of which the bundle's value has a part for *piece*, and like its master."""
    layout = piece.bundle.layout
    if layout is None:
        return {}
    part = local(piece.weight.parameter)
    strides = piece.keys if piece.is_whole else dict.fromkeys(piece.keys, dense_strides(part))
    found = {key: torch.empty_strided(part.shape, strides[key], dtype=layout.states[key].dtype, device="meta") for key in piece.keys}
    for key, place in piece.rest.items():
        found[key] = torch.empty_strided(place.shape, place.strides, dtype=place.dtype, device="meta")
    if layout.master is not None and piece.stepped:
        whole = piece.strides if piece.is_whole else dense_strides(part)
        found[MASTER] = torch.empty_strided(part.shape, whole, dtype=piece.bundle.update_dtype, device="meta")
    return found


def in_a_row(values: torch.Tensor) -> torch.Tensor:
    """*values*, which have no gaps, in the order of memory."""
    return values.as_strided((values.numel(),), (1,))


def _small(key: Key, value: torch.Tensor, piece: Piece, group: Mapping[str, Any]) -> torch.Tensor:
    """*value*, which stays in memory, as torch's optimizers load it. Source: torch.optim.Optimizer.load_state_dict."""
    if key == "step" and not group.get("fused"):
        return value.clone()
    return value.to(piece.shadow.device, torch.float32 if key == "step" else piece.shadow.dtype if value.is_floating_point() else value.dtype, copy=True)
