"""`StepOptions`: what is in parameter groups besides the parameters, through one step; and the forms that parameters are given in."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError

_NOT_OPTIONS = {"params", "param_names"}


class StepOptions:
    """The options of groups as they were when a step began, and as the inner optimizers left them.

    An optimizer that changes its group does so once a step, whatever the bundles are: each starts from the same, and the last is taken over.
    """

    def __init__(self) -> None:
        self._before: dict[int, dict[str, Any]] = {}
        self._after: dict[int, Mapping[str, Any]] = {}

    def of(self, index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of *group*, which is that of *index*. Raises: UnsupportedError for those that cannot be used here."""
        if index not in self._before:
            for key in ("capturable", "differentiable"):
                if group.get(key):
                    raise UnsupportedError(f"{key}=True cannot be used with NVMeOptimizer: its steps wait for a drive, which no graph has in it")
            self._before[index] = copy.deepcopy({key: value for key, value in group.items() if key not in _NOT_OPTIONS})
        return dict(self._before[index])

    def left(self, index: int, options: Mapping[str, Any]) -> None:
        """A bundle of the group of *index* has been updated, and left these *options*."""
        self._after[index] = options

    def end(self, groups: Sequence[dict[str, Any]]) -> None:
        """The step is over: let *groups* have what has changed."""
        for index, options in self._after.items():
            before = self._before[index]
            for key, value in options.items():
                if key not in _NOT_OPTIONS and not (key in before and same(before[key], value)):
                    groups[index][key] = value
        self.forget()

    def forget(self) -> None:
        """Leave the groups as they are."""
        self._before.clear()
        self._after.clear()


def materialised(params: Any) -> Any:
    """*params* of an optimizer, with lists where there are iterators that end."""
    if isinstance(params, torch.Tensor):
        return params
    entries = list(params)
    for entry in entries:
        if isinstance(entry, dict) and not isinstance(entry.get("params"), torch.Tensor | set | None):
            entry["params"] = list(entry["params"])
    return entries


def first_tensor(params: Any) -> torch.Tensor:
    """The first parameter that *params*, in any of the forms that an optimizer takes, has; some tensor where it has none."""
    for entry in [] if isinstance(params, torch.Tensor) else params:
        inner = entry.get("params", ()) if isinstance(entry, Mapping) else (entry,)
        for item in (inner,) if isinstance(inner, torch.Tensor) else inner or ():
            tensor = item[-1] if isinstance(item, tuple) else item
            if isinstance(tensor, torch.Tensor):
                return tensor
    return torch.zeros(1)


def same(one: Any, other: Any) -> bool:
    """Whether two values of an option are equal, tensors or not."""
    if torch.is_tensor(one) or torch.is_tensor(other):
        return torch.is_tensor(one) and torch.is_tensor(other) and one.shape == other.shape and torch.equal(one, other)
    return bool(one == other)
