"""`Forwarding`: further methods and attributes of the optimizer class that `NVMeOptimizer` was given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UsageError
from .modes import fixed_modes
from .options import same
from .steps import Steps


class Forwarding(torch.optim.Optimizer):
    """An optimizer with the attributes of *_template*, which has one small parameter in each group."""

    _steps: Steps
    _template: torch.optim.Optimizer
    _class_name: str

    def __getattr__(self, name: str) -> Any:
        """Attributes that this class lacks come from *optimizer_class*. A method works on all
        parameters, with their states, as it does in memory.
        """
        template = self.__dict__.get("_template")
        if template is None or name.startswith("_") or not hasattr(template, name):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, and neither has the optimizer that it was given"
            )
        if inspect.isroutine(getattr(template, name)):
            return functools.partial(self._call, name)
        return self._agreed(name, [getattr(one, name) for one in self._settled() or [template]])

    def __setattr__(self, name: str, value: Any) -> None:
        """An attribute that *optimizer_class* has and this class lacks is set on the inner
        optimizers.
        """
        template = self.__dict__.get("_template")
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if own or template is None or not hasattr(template, name):
            super().__setattr__(name, value)
            return
        for optimizer in [template, *self._settled()]:
            setattr(optimizer, name, value)
        self._steps.updater.attributes[name] = value

    def _settled(self) -> list[torch.optim.Optimizer]:
        """The inner optimizers, once no update is pending."""
        self._steps.settle()
        return [one.inner for one in self._steps.binding.buckets if one.inner is not None]

    @fixed_modes()
    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        steps = self._steps
        steps.bind()
        with steps.between_steps():
            steps.states.take_up()
            if steps.updated:
                raise UsageError(
                    f"{name}() cannot be called in the midst of a step: call step() or zero_grad() first"
                )
            results: list[Any] = []

            def call(one: torch.optim.Optimizer) -> None:
                result = getattr(one, name)(*args, **kwargs)
                results.append(self if result is one else result)

            calls = steps.health.calls
            for bucket in steps.binding.buckets:
                if not bucket.trained and bucket.layout is None:
                    continue
                try:
                    steps.updater.open(bucket)
                    options = steps.options_of(bucket)
                    left = steps.updater.call(bucket, options, call, calls)
                except BaseException as error:
                    # a method that raises for the first parameters should have changed nothing
                    ended = calls.changing and not isinstance(error, Exception)
                    calls.changing = False
                    if results or ended:
                        steps.health.mark_broken(
                            f"{name}() failed for some parameters ({type(error).__name__}: {error})"
                        )
                    steps.options.forget()
                    raise
                steps.options.left(left)
                steps.states.show(bucket)
                calls.changing = False
            steps.drain()
            steps.options.end(steps.groups)
        return self._agreed(f"{name}()", results or [None])

    def _agreed(self, name: str, values: Sequence[Any]) -> Any:
        if not all(same(value, values[0]) for value in values[1:]):
            raise UsageError(
                f"{name} of {self._class_name} has another value for each bucket of parameters, so that there is no one value to give"
            )
        return values[0]
