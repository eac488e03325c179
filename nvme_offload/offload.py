"""`Offload`: the drives and the host memory that the parts of a training share."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

from .errors import UsageError
from .swap.tier import Tier, engine_config, memory_size

if TYPE_CHECKING:
    import torch

    from .hardware.config import AioConfig
    from .io.engine import StrPath
    from .parameters.streamer import Streamer


class Offload:
    """Drives, and a budget of host memory, for parameters that stream.

    Parameters
    ----------
    paths
        A directory on a drive, or several on different drives, which values are spread over.
    host_memory
        The most pinned host memory to use: bytes, or a size such as "8GB". "auto" takes a share of
        what is available now. What fits in it never touches a drive.
    aio
        Settings of the engine. By default those that `nvme-sweep` chose for the drive.

    Raises
    ------
    UsageError
        An argument is wrong.
    IOFailure, UnsupportedError
        A path cannot be used.

    Notes
    -----
    Lifetime: memory and drive space are freed by `close`, or when this object and the models whose
    parameters stream are gone.
    """

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        host_memory: int | str | Literal["auto"] = "auto",
        *,
        aio: AioConfig | None = None,
    ) -> None:
        given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not given:
            raise UsageError("Offload needs at least one path")
        names = [os.fspath(path) for path in given]
        self._tier = Tier(
            names,
            engine_config(names[0]) if aio is None else aio,
            host_memory=_size(host_memory, "host_memory"),
        )
        self._streamers: weakref.WeakSet[Streamer] = weakref.WeakSet()

    def parameters(
        self,
        model: torch.nn.Module,
        device: torch.device | str,
        *,
        gpu_memory: int | str | Literal["auto"] = "auto",
    ) -> None:
        """Stream the parameters of *model* to *device* as they are used.

        Call it once, with the model in host memory, before the first forward pass. Buffers and
        small parameters move to *device* and stay there.

        Parameters
        ----------
        model
            Any module with plain parameters. They stay the same objects.
        device
            Where the model computes.
        gpu_memory
            The most memory of *device* for parameters: bytes, or a size such as "8GB". The more it
            is, the fewer parameters are copied. "auto" starts with a few hundred megabytes, and takes
            more if forward and backward passes leave it free.

        Raises
        ------
        UsageError
            An argument is wrong, or *gpu_memory* or *host_memory* is too small.
        UnsupportedError
            A parameter is of a kind that cannot stream; the message says which.
        NoSpaceError
            The drives have no room for the parameters that do not fit in host memory.
        """
        from .parameters.setup import stream

        target = _indexed(device)
        limit = _size(gpu_memory, "gpu_memory")
        self._streamers.add(stream(model, self._tier, target, None if limit == "auto" else limit))

    def close(self) -> None:
        """Free host memory and drive space. A second call does nothing. Streamed parameters cannot
        be used afterwards.
        """
        self._tier.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError("Offload cannot be pickled or copied: make one in each process")

    def __repr__(self) -> str:
        return f"<Offload {', '.join(self._tier.paths)}: {len(self._streamers)} models>"


def _size(value: object, name: str) -> int | Literal["auto"]:
    try:
        return memory_size(value)
    except ValueError:
        raise UsageError(
            f'{name} must be "auto", a number of bytes above 0 or a size such as "8GB", not {value!r}'
        ) from None


def _indexed(device: torch.device | str) -> torch.device:
    """*device* with its index."""
    import torch

    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device must be a CUDA device or the CPU, not {device}")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
