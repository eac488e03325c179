"""`AwaitedDTensor`: the class of a DTensor while its update is pending. Importing this module
registers the class, so that uses of DTensors can wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .awaited import Waits, admit, use
from .buckets import local_as_it_is


class AwaitedDTensor(Waits, DTensor):
    """A parameter or a gradient of FSDP2 or tensor parallelism whose update is pending.

    Code that does not go through torch's functions, such as `to_local` and the all-gather of FSDP2,
    reads the local shard. Source: `all_gather_inputs` and `_get_param_all_gather_inputs` of
    torch.distributed.fsdp, which read it before they take the memory that it shares.
    """

    @staticmethod
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a DTensor."""
        make: Any = DTensor
        return make(*args, **kwargs)

    @property
    def _local_tensor(self) -> torch.Tensor:
        use(self)
        return local_as_it_is(self)

    @_local_tensor.setter
    def _local_tensor(self, part: torch.Tensor) -> None:
        use(self)
        slot: Any = DTensor._local_tensor  # a slot of both classes
        slot.__set__(self, part)


admit(DTensor, AwaitedDTensor)
