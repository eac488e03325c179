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
# how often who waits for room looks for tensors that only a finished request still holds
_ENGINE_POLL_SECONDS = 0.01

_log = logging.getLogger(__name__)


class _Arena(Memory):
    """The memory of a pool. Every tensor on it holds it, so that it goes after the last of them,
    and is unregistered before it goes.
    """

    _unregister: Callable[[int], object] | None = None  # also where __init__ raised

    def __init__(self, nbytes: int, reserve: int) -> None:
        super().__init__(nbytes, in_child=False, reserve=reserve)
        self._process_id = os.getpid()

    def register_with_cuda(self, nbytes: int) -> str | None:
        """Let the GPU copy to and from this memory by itself; returns why that could not be, None
        when it is so. Source: cudaHostRegister.
        """
        import torch

        cuda: Any = torch.cuda  # untyped there
        try:
            cudart = cuda.cudart()
            if self._unregister is not None:  # as less than it is now
                cuda.synchronize()  # with what is copied meanwhile
                self._unregister(self.address)
                self._unregister = None
            result = cudart.cudaHostRegister(self.address, nbytes, _CUDA_HOST_REGISTER_DEFAULT)
        # CUDA cannot start: a driver that is too old, a child forked from a process that uses it
        except RuntimeError as error:
            return str(error)
        if int(result) != 0:
            _clear_cuda_error()
            return str(cudart.cudaGetErrorString(result))
        self._unregister = cudart.cudaHostUnregister
        return None

    def __del__(self) -> None:
        # At the end of the process the driver does it, and may be gone already; a forked child has
        # neither the memory nor the driver.
        if (
            self._unregister is not None
            and os.getpid() == self._process_id
            and not sys.is_finalizing()
        ):
            self._unregister(self.address)


class PinnedPool(Closing):
    """A budget of pinned host memory that tensors of every size share.

    One arena of *nbytes*, rounded up to 4 KiB and no further, on huge pages where the kernel grants
    them; `grow` can make it as large as *reserve*, which takes addresses and no memory. Where there
    is a GPU it is registered with CUDA on the current device, so choose that first
    (`torch.cuda.set_device`); otherwise it is locked in memory as far as the limit allows, so that
    it is never swapped out. *pin* says how much of that must be: "auto" takes what there is
    (`pinned` and `pinned_bytes` tell, and a GPU that refuses is warned of), True wants the whole
    arena pinned, False pins nothing.

    All methods may be called from any thread. The arena does not exist in forked children, such as
    the workers of a DataLoader, which would otherwise be given copies of all of it: a tensor of the
    pool must not be touched there.

    Attributes: *nbytes* of the arena; *pinned*, which is "cuda", "mlock" or "none", and
    *pinned_bytes* of the arena that are. Lifetime: the memory is given back after `close`, or when
    the pool is dropped, once its last tensor is gone. Raises: UsageError; MemoryError;
    UnsupportedError when pin=True and not all can be pinned. Source: mlock(2), madvise(2) for
    MADV_HUGEPAGE and MADV_DONTFORK, cudaHostRegister.
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
        # The end of a tensor is told in whatever thread drops it, also by the garbage collector in
        # the middle of any line here: it may take no lock, and what is safe then is to put the
        # offset on this queue. None wakes the waiter whose turn it is.
        self._freed: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # for all that follows and the extents
        # in order of arrival; set for the first, whose turn it is
        self._waiters: deque[threading.Event] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors alive, each rounded up to 4 KiB. Raises: UsageError in a process
        forked since.
        """
        self._check_process()
        with self._lock:
            self._take_back()
            if self._waiters:
                self._freed.put(None)  # the news taken here were for the first of them
            return self._extents.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that `used_bytes` has been."""
        return self._peak_bytes

    @property
    def memory(self) -> memoryview:
        """All bytes of the arena, for `Engine.register`. Lifetime: it holds the memory as a tensor
        does. Raises: UsageError when closed.
        """
        return memoryview(self._live())

    def empty(self, numel: int, dtype: torch.dtype, timeout: float | None = None) -> torch.Tensor:
        """Return an uninitialised tensor of *numel* elements, once there is room for it.

        Who waits is served in order of arrival, so that small tensors do not keep a large one
        waiting for ever.

        Shapes: one dimension; it starts on a page. Units: *timeout* in seconds, None for as long as
        it takes. Lifetime: the room is free again when the tensor and every view of it are gone. A
        copy to or from a GPU that is under way does not hold them: drop a tensor after
        `torch.cuda.Stream.synchronize`, not before. A request of an engine does hold them, until it
        is finished. Raises: WaitTimeout; UsageError when the tensor would not fit in the whole
        pool, when *dtype* is quantized (its scale lies outside of the memory), when the pool is
        closed, and in a process forked since the pool was made.
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
        # The storage of a tensor made from an array holds that very array until it goes itself.
        # as long as it is now: it may have grown meanwhile
        array = np.frombuffer(memoryview(arena), np.uint8, nbytes, offset)
        weakref.finalize(array, self._freed.put, offset).atexit = False
        return torch.from_numpy(array).view(dtype)

    def grow(self, nbytes: int) -> None:
        """Have *nbytes* in all, rounded up to 4 KiB; where there are as many, do nothing. What was
        handed out stays where it is.

        Where the arena is registered with CUDA this waits for the GPU. Raises: UsageError above
        what was reserved, or when closed; MemoryError; UnsupportedError when pin=True and not all
        can be pinned.
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
            self._freed.put(None)  # who waits may have room now
            self._pin(arena)

    def close(self) -> None:
        """Hand out no more tensors, and end the waits for one with a UsageError; a second call does
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
                    self._take_back()
                    offset = self._extents.allocate(nbytes)
                    if offset is not None:
                        self._peak_bytes = max(self._peak_bytes, self._extents.used_bytes)
                        return offset
                # Until there is something to take back; taking it is for whoever has the lock.
                self._freed.put(self._news(deadline))
        except queue.Empty:
            pass
        finally:
            with self._lock:
                if turn in self._waiters:  # not so when Ctrl-C came first
                    self._waiters.remove(turn)
                if self._waiters:
                    self._waiters[0].set()
        raise WaitTimeout(
            f"no room for {format_bytes(nbytes)} within {timeout} s: {format_bytes(self.used_bytes)} of {format_bytes(self.nbytes)} are in use, "
            f"and the largest hole has {format_bytes(self._extents.largest_free_bytes)}"
        )

    def _news(self, deadline: float | None) -> int | None:
        """Wait until something is freed. Raises: queue.Empty at the deadline."""
        while True:
            release_buffers()
            left = _left(deadline)
            try:
                return self._freed.get(
                    timeout=_ENGINE_POLL_SECONDS
                    if left is None
                    else min(left, _ENGINE_POLL_SECONDS)
                )
            except queue.Empty:
                if left is not None and left <= _ENGINE_POLL_SECONDS:
                    raise

    def _take_back(self) -> None:
        """Free what the tensors that are gone had."""
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


def _clear_cuda_error() -> None:
    """Take CUDA's last error, which torch would otherwise raise after the next kernel that the
    caller starts. Source: cudaGetLastError.
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
