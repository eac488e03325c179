"""`States`: shows the states of buckets in `optimizer.state`, dictionaries that wait for pending updates
before every use, and stores changes of it.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UsageError, known
from ..io.archive import MappedFiles
from ..optimizer_states.tree import Key, content, in_a_row, replaced, tensors, top
from . import saved
from .binding import Plan
from .buckets import Bucket, Form, Fragment, Weight, like, local
from .placeholders import StateOnDrive, is_on_drive, whole_or_copied
from .values import MASTER

if TYPE_CHECKING:
    from .steps import Steps

# The methods of a dictionary, except constructors.
_USES = (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__"),
    *("__ne__", "__or__", "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "get"),
    *("items", "keys", "pop", "popitem", "setdefault", "update", "values"),
)


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
        with self._owner.between_steps():
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
        with self._owner.between_steps():
            self.take_up()
            placeholder = weight.placeholders[key]
            self.restore({weight: replaced(dict(weight.shown), {id(placeholder): values})})


class ShownStates(defaultdict[Any, Any]):
    """The states of all parameters. Every use first calls *settle*, which makes pending updates.
    *own* returns the state to set for a parameter in place of a given one.
    """

    def __init__(self, settle: Callable[[], None], own: Callable[[Any, Any], Any]) -> None:
        super().__init__(dict)
        self._settle, self._own = settle, own

    def __setitem__(self, parameter: Any, state: Any) -> None:
        super().__setitem__(parameter, self._own(parameter, state))

    def copy(self) -> Any:
        """A plain dictionary."""
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


class ShownState(dict[Any, Any]):
    """The state of *weight*: small values, and a `StateOnDrive` for each offloaded state. *check*
    is called with added values, *settle* before every use.
    """

    def __init__(
        self,
        weight: Weight,
        check: Callable[[Mapping[Any, Any], Weight], None],
        settle: Callable[[], None],
    ) -> None:
        super().__init__()
        self._weight, self._check, self._settle = weight, check, settle
        # the leaves, each with its path
        self._shown: list[tuple[tuple[Any, ...], Any]] = []
        self._guards: list[Any] = []
        # the arrangement of the fragment that was shown, and the leaves of its states
        self._arrangement: tuple[Any, ...] = ()
        self._leaves: list[tuple[tuple[Any, ...], Any]] = []

    def show(self, state: Mapping[Any, Any], fragment: Fragment) -> None:
        """Replace the content by *state*, made from *fragment*."""
        dict.clear(self)
        dict.update(self, state)
        self._shown = content(state)
        self._arrangement, self._leaves = _arrangement(fragment), content(fragment.states)
        # torch.utils.swap_tensors would exchange these objects unnoticed. It refuses tensors that
        # have weak references.
        self._guards = [weakref.ref(leaf) for _, leaf in self._shown if is_on_drive(leaf)]

    def shows(self, fragment: Fragment) -> bool:
        """Whether `show` would not change the content."""
        return _arrangement(fragment) == self._arrangement and _same(
            content(fragment.states), self._leaves
        )

    def differs_from(self, state: Mapping[Any, Any]) -> bool:
        """Whether *state*, maybe this object, differs from the content that `show` has set."""
        if state is not self:
            return bool(state or self._shown)
        # dict.copy would call the methods of this class, which settle for every key.
        return not _same(content(dict(dict.items(self))), self._shown)

    def __setitem__(self, key: Any, value: Any) -> None:
        own = whole_or_copied({key: value})
        self._check(own, self._weight)
        super().__setitem__(key, own[key])

    update: Any = MutableMapping.update  # by __setitem__
    setdefault: Any = MutableMapping.setdefault

    def __ior__(self, other: Any) -> ShownState:  # type: ignore[misc]
        self.update(other)
        return self

    def copy(self) -> dict[Any, Any]:
        """A plain dictionary."""
        return dict(self.items())

    def __deepcopy__(self, memo: Any) -> dict[Any, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


def _arrangement(fragment: Fragment) -> tuple[Any, ...]:
    """The properties of a fragment's states on which their placeholders depend."""
    layout = fragment.bucket.layout
    dtypes = {} if layout is None else {key: layout.states[key].dtype for key in fragment.keys}
    has_master = layout is not None and layout.master is not None and fragment.stepped
    return fragment.keys, fragment.rest, dtypes, has_master and fragment.strides


def _same(
    leaves: Sequence[tuple[tuple[Any, ...], Any]], others: Sequence[tuple[tuple[Any, ...], Any]]
) -> bool:
    """Whether both have the same objects in the same places."""
    return len(leaves) == len(others) and all(
        one is other and way == where
        for (way, one), (where, other) in zip(leaves, others, strict=True)
    )


def _settling(method: Callable[..., Any]) -> Callable[..., Any]:
    def use(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return method(self, *args, **kwargs)

    return use


for _kind in (ShownStates, ShownState):
    for _name in _USES:
        setattr(_kind, _name, _settling(getattr(_kind, _name)))
