"""The store on drives that fail and fill up: exact bytes or a typed error."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from patience import PATIENCE
from transfers import Bytes, RandomBytes

from nvme_offload._aio import FaultKind
from nvme_offload.errors import IOFailure, NoSpaceError, OffloadError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.store import slabs
from nvme_offload.store.store import TensorStore

Mount = Callable[[str], Path]

PAGE = 4096
BLOCK = 64 << 10
MIB = 1 << 20
CONFIG = AioConfig(block_size=BLOCK, queue_depth=4, direct="auto")
ODD = 3 * BLOCK + 77  # of four transfers, one of which is small and unaligned


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_GROWTH_BYTES", 4 * MIB)
    monkeypatch.setattr(slabs, "_STRIPED_FROM_BYTES", BLOCK)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "one", tmp_path / "two"]
    for path in made:
        path.mkdir()
    return made


def contents(store: TensorStore, name: str) -> Bytes:
    out = np.zeros(store.nbytes(name), np.uint8)
    assert store.get(name, out).wait(PATIENCE) == out.size
    return out


@contextlib.contextmanager
def failing(
    paths: list[Path], transfer: int, error: int = errno.EIO, count: int = 1
) -> Iterator[TensorStore]:
    """A store whose engine fails *count* transfers from number *transfer* on; at the end nothing is
    under way in it.
    """
    with (
        Engine(CONFIG, _faults=[(transfer, count, FaultKind.FAIL, error)]) as engine,
        TensorStore(paths, engine=engine) as store,
    ):
        yield store
        stats = engine.stats()
        assert (stats.read.in_flight, stats.write.in_flight, stats.oldest) == (0, 0, None)


def transfers_of(run: Callable[[TensorStore], object], paths: list[Path]) -> int:
    """The number of transfers in *run* without faults: the first transfer whose fault has no effect."""

    def feels(number: int) -> bool:
        try:
            with failing(paths, number) as store:
                run(store)
        except OffloadError:
            return True
        return False

    low, high = 0, 64
    assert not feels(high)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if feels(middle) else (low, middle)
    return low


# Transfers that fail


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_failed_overwrite_loses_the_value_and_says_so(
    paths: list[Path], random_bytes: RandomBytes, error: int
) -> None:
    old, new = random_bytes(ODD), random_bytes(ODD)
    before = transfers_of(lambda store: store.put("a", old).wait(), paths)
    both = transfers_of(
        lambda store: (store.put("a", old).wait(), store.put("a", new).wait()), paths
    )
    assert both > before >= 4
    for number in range(before, both):
        with failing(paths, number, error) as store:
            store.put("a", old).wait(PATIENCE)
            ticket = store.put("a", new)
            for _ in range(2):
                with pytest.raises(IOFailure, match="of tensor 'a'") as caught:
                    ticket.wait(PATIENCE)
                assert (
                    caught.value.errno,
                    caught.value.operation,
                    isinstance(caught.value, NoSpaceError),
                ) == (error, "write", error == errno.ENOSPC)
            with pytest.raises(IOFailure, match="of tensor 'a'") as caught:
                store.get("a", bytearray(ODD))
            assert caught.value.errno == error
            assert (store.names(), store.nbytes("a")) == (["a"], ODD)
            store.put("a", old).wait(PATIENCE)
            assert_array_equal(contents(store, "a"), old)
            assert store.used_bytes == -(-ODD // PAGE) * PAGE


def test_a_failed_put_of_another_size_leaves_the_old_value(
    paths: list[Path], random_bytes: RandomBytes
) -> None:
    old, new = random_bytes(ODD), random_bytes(ODD + 1)
    before = transfers_of(lambda store: store.put("a", old).wait(), paths)
    both = transfers_of(
        lambda store: (store.put("a", old).wait(), store.put("a", new).wait()), paths
    )
    for number in range(before, both):
        with failing(paths, number) as store:
            store.put("a", old).wait(PATIENCE)
            ticket = store.put("a", new)
            out = np.zeros(ODD, np.uint8)
            assert store.get("a", out).wait(PATIENCE) == ODD
            assert_array_equal(out, old)
            with pytest.raises(IOFailure, match="of tensor 'a'"):
                ticket.wait(PATIENCE)
            assert (store.nbytes("a"), store.used_bytes) == (ODD, -(-ODD // PAGE) * PAGE)


def test_a_failed_first_put_is_a_name_that_is_lost(
    paths: list[Path], random_bytes: RandomBytes
) -> None:
    data = random_bytes(ODD)
    for number in range(transfers_of(lambda store: store.put("a", data).wait(), paths)):
        with failing(paths, number) as store:
            store.put("a", data)
            with pytest.raises(IOFailure, match="of tensor 'a'"):
                store.get("a", bytearray(ODD))
            assert store.names() == ["a"]
            store.delete("a")
            assert (store.names(), store.used_bytes) == ([], 0)
            store.put("a", data)
            assert_array_equal(contents(store, "a"), data)


def test_an_unawaited_failure_is_raised_at_the_end(paths: list[Path]) -> None:
    with Engine(CONFIG, _faults=[(0, 1, FaultKind.FAIL, errno.EIO)]) as engine:
        store = TensorStore(paths, engine=engine)
        store.put("a", bytes(ODD))
        with pytest.raises(IOFailure, match="of tensor 'a'"):
            store.close()
    with (
        Engine(CONFIG, _faults=[(0, 1, FaultKind.FAIL, errno.EIO)]) as engine,
        TensorStore(paths, engine=engine) as store,
    ):
        store.put("a", bytes(ODD))
        store.delete("a")  # its bytes are no longer needed


def test_a_failed_get_can_be_asked_for_again(paths: list[Path], random_bytes: RandomBytes) -> None:
    data = random_bytes(ODD)
    before = transfers_of(lambda store: store.put("a", data).wait(), paths)
    both = transfers_of(lambda store: (store.put("a", data).wait(), contents(store, "a")), paths)
    assert both > before
    for number in range(before, both):
        with failing(paths, number) as store:
            store.put("a", data).wait(PATIENCE)
            with pytest.raises(IOFailure, match="of tensor 'a'") as caught:
                contents(store, "a")
            assert (caught.value.errno, caught.value.operation) == (errno.EIO, "read")
            assert_array_equal(contents(store, "a"), data)


# A full drive


def free_bytes(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bfree * status.f_frsize


def test_a_full_drive_is_known_before_a_byte_is_written(
    mounted: Mount, random_bytes: RandomBytes
) -> None:
    with tempfile.TemporaryDirectory(dir=mounted("ext4-full")) as place:
        before = free_bytes(Path(place))
        values: dict[str, Bytes] = {}
        with TensorStore(place, CONFIG) as store:
            with pytest.raises(NoSpaceError, match="are missing"):
                store.reserve(before + MIB)

            def fill() -> None:
                for number in range(100):
                    data = random_bytes(500_000 + number)
                    store.put(str(number), data)
                    values[str(number)] = data

            with pytest.raises(NoSpaceError, match="are missing") as caught:
                fill()
            assert place in str(caught.value)
            # ext4 reserves some space: the message names less than the bytes that are missing
            named = re.search(r"and (\d+) (bytes|KiB) outside; (\d+) bytes are", str(caught.value))
            assert named is not None, caught.value
            assert int(named[1]) * (1024 if named[2] == "KiB" else 1) < int(named[3])
            assert sum(value.size for value in values.values()) > 0.8 * before
            assert sorted(store.names()) == sorted(values)
            with pytest.raises(NoSpaceError):
                store.put("0", random_bytes(700_000))
            for name in ("1", "3"):  # two holes, neither large enough alone
                store.delete(name)
                del values[name]
            values["large"] = random_bytes(950_000)
            store.put("large", values["large"])
            for name, value in values.items():
                assert_array_equal(contents(store, name), value)
        assert free_bytes(Path(place)) == before


def test_a_full_drive_leaves_its_share_to_the_others(
    mounted: Mount, tmp_path: Path, random_bytes: RandomBytes
) -> None:
    with tempfile.TemporaryDirectory(dir=mounted("ext4-full")) as place:
        limit = free_bytes(Path(place))
        with TensorStore([place, tmp_path], CONFIG, weights=[3, 1]) as store:
            values = {str(number): random_bytes(5 * MIB + number) for number in range(8)}
            for name, value in values.items():
                store.put(name, value)
            assert 0.8 * limit < store.bytes_on(place) <= limit
            assert store.bytes_on(place) + store.bytes_on(tmp_path) == store.used_bytes
            store.reserve(60 * MIB)
            for name, value in values.items():
                assert_array_equal(contents(store, name), value)
