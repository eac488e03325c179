"""The store: tensors come back as they were put, in the order of the calls; room, stripes,
checksums.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from patience import PATIENCE
from processes import finished
from transfers import Bytes, RandomBytes, Stall

import nvme_offload
from nvme_offload._aio import FaultKind
from nvme_offload.errors import (
    CorruptionError,
    IOFailure,
    NoSpaceError,
    UnsupportedError,
    UsageError,
    WaitTimeout,
)
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, allocate
from nvme_offload.store import slabs
from nvme_offload.store.store import StoreStats, TensorStore

PAGE = 4096
MIB = 1 << 20
CONFIG = AioConfig(block_size=64 << 10, queue_depth=8, thread_count=2, direct="auto")


@pytest.fixture(autouse=True)
def _small_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test allocates megabytes rather than gigabytes, and meets more than one file a
    drive.
    """
    monkeypatch.setattr(slabs, "_GROWTH_BYTES", 16 * MIB)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    with TensorStore(tmp_path, CONFIG) as made:
        yield made


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("one", "two", "three")]
    for path in made:
        path.mkdir()
    return made


def contents(store: TensorStore, name: str) -> Bytes:
    out = np.frombuffer(allocate(store.nbytes(name)), np.uint8)
    assert store.get(name, out).wait(PATIENCE) == out.size
    return out


def everything(store: TensorStore) -> dict[str, bytes]:
    return {name: contents(store, name).tobytes() for name in store.names()}


def slab_descriptors(directory: Path) -> list[int]:
    """This process's descriptors of files without a name in *directory*."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(link)  # noqa: PTH115 - the link is not a path: "/place/#123 (deleted)"
            if target.startswith(f"{directory}/#"):
                found.append(int(link.name))
    return found


def needs_checksums(tmp_path: Path) -> None:
    try:
        TensorStore(tmp_path, CONFIG, checksum=True).close()
    except UnsupportedError as error:
        pytest.skip(str(error))


# Values


@pytest.mark.parametrize("nbytes", [600, 6 * MIB])
def test_every_kind_of_buffer(paths: list[Path], random_bytes: RandomBytes, nbytes: int) -> None:
    data = random_bytes(nbytes)
    raw = data.tobytes()
    kinds: dict[str, Any] = {
        "float64": torch.frombuffer(bytearray(raw), dtype=torch.float64).reshape(3, -1),
        "bfloat16": torch.frombuffer(bytearray(raw), dtype=torch.bfloat16),
        "bool": torch.frombuffer(bytearray((data & 1).tobytes()), dtype=torch.bool),
        "view": torch.frombuffer(bytearray(8 + len(raw)), dtype=torch.int64)[1:].copy_(
            torch.frombuffer(bytearray(raw), dtype=torch.int64)
        ),
        "parameter": torch.nn.Parameter(
            torch.frombuffer(bytearray(raw), dtype=torch.float32).nan_to_num()
        ),
        "bytes": raw,
        "big-endian": data.view(">i2"),
        "records": data.view([("a", "<i4"), ("b", "<i4")]),
        "read-only": memoryview(raw),
    }
    with TensorStore(paths, CONFIG) as store:
        for name, buffer in kinds.items():
            wanted = (
                buffer.detach().clone().reshape(-1).view(torch.uint8).numpy()
                if isinstance(buffer, torch.Tensor)
                else np.frombuffer(buffer, np.uint8)
            )
            store.put(name, buffer)
            assert_array_equal(contents(store, name), wanted)
            if isinstance(buffer, torch.Tensor):
                out = torch.empty_like(buffer.detach())
                store.get(name, out).wait(PATIENCE)
                assert_array_equal(out.reshape(-1).view(torch.uint8).numpy(), wanted)


def test_what_is_no_buffer_changes_nothing(store: TensorStore, random_bytes: RandomBytes) -> None:
    data = random_bytes(PAGE)
    store.put("a", data)
    for wrong in (
        torch.zeros(8, 8).T,
        "text",
        np.array(["2001"], "M8[Y]"),
    ):
        with pytest.raises(UsageError):
            store.put("a", wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            store.put("b", wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="writable"):
        store.get("a", bytes(PAGE))
    for size in (0, PAGE - 1, PAGE + 1):
        with pytest.raises(UsageError, match=rf"'a' has 4096 bytes, but .* has {size}$"):
            store.get("a", bytearray(size))
    assert everything(store) == {"a": data.tobytes()}


def test_a_value_of_the_same_size_keeps_its_place(
    store: TensorStore, tmp_path: Path, random_bytes: RandomBytes
) -> None:
    for _ in range(20):
        store.put("a", random_bytes(15 * MIB))
    assert store.used_bytes == 15 * MIB
    assert len(slab_descriptors(tmp_path)) == 1


def test_room_that_was_freed_is_taken_again(
    store: TensorStore, tmp_path: Path, random_bytes: RandomBytes
) -> None:
    for number in range(20):
        store.put(str(number), random_bytes(15 * MIB)).wait(PATIENCE)
        store.delete(str(number))
    assert len(slab_descriptors(tmp_path)) == 1


def test_counters(store: TensorStore) -> None:
    assert store.stats() == StoreStats(0, 0, 0, 0, ())
    store.put("a", bytes(5000))
    store.end_step()
    store.end_step()
    store.put("a", bytes(10))
    store.put("b", bytes(1))
    store.get("a", bytearray(10))
    assert store.stats() == StoreStats(3, 1, 10, 5011, (5000, 0))
    for _ in range(1001):
        store.end_step()
    assert store.stats().bytes_written_by_step == (0,) * 1000


# Order, while transfers are held up


@pytest.fixture
def stalling_store(stalling_directory: Path) -> Iterator[TensorStore]:
    with TensorStore(stalling_directory, CONFIG) as made:
        made.reserve(32 * MIB)
        yield made


def test_a_get_waits_for_the_put_before_it(
    stalling_store: TensorStore, stall: Stall, random_bytes: RandomBytes
) -> None:
    old, new = random_bytes(MIB), random_bytes(MIB)
    stalling_store.put("a", old).wait(PATIENCE)
    out = np.zeros(MIB, np.uint8)
    with ThreadPoolExecutor(1) as threads, stall() as let_go:
        ticket = stalling_store.put("a", new)
        with pytest.raises(WaitTimeout, match=r"put of tensor 'a' did not finish within 0\.01 s"):
            ticket.wait(0.01)
        assert not ticket.done()
        got = threads.submit(lambda: stalling_store.get("a", out).wait(PATIENCE))
        assert not wait([got], 0.05).done
        assert stalling_store.names() == ["a"]
        let_go()
        assert got.result(PATIENCE) == MIB
    assert_array_equal(out, new)
    assert ticket.done()
    assert ticket.wait() == MIB


def test_puts_on_one_name_keep_their_order(
    stalling_store: TensorStore, stall: Stall, random_bytes: RandomBytes
) -> None:
    values = [random_bytes(MIB), random_bytes(MIB), random_bytes(MIB + 1)]
    with ThreadPoolExecutor(1) as threads, stall() as let_go:
        stalling_store.put("a", values[0])
        rest = threads.submit(lambda: [stalling_store.put("a", value) for value in values[1:]])
        assert not wait([rest], 0.05).done
        let_go()
        rest.result(PATIENCE)
    assert_array_equal(contents(stalling_store, "a"), values[2])
    assert stalling_store.used_bytes == MIB + PAGE


def test_a_deleted_tensor_keeps_its_room_until_its_put_is_done(
    stalling_store: TensorStore, stall: Stall, random_bytes: RandomBytes
) -> None:
    """Else the bytes under way would land in the tensor that has the room next."""
    mine, others = random_bytes(MIB), random_bytes(MIB)
    with stall():
        ticket = stalling_store.put("a", mine)
        stalling_store.delete("a")
        assert "a" not in stalling_store
        assert stalling_store.used_bytes == MIB
        stalling_store.put("b", others)
        stalling_store.put("a", others[::-1].copy())
        assert stalling_store.used_bytes == 3 * MIB
    assert ticket.wait(PATIENCE) == MIB
    assert stalling_store.used_bytes == 2 * MIB
    assert everything(stalling_store) == {"b": others.tobytes(), "a": others[::-1].tobytes()}


def test_a_value_of_another_size_frees_the_old_when_it_is_there(
    stalling_store: TensorStore, stall: Stall, random_bytes: RandomBytes
) -> None:
    stalling_store.put("a", random_bytes(MIB)).wait(PATIENCE)
    new = random_bytes(2 * MIB)
    with stall():
        ticket = stalling_store.put("a", new)
        assert (stalling_store.nbytes("a"), stalling_store.used_bytes) == (2 * MIB, 3 * MIB)
    ticket.wait(PATIENCE)
    assert stalling_store.used_bytes == 2 * MIB
    assert_array_equal(contents(stalling_store, "a"), new)


def test_dropped_tickets_do_not_pile_up(store: TensorStore, random_bytes: RandomBytes) -> None:
    data = random_bytes(PAGE)
    store.put("a", data).wait(PATIENCE)
    out = np.zeros(PAGE, np.uint8)
    for _ in range(300):
        store.get("a", out)
        while not all(ticket.done() for ticket in list(store._catalog.in_flight)):
            os.sched_yield()
    assert len(store._catalog.in_flight) <= 1
    assert_array_equal(out, data)


def test_many_threads_on_shared_and_own_names(paths: list[Path]) -> None:
    def work(number: int) -> None:
        generator = np.random.default_rng(number)
        own: dict[str, Bytes] = {}
        for turn in range(60):
            name = f"{number}-{generator.integers(4)}"
            data = generator.integers(0, 256, int(generator.integers(1, 200_000)), dtype=np.uint8)
            store.put(name, data)
            own[name] = data
            shared = np.full(50_000, number, np.uint8)
            store.put("shared", shared)
            out = np.zeros(50_000, np.uint8)
            store.get("shared", out).wait(PATIENCE)
            assert np.all(out == out[0]), "of two puts"
            if turn % 7 == 0 and own:
                gone = next(iter(own))
                store.delete(gone)
                del own[gone]
            for name, data in own.items():
                out = np.zeros_like(data)
                store.get(name, out).wait(PATIENCE)
                assert_array_equal(out, data)
        for name in own:
            store.delete(name)

    with TensorStore(paths, CONFIG, weights=[1, 2, 3]) as store:
        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(work, range(6))) == [None] * 6
        assert store.names() == ["shared"]
        store.delete("shared")
        store.close()
        assert store._catalog.in_flight == {}


# Room and stripes


def test_large_tensors_are_cut_by_weight_and_small_ones_spread(
    paths: list[Path], random_bytes: RandomBytes
) -> None:
    with TensorStore(paths, CONFIG, weights=[1, 2, 1]) as store:
        large = random_bytes(16 * MIB + 5)
        store.put("large", large)
        assert [store.bytes_on(path) for path in paths] == [4 * MIB, 8 * MIB, 4 * MIB + PAGE]
        assert_array_equal(contents(store, "large"), large)
        store.delete("large")
        small = {str(number): random_bytes(MIB) for number in range(12)}
        for name, data in small.items():
            store.put(name, data)
        assert [store.bytes_on(path) for path in paths] == [3 * MIB, 6 * MIB, 3 * MIB]
        assert everything(store) == {name: data.tobytes() for name, data in small.items()}
        with pytest.raises(UsageError, match="not a path of this store"):
            store.bytes_on(paths[0] / "other")


def test_reserve_allocates_once_and_by_weight(paths: list[Path], random_bytes: RandomBytes) -> None:
    with TensorStore(paths[:2], CONFIG, weights=[1, 3]) as store:
        store.reserve(80 * MIB)
        sizes = [
            [os.fstat(descriptor).st_size for descriptor in slab_descriptors(path)]
            for path in paths[:2]
        ]
        assert sizes == [[20 * MIB], [60 * MIB]]
        assert [
            os.fstat(descriptor).st_blocks * 512 >= 20 * MIB
            for path in paths[:2]
            for descriptor in slab_descriptors(path)
        ] == [True, True]
        for number in range(20):
            store.put(str(number), random_bytes(4 * MIB)).wait(PATIENCE)
        store.reserve(80 * MIB)
        store.reserve(0)
        assert sizes == [
            [os.fstat(descriptor).st_size for descriptor in slab_descriptors(path)]
            for path in paths[:2]
        ]
        assert [store.bytes_on(path) for path in paths[:2]] == [20 * MIB, 60 * MIB]
        with pytest.raises(UsageError):
            store.reserve(-1)


def test_what_never_fits_is_refused_with_the_numbers(
    paths: list[Path], random_bytes: RandomBytes
) -> None:
    with TensorStore(paths[:2], CONFIG) as store:
        data = random_bytes(PAGE)
        store.put("a", data)
        with pytest.raises(NoSpaceError) as caught:
            store.reserve(1 << 60)
        text = str(caught.value)
        missing = int(text.rpartition("; ")[2].split()[0])
        # others use the drive, too, and leave it
        assert abs((1 << 60) - store.free_bytes - missing) < 1 << 30
        assert "1048576 TiB" in text
        for path in paths[:2]:
            assert f"{path} has " in text
        assert_array_equal(contents(store, "a"), data)


def test_two_stores_in_one_directory_do_not_meet(tmp_path: Path, random_bytes: RandomBytes) -> None:
    with TensorStore(tmp_path, CONFIG) as first, TensorStore(tmp_path, CONFIG) as second:
        here, there = random_bytes(5 * MIB), random_bytes(5 * MIB)
        first.put("a", here)
        second.put("a", there)
        assert_array_equal(contents(first, "a"), here)
        assert_array_equal(contents(second, "a"), there)
        first.delete("a")
        assert_array_equal(contents(second, "a"), there)


# Checksums


@pytest.mark.parametrize("nbytes", [5000, 20 * MIB])
def test_a_flipped_bit_on_the_drive_is_found(
    paths: list[Path], random_bytes: RandomBytes, nbytes: int
) -> None:
    needs_checksums(paths[0])
    with TensorStore(paths[:2], CONFIG, checksum=True) as store:
        for _ in range(2):  # also where a value was replaced
            data = random_bytes(nbytes)
            store.put("weights", data).wait(PATIENCE)
        assert_array_equal(contents(store, "weights"), data)
        flipped = 0
        for path in paths[:2]:
            for descriptor in slab_descriptors(path):
                size = os.fstat(descriptor).st_size
                with Path(f"/proc/self/fd/{descriptor}").open("r+b") as file:
                    at = file.read(size).find(data[-5000:].tobytes()[:100])
                    if at >= 0:
                        file.seek(at)
                        file.write(bytes([data[-5000] ^ 1]))
                        flipped += 1
        assert flipped == 1
        with pytest.raises(CorruptionError, match="of tensor 'weights'") as caught:
            store.get("weights", np.zeros(nbytes, np.uint8)).wait(PATIENCE)
        assert caught.value.path.startswith(str(paths[1 if nbytes > 5000 else 0]))
        assert pickle.loads(pickle.dumps(caught.value)).reason == caught.value.reason
        store.put("weights", data)
        assert_array_equal(contents(store, "weights"), data)


# Who may call it, and how it ends


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    for wrong in (
        {"paths": []},
        {"weights": [1.0, 2.0]},
        {"weights": [0.0]},
        {"weights": [float("nan")]},
        {"weights": [-1.0]},
    ):
        with pytest.raises(UsageError):
            TensorStore(**{"paths": tmp_path, "config": CONFIG, **wrong})  # type: ignore[arg-type]
    with Engine(CONFIG) as engine, pytest.raises(UsageError, match="not both"):
        TensorStore(tmp_path, CONFIG, engine=engine)
    with pytest.raises(IOFailure, match="missing"):
        TensorStore([tmp_path, tmp_path / "missing"], CONFIG)


def test_an_engine_of_the_caller_stays_open(tmp_path: Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(MIB)
    with Engine(CONFIG) as engine:
        with TensorStore(tmp_path, engine=engine) as store:
            store.put("a", data)
        assert slab_descriptors(tmp_path) == []
        engine.write(data, tmp_path / "file").wait(PATIENCE)
    assert_array_equal(np.fromfile(tmp_path / "file", np.uint8), data)


def test_a_closed_store_is_refused_and_its_room_is_free(tmp_path: Path) -> None:
    store = TensorStore(tmp_path, CONFIG)
    ticket = store.put("a", bytes(MIB))
    store.close()
    store.close()
    assert ticket.wait() == MIB
    assert slab_descriptors(tmp_path) == []
    out = bytearray(MIB)
    for call in (
        lambda: store.put("a", out),
        lambda: store.get("a", out),
        lambda: store.delete("a"),
        lambda: store.names(),
        lambda: "a" in store,
        lambda: store.reserve(1),
        lambda: store.stats(),
    ):
        with pytest.raises(UsageError):
            call()


FORK = """
import os, sys
import numpy
from nvme_offload.hardware.config import AioConfig
from nvme_offload.errors import UsageError
from nvme_offload.store.store import TensorStore

store = TensorStore(".", AioConfig(direct="auto"))
data, out = numpy.arange(1 << 20), numpy.zeros(1 << 20, int)
ticket = store.put("a", data)
if (child := os.fork()) == 0:
    calls = [lambda: store.put("b", data), lambda: store.get("a", out), lambda: store.delete("a"), lambda: "a" in store, store.names, store.stats,
        lambda: store.nbytes("a"), lambda: store.used_bytes, lambda: store.reserve(1), ticket.wait]
    for place, call in enumerate(calls):
        try:
            call()
            print("went through", place)
        except UsageError:
            pass
    store.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
store.get("a", out).wait()
assert (data == out).all()
store.close()
"""


def test_a_forked_child_can_neither_use_nor_hurt_the_store(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(nvme_offload.__file__).parents[1])}
    ended = finished([sys.executable, "-c", FORK], cwd=tmp_path, env=environment)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 0)
    assert list(tmp_path.iterdir()) == []


def test_names_sizes_and_timeouts_are_checked_at_the_door(tmp_path: Path) -> None:
    data = np.zeros(5, np.uint8)
    with TensorStore(tmp_path) as store:
        ticket = store.put("a", data)
        for wrong in (7, None, b"a", ("a",)):
            with pytest.raises(UsageError, match="the name of a tensor must be a str, not"):
                store.put(wrong, data)  # type: ignore[arg-type]
        for timeout in (float("nan"), "1"):
            with pytest.raises(UsageError, match="a timeout is a number of seconds, or None, not"):
                ticket.wait(timeout)  # type: ignore[arg-type]
        for nbytes in (-1, 1.5, "1", 1 << 63):
            with pytest.raises(UsageError, match="nbytes must be"):
                store.reserve(nbytes)  # type: ignore[arg-type]
        assert ticket.wait() == 5
        assert store.names() == ["a"]


def test_a_failure_of_close_after_an_exception_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(_faults=[(0, 1 << 30, FaultKind.FAIL, 5)]) as engine:

        def leave() -> None:
            with TensorStore(tmp_path, engine=engine) as store:
                store.put("a", np.zeros(4096, np.uint8))
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            leave()
    assert "of tensor 'a'" in caplog.text
