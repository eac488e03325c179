"""The random numbers that torch, Python and NumPy draw while an optimizer is tried."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def same_numbers(device: torch.device) -> Iterator[None]:
    """Context in which torch, Python and NumPy draw the same numbers each time."""
    import numpy as np

    python, drawn = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            random.seed(0)
            np.random.seed(0)
            # `torch.manual_seed` seeds all GPUs, also those that `fork_rng` does not restore
            torch.default_generator.manual_seed(0)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(drawn)


def next_numbers(device: torch.device) -> list[float]:
    """The next numbers of the generators of torch, Python and NumPy."""
    import numpy as np

    drawn = [
        float(torch.rand((), dtype=torch.float64, device=one))
        for one in {torch.device("cpu"), device}
    ]
    return [random.random(), np.random.random(), *drawn]
