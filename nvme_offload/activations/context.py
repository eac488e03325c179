"""`save_on_nvme`: a context that offloads autograd's saved tensors to a drive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch

from ..device.stayed import require_hooks
from ..errors import UsageError
from ..hardware.config import AioConfig
from ..io.engine import StrPath
from ..swap.tier import open_tier
from ..units import parse_bytes
from . import checkpointing
from .cache import ActivationCache, ActivationStats


class save_on_nvme:
    """A context that offloads the tensors which a forward pass saves for backward.

    Make one, and enter it in every step. The tensors saved in it are restored ahead of the backward
    pass, which may run inside or outside of the context::

        offload = save_on_nvme("/local_nvme")
        for batch in batches:
            with offload:
                loss = model(batch).sum()
            loss.backward()

    Gradients are bit for bit the same as without.

    Parameters
    ----------
    paths
        A directory on a drive, or several on different drives, which tensors are spread over.
    min_bytes
        Smaller tensors stay on their device: bytes, or a size such as "1MiB".
    host_memory
        The most pinned host memory to use: bytes, or a size such as "8GB". "auto" takes a share of
        the memory available now. Tensors that fit in it never touch a drive. A tensor larger than
        it stays on its device, with one warning.
    aio
        Settings of the engine. By default those that `nvme-sweep` chose for the drive.

    Raises
    ------
    UsageError
        An argument is wrong.
    IOFailure, UnsupportedError
        A path cannot be used, or torch is older than 2.8.

    Notes
    -----
    Raised from a forward or a backward pass: IOFailure, NoSpaceError, TruncatedError and
    CorruptionError of the drive; UnsupportedError while a CUDA graph is captured; RuntimeError in
    backward for a tensor that was modified in place since it was saved, as without hooks. A
    modification that autograd does not see (`Tensor.data`, NumPy) between two saves of a tensor is
    lost: both are restored as at the first.

    Also kept on their device are parameters and views of them, and storages that outlived the step
    that saved them, such as buffers: offloading these frees nothing. Instances of tensor subclasses
    stay too, except DTensors, whose local tensors are saved. A tensor that several operations save,
    whole or as views, is written once.

    Tensors of up to 1 MiB share chunks of up to 4 MiB, or an eighth of *host_memory* if that is
    less. A chunk is freed with the last of its tensors.

    Several graphs may be alive at the same time. Contexts may be nested; a tensor goes to the
    innermost. A compiled block saves the tensors that its compiled backward needs, and restores
    them together: so compile blocks, not the whole model. All methods are thread-safe.

    A block under `torch.utils.checkpoint` saves its inputs here. Without ``use_reentrant``, these
    are the tensors among its arguments, positional and keyword, also in tuples, lists, dicts and
    `functools.partial`, and the results that a policy of selective checkpointing keeps. Its other
    inputs stay in memory, with one line in the log. In a checkpoint within another, and with
    ``use_reentrant``, only positional tensors are saved.

    After KeyboardInterrupt, MemoryError or another exception in the middle of saving or restoring a
    tensor, graphs made before raise UsageError in their backward, and the next forward pass works.

    Lifetime: memory and drive space are freed by `close`, or when this object and every graph made
    in it are gone. Source: torch.autograd.graph.saved_tensors_hooks.
    """

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        min_bytes: int | str = 1 << 20,
        host_memory: int | str | Literal["auto"] = "auto",
        *,
        aio: AioConfig | None = None,
    ) -> None:
        try:
            least = parse_bytes(min_bytes)
        except ValueError as error:
            raise UsageError(f"min_bytes is not a number of bytes: {error}") from None
        require_hooks("save_on_nvme")
        tier = open_tier(paths, host_memory, aio, "save_on_nvme")
        self._cache = ActivationCache(tier, least)
        checkpointing.install()
        # The hooks hold the cache, not this object: a graph that outlives it still works, and no
        # reference cycle keeps the memory.
        hooks = torch.autograd.graph.saved_tensors_hooks
        self._hooks = hooks(self._cache.pack, self._cache.unpack)
        self._hooks_in_checkpoint = hooks(self._cache.pack, self._cache.unpack_in_checkpoint)

    # Of the compiler's graph these are no part: it would look into them, and warn or refuse.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __enter__(self) -> save_on_nvme:
        in_checkpoint = checkpointing.is_innermost()
        self._cache.begin()
        (self._hooks_in_checkpoint if in_checkpoint else self._hooks).__enter__()
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._hooks.__exit__(kind, error, trace)
        if error is not None:
            self._cache.release_device()

    def stats(self) -> ActivationStats:
        """Counters since this was made. Cheap enough to poll.

        Returns
        -------
        ActivationStats
            A snapshot; it is not updated.
        """
        return self._cache.stats()

    def close(self) -> None:
        """Free memory and drive space. A second call does nothing.

        A graph that still needs saved tensors raises UsageError in its backward.
        """
        self._cache.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "save_on_nvme cannot be pickled or copied: make one in each process, and keep it out of the model that is copied or saved"
        )

    def __repr__(self) -> str:
        return f"<save_on_nvme {self._cache!r}>"
