"""Modes of a thread, such as inference_mode: updates run under fixed ones, the inner optimizer
under the caller's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Modes(NamedTuple):
    """The modes of a thread that change an inner optimizer's result: the default *device*, if it is
    not the CPU, and the dtype of *autocast* by device type.
    """

    device: torch.device | None
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def now(cls) -> Modes:
        """The modes of this thread."""
        # In torch 2.8 get_default_device() fails after set_default_device(None).
        device = torch.empty(0).device
        return cls(
            None if device.type == "cpu" else device,
            tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            ),
        )


_entered = threading.local()


@contextlib.contextmanager
def sure_stack() -> Iterator[contextlib.ExitStack]:
    """An ExitStack that leaves its contexts even if Ctrl-C comes at the end of the `with` statement
    or in this function: Python then drops this generator, which ends its `yield`.
    """
    stack = contextlib.ExitStack()
    try:
        try:
            yield stack
        finally:
            stack.close()
    finally:
        stack.close()


@contextlib.contextmanager
def fixed_modes(callers: Modes | None = None) -> Iterator[None]:
    """Disable inference mode, gradients and autocast, and make the CPU the default device.
    *callers*: the modes for `callers_modes`; by default the present ones.
    """
    if getattr(_entered, "modes", None) is not None:
        yield
        return
    now = Modes.now()
    with sure_stack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if now.device is not None:
            stack.enter_context(torch.device("cpu"))
        for kind, _ in now.autocast:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.callback(setattr, _entered, "modes", None)
        _entered.modes = now if callers is None else callers
        yield


def callers() -> Modes:
    """Within `fixed_modes`: the modes of the caller."""
    return getattr(_entered, "modes", None) or Modes.now()


@contextlib.contextmanager
def callers_modes() -> Iterator[None]:
    """Within `fixed_modes`: the caller's default device, unless it is meta, and autocast."""
    modes = callers()
    with sure_stack() as stack:
        if modes.device is not None and modes.device.type != "meta":
            stack.enter_context(modes.device)
        for kind, dtype in modes.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield
