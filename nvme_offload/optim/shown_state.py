"""`optimizer.state`: dictionaries that wait for pending updates before every use."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from ..optimizer_states.tree import content
from .placeholders import is_on_drive, whole_or_copied

if TYPE_CHECKING:
    from .buckets import Fragment, Weight

# The methods of a dictionary, except constructors.
_USES = (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__"),
    *("__ne__", "__or__", "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "get"),
    *("items", "keys", "pop", "popitem", "setdefault", "update", "values"),
)


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
