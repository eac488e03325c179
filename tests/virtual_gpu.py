"""`VirtualGpu`: host memory in place of a GPU's, and a check that events order all accesses to it.

Copies and kernels run immediately, so their results do not show races. A race detector does: the
host and each stream have a vector clock, and two accesses that conflict are a race if the clock of
the second does not contain the first.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nvme_offload
import nvme_offload.offload
from nvme_offload.device.copies import CopyStreams
from nvme_offload.device.room import DeviceRoom
from nvme_offload.device.staging import DeviceStager
from nvme_offload.optim import bucketing
from nvme_offload.optim.buckets import Bucket
from nvme_offload.optim.options import UpdateDevice
from nvme_offload.optimizer_states import on_gpu
from nvme_offload.store.store import TensorStore
from nvme_offload.swap.runner import Runner
from nvme_offload.swap.swapper import TensorSwapper

CPU = torch.device("cpu")
PACKAGE = f"{Path(nvme_offload.__file__).parent}/"
_GRAIN = 16  # bytes whose accesses are recorded together

Clock = collections.Counter[int]


class VirtualDevice(str):
    """The name of the CPU, for which the package uses the streams and events of a GPU."""

    type = "cuda"
    index = 0


class Event:
    """An event of a GPU: *clock* is the work that has ended with it."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self.clock = Clock()

    def query(self) -> bool:
        """Whether it has ended, as far as the host knows: see `VirtualGpu`."""
        known = not self.clock - self._gpu.host
        if not known and self._gpu.ends_early():
            self.synchronize()
            return True
        return known

    def synchronize(self) -> None:
        self._gpu.host |= self.clock

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Stream:
    """A stream of a GPU."""

    def __init__(self, gpu: VirtualGpu, name: str) -> None:
        self._gpu = gpu
        self.name = name
        self.number = next(gpu.numbers)
        self.clock = Clock()

    def launch(self) -> Clock:
        """The work that comes before a kernel or a copy that is launched now, with itself."""
        self.clock |= self._gpu.host
        self.clock[self.number] += 1
        return self.clock

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._gpu)
        event.clock = self.clock.copy()
        return event

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock

    def wait_stream(self, other: Stream) -> None:
        self.clock |= other.clock

    def synchronize(self) -> None:
        self._gpu.host |= self.clock


class _Region:
    """Memory whose accesses are checked: of the device, or of the host."""

    def __init__(self, storage: torch.UntypedStorage, is_host: bool) -> None:
        # keeps the addresses from being reused; a pool keeps those of the host
        self.storage = None if is_host else storage
        self.start = storage.data_ptr()
        self.stop = self.start + storage.nbytes()
        self.is_host = is_host
        # By grain: who wrote it last, and who has read it since, each with its own time.
        self.written: dict[int, tuple[int, int, str]] = {}
        self.read: dict[int, dict[int, tuple[int, str]]] = collections.defaultdict(dict)


class VirtualGpu:
    """A GPU whose work ends late: the host knows of an end only after waiting for it, or where
    *ends_early* returns True for a query.
    """

    def __init__(self, ends_early: Callable[[], bool] = lambda: False) -> None:
        self.ends_early = ends_early
        self.numbers = itertools.count(1)
        self.host = Clock()
        self.computing = Stream(self, "computing")
        self.races: list[str] = []
        self._streams = [self.computing]
        self._current = threading.local()
        self._regions: list[_Region] = []
        self._starts: list[int] = []
        self._is_ahead = False

    # The functions of torch.cuda.

    def stream(self, device: Any = None) -> Stream:
        self._streams.append(Stream(self, f"stream {len(self._streams)}"))
        return self._streams[-1]

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._current, "stream", self.computing)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def synchronize(self, device: Any = None) -> None:
        for stream in self._streams:
            stream.synchronize()

    # Accesses.

    def watch(self, tensor: torch.Tensor, *, is_host: bool) -> None:
        """Check accesses to the memory of *tensor*, which may have grown since the last call."""
        region = self._region(tensor.data_ptr())
        if region is not None:
            region.stop = max(region.stop, region.start + tensor.untyped_storage().nbytes())
        else:
            region = _Region(tensor.untyped_storage(), is_host)
            place = bisect.bisect(self._starts, region.start)
            self._starts.insert(place, region.start)
            self._regions.insert(place, region)

    def access(self, tensor: torch.Tensor, *, writes: bool, what: str, by_host: bool) -> None:
        """Record an access to *tensor* by the current stream, or *by_host*."""
        region = self._region(tensor.data_ptr())
        if region is None or not tensor.numel():
            return
        if by_host:
            number, clock = 0, self.host
            clock[0] += 1
        else:
            stream = self.current_stream()
            number, clock = stream.number, stream.launch()
            what = f"{what} on {stream.name}"
        what = f"{what} ({_where()})"
        last = sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        first = tensor.data_ptr() - region.start
        stop = first + (last + 1) * tensor.element_size()
        conflicts = set()
        for grain in range(first // _GRAIN, -(-stop // _GRAIN)):
            writer = region.written.get(grain)
            if writer is not None and clock[writer[0]] < writer[1]:
                conflicts.add(writer[2])
            if writes:
                for reader, (time, how) in region.read.pop(grain, {}).items():
                    if clock[reader] < time:
                        conflicts.add(how)
                region.written[grain] = (number, clock[number], what)
            elif not self._is_ahead:
                region.read[grain][number] = (clock[number], what)
        self.races += [f"{what} is not ordered after {other}" for other in sorted(conflicts)]

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Context of copies of values that may change meanwhile: a later write does not conflict with them."""
        self._is_ahead = True
        try:
            yield
        finally:
            self._is_ahead = False

    def region_of(self, tensor: torch.Tensor) -> _Region | None:
        """The checked memory of *tensor*, None if it has none."""
        if tensor.device.type != "cpu":
            return None
        with torch._C.DisableTorchFunctionSubclass(), contextlib.suppress(RuntimeError):
            return self._region(tensor.data_ptr())
        return None  # it has no memory: its functions work on other tensors

    def _region(self, address: int) -> _Region | None:
        place = bisect.bisect(self._starts, address) - 1
        if place < 0 or address >= self._regions[place].stop:
            return None
        return self._regions[place]


def _where() -> str:
    """The innermost lines of the package that run now."""
    frame, lines = inspect.currentframe(), list[str]()
    while frame is not None and len(lines) < 3:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            lines.append(f"{path.removeprefix(PACKAGE)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


class _Watch(TorchDispatchMode):
    """Records the accesses of torch's operations."""

    def __init__(self, gpu: VirtualGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name.startswith("new_") or name.endswith("_like"):
            return func(*args, **kwargs)  # it reads no memory
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        gpu = self._gpu
        for argument in func._schema.arguments:
            alias = argument.alias_info
            if alias is not None and not alias.is_write:
                continue  # a view, which accesses no memory
            for tensor in tree_leaves(given.get(argument.name)):
                region = gpu.region_of(tensor) if isinstance(tensor, torch.Tensor) else None
                if region is not None:
                    gpu.access(
                        tensor,
                        writes=alias is not None,
                        what=str(func),
                        by_host=region.is_host and gpu.current_stream() is gpu.computing,
                    )
        return func(*args, **kwargs)


@contextlib.contextmanager
def virtual_gpu(gpu: VirtualGpu) -> Iterator[VirtualGpu]:
    """Context in which *gpu* is the GPU of the package: models stream to it, and updates of parameters
    run on it. Raises: AssertionError at its end if there were races.
    """
    # It replaces private methods: PyTorch has no device of this kind without CUDA.
    stream_of = CopyStreams._stream
    begin, look_ahead = TensorStore.start, DeviceStager._look_ahead
    make, grow = Runner.__init__, TensorSwapper.grow

    def making(runner: Runner, *args: Any) -> None:
        make(runner, *args)
        gpu.watch(runner.memory, is_host=True)

    def growing(swapper: TensorSwapper, *args: Any, **options: Any) -> None:
        grow(swapper, *args, **options)
        gpu.watch(swapper._runner.memory, is_host=True)

    def copy(copies: CopyStreams, target: Any, source: Any, *, after: Any) -> Event:
        host = gpu._region(source.data_ptr())
        to_device = host is not None and host.is_host
        if not to_device:
            gpu.watch(source, is_host=False)
        gpu.watch(target, is_host=not to_device)
        stream = stream_of(copies, CPU, to_device)
        if after is not None:
            stream.wait_event(after)
        with gpu.on(stream):
            target.copy_(source)
        return stream.record_event()

    def transfer(store: TensorStore, one: Any, memory: torch.Tensor) -> None:
        gpu.access(memory, writes=not one.writes, what="a transfer", by_host=True)
        begin(store, one, memory)

    def looking(stager: DeviceStager) -> None:
        with gpu.ahead():
            look_ahead(stager)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", gpu.stream)
        patch.setattr(torch.cuda, "Event", lambda **_: Event(gpu))
        patch.setattr(torch.cuda, "stream", gpu.on)
        patch.setattr(torch.cuda, "current_stream", gpu.current_stream)
        patch.setattr(torch.cuda, "synchronize", gpu.synchronize)
        patch.setattr(torch.cuda, "get_rng_state", lambda _: torch.get_rng_state())
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        patch.setattr(DeviceRoom, "suffices", lambda *_: True)
        patch.setattr(nvme_offload.offload, "_indexed", lambda _: VirtualDevice("cpu"))
        patch.setattr(UpdateDevice, "of", lambda *_: VirtualDevice("cpu"))
        patch.setattr(Bucket, "visits_device", False)
        patch.setattr(bucketing, "_memory_of", lambda _: 1 << 30)
        patch.setattr(on_gpu, "fault", lambda _: "no kernel runs on it")
        patch.setattr(CopyStreams, "start", copy)
        patch.setattr(CopyStreams, "_stream", lambda one, _, to: stream_of(one, CPU, to))
        patch.setattr(Runner, "__init__", making)
        patch.setattr(TensorSwapper, "grow", growing)
        patch.setattr(TensorStore, "start", transfer)
        patch.setattr(DeviceStager, "_look_ahead", looking)
        with _Watch(gpu):
            yield gpu
    if gpu.races:
        raise AssertionError(f"{len(gpu.races)} races: " + "; ".join(gpu.races[:4]))
