"""The tensors of a checkpoint: weights and AdamW states of a small transformer, from a few KiB to a
tenth of the file, with reproducible contents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..peers.buffers import wrong

if TYPE_CHECKING:
    import torch

_LAYERS = 12
_EMBEDDING = 28  # squares of the hidden size
_MATRICES = {"qkv": 3, "out": 1, "up": 4, "down": 4}  # squares of the hidden size
# multiples of the hidden size
_VECTORS = {"norm1": 1, "norm2": 1, "qkv_bias": 3, "out_bias": 1, "up_bias": 4, "down_bias": 1}
_KINDS = {"weight": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}  # bytes of an element
_PATTERN_BYTES = 32 << 20
_STRIDE_BYTES = 64 * 1009  # between the starts of two tensors in the pattern


class Shape(NamedTuple):
    """A tensor of *numel* elements of *itemsize* bytes: 2 for bfloat16, 4 for float32."""

    name: str
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """The size of the tensor."""
        return self.numel * self.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        import torch

        return torch.bfloat16 if self.itemsize == 2 else torch.float32


def shapes(nbytes: int) -> list[Shape]:
    """The tensors of a state of at most *nbytes*."""
    squares = _EMBEDDING + _LAYERS * sum(_MATRICES.values())
    vectors = _LAYERS * sum(_VECTORS.values())
    elements = nbytes // sum(_KINDS.values())
    hidden = max(1, int((math.sqrt(vectors**2 + 4 * squares * elements) - vectors) / (2 * squares)))
    sizes = {"embedding": _EMBEDDING * hidden**2}
    for layer in range(_LAYERS):
        sizes |= {
            f"layers.{layer}.{name}": factor * hidden**2 for name, factor in _MATRICES.items()
        }
        sizes |= {f"layers.{layer}.{name}": factor * hidden for name, factor in _VECTORS.items()}
    return [
        Shape(f"{name}.{kind}", numel, itemsize)
        for name, numel in sizes.items()
        for kind, itemsize in _KINDS.items()
    ]


def build(nbytes: int) -> dict[str, torch.Tensor]:
    """Make the state, with separate memory for each tensor."""
    import torch

    pattern = _pattern()
    state = {}
    for number, shape in enumerate(shapes(nbytes)):
        tensor = torch.empty(shape.numel, dtype=shape.dtype)
        flat = tensor.view(torch.uint8).numpy()
        for begin, piece in _pieces(pattern, number, shape.nbytes):
            flat[begin : begin + piece.size] = piece
        state[shape.name] = tensor
    return state


def require_same(found: Mapping[str, torch.Tensor], nbytes: int, side: str) -> None:
    """Raises: CorruptionError where *found* is not what `build` makes."""
    import torch

    pattern = _pattern()
    expected = shapes(nbytes)
    if set(found) != {shape.name for shape in expected}:
        raise wrong(f"{side} has other tensors", 0, nbytes, "the checkpoint")
    for number, shape in enumerate(expected):
        flat = found[shape.name].reshape(-1).view(torch.uint8).numpy()
        same = flat.size == shape.nbytes
        same = same and all(
            np.array_equal(flat[begin : begin + piece.size], piece)
            for begin, piece in _pieces(pattern, number, shape.nbytes)
        )
        if not same:
            raise wrong(
                f"{side} has other bytes in {shape.name}", 0, shape.nbytes, "the checkpoint"
            )


def _pattern() -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, _PATTERN_BYTES, dtype=np.uint8)


def _pieces(
    pattern: NDArray[np.uint8], number: int, nbytes: int
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    first = number * _STRIDE_BYTES % pattern.size
    begin = 0
    while begin < nbytes:
        piece = pattern[(first + begin) % pattern.size :][: nbytes - begin]
        yield begin, piece
        begin += piece.size
