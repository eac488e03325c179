"""What tests of transfers share: the kinds of fixtures, and the bytes of a file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nvme_offload.hardware.config import AioConfig

Bytes = npt.NDArray[np.uint8]
RandomBytes = Callable[[int], Bytes]
Configure = Callable[..., AioConfig]
Stall = Callable[[], AbstractContextManager[Callable[[], None]]]


def on_disk(path: Path) -> Bytes:
    return np.fromfile(path, np.uint8)
