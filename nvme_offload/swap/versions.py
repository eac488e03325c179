"""`Versions`: two versions of a value of a `TensorSwapper`, one of which a program drops later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..io.section import Section
from .runner import Runner
from .schedule import Schedule

if TYPE_CHECKING:
    import torch

    from ..store.store import TensorStore


class Versions:
    """The part of a `TensorSwapper` that keeps versions."""

    _store: TensorStore
    _lock: threading.RLock
    _changing: Section
    _schedule: Schedule
    _runner: Runner

    # methods of `TensorSwapper`
    create: Callable[..., torch.Tensor]
    _create: Callable[..., torch.Tensor]
    swap_in: Callable[[str], torch.Tensor]
    release: Callable[..., None]
    discard: Callable[[str], None]
    nbytes: Callable[[str], int]
    _drop: Callable[[str], None]
    _pump: Callable[[], None]

    def retain(self, name: str) -> None:
        """Keep the on-drive version of the value *name*, in use, until `commit` or `roll_back`.
        Later writes of the value go to separate space. Its contents have not changed since
        `swap_in`, and the drive must have them: call `write_back` before `swap_in`.
        """
        with self._lock, self._changing:
            if name not in self._runner.retained:
                self._schedule.retain(name)
                self._store.retain(name)
                self._runner.retained.add(name)

    def renew_beside(self, name: str) -> torch.Tensor:
        """Create a newer version of the value *name* in other memory, until `commit` or
        `roll_back`. The value keeps its contents, and both may be in use. Returns the memory of the
        newer version, valid until its `release` by `newer_name`; its contents are undefined.
        Raises: as `create`.
        """
        return self.create(newer_name(name), self.nbytes(name))

    def commit(self, name: str) -> None:
        """Release the older version of *name* that `retain` or `renew_beside` has kept, if there is
        one. Neither version of `renew_beside` may be in use. Raises: as `swap_in`.
        """
        newer = newer_name(name)
        with self._lock:
            with self._changing:
                if newer not in self._schedule:
                    self._runner.commit(name)
                    return
                for one in (name, newer):
                    self._runner.settle(one)
                replaced = self._schedule.replace(name, newer)
                if replaced:
                    for one in (name, newer):
                        self._runner.forget_errors(one)
                        self._runner.delete(one)
            if not replaced:  # memory was short, and the newer version is on the drive
                source = self.swap_in(newer)
                with self._changing:
                    memory = self._create(name, source.numel(), lowest=False, once=True)
                memory.copy_(source)
                self.release(name, changed=True)
                self.discard(newer)

    def keep(self, name: str) -> None:
        """After an update of *name* that was interrupted: as `commit` after `retain`; after
        `renew_beside`, drop the newer version.
        """
        with self._lock, self._changing:
            if not self._drop_newer(name):
                self._runner.commit(name)

    def roll_back(self, name: str) -> None:
        """Return to the version of *name* that `retain` or `renew_beside` kept; the newer version
        is not in use. Waits for a transfer of the value in flight. The next use in this period is
        not learned, because it repeats an earlier use.
        """
        with self._lock:
            with self._changing:
                if self._drop_newer(name):
                    self._schedule.order.repeat(name)
                    return
                if name not in self._runner.retained:
                    raise UsageError(f"nothing is retained of {name!r}")
                self._runner.settle(name)
                self._schedule.roll_back(name)
                self._runner.forget_errors(name)
                self._store.roll_back(name)
                self._runner.retained.remove(name)
            self._pump()

    def _drop_newer(self, name: str) -> bool:
        """Delete the version that `renew_beside` has made, if there is one. Returns: whether."""
        newer = newer_name(name)
        if newer not in self._schedule:
            return False
        self._drop(newer)
        return True


def newer_name(name: str) -> str:
    """The name of the newer version of *name*: see `TensorSwapper.renew_beside`."""
    return f"{name}+"
