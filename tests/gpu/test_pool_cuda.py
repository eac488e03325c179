"""The pool on a machine with a GPU: its tensors are pinned, copies are right, and CUDA forgets the
memory when it goes.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from patience import PATIENCE

from nvme_offload.io.pool import PinnedPool

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[PinnedPool]:
    with PinnedPool(256 * MIB, pin=True) as made:
        yield made


def whole(pool: PinnedPool) -> torch.Tensor:
    return torch.frombuffer(pool.memory, dtype=torch.uint8)


def pieces(pool: PinnedPool, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """*count* tensors on the pool's memory, each from a page on."""
    nbytes = numel * dtype.itemsize
    room = -(-nbytes // 4096) * 4096
    return [
        whole(pool)[number * room : number * room + nbytes].view(dtype) for number in range(count)
    ]


def test_tensors_and_their_views_are_pinned(pool):
    assert (pool.pinned, pool.pinned_bytes) == ("cuda", 256 * MIB)
    first, last = whole(pool)[:20].view(torch.float32), whole(pool)[MIB:]
    for tensor in (first, first[2:], last, last[-1:], last.view(torch.int64).reshape(2, -1)):
        assert tensor.is_pinned()


def test_a_pool_that_is_not_to_be_pinned_is_not():
    with PinnedPool(MIB, pin=False) as pool:
        assert not whole(pool).is_pinned()


@pytest.mark.parametrize("numel", [1, 1023, 4097, 3 * MIB + 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int64])
def test_copies_under_way_on_several_streams_bring_the_same_bytes_back(pool, numel, dtype):
    streams = [torch.cuda.Stream() for _ in range(2)]
    tensors = pieces(pool, 8, numel, dtype)
    sent, back = tensors[:4], tensors[4:]
    for seed, tensor in enumerate(sent):
        tensor.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    for tensor in back:
        tensor.zero_()
    on_gpu = []
    for number, tensor in enumerate(sent):
        with torch.cuda.stream(streams[number % 2]):
            on_gpu.append(tensor.to("cuda", non_blocking=True))
            back[number].copy_(on_gpu[-1], non_blocking=True)
    torch.cuda.synchronize()
    for tensor, copied, returned in zip(sent, on_gpu, back, strict=True):
        assert torch.equal(copied.cpu().view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(returned.view(torch.uint8), tensor.view(torch.uint8))


def test_a_copy_from_the_pool_returns_before_it_is_done(pool):
    source = whole(pool)[: 128 * MIB].fill_(3)
    target = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # cycles during which the stream takes nothing else
    target.copy_(source, non_blocking=True)
    done.record()
    assert not done.query()
    done.synchronize()
    assert bool((target == 3).all())


def test_what_was_registered_can_be_registered_again():
    addresses = set()
    for number in range(16):
        with PinnedPool(64 * MIB, pin=True) as pool:
            tensor = whole(pool).fill_(number)
            addresses.add(tensor.data_ptr())
            assert int(tensor.cuda().max()) == number
        del tensor, pool
    assert len(addresses) < 16, "no address came twice, so that nothing was shown"


def test_memory_stays_registered_while_a_tensor_lives_on_it():
    with PinnedPool(MIB, pin=True) as pool:
        tensor = whole(pool)[:1000].fill_(5)
    del pool
    assert tensor.is_pinned()
    assert int(tensor.cuda().sum()) == 5000


def test_a_refused_registration_says_why_and_leaves_cuda_in_order():
    with PinnedPool(MIB, pin=False) as pool:
        arena = pool._arena
        cudart = torch.cuda.cudart()
        assert int(cudart.cudaHostRegister(arena.address, pool.nbytes, 0)) == 0
        reason = arena.register_with_cuda(pool.nbytes)  # what another library has registered
        assert "already" in reason
        assert int(torch.full((1000,), 7, device="cuda").sum()) == 7000
        assert int(cudart.cudaHostUnregister(arena.address)) == 0
        assert arena.register_with_cuda(pool.nbytes) is None
        assert whole(pool).is_pinned()


def test_the_interpreter_may_end_with_tensors_and_copies_alive():
    code = """
        import torch
        from nvme_offload.io.pool import PinnedPool

        pool = PinnedPool(256 << 20, pin=True)
        tensor = torch.frombuffer(pool.memory, dtype=torch.uint8).fill_(1)
        tensor.itself = tensor  # a cycle, which only the end of the interpreter takes apart
        copied = tensor.to("cuda", non_blocking=True)
        print("end")
    """
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)]
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, cwd=Path(__file__).parents[2]
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "end\n", "")
