"""`ProvisionalUpdates`: updates during backward() that `step` may undo."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..device.room import DeviceRoom
from ..errors import UsageError, known
from ..optimizer_states.fingerprint import fingerprint
from ..optimizer_states.tree import top
from ..parameters.idle import exposure_of
from ..sizes import FORWARD_SHARE, evenly
from ..swap.tier import Tier
from .buckets import Bucket, Form, Fragment, Weight, local
from .options import StepOptions, refuse_second_backward
from .update import Options

_log = logging.getLogger(__name__)
# Kinds of devices on which values that stay in memory are updated provisionally. Tests set it.
BESIDE_ON = {"cuda"}
_NEVER_SEEN = -1, 0  # a version and an address that no parameter has


@dataclasses.dataclass(eq=False)
class Before:
    """The data that an update of *bucket* replaces, except the bucket's value.

    *gradients*: the fingerprint of each fragment's gradient. *changed*: for each weight, whether the
    program has changed it since the last update. For each fragment, its *elements* of the
    parameter, the small *states*, and `Fragment.rounded`.
    *unexposed*: the streamed weights that a caller could not change unseen when the update began:
    see `exposure_of`.
    *left*: the options of groups after the update. *weights*: the fingerprint of each fragment's
    elements after it, if they are not on the way from another device. *exposures*: of *unexposed*,
    after it.
    """

    bucket: Bucket
    gradients: Mapping[Fragment, torch.Tensor | None]
    changed: Mapping[Weight, bool]
    elements: Sequence[torch.Tensor]
    states: Sequence[dict[Any, Any]]
    rounded: Sequence[torch.Tensor | None]
    unexposed: Sequence[Weight]
    left: Options = dataclasses.field(default_factory=dict)
    weights: Mapping[Fragment, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    exposures: Mapping[Weight, int] = dataclasses.field(default_factory=dict)

    def may_differ(self) -> dict[Fragment, torch.Tensor | None]:
        """The entries of *weights* that may have changed since."""
        unchanged = {
            weight
            for weight, times in self.exposures.items()
            if (seen := exposure_of(weight.parameter)) is not None and seen.times == times
        }
        return {one: was for one, was in self.weights.items() if one.weight not in unchanged}


class _OldWeights:
    """The bytes of old weights on a GPU: now, and the *most* at a time, which the peak of its memory
    contains.
    """

    def __init__(self, device: torch.device) -> None:
        self._room = DeviceRoom(device, 0)
        self.nbytes = self.most = 0

    def has_room(self, more: int) -> bool:
        """Whether the passes leave memory for *more* bytes."""
        return self._room.suffices(self.most, self.nbytes + more - self.most)

    def add(self, nbytes: int) -> None:
        """Count *nbytes* more, or fewer if they are negative."""
        self.nbytes += nbytes
        self.most = max(self.most, self.nbytes)


class ProvisionalUpdates:
    """The updates of a step before `step` is called. `before` and `made` enclose each update;
    `roll_back_changed` follows when the gradients are final. *owner* is not kept alive.

    A value that stays in host memory is updated provisionally on a GPU, whose copies then run during
    backward(), as far as two versions fit in memory (see `share_room`), and old weights on the GPU.
    If gradients were changed after backward(), as by clipping, they are expected to change in the
    next step, too, and no update is provisional then. Before a forward pass of a module whose parameters are updated,
    *owner* undoes the updates, unless backward() itself runs that pass.

    If `step` queues its updates for the next forward pass (*overlap*), `FORWARD_SHARE` of the
    updates are left to that pass, spread evenly over the order of backward(), so that the drive
    works under both passes.

    Attributes: *made_count* and *rolled_back_count*, the buckets of the present step.
    """

    def __init__(self, tier: Tier, owner: Any, overlap: bool) -> None:
        self._tier = tier
        self._forward_share = FORWARD_SHARE if overlap else 0.0
        self._second_share = (
            0.0  # of the values, if all stay in memory: those that have two versions
        )
        self._owner = weakref.ref(owner)
        self._forward_hook: Any = None  # set while there are updates
        self._made: dict[Bucket, Before] = {}
        self._order: dict[Bucket, int] = {}
        # the fingerprint of the first complete gradient of this step
        self._sample: dict[Fragment, torch.Tensor | None] = {}
        # Whether no update is provisional in this step: gradients were changed in the last one.
        self.rests = False
        self._old_weights: dict[torch.device, _OldWeights] = {}
        self.made_count = self.rolled_back_count = 0

    def __len__(self) -> int:
        return len(self._made)

    def in_order(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Sort *buckets*: first the ones that backward() updates provisionally, in the order in
        which it completes their gradients. A step without provisional updates has this order, too,
        so that the planner need not learn a new one and move its residents.
        """
        return sorted(buckets, key=self.place)

    def place(self, bucket: Bucket) -> int:
        """The position of *bucket* in that order."""
        last = len(self._order)
        return self._order[bucket] if bucket in self._order and self._is_suitable(bucket) else last

    def came_by(self, bucket: Bucket) -> None:
        """backward() has completed the last gradient of *bucket*."""
        self._order.setdefault(bucket, len(self._order))

    def complete(self, weight: Weight) -> None:
        """backward() has completed the gradient of *weight*. Raises: UsageError the second time."""
        if any(fragment.bucket in self._made for fragment in weight.fragments):
            refuse_second_backward("provisional")
        if not self._sample and weight.fragments:
            found = _fingerprint_of(weight.fragments[0])
            if found is not None:
                self._sample = {weight.fragments[0]: found}

    def may_begin(self, bucket: Bucket) -> bool:
        """Whether an update of *bucket* now spares `step` the drive, and can be undone."""
        return (
            not self.rests
            and self._is_suitable(bucket)
            and bucket.inner is not None
            and all(map(_is_plain, bucket.fragments))
            and (
                not self._tier.swapper.stays(bucket.name)
                or self._tier.swapper.has_room(bucket.room_bytes)
            )
            and self._has_room_for_weights(bucket)
        )

    def _has_room_for_weights(self, bucket: Bucket) -> bool:
        if bucket.visits_device or bucket.device.type != "cuda":
            return True
        old = self._old_weights.setdefault(bucket.device, _OldWeights(bucket.device))
        return old.has_room(bucket.weight_bytes)

    def _is_suitable(self, bucket: Bucket) -> bool:
        return (
            bucket.traits.undoable
            and bucket.nbytes > 0
            and evenly(self._order.get(bucket, 0)) >= self._left_to_step(bucket)
        )

    def _left_to_step(self, bucket: Bucket) -> float:
        """The share of updates like the one of *bucket* that are not provisional."""
        if not self._tier.swapper.stays(bucket.name):
            return self._forward_share
        if bucket.device.type not in BESIDE_ON or not self._tier.swapper.everything_stays:
            return 1.0
        return max(self._forward_share, 1 - self._second_share)

    def share_room(self, buckets: Sequence[Bucket], nbytes: int) -> int:
        """Take as much of *nbytes* for second versions of *buckets* as is useful; return the bytes
        taken.
        """
        sizes = [one.room_bytes for one in buckets if one.device.type in BESIDE_ON]
        whole, largest = sum(sizes), max(sizes, default=0)
        # The terms of `evenly` are spread evenly up to two.
        room = min(max(nbytes - 2 * largest, 0), int(whole * (1 - self._forward_share)))
        self._second_share = room / whole if room else 0.0
        return room + 2 * largest if room else 0

    def before(self, bucket: Bucket) -> Before:
        """Copy the data that an update of *bucket* will replace. The bucket's value is in use, and
        retained. Raises an error if there is no memory for the copies.
        """
        weights = {fragment.weight for fragment in bucket.fragments}
        # before this looks at them
        exposures = {one: exposure_of(one.parameter) for one in weights}
        unexposed = [one for one, seen in exposures.items() if seen and not seen.lasts]
        return Before(
            bucket,
            {fragment: _fingerprint_of(fragment) for fragment in bucket.fragments},
            {weight: weight.was_changed for weight in weights},
            [part.clone() for part in bucket.weights()],
            [_small_states(fragment) for fragment in bucket.fragments],
            [fragment.rounded for fragment in bucket.fragments],
            unexposed,
        )

    def made(self, before: Before, left: Options) -> None:
        """Record that the update of *before* has ended, with the options of groups *left*."""
        before.left = left
        if not before.bucket.visits_device:
            before.weights = {one: _fingerprint_of_weight(one) for one in before.bucket.fragments}
            before.exposures = {
                one: known(exposure_of(one.parameter)).times for one in before.unexposed
            }
        self._made[before.bucket] = before
        self._count_old(before.bucket, before.bucket.weight_bytes)
        self.made_count += 1
        if self._forward_hook is None:
            self._forward_hook = torch.nn.modules.module.register_module_forward_pre_hook(
                _BeforeForward(self)
            )

    def check(self) -> None:
        """Check that only the updates have changed their parameters. Raises: UsageError."""
        if self._changed_by_others():
            raise UsageError(
                'a parameter was changed between backward() and step(), where step_in_backward="provisional" has updated it already: change it after step(), '
                "or call optimizer.zero_grad() and begin the step anew"
            )

    def roll_back(self, before: Before, others: Container[Weight] = ()) -> list[Bucket]:
        """Undo an update, complete or partial, whose value is not in use; return its bucket.
        Parameters of *others*, to which the program has written since, keep their values.
        """
        if self._made.pop(before.bucket, None) is not None:
            self._count_old(before.bucket, -before.bucket.weight_bytes)
        self._tier.swapper.roll_back(before.bucket.name)
        _restore(before, others)
        before.bucket.is_retained = False
        return [before.bucket]

    def roll_back_changed(self, options: StepOptions) -> list[Bucket]:
        """Undo updates whose gradients have other bits now; keep the *options* of all others."""
        made = list(self._made.values())
        changed = _changed([self._sample, *(before.gradients for before in made)])
        if self._sample:
            self.rests = not changed.isdisjoint(self._sample)
        undone = [one for one in reversed(made) if not changed.isdisjoint(one.gradients)]
        for before in undone:
            self.roll_back(before)
        self.rolled_back_count += len(undone)
        for bucket, before in self._made.items():
            self._tier.swapper.commit(bucket.name)
            bucket.is_retained = False
            options.left(before.left)
        self._clear()
        return [before.bucket for before in undone]

    def roll_back_all(self) -> list[Bucket]:
        """Undo every update; return the buckets. No value may be in use. A parameter to which the
        program has written since, such as by loading a model, keeps the written values.
        """
        made, others = [*reversed(self._made.values())], self._changed_by_others()
        if others:
            _log.warning(
                "%d parameters were changed after backward(), which had updated them provisionally: they keep their values",
                len(others),
            )
        for before in made:
            self.roll_back(before, others)
        self.rolled_back_count += len(made)
        self._clear()
        return [before.bucket for before in made]

    def keep_but_made(self, buckets: Iterable[Bucket]) -> None:
        """Keep one version of *buckets* whose updates an exception has ended."""
        for bucket in buckets:
            if bucket not in self._made:
                self._tier.swapper.keep(bucket.name)
                bucket.is_retained = False

    def forget(self, buckets: Iterable[Bucket]) -> None:
        """Drop the updates, even partially undone ones: all *buckets* get other states."""
        self._clear()
        self.keep_but_made(buckets)

    def forget_order(self, buckets: Iterable[Bucket]) -> None:
        """Forget *buckets* that are discarded, which are not provisionally updated now."""
        for bucket in buckets:
            self._order.pop(bucket, None)
        self._sample = {}

    def end_step(self) -> None:
        """The step has ended."""
        self._sample = {}
        self.made_count = self.rolled_back_count = 0

    def _changed_by_others(self) -> set[Weight]:
        weights = {weight for before in self._made.values() for weight in before.changed}
        # a change through `parameter.data` leaves no trace but in the elements
        found = _changed((one.may_differ() for one in self._made.values()), _fingerprint_of_weight)
        changed = {fragment.weight for fragment in found}
        # a parameter that was only moved or cast gets its old values back, too
        return {
            weight
            for weight in weights
            if (weight.was_changed or weight in changed)
            and Form.of(weight.parameter) == weight.form
        }

    def _count_old(self, bucket: Bucket, nbytes: int) -> None:
        if (old := self._old_weights.get(bucket.device)) is not None and not bucket.visits_device:
            old.add(nbytes)

    def _clear(self) -> None:
        self._made.clear()
        for old in self._old_weights.values():
            old.nbytes = 0
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def __del__(self) -> None:
        if self._forward_hook is not None:  # the program has dropped the optimizer before `step`
            self._forward_hook.remove()

    def before_forward(self, module: torch.nn.Module) -> None:
        """A forward pass of *module* is about to begin: see the class."""
        owner = self._owner()
        if owner is not None and torch._C._current_graph_task_id() == -1:
            updated = {
                id(fragment.weight.parameter)
                for bucket in self._made
                for fragment in bucket.fragments
            }
            if not updated.isdisjoint(map(id, module.parameters())):
                owner.undo_provisional()


class _BeforeForward:
    """A hook of all modules that does not keep *updates* alive."""

    def __init__(self, updates: ProvisionalUpdates) -> None:
        self._updates = weakref.ref(updates)

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        updates = self._updates()
        if updates is not None:
            updates.before_forward(module)


def _fingerprint_of(fragment: Fragment) -> torch.Tensor | None:
    """None without a dense gradient; `step` refuses others."""
    gradient = fragment.weight.parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return None
    return fingerprint(fragment.of(local(gradient)))


def _fingerprint_of_weight(fragment: Fragment) -> torch.Tensor | None:
    """None if the parameter was moved or cast."""
    return fingerprint(fragment.of_weight()) if fragment.weight.is_as_bound else None


def _changed(
    gradients: Iterable[Mapping[Fragment, torch.Tensor | None]],
    fingerprint_now: Callable[[Fragment], torch.Tensor | None] = _fingerprint_of,
) -> set[Fragment]:
    """The fragments whose gradients, or weights, have other fingerprints now."""
    changed: set[Fragment] = set()
    compared: dict[torch.device, list[tuple[Fragment, torch.Tensor, torch.Tensor]]] = {}
    for fragment, was in itertools.chain.from_iterable(one.items() for one in gradients):
        now = fingerprint_now(fragment)
        if was is not None and now is not None:
            compared.setdefault(now.device, []).append((fragment, was, now))
        elif was is not now:
            changed.add(fragment)
    for rows in compared.values():  # synchronizes with each GPU once
        same = torch.stack([was for _, was, _ in rows]) == torch.stack([now for *_, now in rows])
        changed.update(
            fragment
            for (fragment, *_), equal in zip(rows, same.all(dim=1).tolist(), strict=True)
            if not equal
        )
    return changed


@torch.no_grad()
def _restore(before: Before, others: Container[Weight]) -> None:
    """Restore parameters, except *others*, and small states."""
    bucket = before.bucket
    for fragment, old in zip(bucket.fragments, before.elements, strict=True):
        if fragment.weight not in others:
            fragment.put_weight(old)
            if old.is_cuda:
                old.record_stream(torch.cuda.current_stream(old.device))
    for fragment, old_states, rounded in zip(
        bucket.fragments, before.states, before.rounded, strict=True
    ):
        _restore_small(fragment, old_states)
        fragment.rounded = rounded
    for weight, was_changed in before.changed.items():
        if weight in others:
            continue
        weight.updated(always=True)
        if was_changed:
            weight.seen = _NEVER_SEEN


def _restore_small(fragment: Fragment, old_states: dict[Any, Any]) -> None:
    """Restore states in memory, in the same tensors, to which the program may have references."""
    states = fragment.states
    for key in [key for key in states if key not in fragment.leaves and key not in old_states]:
        del states[key]
    for key, old in old_states.items():
        now = states.get(key)
        if torch.is_tensor(old) and torch.is_tensor(now) and now.shape == old.shape:
            now.copy_(old)
        else:
            states[key] = old


def _is_plain(fragment: Fragment) -> bool:
    """Whether it is known which states an update of *fragment* changes."""
    return fragment.stepped and all(top(key) is key for key in fragment.leaves)


def _small_states(fragment: Fragment) -> dict[Any, Any]:
    """A copy of the states of *fragment* that are in memory."""
    return copy.deepcopy(
        {key: value for key, value in fragment.states.items() if key not in fragment.leaves}
    )
