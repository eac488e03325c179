"""The pool against a model: whoever holds what in whatever order, each tensor keeps its own
contents and every byte comes back.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from patience import PATIENCE

from nvme_offload.errors import WaitTimeout
from nvme_offload.io.pool import PinnedPool

PAGE = 4096
PAGES = 24

DTYPES = st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.int64])
EMPTY = st.tuples(st.just("empty"), st.integers(0, 6 * PAGE), DTYPES)
VIEW = st.tuples(st.just("view"), st.integers(0, 1 << 16), st.floats(0, 1))
DROP = st.tuples(st.just("drop"), st.integers(0, 1 << 16), st.none())

Filled = tuple[torch.Tensor, int]  # and the number that every element of it is


def pages_of(tensor: torch.Tensor) -> set[int]:
    """Numbers of the pages that the storage of *tensor* has any part of."""
    storage = tensor.untyped_storage()
    return (
        set(range(storage.data_ptr() // PAGE, -(-(storage.data_ptr() + storage.nbytes()) // PAGE)))
        if storage.nbytes()
        else set()
    )


def taken_pages(held: list[Filled]) -> set[int]:
    return set().union(*(pages_of(tensor) for tensor, _ in held))


def tail(tensor: torch.Tensor, filled: int, start: float) -> Filled:
    return tensor[int(tensor.numel() * start) :], filled


def largest_hole_bytes(taken: set[int], first: int) -> int:
    longest = length = 0
    for page in range(first, first + PAGES):
        length = 0 if page in taken else length + 1
        longest = max(longest, length)
    return longest * PAGE


@settings(deadline=None)
@given(steps=st.lists(st.one_of(EMPTY, EMPTY, VIEW, DROP, DROP), max_size=50))
def test_tensors_keep_their_contents_and_the_pool_its_books(
    steps: list[tuple[str, int, object]],
) -> None:
    with PinnedPool(PAGES * PAGE, pin=False) as pool:
        first = pool.empty(1, torch.uint8).data_ptr() // PAGE
        held: list[Filled] = []
        peak_bytes = PAGE
        for number, (step, value, detail) in enumerate(steps, 1):
            taken = taken_pages(held)
            if step == "empty":
                assert isinstance(detail, torch.dtype)
                numel = value // detail.itemsize
                try:
                    held.append((pool.empty(numel, detail, timeout=0).fill_(number), number))
                except WaitTimeout:
                    event("no room")
                    assert largest_hole_bytes(taken, first) < numel * detail.itemsize
                else:
                    assert (held[-1][0].numel(), held[-1][0].dtype) == (numel, detail)
                    assert not taken & pages_of(held[-1][0])
                    assert pages_of(held[-1][0]) <= set(range(first, first + PAGES))
            elif step == "view" and held:
                assert isinstance(detail, float)
                held.append(tail(*held[value % len(held)], detail))
            elif step == "drop" and held:
                held.pop(value % len(held))
            taken_bytes = len(taken_pages(held)) * PAGE
            peak_bytes = max(peak_bytes, taken_bytes)
            assert (pool.used_bytes, pool.peak_bytes) == (taken_bytes, peak_bytes)
            assert [bool((tensor == filled).all()) for tensor, filled in held] == [True] * len(held)
        held.clear()
        assert pool.used_bytes == 0
        assert pool.empty(pool.nbytes, torch.uint8, timeout=0).numel() == pool.nbytes


@settings(deadline=None, max_examples=20)
@given(
    jobs=st.lists(st.lists(st.integers(1, PAGES), min_size=1, max_size=12), min_size=2, max_size=5)
)
def test_threads_that_wait_for_one_another_all_get_their_room(jobs: list[list[int]]) -> None:
    together = threading.Barrier(len(jobs))

    with PinnedPool(PAGES * PAGE, pin=False) as pool:

        def work(worker: int) -> int:
            together.wait(PATIENCE)
            served = 0
            for count in jobs[worker]:
                tensor = pool.empty(count * PAGE, torch.uint8, PATIENCE).fill_(worker)
                served += tensor.numel()
                assert bool((tensor == worker).all())
                del tensor
            return served

        with ThreadPoolExecutor(len(jobs)) as threads:
            assert list(threads.map(work, range(len(jobs)))) == [sum(job) * PAGE for job in jobs]
        assert pool.used_bytes == 0
        assert max(max(job) for job in jobs) * PAGE <= pool.peak_bytes <= pool.nbytes


@pytest.mark.parametrize("holders", [1, 3])
def test_one_who_keeps_a_part_does_not_stop_the_others(holders: int) -> None:
    with PinnedPool(PAGES * PAGE, pin=False) as pool:
        kept = [pool.empty(PAGE, torch.uint8).fill_(200 + number) for number in range(holders)]

        def work(worker: int) -> None:
            for _ in range(100):
                tensor = pool.empty((PAGES - holders) * PAGE, torch.uint8, PATIENCE).fill_(worker)
                assert bool((tensor == worker).all())
                del tensor

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(work, range(4))) == [None] * 4
        assert [bool((tensor == 200 + number).all()) for number, tensor in enumerate(kept)] == [
            True
        ] * holders
        assert pool.used_bytes == holders * PAGE
