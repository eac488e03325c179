"""`save_on_nvme`: a context in which autograd's saved tensors go to a drive."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from ..errors import UsageError
from ..swap.tier import Tier, engine_config, memory_size
from ..units import parse_bytes
from .cache import ActivationCache, ActivationStats

if TYPE_CHECKING:
    from ..hardware.config import AioConfig
    from ..io.engine import StrPath


class save_on_nvme:
    """A context in which the tensors that a forward pass saves for its backward are kept on the
    drives of *paths*, and not on their device.

    Make one and enter it in every step; what is saved in it comes back ahead of the backward pass,
    which may run inside or outside of it::

        offload = save_on_nvme("/local_nvme")
        for batch in batches:
            with offload:
                loss = model(batch).sum()
            loss.backward()

    Gradients are the same bits as without. Tensors of less than *min_bytes* stay on their device,
    and so do parameters and views of them, and what was found to outlive the step that saved it,
    such as a buffer: to keep it elsewhere would free nothing. A tensor that several operations
    save, whole or in views, is written once. One that was modified in place since is an error in
    backward, as it is without hooks; what is modified behind autograd's back (`Tensor.data`, NumPy)
    between two saves of it comes back as it was at the first.

    *host_memory*, bytes or a size such as "8GB", is the most pinned memory that is used; "auto"
    takes a share of what is available when this is made. What fits in it never touches a drive. A
    tensor larger than it stays on its device, with one warning. Tensors of up to 1 MiB share pieces
    of at most 4 MiB, or an eighth of *host_memory*, which are given back when the last of their
    tensors is gone. *aio* are the engine's settings: those that `nvme-sweep` chose for the drive
    unless given.

    Several graphs may be alive at once; contexts may be nested, where the innermost has what is
    saved in it; a checkpointed block (`torch.utils.checkpoint`) saves its inputs here, and a
    compiled one what its compiled backward needs: all of that comes back at once, so compile blocks
    rather than the whole of a model. Tensors of classes of their own stay, but for distributed
    ones, whose parts are saved. All methods may be called from any thread.

    Units: bytes. Lifetime: the memory and the drives' room go with `close`, or when this and every
    graph made in it are gone. Raises: UsageError; IOFailure or UnsupportedError when a path cannot
    be used; out of a forward or a backward pass IOFailure, NoSpaceError, TruncatedError and
    CorruptionError of the drive, and UnsupportedError while a CUDA graph is captured. Source:
    torch.autograd.graph.saved_tensors_hooks.
    """

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        min_bytes: int | str = 1 << 20,
        host_memory: int | str | Literal["auto"] = "auto",
        *,
        aio: AioConfig | None = None,
    ) -> None:
        import torch

        given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not given:
            raise UsageError("save_on_nvme needs at least one path")
        names = [os.fspath(path) for path in given]
        try:
            least = parse_bytes(min_bytes)
        except ValueError as error:
            raise UsageError(f"min_bytes is no number of bytes: {error}") from None
        try:
            cap = memory_size(host_memory)
        except ValueError:
            raise UsageError(
                f'host_memory must be "auto", a number of bytes above 0 or a size such as "8GB", not {host_memory!r}'
            ) from None
        tier = Tier(names, engine_config(names[0]) if aio is None else aio, host_memory=cap)
        self._cache = ActivationCache(tier, least)
        # They hold the cache, not this: a graph that outlives this goes on, and no cycle keeps the
        # memory.
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._cache.pack, self._cache.unpack)

    def __enter__(self) -> save_on_nvme:
        self._cache.begin()
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        if error is not None:
            self._cache.let_go()

    def stats(self) -> ActivationStats:
        """What was saved, moved and waited for since this was made; cheap enough to poll."""
        return self._cache.stats()

    def close(self) -> None:
        """Give back memory and drives; a second call does nothing. A graph that still needs what
        was saved here raises UsageError in its backward.
        """
        self._cache.close()

    def __repr__(self) -> str:
        return f"<save_on_nvme {self._cache!r}>"
