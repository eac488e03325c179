"""Modes of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..device import modes


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Context without dispatch modes, and without inference mode: a later step could neither change the
    tensors made in it nor save them for backward.
    """
    with modes.outside_of_modes():
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                yield
        else:
            yield
