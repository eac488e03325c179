"""The pool: what it hands out, who waits for what, how much is pinned, and who holds the memory
until when.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from patience import PATIENCE, eventually

from nvme_offload.errors import UnsupportedError, UsageError, WaitTimeout
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.io.pool import PinnedPool

PAGE = 4096


@pytest.fixture
def pool() -> Iterator[PinnedPool]:
    """Sixteen pages; unpinned, since most of what a pool does has nothing to do with pinning."""
    with PinnedPool(16 * PAGE, pin=False) as made:
        yield made


def pages(pool: PinnedPool, count: int, timeout: float | None = 0) -> torch.Tensor:
    return pool.empty(count * PAGE, torch.uint8, timeout)


def waiting(pool: PinnedPool, count: int) -> Callable[[], bool]:
    return lambda: f"{count} waiting" in repr(pool)


def in_child(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run *code* in a new interpreter without a GPU, where every warning is an error but the one
    that `conftest.py` lets pass.
    """
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *arguments]
    variables = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": f"error,{os.environ['PYTHONWARNINGS']}",
        **environment,
    }
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=variables,
        cwd=Path(__file__).parents[2],
    )


# Tensors


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.bool,
        torch.bfloat16,
        torch.float32,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.int64,
    ],
)
def test_a_tensor_has_its_elements_starts_on_a_page_and_keeps_what_is_written(pool, dtype):
    first, second = pool.empty(1001, dtype), pool.empty(7, dtype)
    values = torch.arange(1001).remainder(2).to(dtype)
    first.copy_(values)
    second.zero_()
    assert (first.shape, first.dtype, second.shape) == ((1001,), dtype, (7,))
    assert first.data_ptr() % PAGE == second.data_ptr() % PAGE == 0
    assert torch.equal(first.view(torch.uint8), values.view(torch.uint8))
    assert pool.used_bytes == pool._extents.rounded(1001 * dtype.itemsize) + PAGE


def test_a_tensor_may_fill_the_pool_and_a_pool_is_rounded_up_to_pages_only():
    with PinnedPool(3 * PAGE - 5, pin=False) as pool:
        assert pool.nbytes == 3 * PAGE
        tensor = pages(pool, 3)
        assert (pool.used_bytes, pool.peak_bytes) == (3 * PAGE, 3 * PAGE)
        assert tensor.numel() == pool.nbytes


@pytest.mark.parametrize("numel", [PAGE // 4 * 16 + 1, 1 << 40, (1 << 63) - 1])
def test_what_can_never_fit_is_refused_at_once_with_the_number_to_set(pool, numel):
    with pytest.raises(
        UsageError, match=r"never fit in a pool of 64 KiB: make it at least PinnedPool\((\d+)\)"
    ) as caught:
        pool.empty(numel, torch.float32)
    needed = int(re.search(r"PinnedPool\((\d+)\)", str(caught.value))[1])
    assert needed % PAGE == 0
    assert needed - PAGE < numel * 4 <= needed


def test_no_elements_need_no_room(pool):
    everything = pages(pool, 16)
    tensor = pool.empty(0, torch.float16, timeout=0)
    assert (tensor.shape, tensor.dtype, pool.used_bytes) == ((0,), torch.float16, everything.nbytes)


@pytest.mark.parametrize(
    ("numel", "dtype"),
    [
        (-1, torch.uint8),
        (1.5, torch.uint8),
        ("1", torch.uint8),
        (None, torch.uint8),
        (1 << 63, torch.uint8),
    ],
)
def test_a_number_of_elements_that_is_none_is_refused(pool, numel, dtype):
    with pytest.raises(UsageError, match="numel must be"):
        pool.empty(numel, dtype)
    assert pool.used_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", None, float, torch.qint8, torch.quint4x2])
def test_a_dtype_that_plain_memory_cannot_have_is_refused(pool, dtype):
    with pytest.raises(UsageError, match="dtype must be"):
        pool.empty(1, dtype)
    assert pool.used_bytes == 0


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "8GB", 1 << 63])
def test_a_pool_of_no_bytes_is_refused(nbytes):
    with pytest.raises(UsageError):
        PinnedPool(nbytes)


def test_a_pool_that_the_machine_cannot_map_is_a_memory_error():
    with pytest.raises(MemoryError):
        PinnedPool(1 << 60)


@pytest.mark.parametrize("pin", ["yes", None, 1])
def test_a_way_to_pin_that_is_none_is_refused(pin):
    with pytest.raises(UsageError, match="pin must be"):
        PinnedPool(PAGE, pin)


# Who holds the room


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor[5:10],
        lambda tensor: tensor.view(torch.int64).reshape(2, -1),
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: memoryview(tensor.numpy()),
    ],
    ids=["slice", "reshaped", "detached", "array", "storage", "memoryview"],
)
def test_whatever_shows_the_memory_keeps_the_room(pool, keep):
    tensor = pages(pool, 2)
    shown = keep(tensor)
    del tensor
    assert pool.used_bytes == 2 * PAGE
    del shown
    assert (pool.used_bytes, pool.peak_bytes) == (0, 2 * PAGE)


def test_pointing_a_tensor_elsewhere_gives_the_room_back(pool):
    parameter = torch.nn.Parameter(pages(pool, 1).view(torch.float32))
    parameter.data = torch.empty(0)
    assert pool.used_bytes == 0


def test_a_cycle_gives_its_room_back_when_it_is_collected(pool):
    class Node:
        pass

    node = Node()
    node.tensor, node.itself = pages(pool, 1), node
    del node
    gc.collect()
    assert pool.used_bytes == 0


def test_garbage_collected_inside_the_pools_own_code_does_not_hang_it(pool, monkeypatch):
    class Node:
        pass

    node = Node()
    node.tensor, node.itself = pages(pool, 16), node
    del node
    allocate = pool._extents.allocate

    def collect_and_allocate(nbytes: int) -> int | None:
        gc.collect()
        return allocate(nbytes)

    monkeypatch.setattr(pool._extents, "allocate", collect_and_allocate)
    assert pages(pool, 16, PATIENCE).numel() == pool.used_bytes == 16 * PAGE


def test_tensors_outlive_the_pool_and_its_close():
    pool = PinnedPool(4 * PAGE)
    tensor = pages(pool, 1).fill_(7)
    pool.close()
    pool.close()
    assert "closed" in repr(pool)
    for numel in (0, 1):
        with pytest.raises(UsageError, match="closed"):
            pool.empty(numel, torch.uint8)
    with pytest.raises(UsageError, match="closed"):
        _ = pool.memory
    assert pool.used_bytes == PAGE
    del pool
    gc.collect()
    assert tensor.sum() == 7 * PAGE


def test_the_memory_goes_with_the_last_tensor():
    pool = PinnedPool(64 << 20, pin=False)
    address = pages(pool, 1).data_ptr()
    tensor = pool.empty(1, torch.uint8)
    pool.close()
    assert mapping(address)
    del tensor
    assert not mapping(address)


def mapping(address: int) -> dict[str, int]:
    """Bytes by field, of the mapping that starts at *address*; nothing when there is none. Those
    that follow with no hole between belong to it.
    """
    found: dict[str, int] = {}
    end = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start = int(header[1], 16)
            inside = start == (end or address)
            end = int(header[2], 16) if inside else end
        elif inside and (field := re.match(r"(\w+): +(\d+) kB", line)):
            found[field[1]] = found.get(field[1], 0) + int(field[2]) * 1024
    return found


def test_resident_bytes_are_the_ones_asked_for():
    nbytes = 257 << 20
    before = resident_bytes()
    with PinnedPool(nbytes, pin=False) as pool:
        pool.empty(nbytes, torch.uint8).fill_(1)
        grown = resident_bytes() - before
    assert nbytes <= grown <= 1.02 * nbytes


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


# Waiting for room


def test_a_full_pool_answers_within_the_timeout_and_goes_on(pool):
    everything = pages(pool, 16)
    for timeout in (0, -1, 0.02):
        with pytest.raises(
            WaitTimeout,
            match=r"no space for 4 KiB within .* s: 64 KiB of 64 KiB are in use, and the largest free extent has 0 bytes",
        ):
            pages(pool, 1, timeout)
    del everything
    assert pages(pool, 16).numel() == pool.nbytes


def test_a_hole_too_small_is_no_room(pool):
    held = [pages(pool, 4) for _ in range(4)]
    del held[0], held[1]
    with pytest.raises(
        WaitTimeout, match="32 KiB of 64 KiB are in use, and the largest free extent has 16 KiB"
    ):
        pages(pool, 5)


@pytest.mark.parametrize("timeout", [None, PATIENCE, float("inf")])
def test_who_waits_gets_the_room_that_another_thread_gives_back(pool, timeout):
    held = [pages(pool, 16)]
    address = held[0].data_ptr()
    with ThreadPoolExecutor() as threads:
        got = threads.submit(pages, pool, 16, timeout)
        assert eventually(waiting(pool, 1))
        held.clear()
        assert got.result(PATIENCE).data_ptr() == address


def test_asking_how_much_is_used_takes_no_news_from_the_one_who_waits(pool):
    held = [pages(pool, 8), pages(pool, 8)]
    with ThreadPoolExecutor() as threads:
        got = threads.submit(pages, pool, 16, PATIENCE)
        assert eventually(waiting(pool, 1))
        for used in (8, 0):
            del held[0]
            assert pool.used_bytes in (used * PAGE, 16 * PAGE)
        assert got.result(PATIENCE).numel() == 16 * PAGE


def test_who_waits_is_served_in_order_of_arrival(pool):
    held = [pages(pool, 1) for _ in range(16)]
    served = []

    def note(name: str, count: int) -> None:
        tensor = pages(pool, count, PATIENCE)
        # no two of them fit beside each other, so that nobody is served in between
        served.append(name)
        del tensor

    with ThreadPoolExecutor() as threads:
        done = []
        for position, (name, count) in enumerate([("large", 16), ("second", 9), ("third", 9)], 1):
            done.append(threads.submit(note, name, count))
            assert eventually(waiting(pool, position))
        del held[:12]  # room for the second, but the large one is first
        with pytest.raises(WaitTimeout):
            pages(pool, 1, 0.05)
        assert served == []
        held.clear()
        for one in done:
            one.result(PATIENCE)
    assert served == ["large", "second", "third"]
    assert pool.used_bytes == 0


def test_who_gives_up_lets_the_next_one_pass(pool):
    held = [pages(pool, 1) for _ in range(16)]
    with ThreadPoolExecutor() as threads:
        large = threads.submit(pages, pool, 16, 0.2)
        assert eventually(waiting(pool, 1))
        small = threads.submit(pages, pool, 1, PATIENCE)
        assert eventually(waiting(pool, 2))
        held.pop()
        with pytest.raises(WaitTimeout):
            large.result(PATIENCE)
        assert small.result(PATIENCE).numel() == PAGE


def test_closing_ends_every_wait(pool):
    held = pages(pool, 16)
    with ThreadPoolExecutor() as threads:
        got = [threads.submit(pages, pool, 1, PATIENCE) for _ in range(3)]
        assert eventually(waiting(pool, 3))
        pool.close()
        for one in got:
            with pytest.raises(UsageError, match="closed"):
                one.result(PATIENCE)
    assert held.numel() == pool.used_bytes


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("position", [1, 2], ids=["first", "second"])
def test_a_signal_ends_a_wait_and_leaves_the_pool_in_order(pool, position):
    interrupted = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise Interrupted

    def send() -> None:
        # Again and again: one that comes just before the wait in C is seen when that is over.
        while not interrupted.wait(0.05):
            signal.pthread_kill(main, signal.SIGUSR1)

    held = [pages(pool, 1) for _ in range(16)]
    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with ThreadPoolExecutor() as threads:
            first = [threads.submit(pages, pool, 16, PATIENCE) for _ in range(position - 1)]
            assert eventually(waiting(pool, position - 1) if first else lambda: True)
            threads.submit(lambda: eventually(waiting(pool, position)) and send())
            with pytest.raises(Interrupted):
                pages(pool, 3, PATIENCE)
            held.clear()
            assert [one.result(PATIENCE).numel() for one in first] == [16 * PAGE] * len(first)
            first.clear()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "waiting" not in repr(pool)
    assert pages(pool, 16).numel() == 16 * PAGE


# The engine


def test_an_engine_reads_into_the_pool_and_keeps_the_room_until_it_is_done(
    backend, tmp_path, random_bytes
):
    data = random_bytes(5 * PAGE + 3)
    path = tmp_path / "data"
    path.write_bytes(data.tobytes())
    with PinnedPool(16 * PAGE) as pool, Engine(AioConfig(backend=backend, direct="auto")) as engine:
        tensor = pool.empty(data.size, torch.uint8)
        engine.read(tensor, path).wait(PATIENCE)
        assert tensor.numpy().tobytes() == data.tobytes()
        ticket = engine.write(tensor.mul_(2), tmp_path / "twice")
        del tensor
        ticket.wait(PATIENCE)
        assert (tmp_path / "twice").read_bytes() == (data * 2).tobytes()
        assert eventually(lambda: pool.used_bytes == 0)


def test_the_whole_arena_can_be_seen_as_bytes(pool):
    tensor = pages(pool, 1).fill_(9)
    memory = pool.memory
    assert (memory.nbytes, memory.format, memory.readonly) == (pool.nbytes, "B", False)
    assert bytes(memory[:PAGE]) == bytes([9]) * PAGE
    memory[0] = 8
    assert tensor[0] == 8


# Pinning


def test_what_is_pinned_is_said():
    with PinnedPool(PAGE, pin=False) as pool:
        assert (pool.pinned, pool.pinned_bytes) == ("none", 0)
        assert repr(pool) == "<PinnedPool 4 KiB, pinned: none, peak: 0 bytes>"
    with PinnedPool(PAGE) as pool:
        assert pool.pinned == ("cuda" if torch.cuda.is_available() else "mlock")
        assert pool.pinned_bytes == pool.nbytes


def test_what_is_locked_the_kernel_has_locked(without_cuda):
    try:
        made = PinnedPool(5 << 20, pin=True)
    except UnsupportedError as error:
        pytest.skip(f"cannot be shown here: {error}")
    with made as pool:
        assert (pool.pinned, pool.pinned_bytes) == ("mlock", pool.nbytes)
        fields = mapping(pages(pool, 1).data_ptr())
        assert fields["Locked"] == fields["Rss"] == pool.nbytes


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


LIMITED = """
    import logging, os, resource, sys
    import torch
    from nvme_offload.errors import UnsupportedError
    from nvme_offload.io.pool import PinnedPool

    limit, nbytes = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    if os.getuid() == 0:
        os.setuid(65534)  # no limit holds for root
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    with PinnedPool(nbytes) as pool:
        print(pool.pinned, pool.pinned_bytes)
        tensor = pool.empty(nbytes, torch.uint8).fill_(3)
        assert int(tensor.sum()) == 3 * nbytes
    try:
        PinnedPool(nbytes, pin=True)
    except UnsupportedError as error:
        print(error)
"""


@pytest.mark.parametrize(("limit_bytes", "least_bytes"), [(64 << 10, 0), (8 << 20, 4 << 20)])
def test_under_a_limit_as_much_is_locked_as_it_allows_and_that_is_said(limit_bytes, least_bytes):
    child = in_child(LIMITED, str(limit_bytes), str(16 << 20))
    assert (child.returncode, child.stderr) == (0, "")
    told, pinned, refusal = child.stdout.splitlines()
    limit = "64 KiB" if limit_bytes == 64 << 10 else "8 MiB"
    assert re.fullmatch(
        rf".* of 16 MiB could be locked in memory: RLIMIT_MEMLOCK is {limit}; the rest may be swapped out",
        told,
    )
    kind, locked_bytes = pinned.split()
    assert least_bytes <= int(locked_bytes) <= limit_bytes
    assert kind == ("mlock" if int(locked_bytes) else "none")
    assert (
        f"RLIMIT_MEMLOCK is {limit}; raise it to at least 16777216 bytes for this process (ulimit -l 16384,"
        in refusal
    )


def test_a_pool_grows_where_it_is():
    with PinnedPool(2 * PAGE, reserve=1 << 40) as pool:
        first = pages(pool, 2).fill_(3)
        with pytest.raises(WaitTimeout):
            pool.empty(PAGE, torch.uint8, timeout=0)
        pool.grow(PAGE)  # it has as many
        assert pool.nbytes == 2 * PAGE
        pool.grow(5 * PAGE + 1)
        assert (pool.nbytes, len(pool.memory)) == (6 * PAGE, 6 * PAGE)
        more = pages(pool, 4)
        assert more.data_ptr() == first.data_ptr() + 2 * PAGE
        more.fill_(7)
        assert first.eq(3).all()
        assert pool.used_bytes == pool.nbytes
        with pytest.raises(
            UsageError,
            match=f"a pool that reserved 1 TiB cannot grow to 2 TiB: make it with reserve={2 << 40}",
        ):
            pool.grow(2 << 40)
    with pytest.raises(UsageError, match="the pool is closed"):
        pool.grow(7 * PAGE)


def test_who_waits_for_room_gets_what_a_pool_grows_by():
    with PinnedPool(PAGE, pin=False, reserve=2 * PAGE) as pool:
        first = pages(pool, 1)
        with ThreadPoolExecutor(1) as executor:
            grown = executor.submit(pool.empty, PAGE, torch.uint8)
            assert eventually(waiting(pool, 1))
            pool.grow(2 * PAGE)
            assert grown.result(PATIENCE).data_ptr() == first.data_ptr() + PAGE


class FakeCuda:
    """Stands in for `torch.cuda.cudart()`, and notes what is registered."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.calls: list[tuple[object, ...]] = []
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append((nbytes, flags))
        if self.result == 0:
            self.registered[address] = nbytes
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        assert mapping(address), "unmapped before it was unregistered"
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, result: int) -> str:
        return f"error {result}"


@pytest.fixture
def cuda(monkeypatch) -> Callable[[int], FakeCuda]:
    def install(result: int = 0) -> FakeCuda:
        fake = FakeCuda(result)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
        monkeypatch.setattr("nvme_offload.io.pool._clear_cuda_error", lambda: None)
        return fake

    return install


@pytest.mark.parametrize("pin", ["auto", True])
def test_a_gpu_is_told_of_the_arena_until_the_last_tensor_is_gone(cuda, pin):
    fake = cuda(0)
    with PinnedPool(8 * PAGE - 1, pin=pin) as pool:
        assert (pool.pinned, pool.pinned_bytes) == ("cuda", 8 * PAGE)
        tensor = pages(pool, 1)
        assert fake.registered == {tensor.data_ptr(): 8 * PAGE}
        assert fake.calls == [(8 * PAGE, 0)]
    del pool
    view = tensor[1:]
    del tensor
    assert len(fake.registered) == 1
    del view
    assert fake.registered == {}


def test_a_gpu_is_told_anew_of_a_pool_that_grows_once_its_copies_have_ended(cuda, monkeypatch):
    fake = cuda(0)
    waits: list[tuple[int, dict[int, int]]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    # CUDA is not started on the second
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device != 1, False)
    monkeypatch.setattr(
        torch.cuda,
        "synchronize",
        lambda device: waits.append((device, dict(fake.registered))),
    )
    with PinnedPool(PAGE, reserve=8 * PAGE) as pool:
        tensor = pages(pool, 1)
        pool.grow(4 * PAGE)
        assert waits == [(device, {tensor.data_ptr(): PAGE}) for device in (0, 2)]
        assert fake.registered == {tensor.data_ptr(): 4 * PAGE}
        assert (pool.pinned, pool.pinned_bytes) == ("cuda", 4 * PAGE)
        fake.result = 2
        with pytest.warns(
            RuntimeWarning, match="CUDA does not register 32 KiB of host memory: error 2"
        ):
            pool.grow(8 * PAGE)
        assert fake.registered == {}
        assert pool.pinned != "cuda"
    del pool, tensor
    assert fake.registered == {}


def test_a_gpu_is_not_told_when_nothing_is_to_be_pinned(cuda):
    fake = cuda(0)
    with PinnedPool(PAGE, pin=False):
        assert fake.calls == []


def test_a_gpu_that_refuses_is_warned_of_and_the_memory_locked(cuda):
    cuda(2)
    with pytest.warns(
        RuntimeWarning, match="CUDA does not register 4 KiB of host memory: error 2; copies"
    ) as caught:
        pool = PinnedPool(PAGE)
    assert caught[0].filename == __file__
    assert (pool.pinned, pool.pinned_bytes) == ("mlock", PAGE)


def test_a_cuda_that_cannot_start_is_a_gpu_that_refuses(cuda, monkeypatch):
    cuda(0)

    def broken() -> object:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "cudart", broken)
    with pytest.raises(UnsupportedError, match="driver too old"):
        PinnedPool(PAGE, pin=True)


def test_a_gpu_that_refuses_is_an_error_when_all_must_be_pinned(cuda):
    fake = cuda(2)
    with pytest.raises(UnsupportedError, match="error 2; make the pool smaller"):
        PinnedPool(PAGE, pin=True)
    assert fake.registered == {}


# Forks and the end of the interpreter


def test_the_interpreter_may_end_with_tensors_alive():
    code = """
        import threading
        import torch
        from nvme_offload.io.pool import PinnedPool

        pool = PinnedPool(1 << 20)
        tensor = pool.empty(1 << 20, torch.uint8).fill_(1)
        view, parameter = tensor[1:], torch.nn.Parameter(tensor.view(torch.float32))
        class Late:
            def __del__(self):
                assert int(tensor.sum()) == 1 << 20
        late = Late()
        late.itself = late
        threading.Thread(target=lambda: pool.empty(1, torch.uint8), daemon=True).start()
        while "waiting" not in repr(pool):
            pass
        print("end")
    """
    child = in_child(code)
    assert (child.returncode, child.stdout, child.stderr) == (0, "end\n", "")


FORKED = """
    import ctypes, gc, os, sys
    import torch
    from nvme_offload.errors import UsageError
    from nvme_offload.io.pool import PinnedPool

    def refused(use):
        try:
            use()
        except UsageError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError("not refused")

    NBYTES = 4 << 20
    pool = PinnedPool(NBYTES)
    tensor = pool.empty(NBYTES, torch.uint8).fill_(1)
    address = tensor.data_ptr()
    child = os.fork()
    if child == 0:
        refused(lambda: pool.empty(1, torch.uint8))
        refused(lambda: pool.memory)
        refused(lambda: pool.used_bytes)
        repr(pool)
        # Something else of the child's comes to lie where the arena is in the parent.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        MAP_FIXED_NOREPLACE = 0x100000
        assert libc.mmap(address, NBYTES, 3, 0x22 | MAP_FIXED_NOREPLACE, -1, 0) == address, os.strerror(ctypes.get_errno())
        ctypes.memset(address, 5, NBYTES)
        pool.close()
        del pool, tensor
        gc.collect()
        assert ctypes.string_at(address, NBYTES) == bytes([5]) * NBYTES
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert int(tensor.sum()) == NBYTES
    sys.exit(status)
"""


def test_a_forked_child_has_no_pool_and_harms_nothing_when_it_drops_it():
    child = in_child(FORKED)
    assert (child.returncode, child.stderr) == (0, "")


def test_room_held_only_by_a_finished_request_is_found(tmp_path):
    """Nobody waits for the write, and nobody calls the engine again."""
    with Engine(AioConfig(direct="auto")) as engine, PinnedPool(1 << 20) as pool:
        engine.write(pool.empty(1 << 20, torch.uint8), tmp_path / "data")
        assert pool.empty(1 << 20, torch.uint8, timeout=PATIENCE).numel() == 1 << 20
