"""The parameters of a GPT of about a given size, without the GPT. Pure."""

from __future__ import annotations

_VOCABULARY = 50257
_LARGE = 10**9


def gpt_shapes(parameters: int) -> list[tuple[int, ...]]:
    """Shapes of weights and biases in order: embeddings, then blocks. The width is a multiple of
    64, at least 64.
    """
    blocks = 48 if parameters >= _LARGE else 24 if parameters >= _LARGE // 10 else 2
    width = 64
    while _count(blocks, width + 64) <= parameters:
        width += 64
    shapes: list[tuple[int, ...]] = [(min(_VOCABULARY, 8 * width), width)]
    for _ in range(blocks):
        for rows, columns in (
            (3 * width, width),
            (width, width),
            (4 * width, width),
            (width, 4 * width),
        ):
            shapes += [(rows, columns), (rows,)]
        shapes += [(width,)] * 4  # two norms
    return shapes


def _count(blocks: int, width: int) -> int:
    return blocks * (12 * width**2 + 13 * width) + min(_VOCABULARY, 8 * width) * width
