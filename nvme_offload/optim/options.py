"""The options that users give: of `NVMeOptimizer`, of parameter groups during one step, and of the inner
optimizers; and the forms in which users pass parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch

from ..device.room import memory_of
from ..errors import UnsupportedError, UsageError
from .buckets import is_distributed, local

_NOT_OPTIONS = {"params", "param_names"}
# Free memory of a GPU below which parameters in host memory are updated on the CPU: three buckets
# in flight, each with 128 MiB of packed states, and the temporary tensors of one update.
_LEAST_FREE_BYTES = 1 << 30


_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class When:
    """When parameters are updated; see `NVMeOptimizer`. Raises: UsageError."""

    step_in_backward: bool | Literal["local", "provisional"]
    overlap_step: bool
    accumulate: Literal["host"] | None

    def __post_init__(self) -> None:
        if self.step_in_backward not in (False, True, "local", "provisional"):
            raise UsageError(
                f'step_in_backward must be False, True, "local" or "provisional", not {self.step_in_backward!r}'
            )
        if self.accumulate not in (None, "host"):
            raise UsageError(f'accumulate must be None or "host", not {self.accumulate!r}')
        if self.accumulate and (self.step_in_backward or self.overlap_step):
            raise UsageError(
                'accumulate="host" needs step_in_backward=False and overlap_step=False: the one leaves no gradients to accumulate, and the other keeps '
                "the gradients of a whole step on the device of the parameters"
            )

    @property
    def is_provisional(self) -> bool:
        """Whether `step` may undo updates of backward()."""
        return self.step_in_backward == "provisional"


class UpdateDevice:
    """Chooses the device on which each parameter is updated, by the user's *choice*.

    A parameter on a GPU is updated there. For a parameter in host memory "gpu" chooses the current
    CUDA device, and "auto" does so where FSDP2 computes with the parameter on a GPU
    (CPUOffloadPolicy); otherwise the parameter is updated on the CPU.

    Raises: UsageError where *choice* has no effect on this machine.
    """

    def __init__(self, choice: str) -> None:
        if choice not in ("auto", "gpu", "cpu"):
            raise UsageError(f'update_device must be "auto", "gpu" or "cpu", not {choice!r}')
        if choice == "gpu" and not torch.cuda.is_available():
            raise UsageError(
                'update_device="gpu" needs a CUDA device, and torch finds none: leave it out'
            )
        self._choice = choice
        self._logged = False
        self._has_memory: bool | None = None

    def of(self, parameter: torch.Tensor) -> torch.device:
        """The device on which *parameter* is updated. Raises: UsageError."""
        home = local(parameter).device
        if home.type == "meta":  # it will be somewhere else
            return home
        if home.type != "cpu":
            if self._choice == "cpu":
                raise UsageError(
                    f'update_device="cpu" is for parameters in host memory, and a parameter is on {home}: leave it out'
                )
            return home
        if self._choice == "cpu" or (self._choice == "auto" and not self._prefers_gpu(parameter)):
            return home
        device = torch.device("cuda", torch.cuda.current_device())
        if not self._logged:
            self._logged = True
            _log.info(
                'parameters in host memory are updated on %s; update_device="cpu" updates them on the CPU',
                device,
            )
        return device

    def _prefers_gpu(self, parameter: torch.Tensor) -> bool:
        mesh: Any = getattr(parameter, "device_mesh", None)
        if not is_distributed(parameter) or mesh.device_type != "cuda":
            return False
        if self._has_memory is None:
            free, _ = memory_of()
            self._has_memory = free >= _LEAST_FREE_BYTES
            if not self._has_memory:
                _log.info(
                    "parameters in host memory are updated on the CPU: the GPU has %d MiB free",
                    free >> 20,
                )
        return self._has_memory


def refuse_second_backward(step_in_backward: object) -> NoReturn:
    """Refuse gradients of parameters that this step has updated. Raises: UsageError."""
    raise UsageError(
        f"a second backward() before step(): with step_in_backward={step_in_backward!r} the parameters are updated already. To accumulate gradients, or to "
        "drop them, run all but the last backward() under optimizer.no_sync(); to begin anew, call optimizer.zero_grad(). A layer that several "
        "checkpointed regions use needs checkpoint(..., use_reentrant=False): otherwise each region runs its own backward()"
    )


def require_flags(**given: object) -> None:
    """Raises: UsageError for a value that is not True or False, such as "no", which is true in Python."""
    for name, value in given.items():
        if value not in (True, False):
            raise UsageError(f"{name} must be True or False, not {value!r}")


class StepOptions:
    """The options of groups when a step began, and after its updates. Each update starts from the
    same options, and the last ones are kept: an optimizer that changes its group does so once a
    step.
    """

    def __init__(self) -> None:
        self._before: dict[int, dict[str, Any]] = {}
        self._after: dict[int, Mapping[str, Any]] = {}

    def of(self, index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of *group*, whose index is *index*. Raises: UnsupportedError."""
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

    def changed(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """The names of the options of *groups* that have changed since the step began."""
        now = {index: groups[index] for index in self._before}
        return sorted({key for _, key, _ in differences(self._before, now)})

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
    """The options that *after* changes: index of the group, key and value."""
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
    """A small parameter in place of each group of *params*, or of all if there are no groups."""
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
    """A parameter with the dimensions and the device of the first tensor of *items*, if any. Raises:
    UsageError for a parameter of a lazy module.
    """
    given = [items] if isinstance(items, torch.Tensor) else items or ()
    unnamed = (item[-1] if isinstance(item, tuple) else item for item in given)
    found = [one for one in unnamed if isinstance(one, torch.Tensor)]
    if any(map(torch.nn.parameter.is_lazy, found)):
        raise UsageError(
            "a parameter has no shape yet: call the model once before its optimizer is made"
        )
    first = local(found[0]) if found else torch.zeros(1)
    device = None if first.is_meta else first.device
    shape = (1,) * max(first.dim(), 1)
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))


def follow(groups: Sequence[dict[str, Any]], made: Sequence[Mapping[str, Any]]) -> None:
    """Copy to *groups* the options that the class has *made*, such as defaults by kind of group."""
    if len(groups) == len(made):
        for group, other in zip(groups, made, strict=True):
            for key, value in other.items():
                # the existing object may belong to the user
                if key not in _NOT_OPTIONS and not (
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


def same(one: Any, other: Any) -> bool:
    """Whether two values of an option are equal, tensors or not."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one, other)
    return not (torch.is_tensor(one) or torch.is_tensor(other)) and bool(one == other)
