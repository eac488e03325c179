"""`StepOptions`: the options of parameter groups during one step; and functions for the forms in
which the user passes parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError
from .buckets import local

_NOT_OPTIONS = {"params", "param_names"}


class StepOptions:
    """The options of groups when a step began, and after the updates of the inner optimizers.

    An optimizer that changes its group does so once a step, however many buckets there are: the
    update of each bucket starts from the same options, and the options after the last one are kept.
    """

    def __init__(self) -> None:
        self._before: dict[int, dict[str, Any]] = {}
        self._after: dict[int, Mapping[str, Any]] = {}

    def of(self, index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of *group*, whose index is *index*. Raises: UnsupportedError for options that
        cannot be used here.
        """
        if index not in self._before:
            for key in ("capturable", "differentiable"):
                if group.get(key):
                    raise UnsupportedError(
                        f"{key}=True cannot be used with NVMeOptimizer: its steps wait for a drive, which no graph has in it"
                    )
            self._before[index] = copy.deepcopy(
                {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
            )
        return dict(self._before[index])

    def differ(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the options of *groups* have changed since the step began."""
        return bool(differences(self._before, {index: groups[index] for index in self._before}))

    def left(self, options: Mapping[int, Mapping[str, Any]]) -> None:
        """Record the *options* of groups, by index, after the update of a bucket."""
        self._after.update(options)

    def end(self, groups: Sequence[dict[str, Any]]) -> list[str]:
        """End the step: write changed options to *groups*, and return their names."""
        changed = differences(self._before, self._after)
        for index, key, value in changed:
            groups[index][key] = value
        self.forget()
        return sorted({key for _, key, _ in changed})

    def forget(self, indices: Iterable[int] | None = None) -> None:
        """Forget the options without writing them to groups: of all groups, or of *indices*."""
        for index in [*self._before, *self._after] if indices is None else indices:
            self._after.pop(index, None)  # first: an exception may come between the two
            self._before.pop(index, None)


def differences(
    before: Mapping[int, Mapping[str, Any]], after: Mapping[int, Mapping[str, Any]]
) -> list[tuple[int, str, Any]]:
    """The options, by group, that differ in *after* from *before*: index of the group, key and
    value.
    """
    return [
        (index, key, value)
        for index, options in after.items()
        for key, value in options.items()
        if key not in _NOT_OPTIONS
        and not (key in before[index] and same(before[index][key], value))
    ]


def materialised(params: Any) -> Any:
    """*params* of an optimizer, with lists in place of iterators."""
    if isinstance(params, torch.Tensor):
        return params
    entries = list(params)
    for entry in entries:
        if isinstance(entry, dict) and not isinstance(
            entry.get("params"), torch.Tensor | set | None
        ):
            entry["params"] = list(entry["params"])
    return entries


def samples_of(params: Any) -> list[Any]:
    """Small parameters in place of *params*, in any of the forms that an optimizer takes: one for
    each group, with the options of the group, or a single one if there are no groups.
    """
    entries = [] if isinstance(params, torch.Tensor) else list(params)
    if not any(isinstance(entry, Mapping) for entry in entries):
        return [_sample(entries)]
    groups = [
        {key: copy.deepcopy(value) for key, value in entry.items() if key not in _NOT_OPTIONS}
        for entry in entries
    ]
    return [
        {**group, "params": [_sample(entry.get("params", ()))]}
        for group, entry in zip(groups, entries, strict=True)
    ]


def _sample(items: Any) -> torch.Tensor:
    """A parameter with the number of dimensions and the device of the first tensor of *items*; an
    arbitrary one if there is none.
    """
    first = torch.zeros(1, dtype=torch.float32)
    for item in (items,) if isinstance(items, torch.Tensor) else items or ():
        tensor = item[-1] if isinstance(item, tuple) else item
        if isinstance(tensor, torch.Tensor):
            first = local(tensor)
            break
    device = None if first.is_meta else first.device
    shape = (1,) * max(first.dim(), 1)
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))


def same(one: Any, other: Any) -> bool:
    """Whether two values of an option are equal, tensors or not."""
    if torch.is_tensor(one) or torch.is_tensor(other):
        return (
            torch.is_tensor(one)
            and torch.is_tensor(other)
            and one.shape == other.shape
            and torch.equal(one, other)
        )
    return bool(one == other)
