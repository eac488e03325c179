"""`OncePerStep` makes the calls for all sub-groups count as one step of an optimizer.

DeepSpeed calls the optimizer's `step` once for each sub-group. Counters outside the states of
parameters, such as `group["k"]` of schedule-free optimizers, would advance with every call, and so
would the loss scale of `torch_autocast`. Here every call starts from the values at the beginning of
the step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
from collections import deque
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from ..errors import UnsupportedError
from ..optimizer_states.traits import UNIT, alike, known, raw_step

# Steps of a trial. Optimizers that estimate a distance (Prodigy) change it in the second step.
_TRIED = 8
# Attributes that torch's schedulers set on a `step` that they wrap; they differ by release.
_SCHEDULERS = ("_wrapped_by_lr_sched", "_with_counter")
_PLAIN = (int, float, complex, str, bool, type(None))
# Keys that snapshots skip: parameters, and attributes that `_snapshot` handles separately.
_SKIPPED = {"params", "param_groups", "state"}

_log = logging.getLogger(__name__)


class OncePerStep:
    """The calls of *optimizer*'s `step` for the sub-groups of one training step.

    It covers the options of all groups, the optimizer's attributes, and the entries of its state
    with string keys: numbers, strings, tensors of up to `UNIT` elements, lists and dictionaries.

    Attributes: *conflict*, the name of the first value that differs between two calls for one
    group, "" for none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.conflict = ""
        self._optimizer = optimizer
        self._counts = _may_count(optimizer)
        self._before = self._snapshot(range(len(optimizer.param_groups)))
        self._after: dict[int, _Snapshot] = {}  # by group

    @contextlib.contextmanager
    def sub_group(self, group: int) -> Iterator[None]:
        """Context for the call for a sub-group of the parameter group with index *group*."""
        self._before.restore()
        yield
        after = self._snapshot([group])
        earlier = self._after.setdefault(group, after)
        self.conflict = self.conflict or after.difference(earlier)

    def undo(self) -> None:
        """Restore the values at the beginning of the step."""
        self._before.restore()

    def end(self) -> None:
        """Set each group to the values that the calls for its own sub-groups left."""
        for after in self._after.values():
            after.restore()

    def _snapshot(self, groups: range | list[int]) -> _Snapshot:
        optimizer = self._optimizer
        if not self._counts:
            return _Snapshot([])
        return _Snapshot(
            [
                vars(optimizer),
                optimizer.state,
                *(optimizer.param_groups[number] for number in groups),
            ]
        )


def has_hooks(optimizer: Any) -> bool:
    """Whether *optimizer* has hooks that run before or after its steps."""
    module: Any = sys.modules["torch.optim.optimizer"]
    return any(
        getattr(optimizer, f"_optimizer_step_{place}_hooks", None)
        or getattr(module, f"_global_optimizer_{place}_hooks", None)
        for place in ("pre", "post")
    )


def replaces_step(optimizer: Any) -> bool:
    """Whether the method `step` of *optimizer* was replaced, other than by torch's schedulers."""
    step = vars(optimizer).get("step")
    return step is not None and not any(hasattr(step, mark) for mark in _SCHEDULERS)


def _may_count(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of *optimizer* may change more than its parameters and their states. Steps of
    torch's and DeepSpeed's optimizers do not; for 1,000 sub-groups, snapshots would cost as much as
    these steps.
    """
    return (
        known(optimizer) is None
        or not type(optimizer).__module__.startswith(("torch.optim.", "deepspeed.ops."))
        or has_hooks(optimizer)
        or replaces_step(optimizer)
    )


@contextlib.contextmanager
def one_step(optimizer: torch.optim.Optimizer, sub_groups: int) -> Iterator[OncePerStep]:
    """Context of a step that calls *optimizer* for each sub-group. An exception undoes it."""
    if sub_groups > 1 and has_hooks(optimizer):
        _warn_of_hooks(type(optimizer).__name__, sub_groups)
    once = OncePerStep(optimizer)
    try:
        yield once
        once.end()
    except BaseException:
        once.undo()
        raise


@functools.cache
def _warn_of_hooks(name: str, count: int) -> None:
    _log.warning(
        "hooks of the step of %s are called %d times in a step, once for each sub-group of this rank: do not count steps in them",
        name,
        count,
    )


def depends_on_values(optimizer: torch.optim.Optimizer, name: str) -> UnsupportedError:
    """The error for an *optimizer* that computes *name* from all of its parameters."""
    return UnsupportedError(
        f"{type(optimizer).__name__} computes {name!r} from all parameters together, and ZeRO-3 updates them one sub-group after another: "
        'pass one parameter group and set "sub_group_size" to at least the elements of the model, or use another optimizer'
    )


def computed_from_values(optimizer: torch.optim.Optimizer) -> str:
    """The name of an option or attribute that *optimizer* computes in a step from the values of its
    parameters, such as Prodigy's "d"; "" for none. Found by updating two small parameters.
    """
    if known(optimizer) is not None:
        return ""
    for group in optimizer.param_groups:
        samples = [
            torch.nn.Parameter(
                torch.randn(
                    UNIT,
                    generator=torch.Generator().manual_seed(seed),
                    dtype=torch.float32,
                    device="cpu",
                )
                * 10.0**-seed
            )
            for seed in range(2)
        ]
        # An optimizer's constructor and step may require and raise anything.
        with contextlib.suppress(Exception):
            made = alike(optimizer, group)(samples)
            for _ in range(_TRIED):
                step = OncePerStep(made)
                for sample in samples:
                    sample.grad = sample.detach().clone()
                    made.param_groups[0]["params"] = [sample]
                    with step.sub_group(0):
                        raw_step(made)(made)
                step.end()
                if step.conflict:
                    return step.conflict
    return ""


def update_scale(scaler: torch.amp.GradScaler, found_inf: bool) -> None:
    """Update the scale of *scaler* after a step. *found_inf*: a gradient was not finite."""
    sample = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
    sample.grad = torch.full_like(sample, torch.inf if found_inf else 0.0, requires_grad=False)
    scaler.scale(sample)  # creates the scale of a scaler that has scaled no loss
    scaler.unscale_(torch.optim.SGD([sample]))
    scaler.update()


class _Snapshot:
    """The current contents of the dictionaries *roots*, at any depth."""

    def __init__(self, roots: list[MutableMapping[Any, Any]]) -> None:
        self._containers: list[tuple[Any, Any]] = []  # each with a shallow copy
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []  # each with a copy
        self._leaves: dict[tuple[Any, ...], Any] = {}  # numbers and copies of tensors, by path
        self._seen: set[int] = set()
        for root in roots:
            self._take(root, ())

    def restore(self) -> None:
        """Write the contents back into the same objects."""
        for container, content in self._containers:
            if isinstance(container, MutableMapping):
                for key in [key for key in container if _is_taken(key) and key not in content]:
                    del container[key]
                for key, value in content.items():
                    if key not in container or container[key] is not value:
                        container[key] = value
            elif not _same_objects(container, content):
                container.clear()
                container.extend(content)
        for tensor, copied in self._tensors:
            if not _same_bits(tensor, copied):
                tensor.detach().copy_(copied)

    def difference(self, other: _Snapshot) -> str:
        """The name of the first value that *other* does not have; "" if there is none."""
        for path in {**self._leaves, **other._leaves}:
            one, two = self._leaves.get(path, path), other._leaves.get(path, path)
            tensors = isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
            if not (_same_bits(one, two) if tensors else one is two or repr(one) == repr(two)):
                return str(path[0])
        return ""

    def _take(self, value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, _PLAIN):
            self._leaves[path] = value
        elif isinstance(value, torch.Tensor):
            if value.numel() <= UNIT and value.layout is torch.strided and not value.requires_grad:
                self._tensors.append((value, value.detach().clone()))
                self._leaves[path] = self._tensors[-1][1]
        elif isinstance(value, dict | list | tuple | deque) and id(value) not in self._seen:
            self._seen.add(id(value))
            inside = (
                {key: inner for key, inner in value.items() if _is_taken(key)}
                if isinstance(value, dict)
                else dict(enumerate(value))
            )
            if not isinstance(value, tuple):
                self._containers.append((value, inside if isinstance(value, dict) else list(value)))
            for key, inner in inside.items():
                self._take(inner, (*path, key))


def _same_objects(container: Any, content: list[Any]) -> bool:
    return len(container) == len(content) and all(map(operator.is_, container, content))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or (
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and bool(((one == other) | ((one != one) & (other != other))).all())
    )


def _is_taken(key: Any) -> bool:
    return isinstance(key, str) and key not in _SKIPPED
