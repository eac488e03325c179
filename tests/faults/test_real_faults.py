"""Faults that the kernel itself makes: drives that are full, broken or stuck, limits, what is
forbidden, kills, forks, crowds; contents compared.

Faults that `tests/unit` tests are not repeated: a range that fits on no drive, the limit on a
file's size where the file is there, a filesystem without O_DIRECT, too few descriptors and
asynchronous events, Ctrl-C in a wait, tickets and engines dropped, the end of the interpreter
without a close.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numpy.testing import assert_array_equal
from patience import PATIENCE, eventually
from processes import finished
from transfers import Bytes, Configure, RandomBytes, Stall, on_disk

import nvme_offload
from nvme_offload.errors import (
    IOFailure,
    NoSpaceError,
    TruncatedError,
    UnsupportedError,
    WaitTimeout,
)
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, PendingRequest

Mount = Callable[[str], Path]
Limit = Callable[[int, int], AbstractContextManager[None]]

PAGE = 4096
UNTOUCHED = 7


def pages(array: Bytes) -> Bytes:
    return array.reshape(-1, PAGE)


def pages_alike(array: Bytes, other: Bytes) -> npt.NDArray[np.bool_]:
    """By page, whether all its bytes are the same in both."""
    alike: npt.NDArray[np.bool_] = np.all(pages(array) == pages(other), axis=1)
    return alike


def free_bytes(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bfree * status.f_frsize


# Separate interpreters, for resources that a process can lose or forbid itself only once

PROLOGUE = """
import ctypes, os, resource, struct, sys
import numpy, numpy.random  # the second now: a user without rights to where Python lies could not
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, allocate
from nvme_offload.errors import IOFailure, OffloadError, UnsupportedError

def check(libc_result):
    if libc_result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def forbid(system_call, error):
    "From now on *system_call* fails with the errno *error* in this thread and in those that it starts. Source: seccomp(2)."
    instructions = [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, system_call),  # if it is another, skip the next instruction
        (0x06, 0, 0, 0x00050000 | error),  # SECCOMP_RET_ERRNO
        (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    program = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    check(libc.prctl(22, 2, program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
"""


@contextlib.contextmanager
def interpreter(
    script: str, *arguments: object, directory: Path
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs *script* after `PROLOGUE` in *directory*; killed at the end of the
    context if it has not ended by then.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(nvme_offload.__file__).parents[1])}
    command = [sys.executable, "-c", PROLOGUE + script, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, cwd=directory, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def printed_by(script: str, *arguments: object, directory: Path) -> list[str]:
    """The lines that *script* prints; it must end well and complain of nothing."""
    with interpreter(script, *arguments, directory=directory) as process:
        out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert errors == ""
    return out.splitlines()


# A full drive, a limit on files


@pytest.mark.parametrize("settings", [{}, {"direct": False}], ids=str)
def test_a_drive_that_fills_up_under_a_write(
    configure: Configure, mounted: Mount, random_bytes: RandomBytes, settings: dict[str, Any]
) -> None:
    """Into the holes of a file that is long enough, so that nothing can be known before: the kernel
    itself says that it is full, midway.
    """
    place = mounted("ext4-full")
    path, neighbour = place / "data", place / "neighbour"
    data, kept = random_bytes(24 << 20), random_bytes(1_000_001)
    before = free_bytes(place)
    try:
        kept.tofile(neighbour)
        with path.open("wb") as file:
            file.truncate(data.size)
        with (
            Engine(configure(block_size=256 << 10, queue_depth=8, **settings)) as engine,
            engine.open(path, "rw") as file,
        ):
            with pytest.raises(NoSpaceError) as caught:
                engine.write(data, file).wait(PATIENCE)
            error = caught.value
            assert (error.errno, error.operation, error.path, error.offset, error.nbytes) == (
                errno.ENOSPC,
                "write",
                str(path),
                0,
                data.size,
            )
            file.sync()
            target = np.full_like(data, UNTOUCHED)
            assert engine.read(target, file).wait(PATIENCE) == data.size
            written, holes = pages_alike(target, data), ~pages(target).any(axis=1)
            assert np.all(written | holes)
            assert 0 < error.done <= np.count_nonzero(written) * PAGE
            assert_array_equal(on_disk(neighbour), kept)
            # With room again, the same engine and the same file go on.
            os.truncate(path, 0)
            part = data[: 4 << 20]
            assert eventually(lambda: free_bytes(place) > part.size + (1 << 20))
            assert engine.write(part, file).wait(PATIENCE) == part.size
            assert_array_equal(on_disk(path), part)
    finally:
        path.unlink(missing_ok=True)
        neighbour.unlink(missing_ok=True)
    assert eventually(lambda: free_bytes(place) >= before)


def test_without_proc_only_unaligned_ends_of_files_without_a_name_are_refused(
    backend: str, directory: Path, mount_namespace: None
) -> None:
    script = """
import nvme_offload.store.store
backend, path = sys.argv[1:]
data = numpy.arange(10_001, dtype=numpy.uint8)
libc = ctypes.CDLL(None, use_errno=True)
check(libc.unshare(0x00020000))  # CLONE_NEWNS
check(libc.mount(b"none", b"/proc", b"tmpfs", 0, None))
assert not os.path.exists("/proc/self")
config = AioConfig(backend=backend)

def read(engine, file, nbytes):
    back = numpy.zeros(nbytes, numpy.uint8)
    engine.read(back, file).wait()
    return back

with Engine(config) as engine:
    engine.write(data, path).wait()
    print((read(engine, path, data.size) == data).all())
    with engine.open_anonymous(os.path.dirname(path), 1 << 20) as file:
        engine.write(allocate(8192), file).wait()
        try:
            engine.write(data, file)
        except UnsupportedError as error:
            print("mount it, or give offsets and sizes that are multiples of" in str(error))
with nvme_offload.store.store.TensorStore(os.path.dirname(path), config) as store:
    store.put("a", data).wait()
    back = numpy.zeros_like(data)
    store.get("a", back).wait()
    print((back == data).all())
"""
    assert printed_by(script, backend, directory / "data", directory=directory) == ["True"] * 3


def test_growing_past_the_file_size_limit_changes_nothing(
    configure: Configure, directory: Path, random_bytes: RandomBytes, limit: Limit
) -> None:
    path, new = directory / "data", directory / "new"
    kept, data = random_bytes(5000), random_bytes(4 << 20)
    kept.tofile(path)
    with path.open("rb") as synced:
        os.fsync(synced.fileno())
    space = path.stat().st_blocks
    with Engine(configure()) as engine, engine.open(path, "rw") as file:
        with limit(resource.RLIMIT_FSIZE, 1 << 20):
            with pytest.raises(IOFailure) as caught:
                engine.open(new, "rw", size=data.size)
            assert (caught.value.errno, caught.value.path) == (errno.EFBIG, str(new))
            assert not new.exists()
            with pytest.raises(IOFailure) as caught:
                engine.write(data, file, kept.size).wait(PATIENCE)
            error = caught.value
            assert (error.errno, error.operation, error.path, error.done) == (
                errno.EFBIG,
                "write",
                str(path),
                0,
            )
            assert_array_equal(on_disk(path), kept)
            assert path.stat().st_blocks == space, (
                "space was set aside behind the end of the file, and kept"
            )
        assert engine.write(data, file, kept.size).wait(PATIENCE) == data.size
    assert_array_equal(on_disk(path), np.concatenate([kept, data]))


# A file cut under a reader


def test_a_file_cut_in_mid_read_is_read_up_to_there(
    configure: Configure, directory: Path, random_bytes: RandomBytes
) -> None:
    path = directory / "data"
    data = random_bytes(2 << 20)
    choose = random.Random(1)
    cut_short = 0
    with Engine(configure(block_size=16 << 10, queue_depth=4, thread_count=2)) as engine:
        for _ in range(16):
            data.tofile(path)
            cut = choose.randrange(0, data.size, PAGE)
            target = np.full_like(data, UNTOUCHED)
            with engine.open(path, "r") as file:
                moved = engine.stats().read.bytes + choose.randrange(cut + 1)
                ticket = engine.read(target, file)
                while engine.stats().read.bytes < moved and not ticket.done():
                    os.sched_yield()
                os.truncate(path, cut)
                try:
                    done = ticket.wait(PATIENCE)
                except TruncatedError as error:
                    cut_short += 1
                    done = error.done
                right, untouched = (
                    pages_alike(target, data),
                    np.all(pages(target) == UNTOUCHED, axis=1),
                )
                # The kernel fills the rest of a transfer that it finds cut with zeros, and does not
                # count them.
                zeroed = ~pages(target).any(axis=1) & (np.arange(len(right)) >= cut // PAGE)
                assert np.all(right | untouched | zeroed)
                assert done <= np.count_nonzero(right) * PAGE
                assert file.size == cut
                assert engine.read(target[:cut], file).wait(PATIENCE) == cut
                assert_array_equal(target[:cut], data[:cut])
    assert cut_short > 0


# Little locked memory

LITTLE_LOCKED_MEMORY = """
backend = sys.argv[1]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
os.setgroups([])
os.setgid(63210)
os.setuid(63210)  # no limit holds for root, and the memory that an io_uring locks is counted by user
try:
    engine = Engine(AioConfig(backend=backend, block_size=128 << 10, queue_depth=8, direct="auto"))
except UnsupportedError as error:
    sys.exit(f"refused: {error}")
with engine, engine.open("data", "rw") as file:
    for nbytes in (16 << 10, 4 << 20):
        memory = allocate(nbytes)
        array = numpy.frombuffer(memory, numpy.uint8)
        array[:] = data = numpy.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=numpy.uint8)
        assert engine.write(memory, file).wait() == nbytes
        array[:] = 0
        assert engine.read(memory, file).wait() == nbytes
        assert (array == data).all()
        print(nbytes)
"""


def test_with_little_locked_memory_all_works(backend: str, directory: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("becoming a user whom the limit holds for needs root")
    os.chown(directory, 63210, 63210)
    results = printed_by(LITTLE_LOCKED_MEMORY, backend, directory=directory)
    assert results == [str(16 << 10), str(4 << 20)]
    assert_array_equal(
        on_disk(directory / "data"),
        np.random.default_rng(4 << 20).integers(0, 256, 4 << 20, dtype=np.uint8),
    )


# What a kernel or a container forbids

IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER = 425, 426, 427  # the same on every architecture
IO_SETUP = {"x86_64": 206, "aarch64": 0, "riscv64": 0}


@pytest.fixture
def io_uring() -> None:
    try:
        Engine(AioConfig(backend="io_uring")).close()
    except UnsupportedError as error:
        pytest.skip(f"no io_uring here: {error}")


FORBIDDEN = """
system_call, error, forbidden, other = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
forbid(system_call, error)
before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
for _ in range(2):
    try:
        Engine(AioConfig(backend=forbidden, thread_count=2))
    except UnsupportedError as refusal:
        print(refusal)
assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
with Engine(AioConfig(backend=other, direct="auto")) as engine:
    engine.write(b"went another way", "data").wait()
"""


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
@pytest.mark.parametrize(
    "system_call",
    [IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER],
    ids=["setup", "enter", "register"],
)
def test_io_uring_that_seccomp_forbids_is_named_and_libaio_works(
    io_uring: None, directory: Path, system_call: int, error: int
) -> None:
    results = printed_by(FORBIDDEN, system_call, error, "io_uring", "libaio", directory=directory)
    assert len(results) == 2
    for part in (
        "io_uring",
        os.strerror(error),
        "kernel.io_uring_disabled",
        "seccomp",
        'backend="libaio"',
    ):
        assert part in results[0]
        assert part in results[1]
    assert (directory / "data").read_bytes() == b"went another way"


@pytest.mark.parametrize(
    ("error", "named"),
    [(errno.ENOSYS, "io_setup"), (errno.EAGAIN, "fs.aio-max-nr")],
    ids=["ENOSYS", "EAGAIN"],
)
def test_native_aio_that_the_kernel_refuses_is_named_and_posix_works(
    directory: Path, error: int, named: str
) -> None:
    """For a whole machine, by a kernel without it or by fs.aio-max-nr; here for one process."""
    if (system_call := IO_SETUP.get(platform.machine())) is None:
        pytest.skip(f"the number of io_setup on {platform.machine()} is not known here")
    results = printed_by(FORBIDDEN, system_call, error, "libaio", "posix", directory=directory)
    assert len(results) == 2
    for refusal in results:
        assert named in refusal
        assert 'backend="posix"' in refusal
    assert (directory / "data").read_bytes() == b"went another way"


HALF_FORBIDDEN = """
import pathlib, re, select

def switches():
    statuses = [task.read_text() for task in pathlib.Path("/proc/self/task").glob("*/status")]
    return [re.findall(r"ctxt_switches:\\s+(\\d+)", status) for status in statuses if status.startswith("Name:\\tnvme-offload")]

forbid(int(sys.argv[1]), int(sys.argv[2]))
data = numpy.ones(1 << 20, numpy.uint8)
with Engine(AioConfig(backend="io_uring", block_size=4096, queue_depth=4, thread_count=2, direct="auto")) as engine, engine.open("data", "rw") as file:
    tickets = [engine.write(data, file), engine.read(data[: 1 << 10], file), engine.write(data, file, 1 << 20)]
    for ticket in tickets:
        try:
            ticket.wait()
        except IOFailure as failure:
            print(failure.errno, failure.done)
    stats = engine.stats()
    assert (stats.read.in_flight, stats.write.in_flight, stats.oldest) == (0, 0, None)
    # Idle threads do not wake up. Check several times, as they may only be about to sleep.
    outcome = "restless"
    for _ in range(100):
        before = switches()
        select.poll().poll(50)
        if switches() == before:
            outcome = "asleep"
            break
    print(outcome)
"""


def test_a_ring_that_takes_nothing_is_a_typed_error(io_uring: None, directory: Path) -> None:
    (directory / "data").write_bytes(bytes(2 << 20))
    lines = printed_by(HALF_FORBIDDEN, IO_URING_ENTER, errno.EAGAIN, directory=directory)
    assert lines == [f"{errno.EAGAIN} 0"] * 3 + ["asleep"]
    assert not on_disk(directory / "data").any()


# A drive that fails for real


class LoopDrive:
    """A block device on memory. `shrink` leaves it fewer bytes than it says that it has: what lies
    beyond fails with EIO, both ways.
    """

    def __init__(self, nbytes: int, sector_bytes: int) -> None:
        self.memory = os.memfd_create("drive", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.memory, nbytes)
        file = f"/proc/{os.getpid()}/fd/{self.memory}"
        command = ["losetup", "--show", "--find", "--sector-size", str(sector_bytes), file]
        try:
            self.path = Path(finished(command, check=True).stdout.strip())
        except (OSError, subprocess.CalledProcessError) as error:
            os.close(self.memory)
            pytest.skip(f"no loop device here: {error}")

    def shrink(self, nbytes: int) -> None:
        # The loop driver takes a write that got only as far as the end for a whole one. So none may
        # lie across it, two neighbours joined least of all.
        Path(f"/sys/block/{self.path.name}/queue/nomerges").write_text("2")
        os.ftruncate(self.memory, nbytes)
        # else a write would make it long enough again
        fcntl.fcntl(self.memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)

    def contents(self) -> Bytes:
        """The bytes that have reached the drive itself, past its caches."""
        return np.frombuffer(os.pread(self.memory, os.fstat(self.memory).st_size, 0), np.uint8)

    def close(self) -> None:
        subprocess.run(["losetup", "--detach", str(self.path)], check=True)
        os.close(self.memory)


@pytest.fixture
def loop_drive() -> Iterator[Callable[[int, int], LoopDrive]]:
    """A function from bytes and bytes of a sector to a drive of that many."""
    with contextlib.ExitStack() as stack:

        def make(nbytes: int, sector_bytes: int) -> LoopDrive:
            return stack.enter_context(contextlib.closing(LoopDrive(nbytes, sector_bytes)))

        yield make


@pytest.mark.parametrize("misalignment", [0, 13])
def test_a_drive_with_a_dead_half(
    backend: str,
    loop_drive: Callable[[int, int], LoopDrive],
    random_bytes: RandomBytes,
    misalignment: int,
) -> None:
    drive = loop_drive(4 << 20, 512)
    half = 2 << 20
    old, new = random_bytes(2 * half), random_bytes(2 * half)
    around = np.full(2 * half + PAGE, UNTOUCHED, np.uint8)
    target = around[misalignment:][: 2 * half]
    with (
        Engine(
            AioConfig(backend=backend, block_size=64 << 10, queue_depth=8, thread_count=2)
        ) as engine,
        engine.open(drive.path, "rw") as file,
    ):
        assert engine.write(old, file).wait(PATIENCE) == old.size
        file.sync()
        assert_array_equal(drive.contents(), old)
        drive.shrink(half)

        with pytest.raises(IOFailure) as caught:
            engine.read(target, file).wait(PATIENCE)
        error = caught.value
        assert (error.errno, error.operation, error.path, error.offset, error.nbytes) == (
            errno.EIO,
            "read",
            str(drive.path),
            0,
            old.size,
        )
        right, untouched = (
            pages_alike(target[:half], old[:half]),
            np.all(pages(target[:half]) == UNTOUCHED, axis=1),
        )
        assert np.all(right | untouched)
        assert error.done <= np.count_nonzero(right) * PAGE
        assert np.all(around[:misalignment] == UNTOUCHED)
        assert np.all(around[misalignment + target.size :] == UNTOUCHED)

        target[:] = new
        with pytest.raises(IOFailure) as caught:
            engine.write(target, file).wait(PATIENCE)
        error = caught.value
        assert (error.errno, error.operation, error.path, error.offset, error.nbytes) == (
            errno.EIO,
            "write",
            str(drive.path),
            0,
            old.size,
        )
        written = pages_alike(drive.contents(), new[:half])
        assert np.all(written | pages_alike(drive.contents(), old[:half]))
        assert error.done <= np.count_nonzero(written) * PAGE

        for offset in (half, 2 * half - PAGE, half + 700):
            with pytest.raises(IOFailure) as caught:
                engine.read(target[:1000], file, offset).wait(PATIENCE)
            assert (caught.value.errno, caught.value.offset, caught.value.done) == (
                errno.EIO,
                offset,
                0,
            )

        # The other half is as good as ever.
        assert engine.write(new[:half], file).wait(PATIENCE) == half
        target[:] = UNTOUCHED
        assert engine.read(target[:half], file).wait(PATIENCE) == half
        assert_array_equal(target[:half], new[:half])
        assert_array_equal(drive.contents(), new[:half])
        stats = engine.stats()
        assert (stats.read.in_flight, stats.write.in_flight, stats.oldest) == (0, 0, None)


def test_a_write_that_only_the_page_cache_took_fails_where_it_is_waited_for(
    backend: str, loop_drive: Callable[[int, int], LoopDrive], random_bytes: RandomBytes
) -> None:
    drive = loop_drive(4 << 20, 512)
    half = 2 << 20
    data = random_bytes(half)
    drive.shrink(half)
    with (
        Engine(AioConfig(backend=backend, direct=False)) as engine,
        engine.open(drive.path, "rw") as file,
    ):
        engine.write(data, file).wait(PATIENCE)
        file.sync()
        assert_array_equal(drive.contents(), data)
        with pytest.raises(IOFailure) as caught:
            engine.write(data, file, half).wait(PATIENCE)
    assert (caught.value.errno, caught.value.operation, caught.value.path) == (
        errno.EIO,
        "write",
        str(drive.path),
    )


def test_a_drive_of_4096_byte_sectors_takes_offsets_of_512(
    backend: str, loop_drive: Callable[[int, int], LoopDrive], random_bytes: RandomBytes
) -> None:
    drive = loop_drive(1 << 20, 4096)
    model = np.zeros(1 << 20, np.uint8)
    choose = random.Random(2)
    with (
        Engine(
            AioConfig(backend=backend, block_size=16 << 10, queue_depth=4, thread_count=2)
        ) as engine,
        engine.open(drive.path, "rw") as file,
    ):
        assert (file.direct, file.offset_alignment) == (True, 4096)
        for _ in range(100):
            offset = 512 * choose.randrange(2000)
            data = random_bytes(512 * choose.randint(1, min(100, 2048 - offset // 512)))
            model[offset : offset + data.size] = data
            assert engine.write(data, file, offset).wait(PATIENCE) == data.size
            low = 512 * choose.randrange(offset // 512 + 1)
            target = np.full(512 * choose.randint(1, 2048 - low // 512), UNTOUCHED, np.uint8)
            assert engine.read(target, file, low).wait(PATIENCE) == target.size
            assert_array_equal(target, model[low : low + target.size])
        file.sync()
        assert_array_equal(drive.contents(), model)


# A drive that is stuck


def test_a_stuck_drive_is_seen_and_nothing_is_lost(
    engine: Engine, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    first, second = stalling_directory / "first", stalling_directory / "second"
    data = random_bytes(1 << 20)
    with (
        engine.open(first, "rw", size=2 << 20) as here,
        engine.open(second, "rw", size=1 << 20) as there,
    ):
        assert engine.stats().oldest is None
        with stall() as let_go:
            before = time.monotonic()
            tickets = [engine.write(data, here, 4096)]
            after = time.monotonic()
            tickets.append(engine.write(data[:4097], there))
            ages = []
            for timeout in (0, 0.02, 0.02):
                with pytest.raises(WaitTimeout):
                    tickets[0].wait(timeout)
                earliest = time.monotonic() - after
                oldest = engine.stats().oldest
                latest = time.monotonic() - before
                assert oldest is not None
                assert oldest == PendingRequest(
                    "write", str(first), 4096, data.size, oldest.age_seconds
                )
                assert earliest <= oldest.age_seconds <= latest
                ages.append(oldest.age_seconds)
            assert ages[1] - ages[0] > 0.015
            assert ages[2] - ages[1] > 0.015
            assert not any(ticket.done() for ticket in tickets)
            assert engine.stats().write.in_flight == 2
            let_go()
            assert [ticket.wait(PATIENCE) for ticket in tickets] == [data.size, 4097]
            assert engine.stats().oldest is None
    assert_array_equal(on_disk(first)[4096:][: data.size], data)
    assert_array_equal(on_disk(second)[:4097], data[:4097])


# Kill -9 in mid-write

FILE_BYTES, PART_BYTES = 4 << 20, 256 << 10

# Each page of a generation says of which it is, and which page: 512 numbers of 64 bits, all the
# same.
WRITE_GENERATIONS = """
backend, file_bytes, part_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
engine = Engine(AioConfig(backend=backend, block_size=64 << 10, queue_depth=16, thread_count=2, direct="auto"))
named, anonymous = engine.open("named", "rw"), engine.open_anonymous(".", file_bytes)
numbers = numpy.frombuffer(allocate(file_bytes), numpy.uint64).reshape(-1, 512)
for generation in range(1, 1 << 32):
    numbers[:] = (generation << 32 | numpy.arange(len(numbers), dtype=numpy.uint64))[:, None]
    parts = numbers.view(numpy.uint8).reshape(-1, part_bytes)
    tickets = [[engine.write(part, file, place * part_bytes) for file in (named, anonymous)] for place, part in enumerate(parts)]
    for place, pair in enumerate(tickets):
        for ticket in pair:
            ticket.wait()
        print(generation, place, flush=True)
"""


def test_a_kill_in_mid_write_leaves_each_page_old_or_new(backend: str, mounted: Mount) -> None:
    part_pages = PART_BYTES // PAGE
    place_of_page = np.arange(FILE_BYTES // PAGE, dtype=np.uint64)
    choose = random.Random(backend)
    with tempfile.TemporaryDirectory(dir=mounted("ext4")) as made:
        directory = Path(made)
        path = directory / "named"
        np.repeat(place_of_page, PAGE // 8).tofile(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        before = free_bytes(directory)
        for _ in range(5):
            with interpreter(
                WRITE_GENERATIONS, backend, FILE_BYTES, PART_BYTES, directory=directory
            ) as process:
                assert process.stdout
                assert process.stderr
                results = [process.stdout.readline() for _ in range(choose.randint(1, 60))]
                process.kill()
                results += process.stdout.readlines()
                assert (process.wait(PATIENCE), process.stderr.read()) == (-signal.SIGKILL, "")
            assert [entry.name for entry in directory.iterdir()] == ["named"]
            assert eventually(lambda: free_bytes(directory) == before)

            with Engine(AioConfig(backend=backend)) as engine:
                numbers = np.zeros((FILE_BYTES // PAGE, PAGE // 8), np.uint64)
                assert engine.read(numbers, path).wait(PATIENCE) == FILE_BYTES
                assert np.all(numbers == numbers[:, :1]), "a page is of two writes"
                assert_array_equal(numbers[:, 0] & 0xFFFFFFFF, place_of_page)
                generations = (numbers[:, 0] >> 32).astype(np.int64)
                assert generations.max() - generations.min() <= 1
                # Every write that was reported complete is there.
                for line in results:
                    if line.endswith("\n"):  # else the kill came in the midst of it
                        generation, part = map(int, line.split())
                        assert generations[part * part_pages :][:part_pages].min() >= generation
                # The next child starts from generation 0 again.
                assert (
                    engine.write(np.repeat(place_of_page, PAGE // 8), path).wait(PATIENCE)
                    == FILE_BYTES
                )
            assert_array_equal(np.fromfile(path, np.uint64), np.repeat(place_of_page, PAGE // 8))


# A fork in mid-read

# Each buffer begins and ends within a page, so that the parent changes pages that the kernel is
# reading into, while a child shares them. A kernel that had only noted where the pages are would
# read into the child's and leave the parent without.
FORK_AND_TOUCH = """
backend = sys.argv[1]
data = numpy.fromfile("data", numpy.uint8).reshape(-1, 4096)
caught = 0
with Engine(AioConfig(backend=backend, block_size=4096, queue_depth=32, direct="auto")) as engine, engine.open("data", "r") as file:
    for memory in (allocate(len(data) * 8192), numpy.zeros(len(data) * 8192 + 4096, numpy.uint8)):
        array = numpy.frombuffer(memory, numpy.uint8)
        array = array[-array.ctypes.data % 4096 :][: len(data) * 8192].reshape(-1, 8192)
        for number in range(10):
            array[:] = 255
            tickets = [engine.read(array[place, 2048 : 2048 + 4096], file, place * 4096) for place in range(len(data))]
            wait_here, let_go = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(let_go)
                os.read(wait_here, 1)
                os._exit(0)
            array[:, :2048] = array[:, 2048 + 4096 :] = number
            caught += not tickets[-1].done()
            assert [ticket.wait() for ticket in tickets] == [4096] * len(data)
            os.close(let_go)
            os.close(wait_here)
            assert os.waitpid(child, 0)[1] == 0
            assert (array[:, 2048 : 2048 + 4096] == data).all()
            assert (array[:, :2048] == number).all() and (array[:, 2048 + 4096 :] == number).all()
print(caught)
"""


def test_pages_that_a_fork_shares_are_read_into_the_parents(
    backend: str, directory: Path, random_bytes: RandomBytes
) -> None:
    random_bytes(1 << 20).tofile(directory / "data")
    (caught,) = printed_by(FORK_AND_TOUCH, backend, directory=directory)
    assert int(caught) > 0, "no read was under way at any of the forks"


# Crowds

MANY_ENGINES = """
import gc
from concurrent.futures import ThreadPoolExecutor

backend, count = sys.argv[1], int(sys.argv[2])
data = numpy.fromfile("data", numpy.uint8)

def use(_):
    target = numpy.zeros_like(data)
    with Engine(AioConfig(backend=backend, block_size=4096, queue_depth=8, direct="auto")) as engine:
        engine.read(target, "data").wait()
    assert (target == data).all()

def held():
    "Resident bytes, descriptors, threads, queues of libaio, whose events are mapped."
    gc.collect()
    resident = int(open("/proc/self/statm").read().split()[1]) * 4096
    queues = open("/proc/self/maps").read().count("[aio]")
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), queues

with ThreadPoolExecutor(8) as pool:  # ending a libaio queue is slow, but many end concurrently
    for _ in range(6):
        list(pool.map(use, range(count // 6)))
        print(*held())
"""


def test_thousands_of_engines_leave_nothing_behind(
    backend: str, directory: Path, random_bytes: RandomBytes
) -> None:
    if "san.so" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a sanitizer keeps freed memory back")
    random_bytes(10_001).tofile(directory / "data")
    count = 200 if backend == "libaio" else 2000
    held = np.array(
        [line.split() for line in printed_by(MANY_ENGINES, backend, count, directory=directory)],
        int,
    )
    # What malloc keeps for later grows now and then, and a leak in every round.
    grown_bytes, *rest = np.diff(held, axis=0).min(axis=0)
    assert max(rest) <= 0, held
    assert grown_bytes < 32 << 10, held


def test_eight_threads_read_and_write_shared_and_own_files(
    configure: Configure, directory: Path, random_bytes: RandomBytes
) -> None:
    threads, share, rounds = 8, 300_001, 24
    known = random_bytes(1_000_003)
    known.tofile(directory / "known")
    with (
        Engine(configure(block_size=16 << 10, queue_depth=8, thread_count=2)) as engine,
        engine.open(directory / "known", "r") as shared_to_read,
        engine.open(directory / "shared", "rw", size=threads * share) as shared,
    ):

        def work(number: int) -> Bytes:
            """Writes into its share of one file, which shares pages with its neighbours', and into
            a separate file; reads both back, and a third file.
            """
            choose = random.Random(number)
            generator = np.random.default_rng(number)
            models = [np.zeros(share, np.uint8) for _ in range(2)]
            with engine.open(directory / f"own-{number}", "rw", size=share) as own:
                places = [(shared, number * share), (own, 0)]
                for _ in range(rounds):
                    writes, reads = [], []
                    for (file, start), model in zip(places, models, strict=True):
                        low, high = sorted(choose.sample(range(share + 1), 2))
                        model[low:high] = generator.integers(0, 256, high - low, dtype=np.uint8)
                        writes.append(engine.write(model[low:high].copy(), file, start + low))
                    low, high = sorted(choose.sample(range(known.size + 1), 2))
                    seen = np.zeros(high - low, np.uint8)
                    reads.append((engine.read(seen, shared_to_read, low), seen, known[low:high]))
                    for ticket in writes:
                        ticket.wait(PATIENCE)
                    for (file, start), model in zip(places, models, strict=True):
                        low, high = sorted(choose.sample(range(share + 1), 2))
                        seen = np.zeros(high - low, np.uint8)
                        reads.append((engine.read(seen, file, start + low), seen, model[low:high]))
                    for ticket, seen, expected in reads:
                        ticket.wait(PATIENCE)
                        assert_array_equal(seen, expected)
            assert_array_equal(on_disk(directory / f"own-{number}"), models[1])
            return models[0]

        with ThreadPoolExecutor(threads) as pool:
            expected = np.concatenate(list(pool.map(work, range(threads))))
        stats = engine.stats()
        assert (stats.write.requests, stats.read.requests) == (
            threads * rounds * 2,
            threads * rounds * 3,
        )
        assert (stats.write.in_flight, stats.read.in_flight, stats.oldest) == (0, 0, None)
        assert min(stats.write.busy_seconds, stats.read.busy_seconds) > 0
    assert_array_equal(on_disk(directory / "shared"), expected)
    assert_array_equal(on_disk(directory / "known"), known)


WRITE_STRIPES = """
backend, first, stripe = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = numpy.fromfile("wanted", numpy.uint8)
with Engine(AioConfig(backend=backend, block_size=4096, queue_depth=8, thread_count=2, direct="auto")) as engine, engine.open("data", "rw") as file:
    print("ready", flush=True)
    sys.stdin.readline()
    half = len(data) // 2
    mine = slice(0, half) if first == 0 else slice(half, len(data))
    for number in range(3):
        engine.write(255 - data[mine], file, mine.start).wait()
        engine.write(data[mine], file, mine.start).wait()
    print("halves", flush=True)
    sys.stdin.readline()
    for flip in (True, False) * 4:
        starts = range(first * stripe, len(data), 2 * stripe)
        tickets = [engine.write(255 - data[low : low + stripe] if flip else data[low : low + stripe], file, low) for low in starts]
        for ticket in tickets:
            ticket.wait()
"""


def test_two_processes_write_one_file(
    backend: str, directory: Path, random_bytes: RandomBytes
) -> None:
    """First a half each, then every other stripe each; where the two meet, within a page, neither
    undoes the other's bytes.
    """
    data = random_bytes(1_000_003)
    data.tofile(directory / "wanted")
    path = directory / "data"
    np.zeros_like(data).tofile(path)
    arguments = [(backend, first, 5_003) for first in (0, 1)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(interpreter(WRITE_STRIPES, *one, directory=directory))
            for one in arguments
        ]
        for milestone in ("ready\n", "halves\n"):
            for process in processes:
                assert process.stdout
                assert process.stdout.readline() == milestone
            if milestone == "halves\n":
                assert_array_equal(on_disk(path), data)
            for process in processes:
                assert process.stdin
                process.stdin.write("go\n")
                process.stdin.flush()
        for process in processes:
            _, errors = process.communicate(timeout=PATIENCE)
            assert (process.returncode, errors) == (0, "")
    assert_array_equal(on_disk(path), data)
