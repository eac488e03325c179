"""`States`: shows the states of buckets in `optimizer.state`, and stores changes of it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UsageError, known
from ..io.archive import MappedFiles
from ..optimizer_states.tree import Key, replaced, tensors, top
from . import saved
from .binding import Plan
from .buckets import Bucket, Form, Fragment, Weight, in_a_row, like, local
from .placeholders import StateOnDrive, is_on_drive, whole_or_copied
from .shown_state import ShownState, ShownStates
from .values import MASTER

if TYPE_CHECKING:
    from .steps import Steps


class States:
    """Small states, and placeholders for all others, by parameter. *owner* is not kept alive.

    *shown*: `optimizer.state`, used here by the methods of `dict`, which do not wait for pending
    updates. *were_used*: the program may have changed it since `take_up`. *files*: mapped by a
    load.
    """

    def __init__(self, owner: Steps) -> None:
        self._source = weakref.ref(owner)
        self._settle = owner.weakly(lambda steps: steps.settle_for_use())
        self.shown: dict[Any, Any] = ShownStates(self._settle, self._own)
        self.were_used = False
        self.files = MappedFiles()

    @property
    def _owner(self) -> Steps:
        return known(self._source())

    def _own(self, parameter: Any, state: Any) -> Any:
        """The *state* that the program gives *parameter*, with copies of parts of states. If it is shown
        for another parameter, it is a copy, except the master, which belongs to the weight.
        """
        weight = self._owner.binding.of(parameter)
        if weight is None or state is weight.shown:
            return state
        if not isinstance(state, ShownState):
            return whole_or_copied(state) if isinstance(state, Mapping) else state
        others = {key: value for key, value in state.items() if key != MASTER}
        leaves = filter(is_on_drive, tensors(others).values())
        own = {key: value for key, value in weight.placeholders.items() if key == MASTER}
        return {**replaced(others, {id(leaf): leaf.clone() for leaf in leaves}), **own}

    def show(self, bucket: Bucket) -> None:
        """Show the present states of the parameters of *bucket*."""
        for fragment in bucket.fragments:
            if fragment is fragment.weight.fragments[0]:
                self._show(fragment.weight, fragment)

    def _show(self, weight: Weight, fragment: Fragment) -> None:
        """Show the present states of *weight*, of which *fragment* is the first."""
        present = dict.get(self.shown, weight.parameter)
        if weight.shown is None:
            weight.shown = ShownState(weight, saved.check, self._settle)
        elif weight.shown.shows(fragment) and present is (
            weight.shown if dict.__len__(weight.shown) else None
        ):
            return
        weight.placeholders = {
            key: self._placeholder(fragment, key, form)
            for key, form in saved.forms(fragment).items()
        }
        whole = saved.in_place_of_leaves(weight, weight.placeholders, lambda small: small)
        weight.shown.show(whole, fragment)
        if dict.__len__(weight.shown):
            dict.__setitem__(self.shown, weight.parameter, weight.shown)
        else:
            dict.pop(self.shown, weight.parameter, None)

    def _placeholder(self, fragment: Fragment, key: Key, form: torch.Tensor) -> torch.Tensor:
        """The present placeholder of a state if it has this *form*, or a new one."""
        weight = fragment.weight
        present = weight.placeholders.get(key)
        if present is not None:
            part = local(present)
            if (part.dtype, part.shape, part.stride()) == (form.dtype, form.shape, form.stride()):
                return present
        made = StateOnDrive(self._source, weight, key, form, fragment.bucket.home)
        return made if key in fragment.rest else like(weight.parameter, made)

    def take_up(self) -> None:
        """Store the program's changes of `shown`."""
        owner = self._owner
        given = {}
        for weight in owner.binding.weights:
            state = dict.get(self.shown, weight.parameter, {})
            if weight.fragments and (
                bool(state) if weight.shown is None else weight.shown.differs_from(state)
            ):
                given[weight] = state
        if given:
            self.restore(self._checked(given))
        self.were_used = False
        if owner.updated:
            return
        # `shown` has the small values of the first fragment only, and the program may have changed
        # them in place
        for weight in owner.binding.weights:
            for fragment in weight.fragments[1:]:
                if fragment.bucket.layout is not None:  # an aborted first step may leave it without
                    there = set(map(top, fragment.leaves))
                    small = {key: one for key, one in weight.states.items() if key not in there}
                    fragment.states.update(copy.deepcopy(small))

    def of_unbound(self, weights: Sequence[Weight]) -> dict[Weight, dict[str, Any]]:
        """The states shown of *weights*, which are not bound yet. Raises: UsageError."""
        given = {weight: dict.get(self.shown, weight.parameter) for weight in weights}
        return self._checked(
            {weight: state for weight, state in given.items() if state and weight.fragments}
        )

    def _checked(self, given: Mapping[Weight, Any]) -> dict[Weight, dict[str, Any]]:
        for weight, state in given.items():
            saved.check(state, weight)
        copies = {weight: dict(state) for weight, state in given.items()}
        self._owner.bucketing.check_keys(copies, self._owner.groups)
        return copies

    def restore(
        self,
        given: Mapping[Weight, dict[str, Any]],
        *,
        bound_again: bool = False,
        loaded: bool = False,
    ) -> None:
        """Store the states *given*. If their parameters are *bound again*, dtypes stay as torch has
        them, and masters follow the parameters. *loaded* states get the dtypes that load_state_dict
        of torch gives them.
        """
        owner = self._owner
        owner.drain()
        with owner.health.out_of_sync("states were being loaded"):
            for weight, state in given.items():
                if not weight.fragments:  # until the parameter has a bucket
                    dict.pop(self.shown, weight.parameter, None)
                    if state:
                        dict.__setitem__(self.shown, weight.parameter, state)
                weight.updates += 1
            for bucket in owner.binding.buckets:
                if any(fragment.weight in given for fragment in bucket.fragments):
                    keeps = bound_again and owner.bucketing.goes_on_with(
                        bucket, given, owner.groups
                    )
                    saved.restore(
                        owner.updater,
                        bucket,
                        given,
                        owner.groups,
                        keep_dtypes=keeps,
                        loaded=loaded,
                        are_older=bound_again,
                    )
                    self.files.drop()
                    self.show(bucket)

    def bring(self, plan: Plan) -> None:
        """Replace placeholders of states in the buckets of *plan* by tensors, mapped from an
        unnamed file.
        """
        weights = [weight for weight in plan.weights if weight.fragments]
        collected = saved.collect(
            self._owner.updater, plan.buckets, weights, self._owner.tier.paths[0]
        )
        found = dict(zip(weights, map(tensors, collected), strict=True))
        for parameter, state in list(dict.items(self.shown)):
            brought = {}
            for leaf in tensors(state).values() if isinstance(state, dict) else ():
                one = local(leaf)
                if isinstance(one, StateOnDrive) and one.weight in found and one.is_current:
                    whole = found[one.weight].get(one.key)
                    if whole is not None:
                        brought[id(leaf)] = one.of(local(whole)) if one.ways else whole
            if brought:
                dict.__setitem__(self.shown, parameter, replaced(dict.copy(state), brought))

    def detach(self, weights: Iterable[Weight]) -> None:
        """Make `shown` independent of *weights*, whose buckets are discarded."""
        for weight in weights:
            state = dict.get(self.shown, weight.parameter)
            if state is not None and state is weight.shown:
                state = dict.copy(state)
                dict.__setitem__(self.shown, weight.parameter, state)
            if state and Form.of(weight.parameter).dtype != weight.form.dtype:
                # the cast parameter counts, not its old master
                state.pop(MASTER, None)

    def read(self, weight: Weight, key: Key) -> torch.Tensor:
        """A copy of a state, on the device of the parameter. Raises: UsageError if it is gone."""
        first = weight.fragments[0]
        form = saved.forms(first).get(key)
        if form is None:
            raise UsageError(f"the parameter has no state {key!r} any more")
        whole = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype)
        for fragment in [first] if key in first.rest else weight.fragments:
            with self._owner.updater.reading(fragment.bucket) as find:
                values = in_a_row(find(fragment, key))
                in_a_row(whole)[fragment.start :][: values.numel()].copy_(values)
        return whole.to(first.bucket.home)

    def write(self, weight: Weight, key: Key, values: torch.Tensor) -> None:
        """Replace a state."""
        self.take_up()
        placeholder = weight.placeholders[key]
        self.restore({weight: replaced(dict(weight.shown), {id(placeholder): values})})
