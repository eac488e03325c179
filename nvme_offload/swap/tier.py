"""`Tier`: the drives and the host memory of one rank: a store, and a swapper with one budget."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ..errors import NoSpaceError, OffloadError, UsageError, known
from ..hardware import profile_shelf
from ..hardware.config import AioConfig
from ..hardware.drive import describe, filesystem_space
from ..hardware.machine import available_bytes, gpu_count, physical_bytes
from ..io.pool import PinnedPool
from ..io.weak_list import WeakList
from ..sizes import AUTO_SHARE, overflow
from ..store.store import TensorStore, paths_of
from ..units import format_bytes, parse_bytes
from .swapper import SwapperStats, TensorSwapper

if TYPE_CHECKING:
    import torch

    from ..io.engine import StrPath

# The smallest pool. Without a minimum, the pool would grow with every small parameter.
_LEAST_BYTES = 64 << 20
# The steps in which an unpinned pool grows for values from memory that the caller has yet to free: all
# cores populate a step.
STEP_BYTES = 1 << 30
# Growth of pools after which the next tier collects garbage first.
_UNCOLLECTED_BYTES = 256 << 20

# The number of ranks on this machine: torchrun, the deepspeed launcher, Open MPI, other MPIs.
_LOCAL_RANKS = "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"

_log = logging.getLogger(__name__)


class SharedMemory:
    """*nbytes* of host memory that tiers share; *lock* is held while a tier grows."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lock = threading.RLock()
        self._tiers: WeakList[Tier] = WeakList()

    def add(self, tier: Tier) -> None:
        """Let *tier* use this memory, until it is closed."""
        self._tiers.add(tier)

    def left_bytes(self, besides: Tier | None = None) -> int:
        """The bytes that no tier claims, *besides* not counted."""
        claimed = sum(tier.claimed_bytes for tier in self._tiers if tier is not besides)
        return max(self.nbytes - claimed, 0)  # every tier claims whole pages

    @property
    def needed_bytes(self) -> int:
        """The bytes in which no tier would use a drive."""
        return sum(max(tier.claimed_bytes, tier.needed_bytes) for tier in self._tiers)


class Share(int):
    """The most bytes of *memory* that a tier may use, as the `host_memory` of that tier. *least_bytes*
    are reserved for the tier even if it does not use them.
    """

    memory: SharedMemory
    least_bytes: int

    def __new__(cls, memory: SharedMemory, most_bytes: int, least_bytes: int) -> Share:
        """Make a share."""
        share = super().__new__(cls, most_bytes)
        share.memory, share.least_bytes = memory, least_bytes
        return share


class Tier:
    """The drives and the host memory of one rank: a store on *paths*, which are existing directories,
    and a swapper with one memory budget for all values.

    The pool grows as calls of `require` announce how much memory is useful. The budget *host_memory*
    is in bytes; "auto" takes 70 % of the memory available now, divided by the ranks of this machine.
    With a `Share`, it also depends on the tiers that share the memory. *weights* and *checksum* are
    as in `TensorStore`.

    A tier is closed by `close`, when its last user is gone, or when the process ends. Raises:
    UsageError if a directory is missing; IOFailure, UnsupportedError if it cannot be used.
    """

    grown_bytes: ClassVar[int] = 0  # of all pools, since `_collect_dropped` has collected

    def __init__(
        self,
        paths: Sequence[str],
        aio: AioConfig,
        *,
        host_memory: int | Literal["auto"] = "auto",
        weights: Sequence[float] = (),
        checksum: bool = False,
    ) -> None:
        _collect_dropped()
        self.aio = aio
        self.paths = tuple(paths)
        for path in paths:
            _check_directory(path)
        self._weights, self._checksum = list(weights) or None, checksum
        self._resources = contextlib.ExitStack()
        self.store = self._open_store()
        self._swapper: TensorSwapper | None = None
        self._pool: PinnedPool | None = None
        # Names of values whose owners are gone, and bytes that the owners announced.
        self._abandoned: deque[tuple[Collection[str], Collection[int]]] = deque()
        self._needed_bytes = 0
        self._most_bytes = 0  # the reserved size of the pool
        self._reserved_bytes = 0  # on the drives, if not all values fit there
        self._foretold: tuple[dict[str, int], int] | None = None  # the arguments of `foretell`
        self._scratch: dict[str, torch.Tensor] = {}
        self._automatic = host_memory == "auto"
        self._share = host_memory if isinstance(host_memory, Share) else None
        self._cap_bytes = automatic_bytes() if host_memory == "auto" else int(host_memory)
        self._exceeded_bytes = 0  # see `exceed`
        _log.info(
            "engine for %s: %s, blocks of %s, %d in flight in each of %d threads",
            ", ".join(paths),
            aio.backend,
            format_bytes(aio.block_size),
            aio.queue_depth,
            aio.thread_count,
        )
        self.close = weakref.finalize(self, _close, self._resources, os.getpid())
        if self._share is not None:
            self._share.memory.add(self)

    @property
    def cap_bytes(self) -> int:
        """The budget: the most host memory that the values of this rank may use."""
        if self._share is None:
            return self._cap_bytes
        left = self._share.memory.left_bytes(besides=self) - self._beside_bytes
        return min(self._cap_bytes, left)

    @cap_bytes.setter
    def cap_bytes(self, nbytes: int) -> None:
        self._cap_bytes = nbytes

    @property
    def claimed_bytes(self) -> int:
        """The bytes of `SharedMemory` that other tiers must leave to this one."""
        if self._share is None or not self.close.alive:
            return 0
        return max(self._held_bytes + self._beside_bytes, self._share.least_bytes)

    @property
    def needed_bytes(self) -> int:
        """Bytes of host memory that were announced, or that the owner keeps outside of the tier."""
        return self._needed_bytes + self._beside_bytes

    @property
    def _beside_bytes(self) -> int:
        """The part of the share that the owner keeps for memory outside of the tier."""
        return 0 if self._share is None else max(self._share - self._cap_bytes, 0)

    @property
    def swapper(self) -> TensorSwapper:
        """The swapper. Raises `UsageError` before the first `require`."""
        if self._swapper is None:
            raise UsageError("no host memory was requested yet")
        while self._abandoned:
            try:
                names, announced = self._abandoned.popleft()
            except IndexError:
                break  # another thread has taken the last one
            self.give_back(sum(announced))
            self._discard(self._swapper, names)
        return self._swapper

    def counters(self) -> SwapperStats | None:
        """Counters of the swapper; None before the first `require`. Thread-safe."""
        swapper = self._swapper
        return swapper.stats() if swapper is not None else None

    @property
    def interrupted(self) -> bool:
        """Whether an exception has interrupted a call: values are unusable until `reset`."""
        swapper = self._swapper
        return self.store.interrupted or (swapper is not None and swapper.interrupted)

    def reset(self) -> None:
        """Delete every value, even after an exception has interrupted a call. Memory, space on the
        drives and allocations of `make_scratch` stay. Tensors of values and of scratch memory must
        not be used afterwards. Raises: as `TensorStore.reset`.
        """
        swapper = self._swapper
        if swapper is None:
            self.store.reset()
            return
        swapper.reset()
        if self._reserved_bytes:
            self.store.reserve(self._reserved_bytes)
        for name, memory in list(self._scratch.items()):
            self._scratch[name] = swapper.create(name, memory.nbytes, lowest=True)
        if self._foretold is not None:
            sizes, at_once = self._foretold
            self.foretell(sizes, at_once=at_once)

    def start_over(self) -> None:
        """Delete every value, and release memory and space on the drives, as before the first
        `require`. No value may be in use. Raises: as `TensorSwapper.close`.
        """
        try:
            self._resources.pop_all().close()
        finally:
            self._swapper, self._pool = None, None
            self._abandoned.clear()
            self._scratch.clear()
            self._needed_bytes = self._reserved_bytes = self._exceeded_bytes = 0
            self._foretold = None
            self.store = self._open_store()

    def _open_store(self) -> TensorStore:
        store = TensorStore(
            list(self.paths), self.aio, weights=self._weights, checksum=self._checksum
        )
        self._resources.callback(store.close)
        return store

    def end_uses(self) -> None:
        """End every use of a value except uses of `make_scratch`, after an exception has ended a call
        of the tier's only user: see `TensorSwapper.end_uses`. Does nothing while `interrupted`.
        """
        self.release_locks()
        if self._swapper is not None:
            self._swapper.end_uses()

    def release_locks(self) -> None:
        """Release the locks of store and swapper if this thread holds them outside of a call,
        because an exception has ended a `with` at its last line. For a thread that is about to wait
        for another thread.
        """
        self.store.release_lock()
        if self._swapper is not None:
            self._swapper.release_lock()

    def forget(self, names: Collection[str]) -> None:
        """Discard the values *names* that exist, including allocations of `make_scratch`."""
        self._discard(self.swapper, names)

    def abandon(self, names: Collection[str], announced: Collection[int] = ()) -> None:
        """Schedule `forget` of *names* and `give_back` of the bytes *announced* for the next use of
        the swapper. For the garbage collector, which may run in the middle of any line: it takes no
        lock and never waits.
        """
        self._abandoned.append((names, announced))

    def abandon_with(
        self, owner: object, names: Collection[str], announced: Collection[int] = ()
    ) -> None:
        """Call `abandon` with the final *names* and *announced* once *owner* is garbage-collected."""
        left = names, announced
        weakref.finalize(owner, self._abandoned.append, left).atexit = False

    def require(self, nbytes: int, *, pin: bool = True, ahead: bool = True) -> None:
        """Announce that *nbytes* more of host memory are useful, until `give_back`: the pool grows as
        far as the budget allows, with *ahead* also for later calls. Without *pin*, a later call or
        `pin` pins the memory. Raises: MemoryError.
        """
        if self._swapper is not None:
            _ = self.swapper  # releases abandoned values
        self._needed_bytes += nbytes
        if self._needed_bytes > self.cap_bytes:
            self._check_places()
        with contextlib.nullcontext() if self._share is None else self._share.memory.lock:
            cap = max(self.cap_bytes, self._exceeded_bytes)
            least = _LEAST_BYTES if self._share is None else min(_LEAST_BYTES, self._share // 16)
            wanted = min(max(self._needed_bytes, least), cap)
            held = self._held_bytes
            if self._swapper is None:
                self._most_bytes = max(wanted, physical_bytes())
                self._pool = PinnedPool(wanted, reserve=self._most_bytes)
                self._resources.callback(self._pool.close)
                self._resources.callback(self._scratch.clear)
                self._log_memory()
                self._swapper = TensorSwapper(self.store, self._pool)
                self._resources.callback(self._swapper.close)
            elif wanted > self._held_bytes:
                # Doubled, since every change registers the whole pool with CUDA again.
                step = self._held_bytes if pin else min(self._held_bytes, STEP_BYTES)
                most = max(wanted, self._held_bytes + ahead * step)
                grown = min(most, cap, self._most_bytes)
                self._swapper.grow(grown, pin=pin)
                if pin:
                    self._log_memory()
            Tier.grown_bytes += self._held_bytes - held
        if pin:
            self.pin()

    def pin(self) -> None:
        """Pin the memory of calls of `require` that have left it unpinned."""
        pool = self._pool
        if pool is not None and pool.is_pin_due:
            pool.pin()
            self._log_memory()

    def exceed(self, nbytes: int) -> None:
        """Allow the pool to grow to *nbytes* for a value that the budget cannot hold, until the caller
        knows how many bytes would be enough for all values and refuses the configuration.
        """
        self._exceeded_bytes = max(self._exceeded_bytes, nbytes)

    def end_use(self, name: str, *, changed: bool, nbytes: int | None = None) -> None:
        """Release *name* if it is in use: an exception may have come before or after its use."""
        with contextlib.suppress(UsageError):
            self.swapper.release(name, changed=changed, nbytes=nbytes)

    def give_back(self, nbytes: int) -> None:
        """Undo a `require` of *nbytes*."""
        self._needed_bytes -= nbytes

    def make_scratch(self, name: str, nbytes: int) -> None:
        """Allocate *nbytes* until *name* is forgotten. Raises: as `TensorSwapper.create`."""
        # At the lowest address: in the middle it would fragment the memory.
        self._scratch[name] = self.swapper.create(name, nbytes, lowest=True)

    def scratch(self, name: str) -> torch.Tensor:
        """The bytes of `make_scratch`, to be asked for at every use: `require` may move them."""
        return self._scratch[name]

    def _discard(self, swapper: TensorSwapper, names: Collection[str]) -> None:
        for name in names:
            self._scratch.pop(name, None)
            if name in swapper:
                swapper.discard(name)

    @property
    def _held_bytes(self) -> int:
        return self._pool.nbytes if self._pool is not None else 0

    def _log_memory(self) -> None:
        pool = known(self._pool)
        automatic = ", from the memory available" if self._automatic else ""
        held, cap = format_bytes(pool.nbytes), format_bytes(self.cap_bytes)
        _log.info(
            "host memory for offload: %s of at most %s%s; pinned: %s",
            held,
            cap,
            automatic,
            pool.pinned,
        )

    def require_memory(self, whole_bytes: int, *, freed_bytes: int = 0) -> None:
        """Check that the machine has host memory for *whole_bytes* of values, up to the budget: the
        kernel's OOM killer would end the process later. *freed_bytes* of this process are freed while
        the tier takes them. Raises: UsageError.
        """
        ranks = local_ranks()
        available = available_bytes() // ranks + freed_bytes
        if self._swapper is None and self._automatic:
            self.cap_bytes = min(self.cap_bytes, int(available * AUTO_SHARE))
        held = min(self.cap_bytes, whole_bytes) - self._held_bytes
        if held > available:
            raise UsageError(
                f"{f'each of the {ranks} ranks here' if ranks > 1 else 'this process'} needs {format_bytes(held)} of host memory for offloaded values, "
                f"and {format_bytes(available)} are available to it: "
                f'lower "host_memory", or use {"fewer ranks or " if ranks > 1 else ""}a smaller model'
            )

    def require_space(
        self, nbytes: int, *, largest: int | None = None, twice: int = 0, growth: int = 0
    ) -> None:
        """Check that *nbytes* more per rank fit on the drives, if the other ranks of this machine need
        as many. The drives have two versions of *twice* bytes of them at a time.

        *largest* is the size of the largest value, if `foretell` will name the values. If not all
        values fit on the drives, host memory holds as many as it can. Space for the other values, and
        for the *growth* of values if all ranks have it, is allocated immediately, so that no other
        program takes it. Raises: NoSpaceError.
        """
        values, nbytes = nbytes, nbytes + twice
        ranks, free = local_ranks(), self._free_bytes()
        if nbytes * ranks <= free:
            return
        cure = ""
        if largest is not None:
            for more in dict.fromkeys((growth, 0)):
                nbytes = overflow(values + more, self.cap_bytes, largest) + twice
                if more and nbytes * ranks > free:
                    continue  # the space belongs to another rank
                with contextlib.suppress(NoSpaceError):
                    self.store.reserve(nbytes)
                    self._reserved_bytes = nbytes
                    _log.warning(
                        "the drive has no room for all of %s: %s is allocated there, and host memory holds the rest%s",
                        format_bytes(values),
                        format_bytes(nbytes),
                        f"; should states grow, by up to {format_bytes(growth)}, that may not be enough"
                        if more < growth
                        else "",
                    )
                    return
            cure = ", or allow more host_memory"
        self._check_places()
        raise NoSpaceError(
            28,
            f"training needs {format_bytes(nbytes)}{f' a rank and {format_bytes(nbytes * ranks)} for the {ranks} on this machine' if ranks > 1 else ''}, "
            f'and {format_bytes(free)} are free; free some, or name more drives in "paths"{cure}',
            operation="reservation",
            path=", ".join(self.paths),
        )

    def _check_places(self) -> None:
        for path in self.paths:
            _check_place(path)

    def foretell(self, sizes: Mapping[str, int], *, at_once: int) -> None:
        """Announce the first values of the tier after `require`: see `TensorSwapper.foretell`."""
        self._foretold = dict(sizes), at_once
        self.swapper.foretell(sizes, at_once=at_once, stay=self._reserved_bytes > 0)

    def _free_bytes(self) -> int:
        spaces = {Path(path).stat().st_dev: filesystem_space(path) for path in self.paths}
        return sum(space.f_bavail * space.f_frsize for space in spaces.values())


def _collect_dropped() -> None:
    """Free the memory of models and tiers that the program has dropped. They are in cycles, and
    Python's garbage collector counts objects, not bytes.
    """
    if Tier.grown_bytes > _UNCOLLECTED_BYTES:
        Tier.grown_bytes = 0
        gc.collect()


def automatic_bytes(freed_bytes: int = 0) -> int:
    """The budget "auto": a share of the memory available now, divided by the ranks of this machine, and
    of *freed_bytes* that this process has yet to free.
    """
    _collect_dropped()
    return int((available_bytes() / local_ranks() + freed_bytes) * AUTO_SHARE)


def local_ranks() -> int:
    """The number of ranks on this machine, from the launcher's environment. If the environment has
    only the total number, at most the number of GPUs on this machine.

    Source: the environment of torchrun, the deepspeed launcher and MPI. Lightning's launcher, and
    its plugin for Slurm, set WORLD_SIZE only.
    """
    for name in _LOCAL_RANKS:
        if local := os.environ.get(name):
            return max(int(local), 1)
    everywhere = int(os.environ.get("WORLD_SIZE") or 1)
    return max(
        min(everywhere, int(os.environ.get("SLURM_NTASKS_PER_NODE") or gpu_count() or everywhere)),
        1,
    )


def engine_config(path: str, backend: str = "libaio") -> AioConfig:
    """The settings that `nvme-sweep` chose for the drive of *path*, or the defaults."""
    try:
        tuned = AioConfig.for_path(path, backend=backend, direct="auto")
        profile = profile_shelf.find(path)
    except (OffloadError, OSError) as reason:
        _log_once(f"no tuned settings for {path}, so the engine's defaults are used: {reason}")
        return AioConfig(backend=backend, direct="auto")
    swept = f"{profile.drive['path']} on {profile.created[:10]}"
    _log_once(f"engine settings for {path} are those that nvme-sweep chose for {swept}")
    return tuned


@functools.cache
def _log_once(line: str) -> None:
    _log.info("%s", line)


def open_tier(
    paths: StrPath | Sequence[StrPath], host_memory: object, aio: AioConfig | None, owner: str
) -> Tier:
    """The tier of the arguments that a program gives *owner*. Raises: UsageError; as `Tier`."""
    names, cap = paths_of(paths, owner), memory_size(host_memory)
    return Tier(names, engine_config(names[0]) if aio is None else aio, host_memory=cap)


def memory_size(value: object, name: str = "host_memory") -> int | Literal["auto"]:
    """Parse the setting *name*: "auto", bytes, "8GB" or a `Share`. Raises: UsageError."""
    if isinstance(value, Share):
        return value
    if value == "auto":
        return "auto"
    nbytes = 0
    if isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            nbytes = parse_bytes(value)
    if nbytes < 1:
        raise UsageError(f'{name} must be "auto", bytes, or a size such as "8GB", not {value!r}')
    return nbytes


def _check_directory(path: str) -> None:
    """Check that *path* exists: a new directory could be on another drive."""
    if not path.strip():
        raise UsageError(
            "a path is empty: is a variable of the shell not set? Give a directory on the drive"
        )
    if not Path(path).is_dir():
        what = "is not a directory" if Path(path).exists() else "does not exist"
        raise UsageError(
            f"{path} {what}, and is not created: mount the drive, or create the directory on it with mkdir -p, or correct the path"
        )


@functools.cache
def _check_place(path: str) -> None:
    """Warn, once, if *path* is in memory, on the root filesystem or not on the swept drive."""
    drive = describe(path)
    if drive.is_memory:
        _log.warning(
            '%s is in memory (%s): values offloaded there take host memory in addition to "host_memory"',
            path,
            drive.filesystem,
        )
        return
    swept_here = False
    with contextlib.suppress(OffloadError, OSError):
        swept = profile_shelf.swept_elsewhere(drive)
        if swept is not None:
            was = " ".join(filter(None, (swept.drive["model"], swept.drive["device"])))
            _log.warning(
                "%s is on %s, and nvme-sweep measured it on %s: mount that drive, or run `nvme-sweep %s` for this one, which has no tuned settings",
                *(path, drive.device, was, path),
            )
            return
        swept_here = Path(drive.path).is_relative_to(profile_shelf.of_drive(drive).drive["path"])
    if not swept_here and Path(path).stat().st_dev == Path("/").stat().st_dev:
        _log.warning(
            "%s is on the root filesystem: check that its drive is mounted. If it is meant to hold the values, run `nvme-sweep %s`, which ends this warning",
            *(path, path),
        )


def _close(resources: contextlib.ExitStack, process_id: int) -> None:
    if os.getpid() != process_id:
        return  # a forked child has neither the engine's threads nor the transfers
    try:
        resources.close()
    except OffloadError as error:
        _log.error("closing the offload engine: %s", error)
