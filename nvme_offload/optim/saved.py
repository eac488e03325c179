"""States of buckets, one bucket in memory at a time: `collect` returns them as in the plain
optimizer's `state_dict`, `as_kept` as they are stored, and `restore` loads them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import IOFailure, UnsupportedError, UsageError, known
from ..io.archive import Part, Provider, offloaded
from ..optimizer_states.formats import Layout
from ..optimizer_states.kept import Field, fields, is_kept, joined, state_of, unpacked, whole_of
from ..optimizer_states.tree import Key, in_a_row, replaced, tensors, travels
from .buckets import Bucket, Fragment, Weight, like, local
from .placeholders import StateOnDrive, is_on_drive
from .values import MASTER, Find, Values

VERSION = 1  # of state dicts and files; only a reader of the same number understands them
_ALIGNMENT = 64
_AHEAD = 3  # buckets that are read while one is written

State = dict[Any, Any]


def collect(
    updater: Values, buckets: Sequence[Bucket], weights: Sequence[Weight], directory: str
) -> list[State]:
    """The state of each of *weights* as the plain optimizer has it, with its master, if it has one.
    Large tensors are mapped from an unnamed file in *directory*. Raises: IOFailure; as
    `Values.reading`.
    """
    offsets: dict[tuple[Weight, Key], int] = {}
    forms_of: dict[tuple[Weight, Key], torch.Tensor] = {}
    end = 0
    for fragment, key, form in _offloaded(buckets):
        if (fragment.weight, key) not in offsets:
            offsets[fragment.weight, key], forms_of[fragment.weight, key] = end, form
            end += -(-form.numel() * form.itemsize // _ALIGNMENT) * _ALIGNMENT
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            file.truncate(end)
            for bucket in buckets:
                if bucket.layout is None:
                    continue
                with updater.reading(bucket) as find:
                    for fragment, key, form in _offloaded([bucket]):
                        values = in_a_row(find(fragment, key))
                        start = 0 if key in fragment.rest else fragment.start * form.itemsize
                        file.seek(offsets[fragment.weight, key] + start)
                        content: Any = values.view(torch.uint8).numpy()
                        file.write(content)
            file.flush()
        except OSError as error:
            reason = (
                f"{error.strerror}; a state dict takes {end} bytes on the drive, in addition to the states; "
                "save(path) writes them to a file without that"
            )
            code = error.errno or errno.EIO
            raise IOFailure(
                code, reason, operation="write", path=directory, offset=0, nbytes=0, done=0
            ) from error
        mapped = mmap.mmap(file.fileno(), end) if end else b""
    collected: dict[Weight, dict[Key, torch.Tensor]] = {weight: {} for weight in weights}
    for (weight, key), form in forms_of.items():
        flat = torch.empty(0, dtype=form.dtype)
        if form.numel():
            flat = torch.frombuffer(
                mapped, dtype=form.dtype, count=form.numel(), offset=offsets[weight, key]
            )
        whole = flat.as_strided(form.shape, form.stride())
        is_rest = key in weight.fragments[0].rest
        collected[weight][key] = whole if is_rest else like(weight.parameter, whole)
    return [
        in_place_of_leaves(weight, there, torch.Tensor.clone) for weight, there in collected.items()
    ]


def as_kept(updater: Values, buckets: Sequence[Bucket], weights: Sequence[Weight]) -> list[State]:
    """The state of each of *weights* as `optimizer_states.kept` describes it, its tensors without
    memory.
    """
    made = [bucket for bucket in buckets if bucket.layout is not None]
    names = [bucket.name for bucket in made]
    lenders = {
        bucket: _lender(updater, bucket, names[number + 1 :][:_AHEAD])
        for number, bucket in enumerate(made)
    }
    forms_of: dict[tuple[Weight, Key], torch.Tensor] = {}
    parts: dict[tuple[Weight, Key], dict[str, list[Part]]] = defaultdict(lambda: defaultdict(list))
    for fragment, key, form in _offloaded(made):
        forms_of.setdefault((fragment.weight, key), form)
        firsts = {"": 0}
        if key not in fragment.rest:
            fields_of = _fields(fragment, key)
            firsts = {name: fragment.start // one.elements for name, one in fields_of.items()}
        for name, first in firsts.items():
            part = Part(lenders[fragment.bucket], (fragment, key, name), first)
            parts[fragment.weight, key][name].append(part)
    found: dict[Weight, dict[Key, Any]] = {weight: {} for weight in weights}
    for (weight, key), form in forms_of.items():
        fragment, by_name = weight.fragments[0], parts[weight, key]
        if key in fragment.rest:
            found[weight][key] = offloaded(form.shape, form.dtype, by_name[""], form.stride())
            continue
        tensors_of = {}
        for name, field in _fields(fragment, key).items():
            shape, strides = form.shape, form.stride()
            if field.elements > 1:
                shape, strides = torch.Size([-(-form.numel() // field.elements)]), (1,)
            tensors_of[name] = offloaded(shape, field.dtype, by_name[name], strides)
        found[weight][key] = state_of(_layout(fragment), _of_layout(key), tensors_of)
    return [
        in_place_of_leaves(weight, there, torch.Tensor.clone) for weight, there in found.items()
    ]


def _lender(updater: Values, bucket: Bucket, ahead: Sequence[str]) -> Provider:
    """Provides the stored states of *bucket*, and reads the values *ahead* in the background."""

    @contextlib.contextmanager
    def lend() -> Iterator[Mapping[Any, torch.Tensor]]:
        with updater.kept(bucket, ahead) as memory:
            found = {}
            for fragment, key, _ in _offloaded([bucket]):
                if key in fragment.rest:
                    rest = memory[_layout(fragment).nbytes :]
                    found[fragment, key, ""] = in_a_row(fragment.rest[key].within(rest))
                    continue
                for name, field in _fields(fragment, key).items():
                    found[fragment, key, name] = field.of(memory, fragment.place, fragment.numel)
            yield found

    return lend


def _fields(fragment: Fragment, key: Key) -> Mapping[str, Field]:
    return fields(_layout(fragment), _of_layout(key))


def _of_layout(key: Key) -> Key | None:
    return None if key == MASTER else key


def _layout(fragment: Fragment) -> Layout:
    return known(fragment.bucket.layout)


def in_place_of_leaves(
    weight: Weight, there: Mapping[Key, torch.Tensor], small: Callable[[torch.Tensor], torch.Tensor]
) -> State:
    """The state of *weight*, with the tensors *there*, and *small* of all other tensors."""
    state = next((fragment.states for fragment in weight.fragments if fragment.states), {})
    others = {
        id(value): there[key] if key in there else small(value)
        for key, value in tensors(state).items()
    }
    whole = replaced(state, others)
    return {**whole, MASTER: there[MASTER]} if MASTER in there else whole


def restore(
    updater: Values,
    bucket: Bucket,
    given: Mapping[Weight, State],
    groups: Sequence[Mapping[str, Any]],
    *,
    keep_dtypes: bool = False,
    loaded: bool = True,
    are_older: bool = False,
) -> None:
    """Store the states *given* in *bucket*, in the dtypes in which the optimizer makes them, or
    unchanged with *keep_dtypes*; small states are converted if they are *loaded*. A weight that is
    not in *given* keeps its states; placeholders stand for present states. Masters that *are older*
    than the weights follow these in the next update.
    """
    kept: dict[Fragment, State] = {fragment: {} for fragment in bucket.fragments}
    keeping = [
        fragment
        for fragment in bucket.fragments
        if fragment.weight not in given
        or any(map(is_on_drive, tensors(given[fragment.weight]).values()))
    ]
    if bucket.layout is not None and keeping:
        masters = [] if bucket.layout.master is None else [MASTER]
        with updater.reading(bucket) as find:
            for fragment in keeping:
                for key in [*fragment.leaves, *masters]:
                    kept[fragment][key] = find(fragment, key).clone()
    sources = {
        fragment: _given(
            fragment, given[fragment.weight], there, groups[fragment.group], keep_dtypes, loaded
        )
        if fragment.weight in given
        else there
        for fragment, there in kept.items()
    }
    bucket.inner = None
    has_masters = bucket.update_dtype != bucket.dtype
    begun = has_masters and any(fragment.stepped for fragment in bucket.fragments)
    if not any(sources.values()) and not begun:
        bucket.layout, bucket.rest_bytes = None, 0  # the first update creates it
        return

    def fill(find: Find) -> None:
        for fragment, source in sources.items():
            for key, value in source.items():
                if key != MASTER or has_masters:
                    find(fragment, key).copy_(value)

    leaves = {
        fragment: {
            key: torch.empty_like(value, dtype=fragment.leaves[key].dtype, device="meta")
            for key, value in source.items()
            if key != MASTER
        }
        for fragment, source in sources.items()
    }
    updater.store(bucket, leaves, fill, groups)
    for fragment, source in sources.items():
        fragment.has_master = True
        if MASTER not in source or are_older:
            fragment.rounded = None
        elif fragment.weight in given and not is_on_drive(given[fragment.weight][MASTER]):
            fragment.rounded = fragment.fingerprint() if has_masters else None


def _given(
    fragment: Fragment,
    state: State,
    kept: Mapping[Key, torch.Tensor],
    group: Mapping[str, Any],
    keep_dtypes: bool,
    loaded: bool,
) -> dict[Key, torch.Tensor]:
    """Set the states of *fragment* from *state*; return the values of its offloaded states."""
    values: dict[Key, torch.Tensor] = {}
    others: dict[int, torch.Tensor] = {}
    fragment.leaves = {}
    own = local(fragment.weight.parameter).shape
    saved = {key: value for key, value in state.items() if is_kept(value)}
    state = {**state, **{key: torch.empty(0) for key in saved}}
    for key, value in tensors(state).items():
        part = local(value)
        if key in saved:
            values[key] = _unpacked(saved[key], fragment)
            if key != MASTER:
                fragment.leaves[key] = others[id(value)] = torch.empty(
                    0, dtype=torch.float32, device=fragment.shadow.device
                )
        elif key == MASTER or is_on_drive(value) or travels(key, part, own):
            values[key] = (
                kept[_placeholder(value).key]
                if is_on_drive(value)
                else fragment.of(part)
                if part.shape == own
                else part
            )
            if key != MASTER:
                dtype = part.dtype if keep_dtypes else _kept_dtype(key, part, fragment)
                fragment.leaves[key] = others[id(value)] = torch.empty(
                    0, dtype=dtype, device=fragment.shadow.device
                )
        else:
            others[id(value)] = _small(key, value, fragment, group, loaded)
    fragment.states = replaced(
        {key: value for key, value in state.items() if key != MASTER}, others
    )
    fragment.stepped = bool(state)
    return values


def _unpacked(value: Mapping[str, Any], fragment: Fragment) -> torch.Tensor:
    """*fragment*'s part of a state, or master, that is kept as *value*."""
    whole = whole_of(value)
    if "low" in value:
        flat = joined(
            fragment.in_memory_order(fragment.of(whole)),
            fragment.in_memory_order(fragment.of_weight()).cpu(),
        )
        return flat.as_strided(fragment.shape, fragment.strides)
    if fragment.is_whole or not whole.is_contiguous():
        flat = unpacked(value, 0, whole.numel())
        return fragment.of(flat.as_strided(whole.shape, whole.stride()))
    return unpacked(value, fragment.start, fragment.stop)


def _kept_dtype(key: Key, value: torch.Tensor, fragment: Fragment) -> torch.dtype:
    """The dtype in which a loaded state is stored: the optimizer's own, if it is known."""
    traits = fragment.bucket.traits
    if key in traits.states:
        return traits.states[key]
    # such as Adafactor's rows and columns
    form = traits.forms.get(max(len(fragment.weight.form.shape), 1), {}).get(key)
    if form is not None:
        return form.dtype
    narrow = value.dtype == fragment.bucket.dtype != fragment.shadow.dtype
    return fragment.shadow.dtype if narrow else value.dtype


def told(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """What *state_dict* says of its states; nothing if the plain optimizer has saved it. Raises:
    UnsupportedError if it is of another version.
    """
    found: Mapping[str, Any] = state_dict.get("nvme_offload", {})
    if (version := found.get("version", VERSION)) != VERSION:
        raise UnsupportedError(
            f"the states are of version {version!r} and this package reads version {VERSION}: install the release that wrote them"
        )
    return found


def check(state: Any, weight: Weight) -> None:
    """Check that *state* can be a state of *weight*. Raises: UsageError."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"the state of a parameter must be a dictionary, not {type(state).__name__}"
        )
    own, dtype = local(weight.parameter).shape, weight.parameter.dtype
    saved = {key: value for key, value in state.items() if is_kept(value)}
    if "low" in saved.get(MASTER, {}) and dtype != torch.bfloat16:
        raise UsageError(
            f"the masters were saved as the bits that bfloat16 weights lack, and a parameter is in {dtype}: load the states with bfloat16 weights, "
            "and have state_dict() make whole masters of them"
        )
    state = {**state, **{key: whole_of(value) for key, value in saved.items()}}
    found = tensors(state)
    for value in filter(is_on_drive, found.values()):
        placeholder = _placeholder(value)
        if not placeholder.is_current or placeholder.whole is None:
            raise UsageError(
                "a state that was moved before an update, or a part of one, cannot be put into state: put in a clone()"
            )
        if placeholder.weight is not weight or placeholder.key not in {
            *weight.fragments[0].leaves,
            MASTER,
        }:
            raise UsageError(
                "a state that another parameter or another optimizer has on its drive cannot be put into state: put in a clone(), or load the "
                "state_dict() of the other optimizer"
            )
    for key, value in {**state, **found}.items():
        if (
            (key == MASTER or key in weight.traits.states)
            and len(own) > 0
            and (not torch.is_tensor(value) or local(value).shape != own)
        ):
            shape = list(local(value).shape) if torch.is_tensor(value) else type(value).__name__
            raise UsageError(
                f"the loaded {key!r} has the shape {shape} where the parameter has {list(own)} on this rank: load what the same model saved, "
                "cut over as many ranks in the same way, or load it through torch.distributed.checkpoint"
            )


def _placeholder(value: Any) -> StateOnDrive:
    placeholder = local(value)
    return known(placeholder if isinstance(placeholder, StateOnDrive) else None)


def steps(state: Mapping[str, Any]) -> int:
    """The step count of *state*; 0 if it has none."""
    count = state.get("step", 0)
    is_number = isinstance(count, int | float) or (torch.is_tensor(count) and count.numel() == 1)
    return int(count) if is_number else 0


def forms(fragment: Fragment) -> dict[Key, torch.Tensor]:
    """The forms of the whole states, and master, that the bucket's value has for *fragment*."""
    layout = fragment.bucket.layout
    if layout is None:
        return {}
    shape = fragment.weight.form.shape
    # only contiguous parameters are cut; their strides may have changed since
    contiguous = torch.empty(shape, device="meta").stride()
    strides = fragment.keys if fragment.is_whole else dict.fromkeys(fragment.keys, contiguous)
    found = {
        key: torch.empty_strided(shape, strides[key], dtype=layout.states[key].dtype, device="meta")
        for key in fragment.keys
    }
    for key, place in fragment.rest.items():
        found[key] = torch.empty_strided(
            place.shape, place.strides, dtype=place.dtype, device="meta"
        )
    if layout.master is not None and fragment.stepped:
        whole = fragment.strides if fragment.is_whole else contiguous
        found[MASTER] = torch.empty_strided(
            shape, whole, dtype=fragment.bucket.update_dtype, device="meta"
        )
    return found


def _offloaded(buckets: Sequence[Bucket]) -> Iterator[tuple[Fragment, Key, torch.Tensor]]:
    """For each part of a state in *buckets*: the key, and the form of the whole state. The rest
    counts once.
    """
    for bucket in buckets:
        for fragment in bucket.fragments:
            for key, form in forms(fragment).items():
                if key not in fragment.rest or fragment is fragment.weight.fragments[0]:
                    yield fragment, key, form


def _small(
    key: Key, value: torch.Tensor, fragment: Fragment, group: Mapping[str, Any], loaded: bool
) -> torch.Tensor:
    """A copy of *value*, which stays in memory, if *loaded* as torch.optim.Optimizer.load_state_dict
    converts it. Otherwise it keeps its dtype, and follows a parameter that was moved.
    """
    fused = bool(group.get("fused"))
    if key == "step" and not fused:
        return value.clone()
    dtype = value.dtype
    if not loaded:
        stays = value.is_cpu and key != "step"
        return value.to(value.device if stays else fragment.shadow.device, copy=True)
    if key == "step":
        dtype = torch.float32
    elif value.is_floating_point():
        dtype = fragment.shadow.dtype
    return value.to(fragment.shadow.device, dtype, copy=True)
