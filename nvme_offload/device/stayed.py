"""`Stayed`: a saved tensor that stays on its device."""

from __future__ import annotations

import torch


def check_version(version: int, saved_version: int, what: str) -> None:
    """Raises: RuntimeError when *what* was modified since it was saved, as autograd does."""
    if version != saved_version:
        raise RuntimeError(
            f"a tensor that backward needs ({what}) was modified by an inplace operation after it was saved: it is at version {version}, "
            f"and was saved at version {saved_version}"
        )


class Stayed:
    """A tensor that stays on its device."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # not the output itself, which holds the graph that holds this
        self._tensor = tensor.detach()
        self._version = tensor._version

    def restore(self) -> torch.Tensor:
        """The tensor. Raises: RuntimeError when it was modified since it was saved."""
        # A nested tensor has no shape, so the message has the number of elements.
        check_version(
            self._tensor._version,
            self._version,
            f"{self._tensor.dtype}, {self._tensor.numel()} elements",
        )
        return self._tensor
