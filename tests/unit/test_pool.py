"""The pool: its arena, how much of it is pinned, how it grows, and who holds the memory until when."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from patience import PATIENCE
from processes import finished, in_fork

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.io.pool import PinnedPool

PAGE = 4096


def whole(pool: PinnedPool) -> torch.Tensor:
    return torch.frombuffer(pool.memory, dtype=torch.uint8)


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
    return finished(command, env=variables, cwd=Path(__file__).parents[2])


# The arena


def test_a_pool_is_rounded_up_to_pages_only():
    with PinnedPool(3 * PAGE - 5, pin=False) as pool:
        assert pool.nbytes == len(pool.memory) == 3 * PAGE
        assert whole(pool).data_ptr() % PAGE == 0


def test_every_view_shows_the_same_bytes():
    with PinnedPool(2 * PAGE, pin=False) as pool:
        tensor = whole(pool).fill_(9)
        memory = pool.memory
        assert (memory.nbytes, memory.format, memory.readonly) == (pool.nbytes, "B", False)
        memory[0] = 8
        assert (int(tensor[0]), int(whole(pool)[1])) == (8, 9)


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


class User:
    pass


def test_one_user_has_the_pool_until_it_gives_it_back_or_is_gone():
    with PinnedPool(PAGE, pin=False) as pool:
        first, second = User(), User()
        pool.take(first)
        with pytest.raises(UsageError, match="give each swapper a separate pool"):
            pool.take(second)
        pool.give_back()
        pool.take(second)
        del second
        pool.take(first)
    with pytest.raises(UsageError, match="closed"):
        pool.take(first)


# Who holds the memory


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
def test_whatever_shows_the_memory_keeps_it(keep):
    pool = PinnedPool(64 << 20, pin=False)
    address = whole(pool).data_ptr()
    shown = keep(whole(pool))
    pool.close()
    assert mapping(address)
    del shown
    assert not mapping(address)


def test_tensors_outlive_the_pool_and_its_close():
    pool = PinnedPool(4 * PAGE)
    tensor = whole(pool).fill_(7)
    pool.close()
    pool.close()
    assert "closed" in repr(pool)
    with pytest.raises(UsageError, match="closed"):
        _ = pool.memory
    del pool
    gc.collect()
    assert tensor.sum() == 4 * 7 * PAGE


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
        whole(pool).fill_(1)
        grown = resident_bytes() - before
    assert nbytes <= grown <= 1.02 * nbytes


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


# The engine


def test_an_engine_reads_into_the_pool_and_keeps_the_memory_until_it_is_done(
    backend, tmp_path, random_bytes
):
    data = random_bytes(5 * PAGE + 3)
    path = tmp_path / "data"
    path.write_bytes(data.tobytes())
    with PinnedPool(16 * PAGE) as pool, Engine(AioConfig(backend=backend, direct="auto")) as engine:
        tensor = whole(pool)[: data.size]
        engine.read(tensor, path).wait(PATIENCE)
        assert tensor.numpy().tobytes() == data.tobytes()
        ticket = engine.write(tensor.mul_(2), tmp_path / "twice")
        del tensor
        pool.close()
        ticket.wait(PATIENCE)
        assert (tmp_path / "twice").read_bytes() == (data * 2).tobytes()


# Pinning


def test_kernels_may_read_a_vector_beyond_the_end():
    """As torch's fused SGD does, of a momentum buffer in bfloat16."""

    def reads_beyond():
        pool = PinnedPool(4096, False, reserve=1 << 20)
        for nbytes in (4096, 8192, 1 << 20):
            pool.grow(nbytes)
            memory = whole(pool)
            assert memory.numel() == nbytes
            assert ctypes.string_at(memory.data_ptr() + nbytes, 128) == bytes(128)

    result = in_fork(reads_beyond)
    assert result.returncode == 0, result.stderr


def test_what_is_pinned_is_said():
    with PinnedPool(PAGE, pin=False) as pool:
        assert (pool.pinned, pool.pinned_bytes) == ("none", 0)
        assert repr(pool) == "<PinnedPool 4 KiB, pinned: none>"
    with PinnedPool(PAGE) as pool:
        assert pool.pinned == ("cuda" if torch.cuda.is_available() else "mlock")
        assert pool.pinned_bytes == pool.nbytes


def test_locked_memory_is_there_at_once_and_growing_keeps_its_contents(without_cuda):
    nbytes = 200 << 20  # several threads' worth
    try:
        made = PinnedPool(nbytes, pin=True, reserve=2 * nbytes)
    except UnsupportedError as error:
        pytest.skip(f"cannot be shown here: {error}")
    with made as pool:
        assert (pool.pinned, pool.pinned_bytes) == ("mlock", nbytes)
        tensor = whole(pool)
        fields = mapping(tensor.data_ptr())
        assert fields["Locked"] == fields["Rss"] == nbytes
        assert not tensor.any()
        tensor.view(torch.int64).copy_(torch.arange(nbytes // 8))
        pool.grow(2 * nbytes)
        assert mapping(tensor.data_ptr())["Locked"] == 2 * nbytes
        grown = whole(pool).view(torch.int64)
        assert torch.equal(grown[: nbytes // 8], torch.arange(nbytes // 8))
        assert not grown[nbytes // 8 :].any()


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def locked_under_limits():
    nbytes = 16 << 20
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s", force=True)
    for limit in (8 << 20, 64 << 10):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        if os.getuid() == 0:
            os.setuid(65534)  # no limit holds for root
        with PinnedPool(nbytes) as pool:
            print(pool.pinned, pool.pinned_bytes)
            tensor = whole(pool).fill_(3)
            assert int(tensor.sum()) == 3 * nbytes
        del pool, tensor
        try:
            PinnedPool(nbytes, pin=True)
        except UnsupportedError as error:
            print(error)


def test_under_a_limit_as_much_is_locked_as_it_allows_and_that_is_said(without_cuda):
    child = in_fork(locked_under_limits)
    assert (child.returncode, child.stderr) == (0, "")
    lines = child.stdout.splitlines()
    assert len(lines) == 6
    limits = ("8 MiB", 4 << 20, 8 << 20), ("64 KiB", 0, 64 << 10)
    for at, (limit, least_bytes, limit_bytes) in zip((0, 3), limits, strict=True):
        reported, pinned, refusal = lines[at : at + 3]
        assert re.fullmatch(
            rf".* of 16 MiB could be locked in memory: RLIMIT_MEMLOCK is {limit}; the rest may be swapped out",
            reported,
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
        first = whole(pool).fill_(3)
        pool.grow(PAGE)  # it has as many
        assert pool.nbytes == 2 * PAGE
        pool.grow(5 * PAGE + 1)
        assert (pool.nbytes, len(pool.memory)) == (6 * PAGE, 6 * PAGE)
        grown = whole(pool)
        assert grown.data_ptr() == first.data_ptr()
        grown[2 * PAGE :].fill_(7)
        assert first.eq(3).all()
        with pytest.raises(
            UsageError,
            match=f"a pool that reserved 1 TiB cannot grow to 2 TiB: make it with reserve={2 << 40}",
        ):
            pool.grow(2 << 40)
    with pytest.raises(UsageError, match="the pool is closed"):
        pool.grow(7 * PAGE)


class FakeCuda:
    """Stands in for `torch.cuda.cudart()`, and records registered ranges."""

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
def test_a_gpu_is_reported_the_arena_until_the_last_tensor_is_gone(cuda, pin):
    fake = cuda(0)
    with PinnedPool(8 * PAGE - 1, pin=pin) as pool:
        assert (pool.pinned, pool.pinned_bytes) == ("cuda", 8 * PAGE)
        tensor = whole(pool)
        assert fake.registered == {tensor.data_ptr(): 8 * PAGE}
        assert fake.calls == [(8 * PAGE, 0)]
    del pool
    view = tensor[1:]
    del tensor
    assert len(fake.registered) == 1
    del view
    assert fake.registered == {}


def test_a_gpu_is_reported_anew_of_a_pool_that_grows_once_its_copies_have_ended(cuda, monkeypatch):
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
        tensor = whole(pool)
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


def test_growth_that_leaves_pinning_to_a_later_call_registers_nothing(cuda, monkeypatch):
    fake = cuda(0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with PinnedPool(PAGE, reserve=64 * PAGE) as pool:
        tensor = whole(pool)
        for pages in (2, 4, 8, 16, 33):
            pool.grow(pages * PAGE, pin=False)
            # Copies of memory that is registered in part are refused by CUDA.
            assert fake.registered == {}
            assert (pool.pinned, pool.pinned_bytes) == ("none", 0)
        for _ in range(2):
            pool.pin()
            assert fake.registered == {tensor.data_ptr(): 33 * PAGE}
            assert (pool.pinned, pool.pinned_bytes) == ("cuda", 33 * PAGE)
        assert [nbytes for nbytes, _ in fake.calls] == [PAGE, 33 * PAGE]
    del pool, tensor
    assert fake.registered == {}


def test_memory_that_is_pinned_later_is_locked_without_a_gpu():
    with PinnedPool(PAGE, reserve=4 * PAGE) as pool:
        pool.grow(2 * PAGE, pin=False)
        assert pool.pinned_bytes == 0
        pool.grow(3 * PAGE)
        assert pool.pinned_bytes == 3 * PAGE
        pool.pin()
        assert (pool.pinned, pool.pinned_bytes) == ("mlock", 3 * PAGE)
    with PinnedPool(PAGE, pin=False, reserve=4 * PAGE) as pool:
        pool.grow(2 * PAGE, pin=False)
        pool.pin()
        assert pool.pinned == "none"


def test_a_gpu_is_not_called_when_nothing_must_be_pinned(cuda):
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
        import torch
        from nvme_offload.io.pool import PinnedPool

        pool = PinnedPool(1 << 20)
        tensor = torch.frombuffer(pool.memory, dtype=torch.uint8).fill_(1)
        view, parameter = tensor[1:], torch.nn.Parameter(tensor.view(torch.float32))
        class Late:
            def __del__(self):
                assert int(tensor.sum()) == 1 << 20
        late = Late()
        late.itself = late
        print("end")
    """
    child = in_child(code)
    assert (child.returncode, child.stdout, child.stderr) == (0, "end\n", "")


def test_a_forked_child_has_no_pool_and_harms_nothing_when_it_drops_it(without_cuda):
    nbytes = 4 << 20
    pools = [PinnedPool(nbytes)]
    tensors = [whole(pools[0]).fill_(1)]
    address = tensors[0].data_ptr()

    def drops_it():
        for use in (lambda: pools[0].take(sys), lambda: pools[0].memory):
            with pytest.raises(UsageError, match="forked"):
                use()
        repr(pools[0])
        # The child maps other memory at the address of the parent's arena.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        map_fixed_noreplace = 0x100000
        mapped = libc.mmap(address, nbytes, 3, 0x22 | map_fixed_noreplace, -1, 0)
        assert mapped == address, os.strerror(ctypes.get_errno())
        ctypes.memset(address, 5, nbytes)
        pools[0].close()
        pools.clear()
        tensors.clear()
        gc.collect()
        assert ctypes.string_at(address, nbytes) == bytes([5]) * nbytes

    child = in_fork(drops_it)
    assert (child.returncode, child.stderr) == (0, "")
    assert int(tensors[0].sum()) == nbytes
