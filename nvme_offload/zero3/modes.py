"""Inference mode of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context without inference mode, for tensors that outlive the caller's: a later step could
    neither change them nor save them for backward.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield
