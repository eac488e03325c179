"""Puts and gets that start after others, and those that are cancelled: values keep the order of
their names, and room is neither lost nor given twice.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from patience import PATIENCE
from transfers import Bytes, RandomBytes, Stall

from nvme_offload._aio import FaultKind
from nvme_offload.errors import (
    CancelledError,
    CorruptionError,
    IOFailure,
    UnsupportedError,
    UsageError,
)
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, Ticket
from nvme_offload.store import slabs
from nvme_offload.store.store import TensorStore
from nvme_offload.store.transfer import Transfer

PAGE = 4096
MIB = 1 << 20
CONFIG = AioConfig(block_size=64 << 10, queue_depth=8, thread_count=2, direct="auto")
SIZES = [PAGE, 300_001]  # the larger one is cut over the drives


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_GROWTH_BYTES", 4 * MIB)
    monkeypatch.setattr(slabs, "_STRIPED_FROM_BYTES", 128 << 10)


@contextlib.contextmanager
def store_on(directory: Path, **settings: object) -> Iterator[TensorStore]:
    """A store on two drives, with room allocated, so that a put in a stall need not wait for the
    filesystem.
    """
    paths = [directory / "one", directory / "two"]
    for path in paths:
        path.mkdir(exist_ok=True)
    try:
        store = TensorStore(paths, **{"config": CONFIG, **settings})  # type: ignore[arg-type]
    except UnsupportedError as error:
        pytest.skip(str(error))
    with store:
        store.reserve(8 * MIB)
        yield store


@pytest.fixture(params=[False, True], ids=["plain", "checksum"])
def store(request: pytest.FixtureRequest, stalling_directory: Path) -> Iterator[TensorStore]:
    with store_on(stalling_directory, checksum=request.param) as made:
        yield made


def contents(store: TensorStore, name: str) -> Bytes:
    out = np.zeros(store.nbytes(name), np.uint8)
    store.get(name, out).wait(PATIENCE)
    return out


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_get_that_names_the_put_need_not_wait_for_it(
    store: TensorStore, stall: Stall, random_bytes: RandomBytes, nbytes: int
) -> None:
    """The room of one value is read into while the value leaves it: what a swapper does all the
    time.
    """
    leaving, coming = random_bytes(nbytes), random_bytes(nbytes)
    store.put("coming", coming).wait(PATIENCE)
    memory, again = leaving.copy(), np.zeros(nbytes, np.uint8)
    with stall() as let_go:
        put = store.put("leaving", memory)
        get = store.get("coming", memory, after=[put])
        back = store.get("leaving", again, after=[put, get])
        assert not (put.done())
        assert not (get.done())
        assert not (back.done())
        let_go()
        assert back.wait(PATIENCE) == nbytes
    assert_array_equal(memory, coming)
    assert_array_equal(again, leaving)
    assert_array_equal(contents(store, "leaving"), leaving)


@pytest.mark.parametrize("sizes", [SIZES, SIZES[::-1], [PAGE, PAGE]], ids=str)
def test_a_get_after_a_put_has_its_value_whatever_its_size(
    store: TensorStore, stall: Stall, random_bytes: RandomBytes, sizes: list[int]
) -> None:
    old, new = (random_bytes(nbytes) for nbytes in sizes)
    store.put("a", old).wait(PATIENCE)
    out, third = np.zeros_like(new), random_bytes(new.size)
    with stall() as let_go:
        put = store.put("a", new)
        get = store.get("a", out, after=[put])
        let_go()
    replaced = store.put("a", third, after=[get])  # waits for the put, which it replaces
    assert replaced.wait(PATIENCE) == third.size
    assert_array_equal(out, new)
    assert_array_equal(contents(store, "a"), third)
    assert store.used_bytes == -(-third.size // PAGE) * PAGE


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_cancelled_put_leaves_what_was_there(
    store: TensorStore, stall: Stall, random_bytes: RandomBytes, nbytes: int
) -> None:
    """A value of the same size, one of another size, and none; with the gets that were to follow
    it.
    """
    old = random_bytes(nbytes)
    for name in ("same", "other"):
        store.put(name, old).wait(PATIENCE)
    used = store.used_bytes
    with stall() as let_go:
        blocker = store.put("b", random_bytes(PAGE))
        puts = {
            name: store.put(name, random_bytes(size), after=[blocker])
            for name, size in (("same", nbytes), ("other", 2 * PAGE), ("new", nbytes))
        }
        get = store.get("same", np.zeros(nbytes, np.uint8), after=[puts["same"]])
        for put in puts.values():
            assert put.cancel()
            assert not put.cancel()
            with pytest.raises(
                CancelledError, match=rf"it was cancelled before it started, of tensor '{put.name}'"
            ):
                put.wait(0)
        with pytest.raises(CancelledError, match="a transfer that it waited for failed"):
            get.wait(0)
        let_go()
        blocker.wait(PATIENCE)
    assert sorted(store.names()) == ["b", "other", "same"]
    assert store.used_bytes == used + PAGE
    assert_array_equal(contents(store, "same"), old)
    assert_array_equal(contents(store, "other"), old)


def test_cancelled_transfers_are_not_reported(
    stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    with store_on(stalling_directory) as store, stall():
        blocker = store.put("b", random_bytes(PAGE))
        held = store.put("a", random_bytes(PAGE), after=[blocker])
        store.get("a", np.zeros(PAGE, np.uint8), after=[held])
        held.cancel()


def test_another_stores_ticket(stalling_directory: Path, random_bytes: RandomBytes) -> None:
    """Of the same engine it can be followed, of another not: then nothing is left under way, and
    nothing is there.
    """
    data = random_bytes(SIZES[1])
    out = np.zeros_like(data)
    with (
        Engine(CONFIG) as engine,
        store_on(stalling_directory, config=None, engine=engine) as one,
        store_on(stalling_directory) as stranger,
    ):
        with store_on(stalling_directory, config=None, engine=engine) as two:
            two.put("a", data).wait(PATIENCE)
            two.get("a", out, after=[one.put("b", data)]).wait(PATIENCE)
        with pytest.raises(UsageError, match="same engine"):
            one.put("c", data, after=[stranger.put("x", data)])
        assert one.names() == ["b"]
        assert one.used_bytes == -(-data.size // PAGE) * PAGE
    assert_array_equal(out, data)


def test_a_put_that_fails_takes_its_followers_with_it(
    tmp_path: Path, random_bytes: RandomBytes
) -> None:
    """The read into the room that it was to leave does not start, so the newest bytes are still in
    memory.
    """
    coming, leaving = random_bytes(SIZES[1]), random_bytes(SIZES[1])
    memory = leaving.copy()
    count = sum(1 for _ in range(0, SIZES[1], 64 << 10)) + 4  # transfers of the first put, and more
    with (
        Engine(CONFIG, _faults=[(count, 1 << 20, FaultKind.FAIL, errno.EIO)]) as engine,
        store_on(tmp_path, config=None, engine=engine) as store,
    ):
        store.put("coming", coming).wait(PATIENCE)
        put = store.put("leaving", memory)
        get = store.get("coming", memory, after=[put])
        with pytest.raises(CancelledError, match="of tensor 'coming'"):
            get.wait(PATIENCE)
        with pytest.raises(IOFailure, match="of tensor 'leaving'"):
            put.wait(PATIENCE)
        assert_array_equal(memory, leaving)
        assert store.nbytes("coming") == coming.size
        with pytest.raises(IOFailure, match="of tensor 'leaving'"):
            store.get("leaving", memory, after=[put])


def test_bytes_that_change_between_a_put_and_the_get_after_it_are_found(
    stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    """The checksum is the one of the put in flight, not of the value before it."""
    old, new = random_bytes(SIZES[1]), random_bytes(SIZES[1])
    with store_on(stalling_directory, checksum=True) as store:
        store.put("a", old).wait(PATIENCE)
        segment = store._catalog.current("a").segments[0]
        with stall() as let_go:
            put = store.put("a", new)
            tickets = [Ticket(request) for request in put.requests]
            damage = Transfer("damage", True, 1)
            written = store.engine.write(~new[5:6], segment.file, segment.offset + 5, after=tickets)
            damage.requests.append(written._request)
            damaged = store.get("a", np.zeros_like(new), after=[put, damage])
            let_go()
            with pytest.raises(CorruptionError, match="of tensor 'a'"):
                damaged.wait(PATIENCE)
