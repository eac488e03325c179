"""A drive that fails under the swapper: the caller gets the error once, where it matters; no value
is lost, and work continues when the drive does.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from nvme_offload._aio import FaultKind
from nvme_offload.errors import IOFailure, NoSpaceError, OffloadError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.io.pool import PinnedPool
from nvme_offload.store.store import TensorStore
from nvme_offload.swap.swapper import TensorSwapper

SIZE = 8192  # one block, so that transfers are counted as puts and gets are
EIO = (FaultKind.FAIL, errno.EIO)
FULL = (FaultKind.FAIL, errno.ENOSPC)

Fault = tuple[FaultKind, int]
MakeSwapper = Callable[..., TensorSwapper]


@pytest.fixture
def make_swapper(tmp_path: Path) -> Iterator[MakeSwapper]:
    """A function from a budget in values and from faults to a swapper; a fault says which transfer
    is the first, from 1, how many fail, and how.
    """
    with ExitStack() as stack:

        def make(values: int, *faults: tuple[int, int, Fault], lookahead: int = 0) -> TensorSwapper:
            config = AioConfig(
                backend="posix", block_size=SIZE, thread_count=1, queue_depth=1, direct="auto"
            )
            engine = stack.enter_context(
                Engine(
                    config, _faults=[(first - 1, count, *fault) for first, count, fault in faults]
                )
            )
            store = stack.enter_context(TensorStore(tmp_path, engine=engine))
            pool = stack.enter_context(PinnedPool(values * SIZE, pin=False))
            return stack.enter_context(TensorSwapper(store, pool, lookahead_bytes=lookahead * SIZE))

        yield make


def value(number: int) -> torch.Tensor:
    return torch.full((SIZE,), number % 251, dtype=torch.uint8)


def check(swapper: TensorSwapper, name: str, number: int) -> None:
    assert torch.equal(swapper.swap_in(name), value(number))
    swapper.release(name, changed=False)


@pytest.mark.parametrize(("fault", "kind"), [(EIO, IOFailure), (FULL, NoSpaceError)])
def test_a_failed_write_keeps_the_value_and_is_raised_where_the_room_is_needed(
    make_swapper: MakeSwapper, fault: Fault, kind: type[OffloadError]
) -> None:
    swapper = make_swapper(1, (1, 2, fault))
    swapper.swap_out("a", value(1))
    for _ in range(2):
        with pytest.raises(kind):
            swapper.create("b", SIZE)
        assert swapper.names() == ["a"]
        check(swapper, "a", 1)
    swapper.swap_out("b", value(2))  # the drive is well again
    check(swapper, "a", 1)
    check(swapper, "b", 2)
    assert swapper.stats().bytes_written == 2 * SIZE


def test_others_leave_in_place_of_what_cannot_be_written_and_close_tells_of_it(
    make_swapper: MakeSwapper,
) -> None:
    swapper = make_swapper(3, (4, 1, FULL), lookahead=1)
    for number, name in enumerate("abc"):
        swapper.swap_out(name, value(number))
    swapper.flush()  # three writes
    swapper.swap_in("c").copy_(value(9))
    swapper.release("c", changed=True)
    swapper.swap_out("d", value(3))  # c cannot be written: a or b leaves
    for name, number in (("c", 9), ("d", 3), ("a", 0), ("b", 1)):
        check(swapper, name, number)
    with pytest.raises(NoSpaceError, match=r"write of .* of tensor 'c'"):
        swapper.close()
    swapper.close()
