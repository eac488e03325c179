"""The uses of a step of ZeRO-3 with everything on a drive, and of plain rounds over values. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from sweeps.models import Expert, Tensor

PARAMETER_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 2, 4.15  # of an element; the states are "compact"
# parameters up to this size stay on the GPU: stage3_param_persistence_threshold
PERSISTENT_ELEMENTS = 10**5
_SUB_GROUP_ELEMENTS = 1 << 26
_LEAST_SUB_GROUPS = 64  # so that a small model has several too
_UNIT = 4096

Verb = Literal["create", "need", "release", "change", "drop"]


class Event(NamedTuple):
    """An event of the value *name* of *nbytes*: "create" and "need" begin a use; "release",
    "change" and "drop" end it.
    """

    verb: Verb
    name: str
    nbytes: int
    phase: str


class Group(NamedTuple):
    """Tensors that are updated together, with one value for their states."""

    name: str
    tensors: tuple[Tensor, ...]
    expert: Expert | None

    @property
    def elements(self) -> int:
        """Of all its tensors."""
        return sum(tensor.elements for tensor in self.tensors)


def groups_of(
    found: Iterable[tuple[Tensor, Expert | None]], persistent_elements: int = PERSISTENT_ELEMENTS
) -> list[Group]:
    """Sub-groups of consecutive tensors, separate ones per expert, without tensors that stay on the
    GPU.
    """
    found = list(found)
    largest = min(
        _SUB_GROUP_ELEMENTS, sum(tensor.elements for tensor, _ in found) // _LEAST_SUB_GROUPS
    )
    groups: list[Group] = []
    by_expert: dict[Expert, int] = {}
    for tensor, expert in found:
        if tensor.elements <= persistent_elements:
            continue
        last = groups[-1] if groups else None
        if expert is not None:
            place = by_expert.setdefault(expert, len(groups))
        elif (
            last is not None and last.expert is None and last.elements + tensor.elements <= largest
        ):
            place = len(groups) - 1
        else:
            place = len(groups)
        if place == len(groups):
            groups.append(Group(f"s{place}", (tensor,), expert))
        else:
            groups[place] = groups[place]._replace(tensors=(*groups[place].tensors, tensor))
    return groups


def made(groups: Sequence[Group]) -> list[Event]:
    """The creation of parameters and states."""
    events: list[Event] = []
    for group in groups:
        for name, nbytes in (
            *((f"p.{tensor.name}", _bytes(tensor, PARAMETER_BYTES)) for tensor in group.tensors),
            (group.name, _states(group)),
        ):
            events += [Event("create", name, nbytes, "init"), Event("change", name, nbytes, "init")]
    return events


def step(groups: Sequence[Group], share_of_experts: float, chance: random.Random) -> list[Event]:
    """A training step: forward, backward with gradients, and the update. A skewed random share of
    the experts of each layer takes part.
    """
    layers: dict[str, list[Group]] = {}
    for group in groups:
        if group.expert is not None:
            layers.setdefault(group.expert.layer, []).append(group)
    chosen = {
        group.name
        for experts in layers.values()
        for group in _skewed(experts, share_of_experts, chance)
    }
    active = [group for group in groups if group.expert is None or group.name in chosen]
    events: list[Event] = []
    for group in active:
        for tensor in group.tensors:
            name, nbytes = f"p.{tensor.name}", _bytes(tensor, PARAMETER_BYTES)
            events += [
                Event("need", name, nbytes, "forward"),
                Event("release", name, nbytes, "forward"),
            ]
    for group in reversed(active):
        for tensor in reversed(group.tensors):
            name, nbytes = f"p.{tensor.name}", _bytes(tensor, PARAMETER_BYTES)
            gradient = (f"g.{tensor.name}", _bytes(tensor, GRADIENT_BYTES), "backward")
            events += [Event("need", name, nbytes, "backward"), Event("create", *gradient)]
            events += [Event("release", name, nbytes, "backward"), Event("change", *gradient)]
    for group in active:
        states = (group.name, _states(group), "update")
        events.append(Event("need", *states))
        for tensor in group.tensors:
            gradient = (f"g.{tensor.name}", _bytes(tensor, GRADIENT_BYTES), "update")
            parameter = (f"p.{tensor.name}", _bytes(tensor, PARAMETER_BYTES), "update")
            events += [
                Event("need", *gradient),
                Event("need", *parameter),
                Event("drop", *gradient),
                Event("change", *parameter),
            ]
        events.append(Event("change", *states))
    return events


def rounds(
    count: int, there_and_back: bool, changed: bool, seed: int = 0
) -> tuple[list[Event], list[Event]]:
    """*count* values of mixed sizes: their creation, and a round over them in order, with the way
    back if *there_and_back*.
    """
    chance = random.Random(seed)
    values = [
        (str(number), int(2 ** chance.uniform(16, 22)) // _UNIT * _UNIT) for number in range(count)
    ]
    begin = [
        event
        for name, nbytes in values
        for event in (Event("create", name, nbytes, "init"), Event("change", name, nbytes, "init"))
    ]
    order = [*values, *reversed(values)] if there_and_back else values
    end: Verb = "change" if changed else "release"
    return begin, [
        event
        for name, nbytes in order
        for event in (Event("need", name, nbytes, "round"), Event(end, name, nbytes, "round"))
    ]


def most_in_use(events: Iterable[Event]) -> int:
    """The peak of bytes in concurrent use."""
    now = most = 0
    for event in events:
        now += event.nbytes if event.verb in ("create", "need") else -event.nbytes
        most = max(most, now)
    return most


def _skewed(experts: Sequence[Group], share: float, chance: random.Random) -> list[Group]:
    """A *share* of the experts, the first ones more often."""
    luck = {
        group.name: chance.random() ** (1 + 4 * place / len(experts))
        for place, group in enumerate(experts)
    }
    return sorted(experts, key=lambda group: luck[group.name], reverse=True)[
        : max(int(share * len(experts)), 1)
    ]


def _bytes(tensor: Tensor, each: float) -> int:
    return -(-int(tensor.elements * each) // _UNIT) * _UNIT


def _states(group: Group) -> int:
    return -(-int(group.elements * STATE_BYTES) // _UNIT) * _UNIT
