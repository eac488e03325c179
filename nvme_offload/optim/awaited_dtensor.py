"""`AwaitedDTensor`: the class of a DTensor while its update is pending. Importing this module makes
it, so that uses of DTensors can wait.

Code that does not go through torch's functions, such as `to_local` and the all-gather of FSDP2, reads
the local shard. Source: `all_gather_inputs` and `_get_param_all_gather_inputs` of
torch.distributed.fsdp, which read it before they take the memory that it shares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .awaited import use, waiting_class
from .buckets import local_as_it_is


def _read(tensor: Any) -> torch.Tensor:
    use(tensor)
    return local_as_it_is(tensor)


def _write(tensor: Any, part: torch.Tensor) -> None:
    use(tensor)
    slot: Any = DTensor._local_tensor  # a slot of both classes
    slot.__set__(tensor, part)


AwaitedDTensor = waiting_class(DTensor, _local_tensor=property(_read, _write))
