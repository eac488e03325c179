"""`ProvisionalUpdates`: updates that are made during backward(), before it is known whether their
gradients are final, and what it takes to undo them.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy
import torch

from ..errors import UsageError
from ..optimizer_states.fingerprint import fingerprint
from ..optimizer_states.tree import top
from ..sizes import FORWARD_SHARE
from ..swap.tier import Tier
from .buckets import Bucket, Form, Fragment, Weight, local
from .options import StepOptions
from .update import Options

_log = logging.getLogger(__name__)
_GOLDEN = 0.6180339887498949  # its multiples are spread evenly beside any other rhythm
_NEVER_SEEN = -1, 0  # a version and an address that no parameter has


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """The gradient of *fragment* as it was, by its *fingerprint*; None without a dense gradient."""

    fragment: Fragment
    fingerprint: torch.Tensor | None

    @classmethod
    def of(cls, fragment: Fragment) -> _Gradient:
        gradient = fragment.weight.parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return cls(fragment, None)
        return cls(fragment, fingerprint(fragment.of(local(gradient))))


@dataclasses.dataclass(frozen=True)
class _Changes:
    """What was known of changes of *weight* by others."""

    weight: Weight
    count: int
    unnoticed: bool

    @classmethod
    def of(cls, weight: Weight) -> _Changes:
        return cls(weight, weight.changes, weight.was_changed)

    def restore(self) -> None:
        self.weight.updated(always=True)
        self.weight.changes = self.count
        if self.unnoticed:
            self.weight.seen = _NEVER_SEEN


@dataclasses.dataclass(frozen=True)
class _RandomNumbers:
    """The generators that an update on *device* may draw from: torch's, Python's and numpy's."""

    device: torch.device
    states: Sequence[torch.Tensor]
    others: tuple[Any, ...]

    @classmethod
    def on(cls, device: torch.device) -> _RandomNumbers:
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        mersenne: Any = numpy.random.get_state(legacy=True)
        name, keys, *rest = mersenne
        return cls(device, states, (random.getstate(), name, keys.tobytes(), *rest))

    @property
    def drawn(self) -> bool:
        """Whether numbers were drawn since."""
        now = self.on(self.device)
        return now.others != self.others or not all(map(torch.equal, self.states, now.states))

    def restore(self) -> None:
        """Have the same numbers drawn again."""
        python, name, keys, *rest = self.others
        random.setstate(python)
        numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))
        torch.set_rng_state(self.states[0])
        for state in self.states[1:]:
            torch.cuda.set_rng_state(state, self.device)


@dataclasses.dataclass(eq=False)
class Before:
    """What an update of *bucket* replaces, but for the bucket's value: *elements* of parameters, and
    of each fragment the small *states* and how many changes by others its master has *taken_up*.
    *left*: the options of groups that the update left.
    """

    bucket: Bucket
    gradients: Sequence[_Gradient]
    random: _RandomNumbers
    changes: Sequence[_Changes]
    elements: Sequence[torch.Tensor]
    states: Sequence[dict[Any, Any]]
    taken_up: Sequence[int]
    left: Options = dataclasses.field(default_factory=dict)


class ProvisionalUpdates:
    """The updates of a step before `step` is called: `before` and `made` around each;
    `roll_back_changed` when the gradients are final.

    Of a bucket's value the drive keeps the old version. Nothing that is to stay in host memory is
    updated provisionally: `step` needs no drive for that.
    The old parameters are kept beside the new ones. Gradients that were changed after backward(),
    such as by clipping, are expected to be changed in the next step, too: nothing is provisional
    then. A forward pass of a module whose parameters are updated has *owner*, which this does not
    keep alive, undo the updates first, but for one that backward() itself makes.

    Where `step` queues its updates for the next forward pass (*overlap*), that pass has
    `FORWARD_SHARE` of them, spread evenly over the order of backward(): the drive works under both
    passes.

    Attributes: *made_count* and *rolled_back_count* are of the step that goes on, in buckets.
    """

    def __init__(self, tier: Tier, owner: Any, overlap: bool) -> None:
        self._tier = tier
        self._forward_share = FORWARD_SHARE if overlap else 0.0
        self._owner = weakref.ref(owner)
        self._forward_hook: Any = None  # while there are updates
        self._made: dict[Bucket, Before] = {}
        self._order: dict[Bucket, int] = {}
        self._sample: _Gradient | None = None  # the first that was complete in this step
        self._expects_changes = self._draws = False
        self._idle_steps = 0  # in a row, with no provisional updates
        self.made_count = self.rolled_back_count = 0

    def __len__(self) -> int:
        return len(self._made)

    def in_order(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """*buckets* as backward() comes by those that it updates provisionally, and then the others.
        With this order also where none is, the planner need not learn a new one and move its
        residents.
        """
        return sorted(buckets, key=self.place)

    def place(self, bucket: Bucket) -> int:
        """Of *bucket*, in that order."""
        last = len(self._order)
        return self._order.get(bucket, last) if self._is_suitable(bucket) else last

    @property
    def rests(self) -> bool:
        """Whether no update is made provisionally any more, or not for some time."""
        return self._draws or self._idle_steps > 2

    def came_by(self, bucket: Bucket) -> None:
        """backward() has made the last gradient of *bucket*."""
        self._order.setdefault(bucket, len(self._order))

    def complete(self, weight: Weight) -> None:
        """The gradient of *weight* is what backward() has made of it. Raises: UsageError where that
        is the second time in one step.
        """
        if any(fragment.bucket in self._made for fragment in weight.fragments):
            raise UsageError(
                'a second backward() before step(): with step_in_backward="provisional" the parameters are updated already. To accumulate gradients, run all '
                "but the last backward() under optimizer.no_sync(); to begin anew, call optimizer.zero_grad()"
            )
        gradient = weight.parameter.grad
        if (
            self._sample is None
            and weight.fragments
            and gradient is not None
            and gradient.layout is torch.strided  # others are refused by `step`
        ):
            self._sample = _Gradient.of(weight.fragments[0])

    def may_begin(self, bucket: Bucket) -> bool:
        """Whether an update of *bucket* now spares `step` the drive, and can be undone."""
        return (
            not self._expects_changes
            and self._is_suitable(bucket)
            and bucket.inner is not None
            and all(map(_is_plain, bucket.fragments))
        )

    def _is_suitable(self, bucket: Bucket) -> bool:
        return (
            not self._draws
            and bucket.traits.undoable
            and bucket.nbytes > 0
            and not self._tier.swapper.stays(bucket.name)
            and self._order.get(bucket, 0) * _GOLDEN % 1 >= self._forward_share
        )

    def before(self, bucket: Bucket) -> Before:
        """Keep what an update of *bucket*, whose value is in use and on the drive, will replace.
        Raises: where there is no memory for copies; nothing is kept then.
        """
        weights = dict.fromkeys(fragment.weight for fragment in bucket.fragments)
        before = Before(
            bucket,
            [_Gradient.of(fragment) for fragment in bucket.fragments],
            _RandomNumbers.on(bucket.device),
            [_Changes.of(weight) for weight in weights],
            [part.clone() for part in bucket.weights()],
            [_small_states(fragment) for fragment in bucket.fragments],
            [fragment.changes for fragment in bucket.fragments],
        )
        self._tier.swapper.retain(bucket.name)
        bucket.is_retained = True
        return before

    def draws(self, before: Before) -> bool:
        """Whether the update of *before* drew random numbers: then bits depend on the order of
        updates, so that it has to be undone, and none is made provisionally any more.
        """
        if not before.random.drawn:
            return False
        self._draws = True
        before.random.restore()
        return True

    def made(self, before: Before, left: Options) -> None:
        """The update of the bucket of *before* is made, and has *left* these options of groups."""
        before.left = left
        self._made[before.bucket] = before
        self.made_count += 1
        if self._forward_hook is None:
            self._forward_hook = torch.nn.modules.module.register_module_forward_pre_hook(
                self._before_forward
            )

    def check(self) -> None:
        """See that the updates are the only changes of their parameters. Raises: UsageError."""
        if self._changed_by_others():
            raise UsageError(
                'a parameter was changed between backward() and step(), where step_in_backward="provisional" has updated it already: change it after step(), '
                "or call optimizer.zero_grad() and begin the step anew"
            )

    def roll_back(self, before: Before, others: Container[Weight] = ()) -> list[Bucket]:
        """Undo an update, made or half made, whose value is not in use: its bucket. Parameters of
        *others*, to which somebody has written meanwhile, keep what they have.
        """
        self._made.pop(before.bucket, None)
        self._tier.swapper.roll_back(before.bucket.name)
        _restore(before, others)
        before.bucket.is_retained = False
        return [before.bucket]

    def roll_back_changed(self, options: StepOptions) -> list[Bucket]:
        """Undo the updates whose gradients have other bits now, and let the others stand, and their
        *options*: the buckets that were undone. No value may be in use.
        """
        made = [*self._made.values()]
        kept = [gradient for before in made for gradient in before.gradients]
        changed = _changed([*kept, *filter(None, (self._sample,))])
        if self._sample is not None:
            self._expects_changes = self._sample.fragment in changed
        undone = [
            before
            for before in reversed(made)
            if any(gradient.fragment in changed for gradient in before.gradients)
        ]
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
        """Undo every update: the buckets. No value may be in use. A parameter that somebody has
        written to since, such as by loading a model, keeps what was written.
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

    def abandon(self) -> None:
        """Give the parameters back what they were, but for those that somebody has written to;
        nobody will use the states any more.
        """
        others = self._changed_by_others()
        for before in reversed(self._made.values()):
            _restore(before, others)
        self._clear()

    def commit_but_made(self, buckets: Iterable[Bucket]) -> None:
        """Release the old versions of *buckets* that `made` was not called for. An exception has
        ended their updates before anything changed.
        """
        for bucket in buckets:
            if bucket not in self._made:
                self._tier.swapper.commit(bucket.name)
                bucket.is_retained = False

    def forget(self, buckets: Iterable[Bucket]) -> None:
        """Let go of the updates, also of those that were undone in part: other states are loaded
        into all *buckets*.
        """
        for bucket in buckets:
            if bucket.is_retained:
                self._tier.swapper.commit(bucket.name)
                bucket.is_retained = False
        self._clear()

    def forget_order(self, buckets: Iterable[Bucket]) -> None:
        """These *buckets*, none of which is updated now, are no more."""
        for bucket in buckets:
            self._order.pop(bucket, None)
        self._sample = None

    def step_made(self) -> None:
        """The updates of a step are made, or are to be queued."""
        self._idle_steps = 0 if self.made_count else self._idle_steps + 1

    def end_step(self) -> None:
        """The step is over."""
        self._sample = None
        self.made_count = self.rolled_back_count = 0

    def _changed_by_others(self) -> set[Weight]:
        weights = {changes.weight for before in self._made.values() for changes in before.changes}
        # what was only moved or cast gets its old values, too
        return {
            weight
            for weight in weights
            if weight.was_changed and Form.of(weight.parameter) == weight.form
        }

    def _clear(self) -> None:
        self._made.clear()
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        owner = self._owner()
        if owner is None:
            self._clear()
        elif torch._C._current_graph_task_id() == -1 and self._updates_any(module.parameters()):
            owner._undo_provisional()

    def _updates_any(self, parameters: Iterable[torch.Tensor]) -> bool:
        weights = {
            id(fragment.weight.parameter) for bucket in self._made for fragment in bucket.fragments
        }
        return any(id(parameter) in weights for parameter in parameters)


def _changed(gradients: Sequence[_Gradient]) -> set[Fragment]:
    """The fragments whose gradients have other bits than they had."""
    changed: set[Fragment] = set()
    compared: dict[torch.device, list[tuple[Fragment, torch.Tensor, torch.Tensor]]] = {}
    for gradient in gradients:
        was, now = gradient.fingerprint, _Gradient.of(gradient.fragment).fingerprint
        if was is None or now is None:
            if was is not now:
                changed.add(gradient.fragment)
        else:
            compared.setdefault(now.device, []).append((gradient.fragment, was, now))
    for rows in compared.values():  # a GPU is waited for once
        same = torch.stack([was for _, was, _ in rows]) == torch.stack([now for *_, now in rows])
        changed.update(
            fragment
            for (fragment, *_), equal in zip(rows, same.all(dim=1).tolist(), strict=True)
            if not equal
        )
    return changed


def _restore(before: Before, others: Container[Weight]) -> None:
    """Give parameters, but for *others*, and small states back what they were."""
    bucket = before.bucket
    with torch.no_grad():
        for fragment, old in zip(bucket.fragments, before.elements, strict=True):
            if fragment.weight not in others:
                fragment.put_weight(old)
                if old.is_cuda:
                    old.record_stream(torch.cuda.current_stream(old.device))
    for fragment, old_states, taken_up in zip(
        bucket.fragments, before.states, before.taken_up, strict=True
    ):
        _restore_small(fragment, old_states)
        fragment.changes = taken_up
    for changes in before.changes:
        if changes.weight in others:
            changes.weight.look()  # for the masters to follow
        else:
            changes.restore()


def _restore_small(fragment: Fragment, old_states: dict[Any, Any]) -> None:
    """Give *fragment* back what it had in memory of its states: in the same tensors, of which
    somebody may have kept one, and without what came since.
    """
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
    """Whether what an update changes of *fragment* is known before it: it has all of its states, and
    those on the drive have nothing beside them in a container.
    """
    return fragment.stepped and all(top(key) is key for key in fragment.leaves)


def _small_states(fragment: Fragment) -> dict[Any, Any]:
    """A copy of what *fragment* has in memory of its states."""
    return copy.deepcopy(
        {key: value for key, value in fragment.states.items() if key not in fragment.leaves}
    )
