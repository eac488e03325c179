"""`PinnedPool`: pinned host memory of a fixed size, which can grow in place."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal

from ..errors import UnsupportedError, UsageError
from ..units import format_bytes
from .arguments import whole_number
from .closing import Closing
from .engine import Memory

_GRANULE_BYTES = 4096
_CUDA_HOST_REGISTER_DEFAULT = 0

_log = logging.getLogger(__name__)


class _Arena(Memory):
    """The memory of a pool. Views and tensors reference the arena, which is unregistered and
    unmapped after the last of them.
    """

    _unregister: Callable[[int], object] | None = None  # defined also where __init__ raised

    def __init__(self, nbytes: int, reserve: int) -> None:
        super().__init__(nbytes, in_child=False, reserve=reserve)
        self._process_id = os.getpid()

    def register_with_cuda(self, nbytes: int) -> str | None:
        """Register the memory with CUDA, for direct copies. Returns why that failed, or None.
        Source: cudaHostRegister.
        """
        import torch

        cuda: Any = torch.cuda  # untyped in torch
        try:
            cudart = cuda.cudart()
            self.unregister()  # it is registered with the size before it grew
            self.populate()  # in parallel, which CUDA does not do
            result = cudart.cudaHostRegister(self.address, nbytes, _CUDA_HOST_REGISTER_DEFAULT)
        # CUDA cannot start: the driver is too old, or a parent process that used it forked this one
        except RuntimeError as error:
            return str(error)
        if int(result) != 0:
            _clear_cuda_error()
            return str(cudart.cudaGetErrorString(result))
        self._unregister = cudart.cudaHostUnregister
        return None

    def unregister(self) -> None:
        """Undo `register_with_cuda`, after the copies in flight."""
        if self._unregister is not None:
            _synchronize_devices()
            self._unregister(self.address)
            self._unregister = None

    def __del__(self) -> None:
        # At process exit the driver does this itself and may be unloaded already. A forked child
        # has neither the mapping nor the driver.
        if (
            self._unregister is not None
            and os.getpid() == self._process_id
            and not sys.is_finalizing()
        ):
            self.unregister()


class PinnedPool(Closing):
    """One arena of pinned host memory.

    The arena is on huge pages where the kernel grants them. With a GPU it is registered with CUDA
    on the current device, so call `torch.cuda.set_device` first. Otherwise it is locked in memory
    (mlock) as far as RLIMIT_MEMLOCK allows, so that it is not swapped out. All methods are
    thread-safe.

    Parameters
    ----------
    nbytes : int
        Size of the arena in bytes, rounded up to 4 KiB.
    pin : bool or "auto"
        "auto" pins as much as the machine allows, and warns when a GPU refuses. True requires the
        whole pool to be pinned. False pins nothing.
    reserve : int
        Bytes of address space to reserve for `grow`. They take no memory until then.

    Attributes
    ----------
    pinned, pinned_bytes : {"cuda", "mlock", "none"}, int
        How the arena is pinned, and how many bytes of it.
    is_pin_due : bool
        Whether the arena has grown without being pinned: see `pin`.

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
    The memory is freed after `close`, or after the pool is dropped, with the last view of `memory`.
    It is not mapped in forked children, such as the workers of a DataLoader, which must not use it.
    Source: mlock(2), madvise(2) for MADV_HUGEPAGE and MADV_DONTFORK.
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
        self.is_pin_due = False
        self._pin(self._arena)
        self._process_id = os.getpid()
        self._lock = threading.Lock()  # guards growth and pinning
        self._user: weakref.ref[object] | None = None

    @property
    def memory(self) -> memoryview:
        """The whole arena, as unsigned bytes; `torch.frombuffer` makes a tensor of it. The view
        holds the memory. Raises `UsageError` when the pool is closed, and in a process forked
        since.
        """
        return memoryview(self._live())

    def take(self, user: object) -> None:
        """Take the pool for one user. Raises: UsageError if it has another user, or is closed.

        Parameters
        ----------
        user : object
            The user, until `give_back` or until the object is gone.
        """
        self._live()
        if self._user is not None and self._user() is not None:
            raise UsageError("another swapper uses the pool: give each swapper a separate pool")
        self._user = weakref.ref(user)

    def give_back(self) -> None:
        """End the use that began with `take`."""
        self._user = None

    def grow(self, nbytes: int, *, pin: bool = True) -> None:
        """Grow the arena in place; do nothing where it has as many bytes. An arena that is
        registered with CUDA is registered anew, which waits for the GPU.

        Parameters
        ----------
        nbytes : int
            The new size in bytes, rounded up to 4 KiB.
        pin : bool
            False leaves pinning to `pin`, for an arena that soon grows again: CUDA takes seconds to
            register 10 GB. Until then an arena that was registered is not.

        Raises
        ------
        UsageError
            *nbytes* exceeds the reservation, or the pool is closed.
        MemoryError, UnsupportedError
            As when the pool was made.
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
            if pin or not self._pin_wanted:
                self._pin(arena)
                return
            # Memory that is partly registered cannot be copied in one call.
            arena.unregister()
            if _has_gpu():
                arena.populate()  # a copy from the GPU would do it on one core
            self.pinned, self.pinned_bytes, self.is_pin_due = "none", 0, True

    def pin(self) -> None:
        """Pin the whole arena if a call of `grow` has left that out. Raises: as `grow`."""
        with self._lock:
            if self.is_pin_due:
                self._pin(self._live())

    def close(self) -> None:
        """Refuse further use. A second call does nothing."""
        self._arena = None

    def __repr__(self) -> str:
        pinned = (
            self.pinned
            if self.pinned_bytes in (0, self.nbytes)
            else f"{self.pinned} of {format_bytes(self.pinned_bytes)}"
        )
        closed = " closed" if self._arena is None else ""
        return f"<PinnedPool {format_bytes(self.nbytes)}, pinned: {pinned}{closed}>"

    def _pin(self, arena: _Arena) -> None:
        self.is_pin_due = False
        if not self._pin_wanted:
            return
        wholly = self._pin_wanted is True
        refusal = None
        if _has_gpu():
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

    def _live(self) -> _Arena:
        if os.getpid() != self._process_id:
            raise UsageError(
                "the pool belongs to the process that this one was forked from: make one here"
            )
        if self._arena is None:
            raise UsageError("the pool is closed")
        return self._arena


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _synchronize_devices() -> None:
    """Wait for every GPU that this process uses; a wait would start CUDA on others. Source:
    cuDevicePrimaryCtxGetState.
    """
    import torch

    cuda: Any = torch.cuda
    is_used = getattr(torch._C, "_cuda_hasPrimaryContext", lambda device: True)
    for device in range(cuda.device_count()):
        if is_used(device):
            cuda.synchronize(device)


def _clear_cuda_error() -> None:
    """Clear CUDA's last error, which torch would raise after the caller's next kernel."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
