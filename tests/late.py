"""`only_when_awaited`: updates that are made as late as possible."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from nvme_offload.update.queue import UpdateQueue


@contextlib.contextmanager
def only_when_awaited() -> Iterator[None]:
    """Make no queued update before a thread waits for it. Code that reads without waiting finds the
    old values.
    """
    changed = threading.Condition()
    awaited: list[Callable[[], bool]] = []  # one for each waiting thread: whether its wait is over
    ending = False
    make, block = UpdateQueue.make, UpdateQueue._block

    def making(queue: UpdateQueue, job: Any) -> None:
        with changed:
            changed.wait_for(lambda: ending or not all(is_true() for is_true in awaited))
        make(queue, job)

    def blocking(queue: UpdateQueue, is_true: Callable[[], bool]) -> None:
        with changed:
            awaited.append(is_true)
            changed.notify_all()
        try:
            block(queue, is_true)
        finally:
            with changed:
                awaited.remove(is_true)

    with (
        mock.patch.object(UpdateQueue, "make", making),
        mock.patch.object(UpdateQueue, "_block", blocking),
    ):
        yield
    with changed:  # an update that is held after a failed test
        ending = True
        changed.notify_all()
