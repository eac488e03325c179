"""`BackwardUpdates`: which bundles can be updated during backward(), because all of their gradients are complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError
from .bundles import Bundle, Weight, is_distributed
from .spent import SpentGradient


class BackwardUpdates:
    """Calls *update* of *owner*, which this does not keep alive, with each bundle whose weights all have their gradients, and lets those go.

    Attributes: *accumulating*, while gradients are to be left alone. *updated*: the bundles of this step that are done, the owner's own set.
    """

    def __init__(self, owner: Any, updated: set[Bundle]) -> None:
        self._owner = weakref.ref(owner)
        self._updated = updated
        self._waiting: dict[Bundle, set[Weight]] = {}  # whose gradients are not complete
        self._hooks: list[Any] = []
        self.accumulating = False

    def watch(self, weights: Sequence[Weight]) -> None:
        """Have a say in what happens after the gradients of *weights* are complete."""
        for weight in weights:
            if weight.parameter.requires_grad:
                parameter: Any = weight.parameter
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(weight)))

    def end_step(self) -> None:
        """All that were waited for have been updated by others, or never will be."""
        self._waiting.clear()

    def close(self) -> None:
        """Say no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def complete(self, weight: Weight) -> list[Bundle]:
        """The gradient of *weight* is complete: the bundles that waited for nothing else."""
        ready = []
        for bundle in dict.fromkeys(piece.bundle for piece in weight.pieces):
            waiting = self._waiting.setdefault(bundle, {piece.weight for piece in bundle.pieces})
            waiting.discard(weight)
            if not waiting and bundle not in self._updated:
                ready.append(bundle)
        return ready

    def spend(self, bundle: Bundle) -> None:
        """Let the gradients go that *bundle*, which has been updated, was the last to need."""
        for piece in bundle.pieces:
            if all(other.bundle in self._updated for other in piece.weight.pieces) and piece.weight.parameter.grad is not None:
                piece.weight.parameter.grad = SpentGradient(piece.weight.parameter)

    def _hook(self, weight: Weight) -> Callable[[torch.Tensor], None]:
        owner = self._owner

        def ready(_: torch.Tensor) -> None:
            optimizer = owner()
            if optimizer is not None:
                optimizer._gradient_is_complete(weight)

        return ready


def check_undistributed(parameter: torch.Tensor) -> None:
    """See that a gradient of *parameter* that is complete here is the whole gradient. Raises: UnsupportedError."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if several or is_distributed(parameter):
        raise UnsupportedError(
            "step_in_backward=True works in a single process: elsewhere a gradient that is complete on this rank is not yet reduced over the others, "
            "and the parameter would be updated by this rank's part of it; leave it out here"
        )


def clear_spent(parameter: torch.Tensor) -> None:
    """Let the next backward() begin with no gradient."""
    if isinstance(parameter.grad, SpentGradient):
        parameter.grad = None
