"""`Offload`: the drives and the host memory that the parts of a training share."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from .errors import TooLittleMemoryError, UsageError
from .io.closing import Closing
from .sizes import enough_with_later, kept_for_later
from .store.store import paths_of
from .swap.tier import (
    Share,
    SharedMemory,
    Tier,
    automatic_bytes,
    engine_config,
    memory_size,
)
from .units import format_bytes
from .update.queue import wait_for_all

if TYPE_CHECKING:
    import torch

    from .activations import save_on_nvme
    from .hardware.config import AioConfig
    from .io.engine import StrPath
    from .optim import NVMeOptimizer
    from .parameters.streamer import Streamer


class Offload(Closing):
    """Drives, and a budget of host memory, for parameters, optimizer states and activations.

    The parts share one budget. Parts that are made first are served first: make them in the order
    of the bytes that they move: parameters, optimizer, activations.

    Parameters
    ----------
    paths
        A directory on a drive, or several on different drives, which values are spread over.
    host_memory
        The most pinned host memory to use: bytes, or a size such as "8GB". "auto" takes a share of
        the memory available now, and of the memory that `parameters` frees. Values that fit in it
        never touch a drive.
    aio
        Settings of the engine. By default those that `nvme-sweep` chose for the drive.

    Raises
    ------
    UsageError
        An argument is wrong.

    Notes
    -----
    Lifetime: `close`, or the end of a ``with`` block, frees memory and drive space. A part's are
    freed also when it is closed, or when it or the model is gone.
    """

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        host_memory: int | str | Literal["auto"] = "auto",
        *,
        aio: AioConfig | None = None,
    ) -> None:
        self._paths = paths_of(paths, "Offload")
        memory = memory_size(host_memory)
        self._automatic = memory == "auto"
        self._memory = SharedMemory(automatic_bytes() if memory == "auto" else memory)
        self._aio = engine_config(self._paths[0]) if aio is None else aio
        self._parts: list[weakref.ref[Any]] = []  # with a method close; the first is closed last
        # The parameters of a model hold its streamer.
        self._streamers: weakref.WeakKeyDictionary[torch.nn.Module, Streamer] = (
            weakref.WeakKeyDictionary()
        )

    def parameters(
        self,
        model: torch.nn.Module,
        device: torch.device | str,
        *,
        weights: StrPath | None = None,
        gpu_memory: int | str | Literal["auto"] = "auto",
        host_memory: int | str | Literal["auto"] = "auto",
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
        weights
            A file of safetensors, or a directory with such files, with the model's state dict, or a
            checkpoint that `from_pretrained` of transformers reads. The model's parameters may be on
            the meta device. One tensor is read at a time.
        gpu_memory
            The most memory of *device* for parameters: bytes, or a size such as "8GB". The more it
            is, the fewer are copied. "auto" takes what forward and backward passes leave free.
        host_memory
            The part of the budget for these parameters. "auto" takes as much as they need. If any can
            be trained, it leaves a quarter of the rest, but at most 2 GiB, to parts made later.

        Raises
        ------
        UsageError
            An argument is wrong, or *gpu_memory* or *host_memory* is too small.
        UnsupportedError
            A parameter is of a kind that cannot stream; the message says which. Or torch is older
            than 2.8.
        NoSpaceError
            The drives have no room for the parameters that do not fit in host memory.
        IOFailure
            A path cannot be used.
        """
        from .parameters.setup import check, freed_bytes, stream
        from .parameters.weights import SavedWeights

        target = _indexed(device)
        limit = memory_size(gpu_memory, "gpu_memory")
        # an optimizer and activations, if anything can be trained
        later = 2 if check(model, has_values=weights is None) else 0
        if self._automatic and weights is None:  # the model was in memory, and now makes room
            grown = automatic_bytes(freed_bytes(model))
            self._memory.nbytes = max(self._memory.nbytes, grown)
        with self._part(host_memory, later, grows=False) as share, ExitStack() as undo:
            tier = Tier(self._paths, self._aio, host_memory=share)
            undo.callback(tier.close)
            with (
                nullcontext()
                if weights is None
                else SavedWeights(weights, tier.store.engine) as saved
            ):
                streamer = stream(model, tier, target, None if limit == "auto" else limit, saved)
            undo.pop_all()
        self._streamers[model] = streamer
        self._parts.append(weakref.ref(tier))

    def save(self, path: StrPath, model: torch.nn.Module | None = None) -> None:
        """Write the weights of a model to a directory, in files of safetensors.

        `from_pretrained` of transformers, and *weights* of `parameters`, read it. It needs memory
        for one tensor. The directory appears with its whole contents, in place of an earlier save;
        other files in it are kept. A tied parameter is written once.

        Parameters
        ----------
        path
            The directory, on any drive.
        model
            The model; it may be left out if `parameters` was called once.

        Raises
        ------
        UsageError
            *model* is needed, or its parameters do not stream.
        OSError
            The drive failed, or *path* is a file; an earlier directory is unchanged.
        """
        from .parameters.weights import save

        if model is None and len(self._streamers) == 1:
            model = next(iter(self._streamers))
        if model is None or model not in self._streamers:
            raise UsageError("save needs a model whose parameters stream: pass it as model")
        save(model, Path(path), self._streamers[model].copy_of)

    def optimizer(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer] | None = None,
        *,
        host_memory: int | str | Literal["auto"] = "auto",
        **settings: Any,
    ) -> NVMeOptimizer:
        """Make an `NVMeOptimizer` on the same drives, for parameters that stream or do not.

        With ``step_in_backward=True`` a parameter is updated while it is on the device for
        backward. Streamed parameters do not take ``overlap_step=True``.

        Parameters
        ----------
        params
            Parameters, or groups of them.
        optimizer_class
            By default `torch.optim.AdamW`.
        host_memory
            The part of the budget for states. "auto" takes as much as they need, and leaves an eighth
            of the rest, but at most 1 GiB, to activations.
        **settings
            Further arguments of `NVMeOptimizer`, and of *optimizer_class*.

        Returns
        -------
        NVMeOptimizer
            The optimizer.

        Raises
        ------
        UsageError, UnsupportedError, NoSpaceError, IOFailure
            As `NVMeOptimizer`.
        """
        import torch

        from .optim import NVMeOptimizer

        with self._part(host_memory, later=1) as share:
            made = NVMeOptimizer(
                params,
                optimizer_class or torch.optim.AdamW,
                paths=self._paths,
                host_memory=share,
                aio=self._aio,
                **settings,
            )
        self._parts.append(weakref.ref(made))
        return made

    def activations(
        self,
        min_bytes: int | str = 1 << 20,
        *,
        host_memory: int | str | Literal["auto"] = "auto",
    ) -> save_on_nvme:
        """Make a `save_on_nvme` on the same drives.

        Parameters
        ----------
        min_bytes
            Smaller tensors stay on their device.
        host_memory
            The part of the budget for activations. "auto" takes as much as they need of the
            memory that the other parts do not use.

        Returns
        -------
        save_on_nvme
            The context; enter it in every step.

        Raises
        ------
        UsageError, UnsupportedError, IOFailure
            As `save_on_nvme`.
        """
        from .activations import save_on_nvme

        made = save_on_nvme(self._paths, min_bytes, self._share(host_memory), aio=self._aio)
        self._parts.append(weakref.ref(made))
        return made

    def close(self) -> None:
        """Free host memory and drive space. A second call does nothing. Streamed parameters and the
        optimizer cannot be used afterwards.
        """
        parts, self._parts = self._parts, []
        with ExitStack() as closing:
            for part in filter(None, (reference() for reference in parts)):
                closing.callback(part.close)

    def __reduce__(self) -> NoReturn:
        raise UsageError("Offload cannot be pickled or copied: make one in each process")

    def __repr__(self) -> str:
        return f"<Offload {', '.join(self._paths)}: {format_bytes(self._memory.left_bytes())} of host memory left>"

    def _share(self, wanted: object, later: int = 0, *, grows: bool = True) -> Share:
        """The share of a part with *wanted* bytes, before *later* parts. Raises: UsageError."""
        asked = memory_size(wanted)
        left = self._memory.left_bytes()
        if left < self._memory.nbytes:
            wait_for_all()  # a pending update keeps an optimizer that the program has dropped
            gc.collect()  # a model that the program has dropped holds its streamer in a cycle
            left = self._memory.left_bytes()
        if asked == "auto":
            most = max(left - kept_for_later(left, later), 1)
            return Share(self._memory, most, min(most, kept_for_later(left, 1)) if grows else 0)
        if asked > left:
            raise UsageError(
                f"host_memory of {format_bytes(asked)} is more than the {format_bytes(left)} that Offload has left: "
                "give Offload more, or this part less"
            )
        return Share(self._memory, asked, asked)

    @contextmanager
    def _part(self, wanted: object, later: int, *, grows: bool = True) -> Iterator[Share]:
        """`_share` for a part that is made in the context. Its errors name the number to change."""
        try:
            yield self._share(wanted, later, grows=grows)
        except TooLittleMemoryError as error:
            enough = error.enough_bytes
            if wanted == "auto":
                enough = self._memory.needed_bytes + enough_with_later(enough, later)
                raise UsageError(
                    f"{error.reason}: allow at least {enough} bytes ({format_bytes(enough)}) by host_memory of Offload"
                ) from error
            left = self._memory.left_bytes()
            whole = self._memory.nbytes - left + enough
            raise UsageError(
                f"{error.reason}: allow at least {enough} bytes ({format_bytes(enough)}) by its argument host_memory"
                f"{f', and {whole} bytes by host_memory of Offload' if enough > left else ''}"
            ) from error


def _indexed(device: torch.device | str) -> torch.device:
    """*device* with its index."""
    import torch

    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device must be a CUDA device or the CPU, not {device}")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
