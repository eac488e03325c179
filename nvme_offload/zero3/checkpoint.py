"""Checkpoints of an engine whose parameters or optimizer states are in a tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .param_swapper import ParameterSwapper
from .stage3 import Stage3


def engine_methods(engine: type) -> dict[str, Callable[..., Any]]:
    """The methods of *engine*, the class DeepSpeedEngine, that have to know of tiers, by name."""
    original: Any = engine

    def zero_nvme_offload_optimizer(self: Any) -> bool:
        # True has the engine copy a directory of swap files beside the checkpoint.
        if isinstance(self.optimizer, Stage3) and self.optimizer.swaps_natively:
            return False
        offloads: bool = original_offload(self)
        return offloads

    def _get_param_fragment_func(self: Any, param: Any) -> torch.Tensor:
        if isinstance(param.nvme_swapper, ParameterSwapper) and param.nvme_swapper.is_away(param):
            return param.nvme_swapper.partition(param)
        fragment: torch.Tensor = original_fragment(self, param)
        return fragment

    original_offload, original_fragment = original.zero_nvme_offload_optimizer, original._get_param_fragment_func
    return {"zero_nvme_offload_optimizer": zero_nvme_offload_optimizer, "_get_param_fragment_func": _get_param_fragment_func}
