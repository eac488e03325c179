"""The order of copies and kernels on a GPU, which streams with a clock stand for: its work takes time,
and the CPU is ahead of it until it waits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nvme_offload import Offload
from nvme_offload.parameters import home, setup, slots
from nvme_offload.parameters.buckets import Bucket, Division
from nvme_offload.parameters.streamer import AHEAD
from nvme_offload.store.store import TensorStore
from nvme_offload.store.transfer import Transfer

WIDTH, LAYERS = 32, 12
BUCKET = WIDTH * WIDTH * 4
COPY_SECONDS = 3.0


class Gpu:
    """*now*: the time of the CPU. *waits*: how often it has waited. *accesses*: of each memory, when
    they ended, and whether they wrote.
    """

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0
        self.compute = Stream(self)
        self.accesses: dict[int, list[tuple[float, bool]]] = {}

    def access(self, memory: torch.Tensor, begin: float, end: float, *, writes: bool) -> None:
        earlier = self.accesses.setdefault(memory.data_ptr(), [])  # in the order of the program
        for ended, wrote in earlier:
            assert begin >= ended or not (writes or wrote), "memory is used before its time"
        earlier.append((end, writes))


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.end = gpu, 0.0

    def wait_event(self, event: Event) -> None:
        self.end = max(self.end, event.time)

    def record_event(self) -> Event:
        return Event(self.gpu, max(self.end, self.gpu.now))

    def run(self, seconds: float) -> tuple[float, float]:
        begin = max(self.end, self.gpu.now)
        self.end = begin + seconds
        return begin, self.end


class Event:
    def __init__(self, gpu: Gpu, time: float) -> None:
        self.gpu, self.time = gpu, time

    def query(self) -> bool:
        return self.time <= self.gpu.now

    def synchronize(self) -> None:
        if not self.query():
            self.gpu.waits += 1
            self.gpu.now = self.time


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()

    class Copies:
        def __init__(self) -> None:
            self.streams = {True: Stream(made), False: Stream(made)}
            self.to_device = False

        def wait(self, _device: torch.device, to_device: bool, event: Event) -> None:
            self.streams[to_device].wait_event(event)

        def start(self, target: torch.Tensor, source: torch.Tensor, *, after: None) -> Event:
            assert after is None
            slot_memory = any(target.data_ptr() == one.buffer.data_ptr() for one in found)
            stream = self.streams[slot_memory]
            begin, end = stream.run(COPY_SECONDS)
            made.access(source, begin, end, writes=False)
            made.access(target, begin, end, writes=True)
            target.copy_(source)
            return Event(made, end)

        def outlast(self, _tensor: torch.Tensor, _to_device: bool) -> None:
            pass

    found: list[slots.Slot] = []
    of_slot, of_home = slots.Slot.__init__, home.Home.__init__

    def make_slot(slot: slots.Slot, *arguments: object) -> None:
        of_slot(slot, *arguments)
        found.append(slot)

    def make_home(one: home.Home, tier: object, _device: torch.device) -> None:
        of_home(one, tier, torch.device("cuda"))

    monkeypatch.setattr(slots.Slot, "__init__", make_slot)
    monkeypatch.setattr(home.Home, "__init__", make_home)
    monkeypatch.setattr(home, "CopyStreams", Copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: made.compute)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(setup, "DIVISION", Division(BUCKET, small_bytes=0, trainable_share=0))
    monkeypatch.setattr(setup, "POISON", False)  # which waits for the GPU
    return made


@pytest.mark.parametrize("kernel_seconds", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("count", [4, 7])
def test_copies_wait_for_kernels_and_the_cpu_for_neither(
    make: Callable[..., Offload], gpu: Gpu, count: int, kernel_seconds: float
) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    plain.load_state_dict(model.state_dict())
    make("8MB").parameters(model, "cpu", gpu_memory=count * BUCKET)

    def launch(weight: torch.Tensor, *, writes: bool) -> None:
        gpu.access(weight, *gpu.compute.run(kernel_seconds), writes=writes)

    for layer in model:
        layer.register_forward_hook(lambda one, *_: launch(one.weight, writes=False), prepend=True)
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        for step in range(6):
            waits, began = gpu.waits, gpu.now
            assert torch.equal(model(x), plain(x))
            for one, other in zip(reversed(list(model)), reversed(list(plain)), strict=True):
                one.weight.mul_(0.9)
                launch(one.weight.view(-1), writes=True)
                other.weight.mul_(0.9)
            if step > 2:
                assert gpu.waits == waits
                assert gpu.compute.end > began
            gpu.now = max(gpu.now, gpu.compute.end)  # as the loss of a step is read


def test_passes_that_use_each_bucket_once_fetch_the_same_ones(
    make: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tier learns which of them to keep in memory."""
    monkeypatch.setattr(setup, "DIVISION", Division(BUCKET, small_bytes=0, trainable_share=0))
    layers, slot_count, in_memory = 48, 20, 20
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    monkeypatch.setattr(setup, "STREAMED_IN_MEMORY", 1)
    offload = make(in_memory * BUCKET)
    offload.parameters(model, "cpu", host_memory=in_memory * BUCKET, gpu_memory=slot_count * BUCKET)
    fetched: list[str] = []
    read = 0
    of_home, of_store = home.Home.fill, TensorStore.start

    def fill(one: home.Home, slot: slots.Slot, bucket: Bucket) -> None:
        fetched.append(bucket.name)
        of_home(one, slot, bucket)

    def start(store: TensorStore, transfer: Transfer, memory: torch.Tensor) -> None:
        nonlocal read
        read += 0 if transfer.writes else transfer.nbytes
        of_store(store, transfer, memory)

    monkeypatch.setattr(home.Home, "fill", fill)
    monkeypatch.setattr(TensorStore, "start", start)
    passes: list[list[str]] = []
    with torch.inference_mode():
        for _ in range(8):
            fetched.clear()
            read = 0
            model(torch.ones(2, WIDTH))
            passes.append(list(fetched))
    assert passes[-1] == passes[-2]
    assert len(passes[-1]) == layers - (slot_count - AHEAD - 1)
    # Some of the memory has buckets that are read and used next.
    assert read <= (len(passes[-1]) - in_memory + 6) * BUCKET
