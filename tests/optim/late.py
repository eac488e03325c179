"""`only_when_awaited`: updates that are as late as can be."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from nvme_offload.optim.update_queue import UpdateQueue


@contextlib.contextmanager
def only_when_awaited() -> Iterator[None]:
    """No update is made before somebody waits for one: who looks without waiting sees what was
    before.
    """
    wanted = threading.Event()

    def opening(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(queue: UpdateQueue, *args: Any, **kwargs: Any) -> Any:
            wanted.set()
            try:
                return method(queue, *args, **kwargs)
            finally:
                wanted.clear()

        return wrapped

    make = UpdateQueue.make

    def held(queue: UpdateQueue, job: Any) -> None:
        wanted.wait()
        make(queue, job)

    with contextlib.ExitStack() as stack:
        for name in ("_wait", "quiesce", "stop"):
            method = opening(getattr(UpdateQueue, name))
            stack.enter_context(mock.patch.object(UpdateQueue, name, method))
        stack.enter_context(mock.patch.object(UpdateQueue, "make", held))
        stack.callback(wanted.set)  # for one that is held after a test has failed
        yield
