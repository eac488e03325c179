"""`on_virtual_gpu`: ZeRO-3 with updates on a `VirtualGpu`, and partitions that are copied to it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_offload.device.copies import CopyStreams
from nvme_offload.zero3 import param_swapper, stage3_sub_groups
from nvme_offload.zero3.param_swapper import ParameterSwapper

sys.path.append(str(Path(__file__).parents[1]))
from virtual_gpu import CPU, VirtualDevice, VirtualGpu, virtual_gpu


@contextlib.contextmanager
def on_virtual_gpu(seed: str) -> Iterator[None]:
    """Context for engines made in it; *seed* chooses which events end early. Raises: AssertionError
    at its end if there were races.
    """
    chance = random.Random(seed)
    likely = chance.choice([0.0, 0.5, 1.0])
    bring = CopyStreams.bring

    def brought(one: CopyStreams, source: Any, device: Any, into: Any = None) -> Any:
        # `to` makes no copy on the same device
        return bring(one, source, CPU, torch.empty_like(source) if into is None else into)

    def stays(swapper: ParameterSwapper, param: Any, _: Any) -> bool:
        return swapper.tier.swapper.stays(param_swapper._name(param))

    with (
        pytest.MonkeyPatch.context() as patch,
        virtual_gpu(VirtualGpu(lambda: chance.random() < likely)),
    ):
        patch.setattr(stage3_sub_groups, "device_of", lambda *_: VirtualDevice("cpu"))
        patch.setattr(stage3_sub_groups, "most_elements", lambda _: 1 << 40)
        patch.setattr(param_swapper, "_indexed", lambda _: CPU)
        patch.setattr(ParameterSwapper, "_copies_beside", stays)
        patch.setattr(CopyStreams, "bring", brought)
        yield
