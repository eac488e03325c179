"""The training text: the sources of the interpreter's standard library as bytes, so nothing is
downloaded.
"""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

import torch

VALIDATION_SHARE = 0.05


def read_text(most_bytes: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Bytes for training and, from other files, bytes for validation, as flat uint8 tensors; and a
    description.

    Files are in the order of a hash of their names, so that both parts are mixed and reproducible
    with one interpreter.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.parts)
    ]
    files.sort(key=lambda path: (_shuffled(path.relative_to(root).as_posix()), path))
    pieces, size = [], 0
    for path in files:
        if size >= most_bytes:
            break
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
    first, held = 0, 0
    while held < VALIDATION_SHARE * size:
        held += len(pieces[first])
        first += 1
    what = (
        f"{size / 1e6:.1f} MB of the sources of Python {platform.python_version()}'s standard library, {len(pieces)} files; "
        f"{held / 1e6:.2f} MB of them, {first} files, held out"
    )
    return _tensor(pieces[first:]), _tensor(pieces[:first]), what


def _tensor(pieces: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)


def _shuffled(name: str) -> int:
    number = 0
    for letter in name.encode():
        number = (number * 1_000_003 + letter) % 999_999_937
    return number


def batches(text: torch.Tensor, count: int, batch: int, context: int, seed: int) -> torch.Tensor:
    """Where *count* batches of *batch* pieces of *context* + 1 bytes begin, by *seed*. Shape: count
    x batch, int64, on *text*'s device.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(text.numel() - context, (count, batch), generator=generator).to(
        text.device
    )


def cut(
    text: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes at *starts* and those that follow them. Shapes: batch x context, int64."""
    places = starts[:, None] + torch.arange(context + 1, device=text.device)
    piece = text[places].long()
    return piece[:, :-1], piece[:, 1:]
