"""`Inference` takes the place of the optimizer in a ZeRO-3 engine without one. Parameters stream
from a drive through forward passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from . import compat
from .agreement import all_or_none
from .param_swapper import require_budget, swappers_of
from .shared_tier import trained
from .step_stats import StepClock


class Inference(DeepSpeedZeRoOffload):  # type: ignore[misc]  # untyped
    """DeepSpeed's class, with each forward pass of the whole module counted as one step."""

    def __init__(
        self,
        whole: Mapping[str, Any],
        module: torch.nn.Module,
        timers: Any,
        ds_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """*whole*: the configuration, in place of *ds_config*, which may lack sections."""
        super().__init__(module, timers, whole, *args, **kwargs)
        self._tiers = [swapper.tier for swapper in swappers_of(module)]
        try:
            all_or_none(lambda: require_budget(module))
        except BaseException:
            super().destroy()
            raise
        self.clock = StepClock(self._tiers[0]) if self._tiers else None
        self.tier = next(iter(self._tiers), None)
        trained.difference_update(self._tiers)
        self._depth = 0
        self.forward_hooks.append(module.register_forward_pre_hook(self._begin_pass, prepend=True))
        self.forward_hooks.append(module.register_forward_hook(self._end_pass, always_call=True))

    def destroy(self) -> None:
        """Drop the hooks, as the base class does, and DeepSpeed's references to the module."""
        super().destroy()
        compat.drop_references(self.module)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin_pass(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1 and self.clock is not None:
            self.clock.begin()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end_pass(self, *_: Any) -> None:
        # DeepSpeed sees a Lightning step as a forward pass in which the module calls itself.
        self._depth -= 1
        if self._depth == 0 and self.clock is not None:
            self.clock.end()
            for tier in self._tiers:
                if tier.swapper.learned and tier not in trained:
                    # Otherwise the swapper would keep prefetching in the order of an earlier
                    # training.
                    tier.swapper.step()

    def _restore_from_bit16_weights(self) -> None:
        """Do nothing: there are no master weights. DeepSpeed calls this method after a load."""
