"""`Amid`: updates that are made in the midst of a call of the program."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

from nvme_offload.swap.tier import Tier
from nvme_offload.update.queue import UpdateQueue, queues, wait_for


class Amid:
    """Stops the updates of a step at a call of a function, one of *places*, and releases them up to
    their end at a call within a call of the program. *tier*: of the updates, which need its locks.
    """

    def __init__(self, tier: Tier, places: Collection[str]) -> None:
        self._places = places
        self._locks = [tier.swapper._lock, tier.store._lock]
        self._stopped, self._go_on = threading.Event(), threading.Event()
        self._go_on.set()
        self._acting = False  # whether the call of the program has begun
        self._left = 0  # calls before the updates stop

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context for `run`."""
        make, block = UpdateQueue.make, UpdateQueue._block

        def making(queue: UpdateQueue, job: Any) -> None:
            sys.settrace(self._stop)
            try:
                make(queue, job)
            finally:
                sys.settrace(None)
                if not queue._jobs or queue._failed:
                    self._stopped.set()

        def blocking(queue: UpdateQueue, is_true: Callable[[], bool]) -> None:
            if self._acting:
                self._go_on.set()
            block(queue, is_true)

        with (
            mock.patch.object(UpdateQueue, "make", making),
            mock.patch.object(UpdateQueue, "_block", blocking),
        ):
            yield

    def run(
        self, step: Callable[[], Any], stop: int, act: Callable[[], Any], at: int
    ) -> tuple[Any, int]:
        """Call *step*, which queues updates, and then *act*. The updates stop at the *stop*th call of
        the places, and go on at the *at*th call in *act* of this package's or DeepSpeed's functions, or
        where *act* waits or ends. Returns: the result of *act*, and the number of those calls until then.
        """
        calls = 0

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal calls
            file = frame.f_code.co_filename
            if self._go_on.is_set() or not ("/nvme_offload/" in file or "/deepspeed/" in file):
                return
            locks = [*self._locks, *(queue.lock for queue in queues())]
            if any(lock._is_owned() for lock in locks):  # type: ignore[attr-defined]
                return
            calls += 1
            if calls == at:
                self._go_on.set()
                for queue in queues():
                    with queue.lock:
                        wait_for(queue._changed, queue._is_idle)

        self._left = stop
        self._stopped.clear()
        self._go_on.clear()
        step()
        if any(queue.has_jobs for queue in queues()):
            self._stopped.wait()
        self._acting = True
        sys.settrace(count)
        try:
            return act(), calls
        finally:
            sys.settrace(None)
            self._acting = False
            self._go_on.set()

    def _stop(self, frame: Any, event: str, _: Any) -> None:
        if self._go_on.is_set() or frame.f_code.co_name not in self._places:
            return
        if "/nvme_offload/" in frame.f_code.co_filename:
            self._left -= 1
            if self._left == 0:
                self._stopped.set()
                self._go_on.wait()
