"""`Binding`: the parameters that an `NVMeOptimizer` is bound to, and their buckets.

As `torch.optim` reads `param_groups` at every step, `differs` detects a change, `plan` finds the
buckets that share a changed parameter, and `release`, `admit` and `commit` replace these buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError, UsageError
from ..sizes import PLACES
from ..swap.tier import Tier
from .bucketing import Bucketing
from .buckets import Bucket, Form, Weight, is_distributed, local, local_as_it_is, offset_of
from .budget import Budget
from .options import When
from .update import Updater

Groups = Sequence[Mapping[str, Any]]
Options = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a new binding replaces: *weights*, and the *buckets* that share parameters with them.
    *places*: the index of the group by the id of each parameter.
    """

    places: Mapping[int, int]
    weights: Sequence[Weight]
    buckets: Sequence[Bucket]

    @property
    def bound_again(self) -> list[Weight]:
        """The weights whose parameters are still in the groups."""
        return [weight for weight in self.weights if id(weight.parameter) in self.places]

    def updated_weights(self, updated: Container[Bucket]) -> set[Weight]:
        """The weights whose buckets are all *updated*. Raises: UsageError if some of them are."""
        made = {
            weight: {fragment.bucket in updated for fragment in weight.fragments}
            for weight in self.bound_again
        }
        if any(len(found) > 1 for found in made.values()):
            raise UsageError(
                "a parameter was moved, cast or replaced when a step that failed had updated a part of it: undo that and call step() again, or load "
                "a checkpoint"
            )
        return {weight for weight, found in made.items() if True in found}


@dataclasses.dataclass(eq=False)
class Binding:
    """Makes buckets by *bucketing*, and reserves *budget* and *tier* for them; *weights* are in the
    order of the groups. *share_room*: see `ProvisionalUpdates`.
    """

    bucketing: Bucketing
    budget: Budget
    tier: Tier
    updater: Updater
    when: When
    share_room: Callable[[Sequence[Bucket], int], int]
    weights: list[Weight] = dataclasses.field(default_factory=list, init=False)
    buckets: list[Bucket] = dataclasses.field(default_factory=list, init=False)
    _second_bytes: int = dataclasses.field(default=0, init=False)  # of second versions of values
    _by_id: dict[int, Weight] = dataclasses.field(default_factory=dict, init=False)
    _is_made: bool = dataclasses.field(default=False, init=False)

    def of(self, parameter: torch.Tensor) -> Weight | None:
        """The weight of *parameter*; None if it is not bound."""
        return self._by_id.get(id(parameter))

    def differs(self, groups: Groups, *, forms: bool) -> bool:
        """Whether *groups* differ from the bound ones, or with *forms* a parameter changed."""
        return not self._is_made or any(
            there is None
            or weight is None
            or there[1] is not weight.parameter
            or there[0] != weight.group
            or (forms and not weight.is_as_bound)
            for there, weight in itertools.zip_longest(parameters_of(groups), self.weights)
        )

    def plan(self, groups: Groups) -> Plan:
        """Find the weights and buckets to replace for *groups*. Raises: UsageError."""
        places: dict[int, int] = {}
        for index, parameter in parameters_of(groups):
            if id(parameter) in places:
                raise UsageError(
                    "a parameter appears more than once in a group: list each parameter once"
                )
            places[id(parameter)] = index
        stale = {
            weight
            for weight in self.weights
            if id(weight.parameter) not in places or not weight.is_as_bound
        }
        for bucket in self.buckets:
            now = {
                fragment.weight: places.get(id(fragment.weight.parameter))
                for fragment in bucket.fragments
            }
            if len(set(now.values())) > 1 or len(bucket.groups) > 1:
                stale.update(weight for weight, index in now.items() if index != weight.group)
        if self.bucketing.together and (stale or places.keys() - self._by_id.keys()):
            stale.update(self.weights)
        while True:
            buckets = {fragment.bucket for weight in stale for fragment in weight.fragments}
            sharing = {fragment.weight for bucket in buckets for fragment in bucket.fragments}
            if sharing <= stale:
                break
            stale |= sharing
        return Plan(
            places,
            [weight for weight in self.weights if weight in stale],
            [bucket for bucket in self.buckets if bucket in buckets],
        )

    def release(self, plan: Plan) -> None:
        """Discard the buckets of *plan* and their states. If no bucket is left, reset the tier."""
        gone, dissolved = set(plan.weights), set(plan.buckets)
        self.buckets = [bucket for bucket in self.buckets if bucket not in dissolved]
        self.weights = [weight for weight in self.weights if weight not in gone]
        self._by_id = {id(weight.parameter): weight for weight in self.weights}
        for weight in plan.weights:
            weight.release()
        for weight in self.weights:
            weight.group = plan.places[id(weight.parameter)]
        if not self.buckets:
            self.bucketing.together = False
            self.budget.forget()
            self._second_bytes = 0
            self.tier.cap_bytes = self.budget.cap_bytes
            if self.tier.counters() is not None:
                self.tier.start_over()
        elif plan.buckets:
            self.tier.forget([bucket.name for bucket in plan.buckets])
            self.tier.give_back(_room_bytes(plan.buckets))

    def admit(
        self, groups: Groups, options: Options, plan: Plan, updated: Collection[Weight]
    ) -> tuple[list[Weight], list[Bucket]]:
        """Make buckets of the unbound parameters of *groups*, after `release` of *plan*, and room
        for them; `commit` binds them. Weights that were *updated* in this step do not share a
        bucket with others.
        """
        before = {id(weight.parameter): weight for weight in plan.bound_again}
        elements = sum(local(one).numel() for _, one in parameters_of(groups) if one.requires_grad)
        weights: list[Weight] = []
        buckets: list[Bucket] = []
        for index, group in enumerate(groups):
            new = [one for one in group["params"] if id(one) not in self._by_id]
            if new:
                made = self.bucketing.admit(
                    index, new, options(index, group), before, updated, elements
                )
                weights += made[0]
                buckets += made[1]
        buckets = self.bucketing.joined(buckets)
        self._make_room(buckets, _room_bytes(plan.buckets) if self.buckets else 0)
        return weights, buckets

    def commit(self, groups: Groups, weights: Sequence[Weight], buckets: Sequence[Bucket]) -> None:
        """Bind the weights and buckets that `admit` has made for *groups*."""
        self._by_id.update({id(weight.parameter): weight for weight in weights})
        self.weights = [self._by_id[id(parameter)] for _, parameter in parameters_of(groups)]
        self.buckets += buckets
        self._is_made = True
        for weight in weights:
            weight.offset = offset_of(weight.parameter)
        for number, weight in enumerate(self.weights):
            weight.number = number

    def check_trains(self) -> None:
        """Check that the optimizer has parameters to update. Raises: UnsupportedError."""
        if not self.buckets and any(weight.form.device.type == "meta" for weight in self.weights):
            raise UnsupportedError(
                "all parameters of the optimizer are on the meta device, and to_empty() makes others in their place: put those into param_groups before the "
                "first step, or make the optimizer of them"
            )

    def _make_room(self, buckets: Sequence[Bucket], freed_bytes: int) -> None:
        trained = [bucket for bucket in buckets if bucket.trained]
        tier, when = self.tier, self.when
        nbytes = self.bucketing.required_bytes(trained)
        tier.cap_bytes = self.budget.values_bytes
        self.updater.slack_bytes = self.budget.cap_bytes - self.budget.values_bytes
        tier.require_memory(nbytes)
        # the tier holds nothing else, and all sizes are known
        foretold = not (
            self.buckets or when.accumulate or any(bucket.traits.rest for bucket in trained)
        )
        in_order = reversed(trained) if when.step_in_backward else trained
        sizes = {bucket.name: bucket.room_bytes for bucket in in_order if bucket.room_bytes}
        tier.require_space(
            max(nbytes - freed_bytes, 0),
            largest=max(sizes.values(), default=0) if foretold else None,
            twice=max(nbytes - tier.cap_bytes, 0) if when.is_provisional else 0,
            growth=self.bucketing.growth_bytes(trained),
        )
        if when.is_provisional:
            tier.give_back(self._second_bytes)
            left = tier.cap_bytes - tier.needed_bytes - nbytes
            self._second_bytes = self.share_room([*self.buckets, *trained], left)
        tier.require(nbytes + self._second_bytes)
        if foretold:
            on_cpu = all(bucket.device.type == "cpu" for bucket in trained)
            tier.foretell(sizes, at_once=1 if on_cpu else PLACES)


def parameters_of(groups: Groups) -> Iterator[tuple[int, torch.Tensor]]:
    """All parameters of *groups*, each with the index of its group."""
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            yield index, parameter


def may_be_replaced(groups: Groups) -> bool:
    """Whether the parameters of *groups* will probably be replaced: they are on the meta device, or
    plain tensors on one of several ranks, as before FSDP2.
    """
    dist = torch.distributed
    ranks = dist.is_available() and dist.is_initialized()
    return any(
        local_as_it_is(parameter).device.type == "meta"
        or (
            ranks
            and not is_distributed(parameter)
            and not getattr(parameter, "_fsdp_flattened", False)  # FSDP1 has replaced it already
        )
        for _, parameter in parameters_of(groups)
    )


def check_resized(weights: Sequence[Weight], states: dict[Any, Any], groups: Groups) -> None:
    """Check that none of *weights* has *states* of another shape. Raises: UsageError."""
    for weight in weights:
        now, before = Form.of(weight.parameter).shape, weight.form.shape
        if weight.fragments and now != before and dict.get(states, weight.parameter):
            raise UsageError(
                f"{_name_of(weight.parameter, groups)} has become one of shape {list(now)}, and its states are of shape {list(before)}: remove them by "
                "optimizer.state.pop(parameter), and the next step makes new ones"
            )


def _name_of(parameter: torch.Tensor, groups: Groups) -> str:
    for index, group in enumerate(groups):
        for place, one in enumerate(group["params"]):
            if one is parameter:
                names = group.get("param_names")
                return (
                    f"parameter {names[place]!r}"
                    if names
                    else f"parameter {place} of group {index}"
                )
    return "a parameter"


def _room_bytes(buckets: Sequence[Bucket]) -> int:
    return sum(bucket.room_bytes for bucket in buckets)
