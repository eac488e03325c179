"""`PinnedPool`: pinned host memory with a hard byte budget, handed out as tensors."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import UnsupportedError, UsageError, WaitTimeout, whole_number
from ..units import format_bytes
from .closing import Closing
from .engine import Memory, release_buffers
from .extents import Extents

if TYPE_CHECKING:
    import torch

_GRANULE_BYTES = 4096
_CUDA_HOST_REGISTER_DEFAULT = 0
# poll interval of a waiter, for tensors that only a finished request still holds
_POLL_SECONDS = 0.01

_log = logging.getLogger(__name__)


class _Arena(Memory):
    """The memory of a pool. Every tensor on it references it, so it is unregistered and unmapped
    after the last of them.
    """

    _unregister: Callable[[int], object] | None = None  # defined also where __init__ raised

    def __init__(self, nbytes: int, reserve: int) -> None:
        super().__init__(nbytes, in_child=False, reserve=reserve)
        self._process_id = os.getpid()

    def register_with_cuda(self, nbytes: int) -> str | None:
        """Register the memory with CUDA, for direct copies from and to the GPU. Returns why that
        failed, or None. Source: cudaHostRegister.
        """
        import torch

        cuda: Any = torch.cuda  # untyped in torch
        try:
            cudart = cuda.cudart()
            if self._unregister is not None:  # registered with the size before it grew
                _synchronize_devices()  # copies in flight use it
                self._unregister(self.address)
                self._unregister = None
            result = cudart.cudaHostRegister(self.address, nbytes, _CUDA_HOST_REGISTER_DEFAULT)
        # CUDA cannot start: the driver is too old, or a parent process that used it forked this one
        except RuntimeError as error:
            return str(error)
        if int(result) != 0:
            _clear_cuda_error()
            return str(cudart.cudaGetErrorString(result))
        self._unregister = cudart.cudaHostUnregister
        return None

    def __del__(self) -> None:
        # At process exit the driver does this itself and may be unloaded already. A forked child
        # has neither the mapping nor the driver.
        if (
            self._unregister is not None
            and os.getpid() == self._process_id
            and not sys.is_finalizing()
        ):
            self._unregister(self.address)


class PinnedPool(Closing):
    """A fixed budget of pinned host memory, shared by tensors of any size.

    The budget is one arena on huge pages where the kernel grants them. With a GPU it is registered
    with CUDA on the current device, so call `torch.cuda.set_device` first. Otherwise it is locked
    in memory (mlock) as far as RLIMIT_MEMLOCK allows, so that it is not swapped out. All methods
    are thread-safe.

    Parameters
    ----------
    nbytes : int
        Size of the arena in bytes, rounded up to 4 KiB.
    pin : bool or "auto"
        "auto" pins what the machine allows, and warns when a GPU refuses. True requires all of it
        to be pinned. False pins nothing.
    reserve : int
        Bytes of address space to reserve for `grow`. They take no memory until then.

    Attributes
    ----------
    nbytes : int
        Size of the arena in bytes.
    pinned : {"cuda", "mlock", "none"}
        How the arena is pinned.
    pinned_bytes : int
        How much of the arena is pinned, in bytes.

    Raises
    ------
    UsageError
        An argument is invalid.
    MemoryError
        The memory cannot be mapped.
    UnsupportedError
        *pin* is True and not all of the arena can be pinned.

    Notes
    -----
    The memory is freed after `close`, or after the pool is dropped, with its last tensor. It is not
    mapped in forked children, such as the workers of a DataLoader: a tensor of the pool must not be
    used there. Source: mlock(2), madvise(2) for MADV_HUGEPAGE and MADV_DONTFORK, cudaHostRegister.
    """

    def __init__(
        self, nbytes: int, pin: bool | Literal["auto"] = "auto", *, reserve: int = 0
    ) -> None:
        if not (isinstance(pin, bool) or pin == "auto"):
            raise UsageError(f"pin must be true, false or 'auto', not {pin!r}")
        count = whole_number("nbytes", nbytes)
        if count == 0:
            raise UsageError("a pool needs at least 1 byte")
        self.nbytes = -(-count // _GRANULE_BYTES) * _GRANULE_BYTES
        self.pinned: Literal["cuda", "mlock", "none"] = "none"
        self.pinned_bytes = 0
        self._reserved = max(whole_number("reserve", reserve), self.nbytes)
        self._arena: _Arena | None = _Arena(self.nbytes, self._reserved)
        self._pin_wanted = pin
        self._pin(self._arena)
        self._process_id = os.getpid()
        self._extents = Extents(self.nbytes, _GRANULE_BYTES)
        self._peak_bytes = 0
        # A tensor is finalized in any thread, also by the garbage collector in the middle of any
        # line here. The finalizer must not take a lock, so it only puts the offset on this queue.
        # None wakes the first waiter.
        self._freed: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the extents and all attributes below
        # in order of arrival; the event of the first is set: it is its turn
        self._waiters: deque[threading.Event] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes of the live tensors, each rounded up to 4 KiB. Raises `UsageError` in a process
        forked since.
        """
        self._check_process()
        with self._lock:
            self._process_freed()
            if self._waiters:
                self._freed.put(None)  # this call may have taken the wake-up of the first waiter
            return self._extents.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The maximum of `used_bytes` so far."""
        return self._peak_bytes

    @property
    def memory(self) -> memoryview:
        """The whole arena. It holds the memory as a tensor does. Raises `UsageError` when the pool
        is closed.
        """
        return memoryview(self._live())

    def empty(self, numel: int, dtype: torch.dtype, timeout: float | None = None) -> torch.Tensor:
        """Allocate an uninitialised tensor, waiting until there is space for it.

        Waiters are served in order of arrival, so that small tensors do not starve a large one.

        Parameters
        ----------
        numel : int
            Number of elements.
        dtype : torch.dtype
            Not a quantized one: its scale is kept outside of the memory.
        timeout : float, optional
            Seconds; None waits without a limit.

        Returns
        -------
        torch.Tensor
            One dimension, page-aligned. Its memory is free again when it and every view of it are
            gone. A GPU copy in flight does not hold it: drop the tensor after
            `torch.cuda.Stream.synchronize`. A request of an engine holds it until it finishes.

        Raises
        ------
        WaitTimeout
            *timeout* passed.
        UsageError
            The tensor is larger than the pool, *dtype* is quantized, the pool is closed, or the
            process was forked since the pool was made.
        """
        import torch

        arena = self._live()
        numel = whole_number("numel", numel)
        if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
            raise UsageError(f"dtype must be a torch.dtype that is not quantized, not {dtype!r}")
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = numel * dtype.itemsize
        if nbytes > self.nbytes:
            needed = self._extents.rounded(nbytes)
            raise UsageError(
                f"{numel} elements of {dtype} are {format_bytes(nbytes)} and never fit in a pool of {format_bytes(self.nbytes)}: "
                f"make it at least PinnedPool({needed})"
            )
        offset = self._allocate(nbytes, timeout)
        # The storage of a tensor made from an array references that array, so the finalizer runs
        # with the last view. The length is that of now: the arena may have grown.
        array = np.frombuffer(memoryview(arena), np.uint8, nbytes, offset)
        weakref.finalize(array, self._freed.put, offset).atexit = False
        return torch.from_numpy(array).view(dtype)

    def grow(self, nbytes: int) -> None:
        """Grow the arena to *nbytes* in all, rounded up to 4 KiB; do nothing where it has as many.
        Allocated tensors stay where they are. An arena that is registered with CUDA is registered
        anew, which waits for the GPU.

        Parameters
        ----------
        nbytes : int
            The new size in bytes.

        Raises
        ------
        UsageError
            *nbytes* is above what was reserved, or the pool is closed.
        MemoryError
            The memory cannot be mapped.
        UnsupportedError
            *pin* is True and not all of the arena can be pinned.
        """
        count = -(-whole_number("nbytes", nbytes) // _GRANULE_BYTES) * _GRANULE_BYTES
        with self._lock:
            arena = self._live()
            if count <= self.nbytes:
                return
            if count > self._reserved:
                raise UsageError(
                    f"a pool that reserved {format_bytes(self._reserved)} cannot grow to {format_bytes(count)}: make it with reserve={count}"
                )
            arena.grow(count)
            self.nbytes = count
            self._extents.grow(count)
            self._freed.put(None)  # there may be space for a waiter now
            self._pin(arena)

    def close(self) -> None:
        """Refuse further tensors, and end waits for one with a `UsageError`. A second call does
        nothing.
        """
        self._arena = None
        self._freed.put(None)

    def __repr__(self) -> str:
        pinned = (
            self.pinned
            if self.pinned_bytes in (0, self.nbytes)
            else f"{self.pinned} of {format_bytes(self.pinned_bytes)}"
        )
        state = (
            " closed"
            if self._arena is None
            else f", {len(self._waiters)} waiting"
            if self._waiters
            else ""
        )
        return f"<PinnedPool {format_bytes(self.nbytes)}, pinned: {pinned}, peak: {format_bytes(self._peak_bytes)}{state}>"

    def _pin(self, arena: _Arena) -> None:
        import torch

        if not self._pin_wanted:
            return
        wholly = self._pin_wanted is True
        refusal = None
        if torch.cuda.is_available():
            refusal = arena.register_with_cuda(self.nbytes)
            if refusal is None:
                self.pinned, self.pinned_bytes = "cuda", self.nbytes
                return
            if wholly:
                raise UnsupportedError(
                    f"CUDA does not register {format_bytes(self.nbytes)} of host memory: {refusal}; make the pool smaller or pass pin='auto'"
                )
        self.pinned_bytes = arena.lock()
        self.pinned = "mlock" if self.pinned_bytes else "none"
        if refusal is not None:
            warnings.warn(
                f"CUDA does not register {format_bytes(self.nbytes)} of host memory: {refusal}; copies to and from the GPU will be several times slower",
                RuntimeWarning,
                stacklevel=3,
            )
        if self.pinned_bytes == self.nbytes:
            return
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shortfall = (
            f"{format_bytes(self.pinned_bytes)} of {format_bytes(self.nbytes)} could be locked in memory: "
            f"RLIMIT_MEMLOCK is {'unlimited' if limit == resource.RLIM_INFINITY else format_bytes(limit)}"
        )
        if wholly:
            raise UnsupportedError(
                f"only {shortfall}; raise it to at least {self.nbytes} bytes for this process (ulimit -l {self.nbytes >> 10}, memlock in "
                "/etc/security/limits.conf, LimitMEMLOCK= of a systemd unit, --ulimit memlock=-1 of a container), or pass pin='auto'"
            )
        _log.info("%s; the rest may be swapped out", shortfall)

    def _allocate(self, nbytes: int, timeout: float | None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        turn = threading.Event()
        try:
            with self._lock:
                if not self._waiters:
                    turn.set()
                self._waiters.append(turn)
            while turn.wait(_left(deadline)):
                with self._lock:
                    self._live()
                    self._process_freed()
                    offset = self._extents.allocate(nbytes)
                    if offset is not None:
                        self._peak_bytes = max(self._peak_bytes, self._extents.used_bytes)
                        return offset
                # Wait without the lock for a freed offset, then put it back: it is processed under
                # the lock.
                self._freed.put(self._next_freed(deadline))
        except queue.Empty:
            pass
        finally:
            with self._lock:
                if turn in self._waiters:  # not there when Ctrl-C arrived before the append
                    self._waiters.remove(turn)
                if self._waiters:
                    self._waiters[0].set()
        raise WaitTimeout(
            f"no space for {format_bytes(nbytes)} within {timeout} s: {format_bytes(self.used_bytes)} of {format_bytes(self.nbytes)} are in use, "
            f"and the largest free extent has {format_bytes(self._extents.largest_free_bytes)}"
        )

    def _next_freed(self, deadline: float | None) -> int | None:
        """Wait until a tensor is freed; its offset. Raises: queue.Empty at the deadline."""
        while True:
            release_buffers()
            left = _left(deadline)
            try:
                return self._freed.get(
                    timeout=_POLL_SECONDS if left is None else min(left, _POLL_SECONDS)
                )
            except queue.Empty:
                if left is not None and left <= _POLL_SECONDS:
                    raise

    def _process_freed(self) -> None:
        """Free the extents of finalized tensors. Needs the lock."""
        with contextlib.suppress(queue.Empty):
            while True:
                offset = self._freed.get_nowait()
                if offset is not None:
                    self._extents.free(offset)

    def _live(self) -> _Arena:
        self._check_process()
        if self._arena is None:
            raise UsageError("the pool is closed")
        return self._arena

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise UsageError(
                "the pool belongs to the process that this one was forked from: make one here"
            )


def _synchronize_devices() -> None:
    """Wait for every GPU that this process uses. Others are left alone: a wait would start CUDA on
    them, which takes memory there. Source: cuDevicePrimaryCtxGetState.
    """
    import torch

    cuda: Any = torch.cuda
    is_used = getattr(torch._C, "_cuda_hasPrimaryContext", lambda device: True)
    for device in range(cuda.device_count()):
        if is_used(device):
            cuda.synchronize(device)


def _clear_cuda_error() -> None:
    """Clear CUDA's last error, which torch would raise after the caller's next kernel. Source:
    cudaGetLastError.
    """
    import torch

    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _left(deadline: float | None) -> float | None:
    return (
        None
        if deadline is None
        else min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
    )
