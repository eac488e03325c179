"""The swapper on a real store: which values stay, which stream, which errors a caller gets."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from patience import PATIENCE

from nvme_offload.errors import OutOfHostMemoryError, UsageError, WaitTimeout
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.pool import PinnedPool
from nvme_offload.sizes import AHEAD_PARTS
from nvme_offload.store.store import TensorStore
from nvme_offload.store.transfer import Transfer
from nvme_offload.swap.swapper import SwapperStats, TensorSwapper, newer_name

SIZE = 16 << 10
MakeSwapper = Callable[..., TensorSwapper]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    with TensorStore(tmp_path, AioConfig(block_size=8 << 10, queue_depth=4, direct="auto")) as made:
        yield made


@pytest.fixture
def make_swapper(store: TensorStore) -> Iterator[MakeSwapper]:
    """A function from a budget, in values of `SIZE`, to a swapper with it."""
    made = []

    def make(values: float, **settings: int | None) -> TensorSwapper:
        swapper = TensorSwapper(store, PinnedPool(int(values * SIZE), pin=False), **settings)
        made.append(swapper)
        return swapper

    yield make
    for swapper in made:
        swapper.close()


def pattern(number: int, nbytes: int = SIZE) -> torch.Tensor:
    return (
        torch.arange(number, number + nbytes, dtype=torch.int64)
        .mul(31)
        .remainder(251)
        .to(torch.uint8)
    )


def train(
    swapper: TensorSwapper, order: list[int], contents: dict[int, int], changed: bool = True
) -> tuple[SwapperStats, SwapperStats]:
    """One step: each value of *order* is checked, changed and released; the counters before
    and after.
    """
    before = swapper.stats()
    for number in order:
        tensor = swapper.swap_in(f"n{number}")
        assert torch.equal(tensor, pattern(contents[number]))
        if changed:
            contents[number] += 1
            tensor.copy_(pattern(contents[number]))
        swapper.release(f"n{number}", changed=changed)
    swapper.step()
    return before, swapper.stats()


def fill(swapper: TensorSwapper, count: int) -> dict[int, int]:
    contents = {number: 1000 * number for number in range(count)}
    for number in contents:
        swapper.swap_out(f"n{number}", pattern(contents[number]))
    swapper.step()
    return contents


def test_what_fits_never_touches_the_drive(make_swapper: MakeSwapper, store: TensorStore) -> None:
    swapper = make_swapper(5)
    contents = fill(swapper, 5)
    for _ in range(4):
        train(swapper, [*range(5), *reversed(range(5))], contents)
    stats = swapper.stats()
    assert (stats.bytes_read, stats.bytes_written, stats.misses, stats.hits) == (0, 0, 0, 40)
    assert stats.resident_bytes == stats.peak_bytes == 5 * SIZE
    assert store.names() == []


def _renewed_beside(swapper: TensorSwapper, name: str, number: int) -> None:
    """Give *name* a newer version with the pattern of *number*."""
    swapper.renew_beside(name).copy_(pattern(number))
    swapper.release(newer_name(name), changed=True)


def _contents(swapper: TensorSwapper, name: str) -> torch.Tensor:
    found = swapper.swap_in(name).clone()
    swapper.release(name, changed=False)
    return found


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("end", ["commit", "roll_back", "keep", "discard"])
def test_a_value_has_two_versions_until_one_is_chosen(
    make_swapper: MakeSwapper, store: TensorStore, end: str, flushed: bool
) -> None:
    swapper = make_swapper(4)
    fill(swapper, 2)
    _renewed_beside(swapper, "n0", 7)
    assert torch.equal(_contents(swapper, "n0"), pattern(0))
    if flushed:
        swapper.flush()  # the drive has both versions
    getattr(swapper, end)("n0")
    assert swapper.names() == ["n0", "n1"] if end == "commit" else "n1" in swapper.names()
    assert len(swapper.names()) == (1 if end == "discard" else 2)
    assert not any(name.endswith("+") for name in store.names())
    for number in range(4):  # so that values are written to the drive
        swapper.swap_out(f"other{number}", pattern(number))
    if end != "discard":
        assert torch.equal(_contents(swapper, "n0"), pattern(7 if end == "commit" else 0))
    assert torch.equal(_contents(swapper, "n1"), pattern(1000))


def test_a_newer_version_that_went_to_the_drive_becomes_the_value(
    make_swapper: MakeSwapper, store: TensorStore
) -> None:
    swapper = make_swapper(3)
    fill(swapper, 2)
    _renewed_beside(swapper, "n0", 7)
    for number in range(6):
        swapper.swap_out(f"other{number}", pattern(number))
        swapper.flush()
    others = [swapper.swap_in(f"other{number}") for number in range(3)]  # all memory
    for number in range(len(others)):
        swapper.release(f"other{number}", changed=False)
    before = swapper.stats().misses
    swapper.commit("n0")
    assert swapper.stats().misses == before + 1  # it was not in memory
    assert newer_name("n0") not in swapper
    assert torch.equal(_contents(swapper, "n0"), pattern(7))
    assert not any(name.endswith("+") for name in store.names())


def test_versions_in_use_are_not_chosen(make_swapper: MakeSwapper) -> None:
    swapper = make_swapper(4)
    fill(swapper, 1)
    swapper.renew_beside("n0").copy_(pattern(7))
    with pytest.raises(UsageError, match="in use"):
        swapper.commit("n0")
    swapper.release(newer_name("n0"), changed=True)
    swapper.commit("n0")
    assert torch.equal(_contents(swapper, "n0"), pattern(7))


def test_a_new_value_in_place_of_two_versions_is_the_only_one(make_swapper: MakeSwapper) -> None:
    swapper = make_swapper(4)
    fill(swapper, 1)
    _renewed_beside(swapper, "n0", 7)
    swapper.swap_out("n0", pattern(8))
    assert swapper.names() == ["n0"]
    swapper.commit("n0")
    assert torch.equal(_contents(swapper, "n0"), pattern(8))


def test_a_value_can_be_copied_before_its_use(make_swapper: MakeSwapper) -> None:
    count = 2 * AHEAD_PARTS
    swapper = make_swapper(count)
    contents = fill(swapper, count)
    order = list(range(count))
    train(swapper, order, contents)
    seen = swapper.upcoming(count)
    assert [glimpse.value.name for glimpse, _ in seen] == ["n0", "n1"]  # a part of the period
    copies = [memory.clone() for _, memory in seen]
    assert [torch.equal(copies[n], pattern(contents[n])) for n in (0, 1)] == [True, True]
    for glimpse, _ in seen:
        swapper.swap_in(glimpse.value.name)
    assert [swapper.is_as_glimpsed(glimpse) for glimpse, _ in seen] == [True, True]
    assert swapper.upcoming(count)[0][0].value.name == "n2"
    for glimpse, _ in seen:
        swapper.release(glimpse.value.name, changed=True)
    swapper.swap_in("n0")
    assert not swapper.is_as_glimpsed(seen[0][0])  # after a use in between


def test_a_replaced_value_is_not_the_one_that_was_copied(make_swapper: MakeSwapper) -> None:
    count = 2 * AHEAD_PARTS
    swapper = make_swapper(count)
    contents = fill(swapper, count)
    train(swapper, list(range(count)), contents)
    (first, _), _ = swapper.upcoming(2)
    swapper.discard("n0")
    swapper.swap_out("n0", pattern(7))
    swapper.swap_in("n0")
    assert not swapper.is_as_glimpsed(first)


def test_nothing_is_copied_before_its_use_that_may_move(make_swapper: MakeSwapper) -> None:
    count = 2 * AHEAD_PARTS
    swapper = make_swapper(count - 1)
    contents = fill(swapper, count)
    for _ in range(3):
        train(swapper, list(range(count)), contents)
    assert swapper.upcoming(count) == []
    roomy = make_swapper(count)
    contents = fill(roomy, count)
    train(roomy, list(range(count)), contents)
    roomy.swap_in("n1", in_order=False)
    assert [glimpse.value.name for glimpse, _ in roomy.upcoming(count)] == ["n0"]  # n1 is in use


def test_hints_read_ahead_where_nothing_is_learned(
    make_swapper: MakeSwapper, store: TensorStore
) -> None:
    swapper = make_swapper(4, lookahead_bytes=2 * SIZE)
    for number in range(8):
        swapper.swap_out(f"n{number}", pattern(number))
    swapper.create("everything", 4 * SIZE)  # so that all others leave
    swapper.discard("everything")
    assert store.stats().gets == 0
    swapper.prefetch(["unknown", "n5", "n3", "n4"])
    assert store.stats().gets == 2
    for number in (5, 3, 4):
        assert torch.equal(swapper.swap_in(f"n{number}"), pattern(number))
        swapper.release(f"n{number}", changed=False)
    assert store.stats().gets == 3
    assert (swapper.stats().misses, swapper.stats().unused_prefetches) == (3, 0)


def test_hints_of_another_order_than_the_learned_are_followed(make_swapper: MakeSwapper) -> None:
    count, values = 24, 12
    swapper = make_swapper(values)
    contents = fill(swapper, count)
    drawn = random.Random(7)
    for _ in range(4):
        order = drawn.sample(range(count), count)
        swapper.prefetch([f"n{number}" for number in order])
        before, after = train(swapper, order, contents)
    read = (after.bytes_read - before.bytes_read) // SIZE
    assert read <= count - values + 6  # 3 more than in a cycle
    assert after.unused_prefetches - before.unused_prefetches <= 3


def test_a_value_may_be_shorter_than_its_room(make_swapper: MakeSwapper) -> None:
    swapper = make_swapper(2)
    room = swapper.create("short", SIZE)
    room[:1001].copy_(pattern(7, 1001))
    swapper.release("short", changed=True, nbytes=1001)
    swapper.swap_out("other", pattern(1))
    swapper.swap_out("another", pattern(2))
    swapper.flush()
    swapper.swap_out("more", pattern(3, 2 * SIZE))  # everything else leaves
    assert swapper.stats().bytes_written == 2 * SIZE + 1001
    read = swapper.stats().bytes_read
    tensor = swapper.swap_in("short")
    assert tensor.shape == (SIZE,)
    assert tensor.dtype == torch.uint8
    assert torch.equal(tensor[:1001], pattern(7, 1001))
    assert swapper.stats().bytes_read - read == 1001
    assert swapper.nbytes("short") == SIZE
    swapper.release("short", changed=True, nbytes=0)
    swapper.swap_out("more", pattern(4, 2 * SIZE))
    assert swapper.swap_in("short").shape == (SIZE,)
    assert swapper.stats().bytes_read - read == 1001


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([True, False]),
        torch.empty(0),
        torch.ones(3).bfloat16(),
    ],
)
def test_tensors_of_every_kind_are_copied_in(
    make_swapper: MakeSwapper, tensor: torch.Tensor
) -> None:
    swapper = make_swapper(1)
    swapper.swap_out("value", tensor)
    swapper.swap_out("other", pattern(1))
    found = swapper.swap_in("value")
    assert torch.equal(found, tensor.reshape(-1).view(torch.uint8))


def test_flush_writes_what_changed_once_and_keeps_it_in_memory(
    make_swapper: MakeSwapper, store: TensorStore
) -> None:
    swapper = make_swapper(4)
    contents = fill(swapper, 3)
    swapper.flush()
    assert swapper.stats().bytes_written == 3 * SIZE
    for number in contents:
        out = torch.empty(SIZE, dtype=torch.uint8)
        store.get(f"n{number}", out).wait()
        assert torch.equal(out, pattern(contents[number]))
    train(swapper, [0, 1, 2], contents, changed=False)
    swapper.flush()
    assert swapper.stats().bytes_written == 3 * SIZE
    assert swapper.stats().bytes_read == 0
    swapper.swap_in("n0")
    swapper.release("n0", changed=True)
    swapper.swap_in("n1")  # in use: not written
    swapper.flush()
    assert swapper.stats().bytes_written == 4 * SIZE


def test_usage_errors_change_nothing(make_swapper: MakeSwapper) -> None:
    swapper = make_swapper(2)
    contents = fill(swapper, 4)
    swapper.swap_in("n0")
    for call in (
        lambda: swapper.swap_in("n0"),
        lambda: swapper.swap_in("nowhere"),
        lambda: swapper.create("n0", SIZE),
        lambda: swapper.create("large", 2 * SIZE),
        lambda: swapper.create("n1", 2 * SIZE),
        lambda: swapper.create("negative", -1),
        lambda: swapper.release("n1", changed=True),
        lambda: swapper.release("n0", changed=True, nbytes=SIZE + 1),
        lambda: swapper.discard("nowhere"),
        lambda: swapper.nbytes("nowhere"),
    ):
        with pytest.raises(UsageError):
            call()
    swapper.release("n0", changed=False)
    assert set(swapper.names()) == {f"n{number}" for number in contents}
    train(swapper, list(range(4)), contents)


def test_what_would_do_is_said_and_does(make_swapper: MakeSwapper) -> None:
    swapper = make_swapper(3)
    for name in "abc":
        swapper.swap_out(name, pattern(1))
    held = swapper.swap_in("b")  # in the middle
    with pytest.raises(
        OutOfHostMemoryError,
        match=r"no space for 'wide', 32 KiB.*16 KiB are in use by 'b' \(16 KiB\).*at least 65536 bytes",
    ):
        swapper.create("wide", 2 * SIZE)
    assert torch.equal(held, pattern(1))
    swapper.release("b", changed=False)
    swapper.swap_out("wide", pattern(2, 2 * SIZE))


def test_a_swapper_takes_the_whole_pool_and_releases_it(store: TensorStore) -> None:
    pool = PinnedPool(2 * SIZE, pin=False)
    with TensorSwapper(store, pool) as swapper:
        with pytest.raises(UsageError, match="a separate pool"):
            TensorSwapper(store, pool)
        swapper.swap_out("value", pattern(1))
        swapper.flush()
    assert store.names() == []
    TensorSwapper(store, pool).close()
    swapper.close()
    for call in (
        lambda: swapper.swap_in("value"),
        lambda: swapper.create("new", 1),
        swapper.flush,
        swapper.step,
    ):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_threads_take_turns(make_swapper: MakeSwapper) -> None:
    swapper = make_swapper(4)
    fill(swapper, 9)
    wrong: list[int] = []

    def use(numbers: list[int]) -> None:
        for _ in range(10):
            for number in numbers:
                tensor = swapper.swap_in(f"n{number}")
                if not torch.equal(tensor, pattern(1000 * number)):
                    wrong.append(number)
                swapper.release(f"n{number}", changed=True)

    threads = [
        threading.Thread(target=use, args=([first, first + 3, first + 6],)) for first in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []


class Patient:
    """A store whose every get is not done within the first *waits* waits for it."""

    def __init__(self, store: TensorStore, waits: int) -> None:
        self.store = store
        self.left = waits

    def finish(self, transfer: Transfer, timeout: float | None = None) -> None:
        assert timeout is not None
        if not transfer.writes:
            self.left -= 1
            if self.left >= 0:
                raise WaitTimeout("not yet")
        self.store.finish(transfer)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_a_long_wait_says_what_it_is_for(
    store: TensorStore, caplog: pytest.LogCaptureFixture
) -> None:
    with TensorSwapper(Patient(store, 2), PinnedPool(SIZE, pin=False)) as swapper:
        swapper.swap_out("a", pattern(1))
        swapper.swap_out("b", pattern(2))
        assert torch.equal(swapper.swap_in("a"), pattern(1))
    reported = [record.getMessage() for record in caplog.records]
    assert reported == [
        f"waiting for the drive for {seconds} s: the read of 16 KiB of 'a'; 1 transfers of 16 KiB are in flight"
        for seconds in (5, 10)
    ]
