"""The store on drives that fail and fill up, and in processes that are killed: exact bytes or a
typed error, and a snapshot that is whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from numpy.testing import assert_array_equal
from patience import PATIENCE

import nvme_offload
from nvme_offload._aio import FaultKind
from nvme_offload.errors import IOFailure, NoSpaceError, OffloadError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.store import slabs
from nvme_offload.store.store import TensorStore

Bytes = npt.NDArray[np.uint8]
RandomBytes = Callable[[int], Bytes]
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
    """How many transfers *run* takes where nothing fails: the first whose failure nobody feels."""

    def feels(number: int) -> bool:
        try:
            with failing(paths, number) as store:
                run(store)
        except OffloadError:
            return True
        return False

    low, high = 0, 1024
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
            for lost in (
                lambda: store.get("a", bytearray(ODD)),
                lambda: store.snapshot(paths[0] / "snapshot"),
            ):
                with pytest.raises(IOFailure, match="of tensor 'a'") as caught:
                    lost()
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


def test_a_failure_that_nobody_heard_is_raised_at_the_end(paths: list[Path]) -> None:
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
        store.delete("a")  # nobody needs it any more


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


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_snapshot_that_fails_leaves_the_last_one(
    paths: list[Path], tmp_path: Path, random_bytes: RandomBytes, error: int
) -> None:
    directory = tmp_path / "snapshot"
    old, new = (
        {"a": random_bytes(ODD), "b": random_bytes(9)},
        {"a": random_bytes(ODD), "b": random_bytes(8 * MIB)},
    )

    def put_all(store: TensorStore, values: dict[str, Bytes]) -> None:
        for name, value in values.items():
            store.put(name, value).wait(PATIENCE)

    before = transfers_of(lambda store: put_all(store, new), paths)
    both = transfers_of(
        lambda store: (put_all(store, new), store.snapshot(tmp_path / "other")), paths
    )
    with TensorStore(paths, CONFIG) as store:
        put_all(store, old)
        store.snapshot(directory)
    chosen = [before, both - 1, *random.Random(error).sample(range(before, both), 5)]
    for number in chosen:
        with failing(paths, number, error) as store:
            put_all(store, new)
            with pytest.raises(IOFailure) as caught:
                store.snapshot(directory)
            assert caught.value.errno == error
            assert len(list(directory.iterdir())) == 2
            assert sorted(store.restore(directory)) == ["a", "b"]
            for name, value in old.items():
                assert_array_equal(contents(store, name), value)


def test_a_restore_that_fails_changes_nothing(
    paths: list[Path], tmp_path: Path, random_bytes: RandomBytes
) -> None:
    directory = tmp_path / "snapshot"
    saved, present = random_bytes(9 * MIB), random_bytes(ODD)
    with TensorStore(paths, CONFIG) as store:
        store.put("a", saved)
        store.snapshot(directory)
    before = transfers_of(lambda store: store.put("a", present).wait(), paths)
    for number in (before, before + 1, before + 140, before + 200):
        with failing(paths, number) as store:
            store.put("a", present).wait(PATIENCE)
            used_bytes = store.used_bytes
            with pytest.raises(IOFailure):
                store.restore(directory)
            assert store.used_bytes == used_bytes
            assert_array_equal(contents(store, "a"), present)
            store.restore(directory)
            assert_array_equal(contents(store, "a"), saved)


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
            # what ext4 keeps for itself is nobody's: it names less than the bytes that are missing
            named = re.search(r"and (\d+) (bytes|KiB) outside; (\d+) bytes are", str(caught.value))
            assert named is not None, caught.value
            assert int(named[1]) * (1024 if named[2] == "KiB" else 1) < int(named[3])
            assert sum(value.size for value in values.values()) > 0.8 * before
            assert sorted(store.names()) == sorted(values)
            with pytest.raises(NoSpaceError):
                store.put("0", random_bytes(700_000))
            for name in ("1", "3"):  # two holes, neither large enough by itself
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


def test_a_snapshot_without_room_leaves_the_last_one(
    mounted: Mount, tmp_path: Path, random_bytes: RandomBytes
) -> None:
    with (
        tempfile.TemporaryDirectory(dir=mounted("ext4-full")) as place,
        TensorStore(tmp_path, CONFIG) as store,
    ):
        directory = Path(place) / "snapshot"
        old = random_bytes(6 * MIB)
        store.put("a", old)
        store.snapshot(directory)
        before = sorted(entry.name for entry in directory.iterdir())
        store.put("a", random_bytes(11 * MIB))
        with pytest.raises(NoSpaceError):
            store.snapshot(directory)
        assert sorted(entry.name for entry in directory.iterdir()) == before
        store.restore(directory)
        assert_array_equal(contents(store, "a"), old)


def test_a_restore_without_room_changes_nothing(
    mounted: Mount, tmp_path: Path, random_bytes: RandomBytes
) -> None:
    with tempfile.TemporaryDirectory(dir=mounted("ext4-full")) as place:
        with TensorStore(tmp_path, CONFIG) as store:
            store.put("a", random_bytes(9 * MIB))
            store.snapshot(tmp_path / "snapshot")
        with TensorStore(place, CONFIG) as store:
            data = random_bytes(5 * MIB)
            store.put("a", data)
            with pytest.raises(NoSpaceError, match="restore of"):
                store.restore(tmp_path / "snapshot")
            assert store.used_bytes == 5 * MIB
            assert_array_equal(contents(store, "a"), data)


# Kill -9 in mid-snapshot

SNAPSHOTS = """
import os, signal, sys
import numpy
from nvme_offload.store import snapshot
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.store.store import TensorStore

CONFIG = AioConfig(block_size=64 << 10, queue_depth=4, direct="auto")
SIZES = {"large": 9 << 20, "odd": 100_001, "small": 5}

def value(generation, name):
    return numpy.full(SIZES[name], generation % 251, numpy.uint8)

def put_all(store, generation):
    for name in SIZES:
        store.put(name, value(generation, name))

def restored(store):
    "The generation that the snapshot is of; all of it must be."
    assert sorted(store.restore("snapshot")) == sorted(SIZES)
    for name, size in SIZES.items():
        out = numpy.zeros(size, numpy.uint8)
        store.get(name, out).wait(50)
        if name == "large":
            generation = out[0]
        assert (out == generation).all(), "of two snapshots"
    return int(generation)
"""

# Each child kills itself at a later line of the code that writes snapshots, where the new one takes
# the old one's place at every line; a second one sees what is there. Forked before there is any
# engine.
KILLED_AT_EVERY_LINE = """
def in_child(work):
    if (child := os.fork()) == 0:
        status = 255
        try:
            status = work()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitpid(child, 0)[1]

def write(generation, function, line):
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in (snapshot.__file__, snapshot.commit.__file__):
            return None
        if event == "line" and function in ("", frame.f_code.co_name):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    with TensorStore(".", CONFIG) as store:
        put_all(store, generation)
        if line:
            sys.settrace(trace)
        store.snapshot("snapshot")
        sys.settrace(None)
    return 0

def read():
    with TensorStore(".", CONFIG) as store:
        return restored(store)

assert in_child(lambda: write(1, "", 0)) == 0
last = 1
for function, step in (("", 37), ("write_file", 1)):
    line, ended = 1, False
    while not ended:
        generation = last + 1
        ended = in_child(lambda: write(generation, function, line)) == 0
        found = os.waitstatus_to_exitcode(in_child(read))
        assert found in ((generation,) if ended else (last, generation)), (function, line, found, last)
        assert len(os.listdir("snapshot")) <= (2 if ended else 4), os.listdir("snapshot")
        print("new" if found == generation else "old")
        last, line = found, line + step
    print("-")
"""

WRITE_SNAPSHOTS = """
generation = int(sys.argv[1])
with TensorStore(".", CONFIG) as store:
    while True:
        put_all(store, generation)
        store.snapshot("snapshot")
        print(generation, flush=True)
        generation += 1
"""


@contextlib.contextmanager
def interpreter(
    script: str, *arguments: object, directory: Path
) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(nvme_offload.__file__).parents[1])}
    command = [sys.executable, "-c", SNAPSHOTS + script, *map(str, arguments)]
    with subprocess.Popen(
        command,
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_kill_at_any_line_leaves_the_old_snapshot_or_the_new(tmp_path: Path) -> None:
    with interpreter(KILLED_AT_EVERY_LINE, directory=tmp_path) as process:
        out, errors = process.communicate(timeout=PATIENCE)
    assert (errors, process.returncode) == ("", 0)
    for told in (run.split() for run in out.split("-")[:2]):
        assert told == ["old"] * told.count("old") + ["new"] * told.count("new")
        assert told.count("old") > 5
        assert told.count("new") > 0


def test_kills_at_any_time_leave_a_whole_snapshot(tmp_path: Path) -> None:
    choose = random.Random(3)
    generation = 1
    for _ in range(4):
        with interpreter(WRITE_SNAPSHOTS, generation, directory=tmp_path) as process:
            assert process.stdout
            assert process.stderr
            told = [process.stdout.readline() for _ in range(choose.randint(1, 3))]
            for _ in range(choose.randint(0, 3000)):
                os.sched_yield()
            process.kill()
            told += process.stdout.readlines()
            assert (process.wait(PATIENCE), process.stderr.read()) == (-signal.SIGKILL, "")
        last = int([line for line in told if line.endswith("\n")][-1])
        with TensorStore(tmp_path, CONFIG) as store:
            assert sorted(store.restore(tmp_path / "snapshot")) == ["large", "odd", "small"]
            found = {
                int(number) for name in store.names() for number in np.unique(contents(store, name))
            }
            assert len(found) == 1, "of two snapshots"
            assert found <= {last % 251, (last + 1) % 251}
        assert {entry.name for entry in tmp_path.iterdir()} == {"snapshot"}
        generation = last + 2
