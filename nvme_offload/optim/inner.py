"""`Maker`: makes the inner optimizers. Each updates one bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def follow(groups: Sequence[dict[str, Any]], made: Sequence[Mapping[str, Any]]) -> None:
    """Copy to *groups* the options that the class has *made*, such as defaults by kind of group."""
    if len(groups) == len(made):
        for group, other in zip(groups, made, strict=True):
            for key, value in other.items():
                # the existing object may belong to the user
                if key not in ("params", "param_names") and not (
                    key in group and type(group[key]) is type(value)
                ):
                    group[key] = copy.deepcopy(value)


class Maker:
    """Makes inner optimizers the way the user made the optimizer of all parameters: of groups
    (*in_groups*) or of a list. *groups*: as the user gave them.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        kwargs: Mapping[str, Any],
        groups: Sequence[dict[str, Any]],
        *,
        in_groups: bool,
    ):
        self._class = optimizer_class
        self._kwargs = kwargs
        self._in_groups = in_groups
        self._options = {key for group in groups for key in group}

    def add(self, group: dict[str, Any]) -> None:
        """Note the options of a *group* that was added."""
        self._in_groups = True
        self._options |= group.keys()

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make an optimizer of *groups*."""
        if not self._in_groups and len(groups) == 1:
            made = self._class(groups[0]["params"], **self._kwargs)
            made.param_groups[0].update(
                {key: value for key, value in groups[0].items() if key != "params"}
            )
            return made
        # Some classes refuse the keys that schedulers add to a group.
        return self._class(
            [
                {key: value for key, value in group.items() if key in self._options}
                for group in groups
            ],
            **self._kwargs,
        )
