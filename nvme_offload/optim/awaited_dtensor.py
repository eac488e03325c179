"""`AwaitedDTensor`: the class that a DTensor has until its update is made. Importing this makes
DTensors such whose uses can be made to wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .awaited import Waits, admit, use
from .buckets import local_as_it_is


class AwaitedDTensor(Waits, DTensor):
    """A parameter or a gradient, as of FSDP2 and tensor parallelism, with an update that is to come.

    What is no function of torch, such as `to_local` and what FSDP2 gathers, asks for the part that
    is on this rank. Source: `all_gather_inputs` and `_get_param_all_gather_inputs` of
    torch.distributed.fsdp, which ask for it before they take the memory that it shares.
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
        slot: Any = DTensor._local_tensor  # that instances of both classes have
        slot.__set__(self, part)


admit(DTensor, AwaitedDTensor)
