"""`GradientHooks`: hooks that autograd and FSDP2 call when a parameter's gradient is complete."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class GradientHooks:
    """Calls `gradient_came` of *owner* with every parameter whose gradient is complete. It does not
    keep *owner* alive.
    """

    def __init__(self, owner: Any) -> None:
        source = weakref.ref(owner)

        def came(parameter: torch.Tensor) -> None:
            optimizer = source()
            if optimizer is not None:
                optimizer.gradient_came(parameter)

        compiler: Any = torch.compiler
        # compiled autograd would compile the update, which would change its rounding
        self._hook = compiler.disable(came)
        self._handles: dict[int, Any] = {}  # by their key in the parameter's hooks

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add hooks to *parameters*, except frozen ones. A parameter that has left the groups keeps
        its hook, since FSDP2 may be calling it.
        """
        self._handles = {
            key: handle
            for key, handle in self._handles.items()
            if handle.hooks_dict_ref() is not None
        }
        for parameter in parameters:
            one: Any = parameter
            # torch.utils.swap_tensors removes the hooks of a parameter
            if one.requires_grad and self._handles.keys().isdisjoint(
                one._post_accumulate_grad_hooks or ()
            ):
                handle = one.register_post_accumulate_grad_hook(self._hook)
                self._handles[handle.id] = handle

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
