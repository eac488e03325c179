"""DeepSpeed's `async_io` op on our engine: its contract, faults of DeepSpeed's that it avoids, the
same calls on both, and DeepSpeed itself on it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib.util
import inspect
import json
import logging
import os
import resource
import textwrap
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import forked
import pytest
import torch
from patience import PATIENCE
from transfers import Stall

from nvme_offload import CorruptionError, IOFailure, NoSpaceError, TruncatedError, UsageError
from nvme_offload.zero3 import op, operation

Limit = Callable[[int, int], AbstractContextManager[None]]
Mount = Callable[[str], Path]

MIB = 1 << 20
PAGE = 4096
EMPTY = torch.empty(0, dtype=torch.uint8)

has_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def random(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def on_disk(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def workers() -> int:
    """Threads of engines in this process."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += (task / "comm").read_text() == "nvme-offload\n"
    return count


def locked_kibibytes() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmLck:")[2].split()[0])


def run_forked(directory: Path, code: str, *arguments: str) -> tuple[int, str]:
    """The exit status of *code* as a program in *directory*, and its output."""
    script, output = directory / "script.py", directory / "output.txt"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # any free port
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(op.__file__).parents[2]), os.environ.get("PYTHONPATH")])
        ),
    }
    with output.open("w+") as said:
        program = forked.start(
            [str(script), *arguments], env=environment, cwd=directory, stdout=said, stderr=said
        )
        status = program.wait(PATIENCE)
    return status, output.read_text(encoding="utf-8")


@pytest.fixture
def handle() -> op.aio_handle:
    return op.aio_handle(64 << 10, 8, False, True, 2)


# The contract


def test_the_settings_of_a_handle_are_deepspeeds_and_can_be_asked_for():
    plain = op.aio_handle()
    assert (plain.get_block_size(), plain.get_queue_depth(), plain.get_intra_op_parallelism()) == (
        MIB,
        128,
        1,
    )
    assert (plain.get_single_submit(), plain.get_overlap_events(), plain.get_alignment()) == (
        False,
        False,
        512,
    )
    for asked in (1, 1024, 4097):  # what a drive takes is the engine's business
        assert op.aio_handle(block_size=asked).get_block_size() == asked
    chosen = op.aio_handle(
        block_size=8192,
        queue_depth=3,
        single_submit=True,
        overlap_events=True,
        intra_op_parallelism=2,
    )
    assert (
        chosen.get_block_size(),
        chosen.get_queue_depth(),
        chosen.get_intra_op_parallelism(),
    ) == (8192, 3, 2)
    assert (chosen.get_single_submit(), chosen.get_overlap_events(), chosen.get_alignment()) == (
        True,
        True,
        1024,
    )


def test_the_strings_that_ds_nvme_tune_prints_are_flags():
    handle = op.aio_handle(MIB, 8, "false", "True", 1)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"single_submit": "yes"}, "single_submit must be true or false, not 'yes'"),
        ({"overlap_events": torch.ones(2)}, "overlap_events must be true or false"),
        (
            {"intra_op_parallelism": 0},
            "intra_op_parallelism must be a whole number from 1 to 128, not 0",
        ),
        ({"intra_op_parallelism": "1"}, "intra_op_parallelism must be a whole number, not '1'"),
        ({"block_size": 0}, "block_size must be"),
        ({"block_size": -4096}, "block_size must be"),
        ({"queue_depth": 0}, "queue_depth must be"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_deepspeeds_words(settings, message):
    with pytest.raises(UsageError, match=message):
        op.aio_handle(**settings)


@pytest.mark.every_filesystem
@pytest.mark.parametrize(
    ("numel", "offset"),
    [(1, 0), (MIB, 0), (MIB + 1, 0), (3 * MIB - 7, 5), (513, 4095), (200_000, 512)],
)
def test_any_size_and_offset_moves_right_by_every_method(handle, directory, numel, offset):
    writes = {
        "write": lambda data, path: handle.write(data, path, True, offset) + 1,
        "pwrite": lambda data, path: handle.pwrite(data, path, True, False, offset),
        "sync_pwrite": lambda data, path: handle.sync_pwrite(data, path, offset),
        "async_pwrite": lambda data, path: handle.async_pwrite(data, path, offset) or handle.wait(),
    }
    reads = {
        "read": lambda data, path: handle.read(data, path, True, offset) + 1,
        "pread": lambda data, path: handle.pread(data, path, True, False, offset),
        "sync_pread": lambda data, path: handle.sync_pread(data, path, offset),
        "async_pread": lambda data, path: handle.async_pread(data, path, offset) or handle.wait(),
    }
    for seed, ((name, write), read) in enumerate(zip(writes.items(), reads.values(), strict=True)):
        path = directory / name
        data, back = random(numel, seed), torch.zeros(numel, dtype=torch.uint8)
        assert write(data, str(path)) == 1
        assert torch.equal(on_disk(path)[offset:], data)
        assert read(back, str(path)) == 1
        assert torch.equal(back, data)
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("block_size", [128 << 10, 1024, 1 << 20])
def test_the_module_functions_move_whole_files(tmp_path, block_size):
    data, back = random(2 * MIB + 3), torch.zeros(2 * MIB + 3, dtype=torch.uint8)
    path = tmp_path / "w"
    assert op.aio_write(data, str(path), block_size, 4, False, True, True) == 0
    assert (
        op.aio_read(
            buffer=back,
            filename=path,
            block_size=block_size,
            queue_depth=4,
            single_submit=False,
            overlap_events=True,
            validate=True,
        )
        == 0
    )
    assert torch.equal(on_disk(path), data)
    assert torch.equal(back, data)


def test_arguments_go_by_their_names_in_deepspeed(handle, tmp_path):
    path, data, back = str(tmp_path / "w"), random(PAGE), torch.zeros(PAGE, dtype=torch.uint8)
    assert (
        handle.pwrite(buffer=data, filename=path, validate=False, file_offset=8, **{"async": True})
        == 0
    )
    assert handle.pread(back, path, file_offset=8, validate=False, **{"async": False}) == 2
    assert torch.equal(back, data)
    assert handle.pwrite(data, path, False, **{"async": True}) == 0
    assert handle.async_pread(filename=path, buffer=back, file_offset=8) == 0
    assert handle.wait() == 2
    with pytest.raises(TypeError, match="asynchronous"):
        handle.pread(back, path, False)
    with pytest.raises(TypeError, match="either filename or fd"):
        handle.async_pwrite(back)
    assert [*inspect.signature(handle.new_cpu_locked_tensor).parameters] == [
        "num_elem",
        "example_tenosr",
    ]


def test_wait_counts_what_was_started_since_the_last_one(handle, tmp_path):
    assert handle.wait() == 0
    parts = random(6 * MIB).chunk(6)
    for index, part in enumerate(parts[:4]):
        assert handle.async_pwrite(part, str(tmp_path / str(index))) == 0
    assert handle.wait() == 4
    assert handle.wait() == 0
    handle.async_pwrite(parts[4], str(tmp_path / "4"))
    assert handle.sync_pwrite(parts[5], str(tmp_path / "5")) == 2
    assert torch.equal(
        torch.cat([on_disk(tmp_path / str(index)) for index in range(6)]), torch.cat(parts)
    )


def test_buffers_are_on_the_cpu_whatever_the_default_device(handle, tmp_path):
    strided = random(64).view(8, 8).t()
    with torch.device("meta"):
        assert handle.sync_pwrite(strided, tmp_path / "file") == 1
        locked = handle.new_cpu_locked_tensor(64, EMPTY)
        assert handle.pread(locked, tmp_path / "file", True, False) == 1
    assert torch.equal(locked, strided.reshape(-1))


def test_read_and_write_leave_earlier_operations_to_wait(handle, tmp_path):
    handle.async_pwrite(random(MIB), tmp_path / "one")
    assert handle.write(random(MIB, 1), tmp_path / "two", False) == 0
    assert handle.wait() == 1


def test_operations_are_in_flight_together(handle, stall: Stall, stalling_directory):
    """All transfers are started before the first can end."""
    parts = random(4 * MIB).chunk(4)
    for index, part in enumerate(parts):
        handle.sync_pwrite(part, stalling_directory / str(index))
    with stall() as thaw:
        for index, part in enumerate(reversed(parts)):
            assert handle.async_pwrite(part, stalling_directory / str(index)) == 0
        thaw()
        assert handle.wait() == 4
    assert [
        torch.equal(on_disk(stalling_directory / str(index)), part)
        for index, part in enumerate(reversed(parts))
    ] == [True] * 4


def test_an_existing_file_keeps_its_length_and_its_other_bytes(handle, tmp_path):
    path, before, data = tmp_path / "w", random(3 * MIB), random(MIB, 1)
    path.write_bytes(before.numpy().tobytes())
    handle.sync_pwrite(data, path, 512)
    before[512 : 512 + MIB] = data
    assert torch.equal(on_disk(path), before)


# Buffers


def test_buffers_of_any_shape_move_in_the_order_of_their_elements(handle, tmp_path):
    matrix = torch.arange(300_000, dtype=torch.float32).reshape(300, 1000)
    buffers = {
        "matrix": matrix,
        "transposed": matrix.t(),
        "strided": matrix[::3, 5:-7:2],
        "expanded": matrix[:1].expand(4, 1000),
        "scalar": torch.tensor(3.5),
        "nothing": matrix[:0],
        "parameter": torch.nn.Parameter(matrix),
        "conjugate": torch.complex(matrix, -matrix).conj(),
        "negative": torch.complex(matrix, -matrix).conj().imag,
    }
    for name, buffer in buffers.items():
        handle.pwrite(buffer, tmp_path / name, True, True)
    assert handle.wait() == len(buffers)
    for name, buffer in buffers.items():
        expected = buffer.detach().resolve_conj().resolve_neg().contiguous().numpy().tobytes()
        assert (tmp_path / name).read_bytes() == expected, name
    targets = {
        name: torch.zeros_like(buffer, memory_format=torch.preserve_format)
        for name, buffer in buffers.items()
        if name != "expanded"
    }
    targets["strided"] = torch.zeros_like(matrix)[::3, 5:-7:2]
    targets["transposed"] = torch.zeros_like(matrix).t()
    targets["parameter"] = torch.nn.Parameter(torch.zeros_like(matrix))
    targets["conjugate"] = torch.zeros_like(torch.complex(matrix, matrix)).conj()
    for name, target in targets.items():
        handle.pread(target, tmp_path / name, True, True)
    assert handle.wait() == len(targets)
    for name, target in targets.items():
        assert torch.equal(target, buffers[name]), name


def test_a_tensor_can_be_pointed_elsewhere_while_it_is_in_flight(handle, tmp_path):
    """As DeepSpeed's swappers do with `tensor.data`."""
    data, back = random(MIB), torch.zeros(MIB, dtype=torch.uint8)
    tensor, memory = data.clone(), back[:]
    handle.pwrite(tensor, tmp_path / "w", True, True)
    tensor.data = torch.zeros(1, dtype=torch.uint8)
    assert handle.wait() == 1
    handle.pread(memory, tmp_path / "w", True, True)
    memory.data = torch.zeros(1, dtype=torch.uint8)
    assert handle.wait() == 1
    assert torch.equal(back, data)


def test_memory_outlives_the_operation_on_it(handle, stall: Stall, stalling_directory):
    path = stalling_directory / "w"
    handle.sync_pwrite(torch.zeros(MIB, dtype=torch.uint8), path)
    with stall() as thaw:
        handle.async_pwrite(random(MIB), path)
        gc.collect()
        torch.full((MIB,), 7, dtype=torch.uint8)
        thaw()
        handle.wait()
    assert torch.equal(on_disk(path), random(MIB))


@pytest.mark.parametrize(
    "buffer",
    [b"bytes", torch.empty(4, device="meta"), torch.eye(3).to_sparse(), None],
    ids=["bytes", "meta", "sparse", "none"],
)
def test_what_is_no_tensor_with_memory_is_refused_before_a_file_is_made(handle, tmp_path, buffer):
    for call in (handle.async_pwrite, handle.async_pread, handle.sync_pwrite):
        with pytest.raises(UsageError, match="buffer must be"):
            call(buffer, tmp_path / "w")
    assert [*tmp_path.iterdir()] == []
    assert handle.wait() == 0


@pytest.mark.parametrize(
    "arguments", [(None, 0), (5.5, 0), ("w", -1), ("w", "0"), ("w", 1 << 63), ("a\0b", 0)]
)
def test_places_that_cannot_be_are_refused(handle, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        handle.sync_pwrite(random(8), *arguments)
    with pytest.raises(UsageError):
        handle.async_pread(random(8), *arguments)


# Order


@pytest.mark.parametrize("numel", [4 * MIB, 4 * MIB + 13])
def test_operations_on_the_same_bytes_take_effect_one_after_another(handle, tmp_path, numel):
    """As they do in DeepSpeed's queues; on other bytes they need not."""
    for turn in range(3):
        first, second, back = (
            random(numel, turn),
            random(numel, turn + 10),
            torch.zeros(numel, dtype=torch.uint8),
        )
        path, link = tmp_path / f"{turn}", tmp_path / f"{turn}-link"
        handle.async_pwrite(first, path)
        link.hardlink_to(path)
        handle.async_pwrite(second, link)  # the last one stays
        handle.async_pread(back, path)  # sees the earlier write
        handle.async_pwrite(back, tmp_path / "copy")  # writes the bytes of the earlier read
        handle.async_pread(second, tmp_path / "copy")
        handle.async_pread(second.view(torch.uint8), path)
        assert handle.wait() == 6
        assert torch.equal(on_disk(path), random(numel, turn + 10))
        assert torch.equal(on_disk(tmp_path / "copy"), random(numel, turn + 10))
        assert torch.equal(second, back)
        assert torch.equal(first, random(numel, turn))


def test_a_strided_buffer_is_written_as_it_was_read(handle, tmp_path):
    data = random(2 * MIB)
    (tmp_path / "from").write_bytes(data[::2].numpy().tobytes())
    target = torch.zeros(2 * MIB, dtype=torch.uint8)
    handle.async_pread(target[::2], tmp_path / "from")
    handle.async_pwrite(target, tmp_path / "to")
    assert handle.wait() == 2
    data[1::2] = 0
    assert torch.equal(on_disk(tmp_path / "to"), data)


# Faults


def test_what_cannot_be_opened_fails_at_once_and_leaves_the_rest(handle, tmp_path):
    data = random(MIB)
    handle.async_pwrite(data, tmp_path / "w")
    for call in (handle.async_pread, handle.sync_pread):
        with pytest.raises(IOFailure) as caught:
            call(torch.zeros(8), tmp_path / "missing")
        assert (caught.value.errno, caught.value.path) == (errno.ENOENT, str(tmp_path / "missing"))
    with pytest.raises(IOFailure) as caught:
        handle.pwrite(data, str(tmp_path / "no" / "directory"), False, True)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(IOFailure) as caught:
        handle.write(data, tmp_path, False)
    assert caught.value.errno == errno.EISDIR
    assert handle.wait() == 1
    assert torch.equal(on_disk(tmp_path / "w"), data)


@pytest.mark.every_filesystem
def test_a_short_file_is_reported_after_all_others_are_finished(handle, directory):
    data, back, short = (
        random(3 * MIB),
        torch.zeros(3 * MIB, dtype=torch.uint8),
        torch.zeros(3 * MIB, dtype=torch.uint8),
    )
    (directory / "long").write_bytes(data.numpy().tobytes())
    (directory / "short").write_bytes(data[: MIB + 5].numpy().tobytes())
    assert handle.async_pread(short, directory / "short") == 0
    assert handle.async_pread(back, directory / "long") == 0
    assert handle.async_pwrite(data, directory / "w") == 0
    with pytest.raises(TruncatedError) as caught:
        handle.wait()
    failure = caught.value
    assert (failure.operation, failure.path, failure.offset, failure.nbytes) == (
        "read",
        str(directory / "short"),
        0,
        3 * MIB,
    )
    assert torch.equal(back, data)
    assert torch.equal(on_disk(directory / "w"), data)
    assert handle.wait() == 0
    assert handle.sync_pread(back, directory / "long") == 1
    for call in (
        handle.sync_pread,
        lambda *where: handle.read(*where, False),
        lambda *where: handle.pread(*where, False, False),
    ):
        with pytest.raises(TruncatedError):
            call(short, directory / "short")


def test_a_write_beyond_the_limit_on_a_files_size_fails(handle, tmp_path, limit: Limit):
    data = random(2 * MIB)
    with limit(resource.RLIMIT_FSIZE, MIB):
        handle.async_pwrite(data, tmp_path / "large")
        handle.async_pwrite(data[:MIB], tmp_path / "small")
        with pytest.raises(IOFailure) as caught:
            handle.wait()
    assert (caught.value.errno, caught.value.nbytes) == (errno.EFBIG, 2 * MIB)
    assert torch.equal(on_disk(tmp_path / "small"), data[:MIB])
    assert handle.sync_pwrite(data, tmp_path / "large") == 1


def test_a_full_drive_is_reported(handle, mounted: Mount):
    directory = mounted("ext4-full")
    with pytest.raises(NoSpaceError):
        handle.sync_pwrite(torch.zeros(64 * MIB, dtype=torch.uint8), directory / "w")
    (directory / "w").unlink(missing_ok=True)


def test_of_several_failures_the_first_is_raised_and_the_others_are_logged(
    handle, tmp_path, caplog
):
    for name in ("one", "two", "three"):
        (tmp_path / name).touch()
        handle.async_pread(torch.zeros(8), tmp_path / name)
    with pytest.raises(TruncatedError, match="one"):
        handle.wait()
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "two" in caplog.messages[0]
    assert "three" in caplog.messages[1]


@pytest.mark.parametrize("writing", [True, False], ids=["write", "read"])
def test_bytes_that_changed_in_between_are_corruption(handle, tmp_path, writing):
    path, data = tmp_path / "w", random(2 * MIB)
    path.write_bytes(data.numpy().tobytes())
    (handle.pwrite if writing else handle.pread)(data, path, True, True)
    handle._pending[0].ticket.wait()
    with path.open("r+b") as file:
        file.seek(MIB + 17)
        file.write(bytes([int(data[MIB + 17]) ^ 1]))
    with pytest.raises(CorruptionError) as caught:
        handle.wait()
    assert (caught.value.operation, caught.value.nbytes) == (
        "write" if writing else "read",
        2 * MIB,
    )
    assert handle.wait() == 0


@pytest.mark.parametrize("descriptors", [64, 65])  # the first or the second of an operation lacks
def test_there_may_be_more_operations_than_descriptors(
    handle, tmp_path, limit: Limit, descriptors: int
):
    parts = random(200 * 1000).chunk(200)  # unaligned: two descriptors each
    with limit(resource.RLIMIT_NOFILE, descriptors):
        for index, part in enumerate(parts):
            assert handle.async_pwrite(part, tmp_path / str(index)) == 0
        assert handle.wait() == 200
    assert all(
        torch.equal(on_disk(tmp_path / str(index)), part) for index, part in enumerate(parts)
    )


def test_what_goes_through_the_page_cache_is_said_once(mounted: Mount, caplog):
    directory = mounted("tmpfs")
    operation._warned_devices.discard(directory.stat().st_dev)
    handle = op.aio_handle()
    for name in ("one", "two"):
        handle.sync_pwrite(random(8), directory / name)
    assert ["page cache" in message for message in caplog.messages] == [True]


# Handles and their engines


def test_handles_with_equal_settings_share_an_engine_until_the_last_one_goes():
    before = workers()
    handles = [op.aio_handle(MIB, 7, False, True, 3) for _ in range(4)]
    assert workers() == before + 3
    other = op.aio_handle(MIB, 7, False, False, 2)
    assert workers() == before + 5
    del handles[1:]
    assert workers() == before + 5
    del handles, other
    assert workers() == before


def test_a_handle_that_is_dropped_finishes_its_work_and_logs_what_failed(tmp_path, caplog):
    data = random(8 * MIB)
    (tmp_path / "short").touch()
    handle = op.aio_handle(MIB, 3, False, True, 1)
    handle.async_pwrite(data, tmp_path / "w")
    del handle
    assert torch.equal(on_disk(tmp_path / "w"), data)
    assert caplog.messages == []
    handle = op.aio_handle(MIB, 3, False, True, 1)
    handle.async_pread(torch.zeros(8), tmp_path / "short")
    del handle
    assert ["short" in message for message in caplog.messages] == [True]


def test_the_end_of_the_interpreter_finishes_what_is_pending(tmp_path):
    code = """
    import sys, torch
    from nvme_offload.zero3 import op
    handle = op.aio_handle()
    handle.async_pwrite(torch.full((32 << 20,), 5, dtype=torch.uint8), sys.argv[1])
    sys.exit()
    """
    assert run_forked(tmp_path, code, str(tmp_path / "w")) == (0, "")
    assert torch.equal(on_disk(tmp_path / "w"), torch.full((32 * MIB,), 5, dtype=torch.uint8))


def test_a_forked_child_can_go_on(tmp_path):
    code = """
    import os, sys, torch
    from nvme_offload.zero3 import op
    torch.set_num_threads(1)  # OpenMP's threads are not there in the child, and it waits for them
    place = sys.argv[1]
    handle = op.aio_handle(1 << 20, 8, False, True, 2)
    data = torch.arange(1 << 20)
    handle.sync_pwrite(data, place + "/parent")
    child = os.fork()
    if child == 0:
        back = torch.zeros_like(data)
        handle.sync_pread(back, place + "/parent")
        op.aio_handle(1 << 20, 8, False, True, 2).sync_pwrite(back + 1, place + "/child")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    back = torch.zeros_like(data)
    handle.sync_pread(back, place + "/child")
    assert torch.equal(back, data + 1)
    """
    assert run_forked(tmp_path, code, str(tmp_path)) == (0, "")


# Descriptors


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # fails where other code closed it


@pytest.mark.every_filesystem
@pytest.mark.parametrize("flags", [0, os.O_DIRECT, os.O_APPEND], ids=["plain", "direct", "append"])
def test_a_descriptor_is_written_to_and_left_open(handle, directory, flags):
    data = random(MIB + 100)
    with opened(directory / "w", os.O_CREAT | os.O_WRONLY | flags) as descriptor:
        assert handle.async_pwrite(data, descriptor, 512) == 0
        assert handle.async_pwrite(data[:100], fd=descriptor) == 0
        assert handle.async_pwrite(buffer=data[:1000], fd=descriptor, file_offset=2 * MIB) == 0
        assert handle.wait() == 3
        os.fsync(descriptor)
    stored = on_disk(directory / "w")
    assert torch.equal(stored[512 : 512 + len(data)], data)
    assert torch.equal(stored[:100], data[:100])
    assert torch.equal(stored[2 * MIB :], data[:1000])


def test_a_descriptor_of_a_renamed_file_is_written_to(handle, tmp_path):
    data = random(MIB + 100)
    with opened(tmp_path / "w", os.O_RDWR | os.O_CREAT) as descriptor:
        (tmp_path / "w").rename(tmp_path / "other")
        handle.async_pwrite(data, descriptor)
        assert handle.wait() == 1
    assert torch.equal(on_disk(tmp_path / "other"), data)


@pytest.mark.parametrize("kind", ["deleted", "anonymous", "replaced"])
def test_a_descriptor_whose_file_has_no_name_is_refused(handle, tmp_path, kind):
    path = tmp_path / "w"
    flags = os.O_RDWR | (os.O_TMPFILE if kind == "anonymous" else os.O_CREAT)
    with opened(tmp_path if kind == "anonymous" else path, flags) as descriptor:
        if kind != "anonymous":
            path.unlink()
        if kind == "replaced":
            path.write_bytes(b"another file")
        with pytest.raises(IOFailure) as caught:
            handle.async_pwrite(random(MIB), descriptor)
    assert caught.value.errno == errno.ENOENT
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"another file"] * (
        kind == "replaced"
    )


def test_a_descriptor_may_be_closed_before_the_wait(handle, tmp_path):
    data = random(8 * MIB)
    with opened(tmp_path / "w", os.O_CREAT | os.O_WRONLY) as descriptor:
        handle.async_pwrite(data, descriptor)
    assert handle.wait() == 1
    assert torch.equal(on_disk(tmp_path / "w"), data)


def test_descriptors_that_cannot_be_written_to_are_refused(handle, tmp_path):
    data = random(MIB)
    (tmp_path / "w").touch()
    with opened(tmp_path / "w", os.O_RDONLY) as descriptor, pytest.raises(IOFailure) as caught:
        handle.async_pwrite(data, descriptor)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(IOFailure) as caught:
        handle.async_pwrite(data, descriptor)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(UsageError):
        handle.async_pread(data, descriptor)
    receiver, sender = os.pipe()
    try:
        with pytest.raises(IOFailure) as caught:
            handle.async_pwrite(data, sender)
        assert caught.value.errno == errno.ENOENT
    finally:
        os.close(receiver)
        os.close(sender)


# Locked memory

locking = pytest.mark.parametrize(
    "kind", [op.aio_handle, op.pin_handle], ids=lambda kind: kind.__name__
)


@locking
@pytest.mark.parametrize(
    ("numel", "dtype"), [(1, torch.uint8), (1025, torch.bfloat16), (MIB + 1, torch.float32)]
)
def test_a_locked_tensor_is_flat_zero_and_on_a_page(kind, numel, dtype):
    tensor = kind().new_cpu_locked_tensor(numel, torch.ones(2, 3, dtype=dtype))
    assert (tensor.shape, tensor.dtype, tensor.is_cpu, tensor.requires_grad) == (
        (numel,),
        dtype,
        True,
        False,
    )
    assert tensor.data_ptr() % PAGE == 0
    assert tensor.untyped_storage().nbytes() == numel * dtype.itemsize
    assert torch.equal(tensor, torch.zeros(numel, dtype=dtype))


@locking
def test_views_of_a_locked_tensor_are_pinned_and_nothing_else(kind):
    handle = kind()
    tensor = handle.new_cpu_locked_tensor(1000, EMPTY)
    for view in (
        tensor,
        tensor[5:],
        tensor.narrow(0, 10, 20),
        tensor.view(torch.int32).reshape(10, 25).t(),
        tensor[::7],
        tensor.data,
    ):
        assert handle.is_pinned(view)
        assert op.aio_handle().is_pinned(view)
    assert not handle.is_pinned(torch.zeros(8))
    assert not handle.is_pinned(torch.Tensor())
    assert not handle.is_pinned(torch.empty(4, device="meta"))
    beyond = torch.frombuffer(bytearray(8), dtype=torch.uint8)
    assert not handle.is_pinned(beyond)


@locking
def test_freeing_forgets_a_tensor_once(kind):
    handle = kind()
    tensor = handle.new_cpu_locked_tensor(1000, EMPTY)
    assert not handle.free_cpu_locked_tensor(tensor[1:])
    assert handle.is_pinned(tensor)
    assert handle.free_cpu_locked_tensor(tensor)
    # memory registered with CUDA stays registered, and torch reports it
    assert handle.is_pinned(tensor) == tensor.is_pinned()
    assert not handle.free_cpu_locked_tensor(tensor)
    assert int(tensor.sum()) == 0  # still there, for who still has it


@locking
def test_the_memory_goes_with_the_last_view_freed_or_not(kind):
    handle = kind()
    before = locked_kibibytes()
    tensor = handle.new_cpu_locked_tensor(MIB, EMPTY)
    if locked_kibibytes() < before + 1024:
        pytest.skip(
            f"CUDA pins, or no memory can be locked here: RLIMIT_MEMLOCK is {resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]}"
        )
    view = tensor[100:200]
    reported = []
    # deepspeed.utils.pin_memory frees the memory then
    weakref.finalize(tensor, reported.append, "gone")
    address = tensor.data_ptr()
    del tensor
    assert reported == []
    assert handle.is_pinned(view)
    view += 1
    assert int(view.sum()) == 100
    del view
    assert reported == ["gone"]
    assert locked_kibibytes() == before
    assert not op.pin_handle().free_cpu_locked_tensor_by_ptr(address)


def test_locked_tensors_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="num_elem must not be negative"):
        op.aio_handle().new_cpu_locked_tensor(-1, EMPTY)
    with pytest.raises(UsageError, match="num_elem must be a whole number"):
        op.aio_handle().new_cpu_locked_tensor(1.5, EMPTY)
    assert op.aio_handle().new_cpu_locked_tensor(0, EMPTY).numel() == 0


def test_too_small_a_limit_on_locked_memory_is_no_end(limit: Limit, tmp_path):
    """It ends the process where DeepSpeed's op meets it."""
    with limit(resource.RLIMIT_MEMLOCK, 0):
        handle = op.aio_handle()
        tensor = handle.new_cpu_locked_tensor(MIB, EMPTY)
        pinned = op.pin_handle().new_cpu_locked_tensor(MIB, EMPTY)
    tensor.copy_(random(MIB))
    handle.sync_pwrite(tensor, tmp_path / "w")
    handle.sync_pread(pinned, tmp_path / "w")
    assert torch.equal(pinned, random(MIB))


def test_memcpy_copies_and_checks():
    source, target = torch.arange(1000.0), torch.zeros(1000)
    assert op.deepspeed_memcpy(target, source) == 0
    assert torch.equal(target, source)
    assert op.deepspeed_memcpy(dst=target.reshape(10, 100), src=source.flip(0)) == 0
    assert torch.equal(target, source.flip(0))
    for other in (torch.zeros(999), torch.zeros(1000, dtype=torch.int32)):
        with pytest.raises(UsageError, match="cannot be copied"):
            op.deepspeed_memcpy(other, source)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_a_gpu_are_copied_out_in_wait(handle, tmp_path):
    data = random(3 * MIB + 5).cuda()
    handle.pwrite(data, tmp_path / "w", True, True)
    data.zero_()  # it was copied
    handle.pwrite(data.t(), tmp_path / "zero", True, True)
    assert handle.wait() == 2
    assert torch.equal(on_disk(tmp_path / "w"), random(3 * MIB + 5))
    handle.async_pread(data, tmp_path / "w")
    handle.async_pwrite(data, tmp_path / "copy")
    assert handle.wait() == 2
    assert torch.equal(data.cpu(), random(3 * MIB + 5))
    assert torch.equal(on_disk(tmp_path / "copy"), random(3 * MIB + 5))
    locked = handle.new_cpu_locked_tensor(MIB, EMPTY)
    assert locked.is_pinned()
    assert handle.is_pinned(torch.empty(8).pin_memory())
    assert not handle.is_pinned(data)


# The same calls on DeepSpeed's op

SCENARIOS = '''
"""Run every scenario on one op, and write what came of it. Arguments: "ours" or the folder of torch's extensions, a directory, a file."""
import ctypes, hashlib, importlib.machinery, importlib.util, json, os, sys, types
import torch

side, place, answer = sys.argv[1:]
EMPTY = torch.empty(0, dtype=torch.uint8)
MIB = 1 << 20

def built(name):
    path = f"{side}/{name}/{name}.so"
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module

if side == "ours":
    from nvme_offload.zero3 import op
    pins = op
else:  # it warns of drives wearing out through deepspeed.utils, once; that import takes seconds
    sys.modules["deepspeed"], sys.modules["deepspeed.utils"] = types.ModuleType("deepspeed"), types.ModuleType("deepspeed.utils")
    sys.modules["deepspeed.utils"]._deepspeed_nvme_write_warning_emitted = True
    pins, op = built("pin_memory"), built("async_io")

def random(numel, seed=0):
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))

def locked(handle, numel, seed=0):
    return handle.new_cpu_locked_tensor(numel, EMPTY).copy_(random(numel, seed))

def digest(thing):
    data = open(thing, "rb").read() if isinstance(thing, str) else thing.contiguous().view(torch.uint8).numpy().tobytes()
    return [len(data), hashlib.sha256(data).hexdigest()]

def outcome(call, *arguments, **named):
    try:
        result = call(*arguments, **named)
    except Exception:
        return "failed"
    return "failed" if result == -1 else result

def settings(path):
    chosen = op.aio_handle(8192, 3, True, True, 2)
    return [[h.get_block_size(), h.get_queue_depth(), h.get_single_submit(), h.get_overlap_events(), h.get_intra_op_parallelism(), h.get_alignment()]
            for h in (op.aio_handle(), chosen, op.aio_handle(intra_op_parallelism=4, queue_depth=1))]

def whole_files(path):
    handle = op.aio_handle()
    data, back = locked(handle, 3 * MIB), locked(handle, 3 * MIB, 1)
    results = [op.aio_write(data, path, MIB, 8, False, True, True), op.aio_read(back, path, MIB, 8, False, False, True), digest(back)]
    return [*results, handle.write(back, path + "2", False), handle.read(data, path + "2", False), digest(data), os.stat(path).st_mode & 0o777]

def every_method(path):
    handle = op.aio_handle(128 << 10, 4, False, True, 2)
    data, back = locked(handle, 2 * MIB), locked(handle, 2 * MIB, 1)
    return [
        handle.pwrite(data, path, False, False), handle.pread(back, path, True, True), handle.wait(), digest(back),
        handle.sync_pwrite(data[:MIB], path, MIB), handle.async_pread(back, path), handle.wait(), digest(back),
        handle.async_pwrite(buffer=data, filename=path + "2", file_offset=4096), handle.wait(), digest(path + "2"),
        handle.pread(buffer=back, filename=path + "2", validate=False, file_offset=4096, **{"async": False}), digest(back),
        handle.sync_pread(buffer=back[:4096], filename=path, file_offset=512), digest(back),
    ]

def counts(path):
    handle = op.aio_handle(MIB, 8, False, False, 1)
    parts = locked(handle, 6 * MIB).chunk(6)
    results = [handle.async_pwrite(part, f"{path}{i}", 0) for i, part in enumerate(parts[:4])]
    results += [handle.wait(), handle.async_pwrite(parts[4], path + "4"), handle.sync_pwrite(parts[5], path + "5")]
    return results + [digest(f"{path}{i}") for i in range(6)]

def longer_file(path):
    handle = op.aio_handle()
    open(path, "wb").write(bytes(3 * MIB))
    return [handle.sync_pwrite(locked(handle, MIB), path, MIB), digest(path)]

def descriptors(path):
    handle = op.aio_handle(intra_op_parallelism=2)
    data = locked(handle, 2 * MIB)
    fd = os.open(path, os.O_DIRECT | os.O_CREAT | os.O_WRONLY)
    results = [handle.async_pwrite(data, fd, 4096), handle.wait(), handle.async_pwrite(buffer=data[:4096], fd=fd, file_offset=0), handle.wait()]
    os.fsync(fd)
    os.close(fd)
    return [*results, digest(path)]

def unpinned(path):
    handle = op.aio_handle()
    data, back = random(MIB), random(MIB, 1)
    return [handle.async_pwrite(data, path), handle.wait(), handle.async_pread(back, path), handle.wait(), digest(back), handle.is_pinned(back)]

def dtypes(path):
    handle = op.aio_handle()
    results = []
    for dtype in (torch.bfloat16, torch.float64, torch.int32, torch.bool):
        data = handle.new_cpu_locked_tensor(4096, torch.empty(1, 2, dtype=dtype)).copy_(torch.arange(4096) % 2)
        back = handle.new_cpu_locked_tensor(4096, data)
        results += [str(back.dtype), [*back.shape], back.data_ptr() % 4096, handle.sync_pwrite(data, path), handle.sync_pread(back, path), digest(back)]
        os.unlink(path)
    return results

def order(path):
    handle = op.aio_handle(MIB, 4, False, True, 1)
    first, second, back = locked(handle, 4 * MIB), locked(handle, 4 * MIB, 1), locked(handle, 4 * MIB, 2)
    handle.sync_pwrite(back, path + "copy")
    handle.sync_pwrite(back, path)
    results = [handle.async_pwrite(first, path), handle.async_pwrite(second, path), handle.async_pread(back, path),
               handle.async_pwrite(back, path + "copy"), handle.async_pread(first, path + "copy"), handle.wait()]
    return [*results, digest(path), digest(path + "copy"), digest(back), digest(first)]

def failures(path):
    handle = op.aio_handle()
    data = locked(handle, MIB)
    results = [outcome(handle.async_pread, data, path), outcome(handle.sync_pread, data, path), outcome(handle.async_pwrite, data, path + "/no/w"),
               outcome(handle.write, data, path + "/no/w", False), outcome(op.aio_read, data, path, MIB, 1, False, True, False)]
    return [*results, handle.sync_pwrite(data, path), handle.sync_pread(data, path), digest(data)]

def wrong_calls(path):
    handle = op.aio_handle()
    data = locked(handle, MIB)
    return [outcome(handle.pread, data, path, False), outcome(handle.async_pwrite, data), outcome(handle.async_pwrite, data, path, 0, 0),
            outcome(op.aio_handle, block_size="1M"), outcome(op.aio_handle, single_submit="yes"), outcome(op.aio_handle, thread_count=2),
            outcome(handle.pwrite, data, path, False, True, offset=3), outcome(op.aio_write, data, path, MIB)]

def locked_memory(path):
    handle, other = op.aio_handle(), pins.pin_handle()
    tensor, pinned = handle.new_cpu_locked_tensor(num_elem=1000, example_tenosr=EMPTY), other.new_cpu_locked_tensor(num_elem=500, example_tensor=EMPTY)
    results = [handle.is_pinned(t) for t in (tensor, tensor[5:], tensor.view(10, 100), pinned, pinned[499:], torch.zeros(5), torch.Tensor())]
    results += [other.is_pinned(t) for t in (tensor, pinned[3:], torch.zeros(5))]
    results += [handle.free_cpu_locked_tensor(tensor[1:]), handle.free_cpu_locked_tensor(tensor=tensor), handle.free_cpu_locked_tensor(torch.zeros(5))]
    address = pinned.data_ptr()
    results += [other.free_cpu_locked_tensor_by_ptr(address=address), other.free_cpu_locked_tensor_by_ptr(address)]
    return [*results, other.free_cpu_locked_tensor(torch.zeros(5))]

def memcpy(path):
    # A multiple of 128 and a rest below 32: DeepSpeed's loop over 8 vectors writes past the end if 4 are left.
    target = torch.zeros(100_099)
    return [op.deepspeed_memcpy(target, torch.arange(100_099.0)), digest(target)]

scenarios = [settings, whole_files, every_method, counts, longer_file, descriptors, unpinned, dtypes, order, failures, wrong_calls, locked_memory, memcpy]
with open(answer, "w") as file:
    json.dump({scenario.__name__: scenario(f"{place}/{scenario.__name__}") for scenario in scenarios}, file)
'''
NAMES = SCENARIOS.partition("\nscenarios = [")[2].partition("]")[0].split(", ")


@pytest.fixture(scope="session")
def both_sides(
    deepspeeds_op: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, object], dict[str, object]]:
    """What came of the scenarios, by name, on our op and on DeepSpeed's."""
    results = []
    for side in ("ours", str(deepspeeds_op)):
        directory = tmp_path_factory.mktemp("side")
        answer = directory / "answer.json"
        status, said = run_forked(directory, SCENARIOS, side, str(directory), str(answer))
        if side != "ours" and status == 1 and "ImportError" in said:
            pytest.skip(f"DeepSpeed's op was built for another torch: {said.splitlines()[-1]}")
        assert status == 0, said
        results.append(json.loads(answer.read_text()))
    return results[0], results[1]


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", NAMES)
def test_the_same_calls_give_the_same_on_deepspeeds_op(both_sides, name):
    ours, theirs = both_sides
    assert ours[name] == theirs[name]


# DeepSpeed on our op


def run_with_deepspeed(directory: Path, code: str, *arguments: str) -> str:
    """Run *code* where DeepSpeed is on the CPU and whatever it would compile fails; a file, so that
    processes it spawns find it too.
    """
    preamble = """
    import sys
    import torch.utils.cpp_extension
    from nvme_offload.zero3 import op

    def refuse(name, *rest, **named):
        raise AssertionError(f"{name} must not be compiled")

    torch.utils.cpp_extension.load = refuse
    """
    status, said = run_forked(
        directory, textwrap.dedent(preamble) + textwrap.dedent(code), *arguments
    )
    assert status == 0, said[-6000:]
    return said


@has_deepspeed
@pytest.mark.deepspeed
def test_deepspeed_finds_the_op_until_it_is_removed(tmp_path):
    code = """
    import os
    os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
    import deepspeed.ops, torch
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    def state():
        seen = vars(deepspeed.ops).get("__compatible_ops__")
        return dict(OpBuilder._loaded_ops), getattr(sys, "_deepspeed_pin_memory_op_module", None), AsyncIOBuilder.is_compatible, seen and dict(seen)

    def check():
        op.install()
        op.install()
        assert AsyncIOBuilder().load() is op
        assert AsyncIOBuilder().load(verbose=False).aio_handle().wait() == 0
        assert PinMemoryBuilder().load().pin_handle is op.pin_handle
        assert AsyncIOBuilder().is_compatible(verbose=True) is True
        assert deepspeed.ops.__compatible_ops__["async_io"] is True

    before = state()
    assert before[1] is None and before[3] is None
    op.remove()
    check()
    op.remove()
    op.remove()
    assert state() == before

    theirs, pins = object(), object()
    OpBuilder._loaded_ops["async_io"] = theirs
    sys._deepspeed_pin_memory_op_module = pins
    deepspeed.ops.__compatible_ops__ = {"async_io": False, "other": False}
    before = state()
    check()
    op.remove()
    assert state() == before

    op.install()
    from deepspeed.accelerator import get_accelerator
    accelerator = get_accelerator()
    pinned = accelerator.pin_memory(torch.arange(100.0).reshape(4, 25))
    assert torch.equal(pinned, torch.arange(100.0).reshape(4, 25))
    view = pinned[1]
    assert accelerator.is_pinned(pinned) and accelerator.is_pinned(view) and op.aio_handle().is_pinned(view)
    del pinned
    assert accelerator.is_pinned(view) and view[0] == 25
    empty = accelerator.pin_empty(3, 5, dtype=torch.bfloat16)
    assert empty.shape == (3, 5) and accelerator.unpin_memory(empty) and not op.pin_handle().is_pinned(empty)
    print("through")
    """
    assert "through" in run_with_deepspeed(tmp_path, code)


@has_deepspeed
@pytest.mark.deepspeed
def test_deepspeeds_checkpoint_writer_saves_what_torch_loads(tmp_path):
    code = """
    import types
    import torch
    op.install()
    import deepspeed.io.fast_file_writer
    # Another op of DeepSpeed's, which its CPU accelerator lacks.
    cast = lambda them: [one.reshape(-1).view(torch.uint8) for one in them] if isinstance(them, list) else them.reshape(-1).view(torch.uint8)
    utils = types.SimpleNamespace(load=lambda: types.SimpleNamespace(cast_to_byte_tensor=cast))
    deepspeed.io.fast_file_writer.UtilsBuilder = lambda: utils
    from deepspeed.io import FastFileWriter, FastFileWriterConfig
    handle = op.aio_handle(block_size=1 << 20, queue_depth=8, overlap_events=True, intra_op_parallelism=2)
    state = {"weights": torch.randn(1500, 1001), "odd": torch.arange(12345, dtype=torch.int16), "step": 7}
    for double in (True, False):
        for zipped in (True, False):
            path = f"{sys.argv[1]}/{double}-{zipped}.pt"
            buffer = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
            writer = FastFileWriter(path, FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer, double_buffer=double))
            torch.save(state, writer, _use_new_zipfile_serialization=zipped)
            writer.close()
            back = torch.load(path)
            assert back["step"] == 7 and all(torch.equal(back[name], state[name]) for name in ("weights", "odd"))
            assert writer._stats["aio_bytes"] >= 5 << 20
    print("through")
    """
    assert "through" in run_with_deepspeed(tmp_path, code, str(tmp_path))


@pytest.mark.slow
@has_deepspeed
@pytest.mark.deepspeed
def test_deepspeeds_benchmark_runs(tmp_path):
    """`ds_io`, whose processes are spawned from this script and install the op for themselves; then
    its engines one by one.
    """
    code = """
    op.install()
    if __name__ == "__main__":
        import os
        import torch
        from deepspeed.nvme import ds_io_main
        from deepspeed.nvme.ds_aio_args import get_validated_args
        from deepspeed.nvme.ds_aio_basic import AIOBasic_Engine
        from deepspeed.nvme.ds_aio_handle import AIOHandle_Engine
        ds_io_main()
        args = get_validated_args()
        for kind in (AIOHandle_Engine, AIOBasic_Engine):
            args.read, args.use_accelerator_pin_memory = False, kind is AIOBasic_Engine
            writer = kind(args, 0, False)
            writer.ctxt["buffer"].copy_(torch.randint(0, 256, (args.io_size,), dtype=torch.uint8))
            writer.write(args, 0, 0)
            args.read = True
            reader = kind(args, 0, True)
            reader.read(args, 0, 0)
            for engine, verb in ((writer, "write"), (reader, "read")):
                path = f"{args.folder}/_aio_{verb}_{args.io_size}.pt.0" + ("_0" if kind is AIOHandle_Engine else "")
                with open(path, "rb") as file:
                    assert file.read() == engine.ctxt["buffer"].numpy().tobytes()
                os.unlink(path)
                engine.fini()
        print("through")
    """
    options = [
        "--folder",
        str(tmp_path),
        "--io_size",
        "8M",
        "--validate",
        "--loops",
        "1",
        "--io_parallel",
        "2",
    ]
    output = run_with_deepspeed(tmp_path, code, *options)
    assert "Write Speed" in output
    assert "through" in output


TRAINING = """
import json, os
import deepspeed.ops
deepspeed.ops.__compatible_ops__ = {"async_io": False}  # no other op
op.install()
import deepspeed, torch

device, pipelined, place = sys.argv[1], sys.argv[2] == "pipelined", sys.argv[3]
WIDTH = 512

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1000))  # what comes behind it is aligned to nothing
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x))) * self.gain[:WIDTH]

where = {"device": device, "pin_memory": True, **({"nvme_path": place} if device == "nvme" else {})}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1_500_000,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {**where, "buffer_count": 8, "buffer_size": 1_100_000, "max_in_cpu": 0},
        "offload_optimizer": {**where, "buffer_count": 14, "pipeline_read": pipelined, "pipeline_write": pipelined},
    },
    "aio": {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True},
}
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=config):
    model = torch.nn.Sequential(Block(), Block())
engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
x = torch.randn(1, 16, WIDTH, dtype=torch.bfloat16)
losses = []
for _ in range(3):
    loss = engine(x).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item().hex())
files = [name for _, _, names in os.walk(place) for name in names if name.endswith(".swp")]
print("ANSWER", json.dumps([losses, len(files)]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@has_deepspeed
@pytest.mark.deepspeed
def test_deepspeeds_own_swappers_train_as_on_the_cpu(tmp_path):
    """Bit for bit, also with a parameter of 1000 elements ahead of the large ones, which makes
    DeepSpeed's op train wrongly and say nothing.
    """
    variants = (("cpu", "plain"), ("nvme", "plain"), ("nvme", "pipelined"))

    def answer(variant):
        place = tmp_path / "-".join(variant)
        place.mkdir()
        output = run_with_deepspeed(place, TRAINING, *variant, str(place))
        return json.loads(output.partition("ANSWER")[2].splitlines()[0])

    with ThreadPoolExecutor(2) as pool:
        answers = dict(zip(variants, pool.map(answer, variants), strict=True))
    losses, files = answers["cpu", "plain"]
    assert (len(set(losses)), files) == (3, 0)
    for variant in variants[1:]:
        assert answers[variant][0] == losses
        assert answers[variant][1] >= 12  # parameters, gradients, and the states of the optimizer
