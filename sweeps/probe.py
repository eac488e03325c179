"""Where the time of a step goes that streams: waits of the CPU and of the GPU, copies, allocations."""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from nvme_offload.device.copies import CopyStreams
from nvme_offload.optim import update
from nvme_offload.parameters.streamer import Streamer

_FRAMES = 2  # of the package, which name a wait


class Probe:
    """Counts from `take` to `take`. It replaces functions of torch and of the package for the rest
    of the process. A function that is timed has the time of those that it calls, too.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._stalls: list[tuple[str, Any, Any]] = []  # events before and after a wait of the GPU
        self._depth: Counter[str] = Counter()
        self._gc_began = 0.0
        cuda: Any = torch.cuda
        for owner, name in (
            (cuda.Event, "synchronize"),
            (cuda.Stream, "synchronize"),
            (cuda, "synchronize"),
        ):
            self._replace(owner, name, self._timed("CPU waits"))
        for name in ("__bool__", "item", "tolist"):  # these wait for the GPU
            self._replace(torch.Tensor, name, self._timed("CPU waits", of_package=True))
        self._replace(cuda.Stream, "wait_event", self._stalled)
        self._replace(CopyStreams, "start", self._copied)
        for name in ("begin", "end", "view"):
            self._replace(Streamer, name, self._timed("Python", named=name))
        self._replace(update.Updater, "open", self._timed("Python", named="open"))
        self._replace(update.Updater, "step", self._timed("Python", named="update"))
        self._replace(update, "widened", self._timed("Python", named="widened to 16 bits"))
        gc.callbacks.append(self._collects)

    def take(self) -> dict[str, Any]:
        """The counts since the last call, once the GPU is done: seconds as ms, bytes as GB."""
        torch.cuda.synchronize()
        for kind, before, after in self._stalls:
            self._counts[f"GPU waits, ms: {kind}"] += before.elapsed_time(after)
        self._stalls.clear()
        found = {key: round(value, 2) for key, value in sorted(self._counts.items())}
        self._counts.clear()
        memory = torch.cuda.memory_stats()
        for key in ("num_alloc_retries", "num_device_alloc", "num_device_free"):
            found[key] = memory.get(key, 0)
        found["GPU reserved, GB"] = round(memory["reserved_bytes.all.current"] / 1e9, 2)
        return found

    @staticmethod
    def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        function = getattr(owner, name)
        setattr(owner, name, functools.wraps(function)(wrap(function)))

    def _timed(self, kind: str, *, named: str = "", of_package: bool = False) -> Any:
        """Count the calls of a function, and their time."""

        def wrap(function: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                caller = named or _caller()
                if of_package and not caller:
                    return function(*args, **kwargs)
                key = f"{kind}, ms: {caller or 'the program'}"
                self._depth[key] += 1
                began = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    self._depth[key] -= 1
                    if not self._depth[key]:
                        self._counts[key] += 1e3 * (time.perf_counter() - began)
                    self._counts[f"calls: {caller or 'the program'}"] += 1

            return timed

        return wrap

    def _stalled(self, function: Any) -> Any:
        def wait(stream: Any, event: Any) -> None:
            caller = _caller()
            if stream != torch.cuda.current_stream() or not caller:
                function(stream, event)
                return
            cuda: Any = torch.cuda
            before, after = (cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            function(stream, event)
            after.record(stream)
            self._stalls.append((caller, before, after))

        return wait

    def _copied(self, function: Any) -> Any:
        def start(copies: Any, target: Any, source: Any, *, after: Any) -> Any:
            way = "in" if target.is_cuda else "out"
            part = sys._getframe(1).f_globals["__name__"].split(".")[1]
            what = "weights" if part == "parameters" else "states"
            self._counts[f"copies {way}: {what}"] += 1
            self._counts[f"GB {way}: {what}"] += source.nbytes / 1e9
            return function(copies, target, source, after=after)

        return start

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        else:
            self._counts["Python, ms: garbage collection"] += 1e3 * (
                time.perf_counter() - self._gc_began
            )


def _caller() -> str:
    """The innermost functions of the package that run, joined by "<"; empty if none is near."""
    names: list[str] = []
    frame: Any = sys._getframe(2)
    for _ in range(8):
        if frame is None or len(names) == _FRAMES:
            break
        if frame.f_globals.get("__name__", "").startswith("nvme_offload."):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return "<".join(names)
