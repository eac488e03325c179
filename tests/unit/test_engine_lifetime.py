"""Who lives how long: buffers, tickets and engines, threads and forks, signals and the end of the
interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from patience import PATIENCE, eventually
from transfers import Bytes, Configure, RandomBytes, Stall, on_disk

import nvme_offload
from nvme_offload.errors import (
    OffloadError,
    TruncatedError,
    UsageError,
    WaitTimeout,
)
from nvme_offload.hardware.config import BACKENDS, AioConfig
from nvme_offload.io.engine import Engine


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# Waiting


def test_the_first_unawaited_error_is_raised_at_close(
    configure: Configure, directory: Path
) -> None:
    path = directory / "data"
    path.write_bytes(bytes(1000))
    engine = Engine(configure())
    with pytest.raises(TruncatedError):
        engine.read(bytearray(2001), path).wait(PATIENCE)
    ticket = engine.read(bytearray(3001), path)  # waited for after the close
    assert eventually(ticket.done)
    engine.read(bytearray(4001), path)
    with pytest.raises(TruncatedError) as caught:
        engine.close()
    assert (caught.value.nbytes, caught.value.path) == (3001, str(path))
    with pytest.raises(TruncatedError):
        ticket.wait()
    engine.close()


def test_the_end_of_with_raises_unawaited_errors(configure: Configure, directory: Path) -> None:
    path = directory / "data"
    path.write_bytes(bytes(1000))
    with pytest.raises(TruncatedError), Engine(configure()) as engine:
        engine.read(bytearray(1001), path)


def test_an_exception_passes_through_with_and_the_data_arrives(
    configure: Configure, directory: Path, random_bytes: RandomBytes
) -> None:
    path = directory / "data"
    data = random_bytes(8 << 20)
    engine = Engine(configure(block_size=4096))
    engine.write(data, path)
    with pytest.raises(KeyError, match="from the body"), engine:
        raise KeyError("from the body")
    assert_array_equal(on_disk(path), data)


# Closing


def test_a_closed_engine_keeps_its_results_and_takes_no_more(
    configure: Configure, directory: Path, random_bytes: RandomBytes
) -> None:
    path = directory / "data"
    data = random_bytes(8 << 20)
    engine = Engine(configure(block_size=4096))
    file = engine.open(path, "rw")
    ticket = engine.write(data, file)
    engine.close()
    assert ticket.done()
    assert ticket.wait(0) == data.size
    assert_array_equal(on_disk(path), data)
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: engine.write(data, file),
        lambda: engine.read(data, file),
        lambda: engine.write(data, path),
        lambda: engine.write(data, directory / "new"),
        lambda: engine.write(b"", file),
        lambda: engine.open(path, "r"),
        lambda: engine.open(directory / "new", "rw"),
        lambda: engine.open_anonymous(directory, 4096),
        engine.stats,
    ]
    for call in calls:
        with pytest.raises(UsageError, match="closed"):
            call()
    assert_array_equal(on_disk(path), data)
    assert not (directory / "new").exists()
    file.close()


def test_closing_waits_for_what_stalls_and_other_threads_go_on(
    configure: Configure, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    path = stalling_directory / "data"
    data = random_bytes(1_000_001)
    engine = Engine(configure(block_size=64 << 10))
    results: list[int] = []
    with engine.open(path, "rw", size=data.size) as file, stall() as let_go:
        ticket = engine.write(data, file)
        waiter = threading.Thread(target=lambda: results.append(ticket.wait(PATIENCE)))
        closers = [threading.Thread(target=engine.close) for _ in range(2)]
        for thread in (waiter, *closers):
            thread.start()
        for thread in (waiter, *closers):
            thread.join(0.05)
            assert thread.is_alive()
        let_go()
        for thread in (waiter, *closers):
            thread.join(PATIENCE)
            assert not thread.is_alive()
    assert results == [data.size]
    assert_array_equal(on_disk(path), data)


def test_an_engine_dropped_unclosed_warns_and_finishes_and_its_tickets_stay(
    configure: Configure, directory: Path, random_bytes: RandomBytes
) -> None:
    path = directory / "data"
    data = random_bytes(8 << 20)
    engine = Engine(configure(block_size=4096))
    ticket = engine.write(data, path)
    with pytest.warns(ResourceWarning, match="never closed"):
        del engine
    assert_array_equal(on_disk(path), data)
    assert ticket.wait(0) == data.size


@pytest.mark.filterwarnings("error")
def test_a_closed_engine_is_dropped_in_silence(
    configure: Configure, recwarn: pytest.WarningsRecorder
) -> None:
    with Engine(configure()) as engine:
        pass
    del engine
    gc.collect()
    assert len(recwarn) == 0


# Buffers


def test_a_buffer_lives_until_its_request_is_finished(
    configure: Configure, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    path = stalling_directory / "data"
    data = random_bytes(2_000_001)
    engine = Engine(configure(block_size=64 << 10, queue_depth=2))
    with engine.open(path, "rw", size=data.size) as file, stall():
        buffer = data.copy()
        held = weakref.ref(buffer)
        ticket = engine.write(buffer, file)
        del buffer, ticket
        gc.collect()
        assert held() is not None
    engine.close()
    gc.collect()
    assert held() is None
    assert_array_equal(on_disk(path), data)


def test_the_memory_of_a_dropped_tensor_is_not_used_again_before_its_time(
    configure: Configure, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    import torch

    path = stalling_directory / "data"
    data = random_bytes(1 << 20)
    engine = Engine(configure())
    with engine.open(path, "rw", size=data.size) as file, stall():
        tensor = torch.from_numpy(data).clone()
        parameter = torch.nn.Parameter(tensor.view(torch.float32))
        engine.write(parameter, file)
        # what DeepSpeed does to a parameter that it has swapped out
        parameter.data = torch.zeros(1)
        del tensor, parameter
        gc.collect()
        others = [torch.full((1 << 20,), 7, dtype=torch.uint8) for _ in range(16)]
    engine.close()
    assert len(others) == 16
    assert_array_equal(on_disk(path), data)


def test_a_buffer_that_can_be_resized_is_locked_meanwhile(
    configure: Configure, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    path = stalling_directory / "data"
    data = random_bytes(1_000_001)
    buffer = bytearray(data.tobytes())
    with Engine(configure()) as engine, engine.open(path, "rw", size=data.size) as file:
        with stall():
            ticket = engine.write(buffer, file)
            with pytest.raises(BufferError):
                buffer.clear()
        ticket.wait(PATIENCE)
        buffer.clear()
    assert_array_equal(on_disk(path), data)


def test_reads_whose_everything_was_dropped_still_land(
    configure: Configure, directory: Path, random_bytes: RandomBytes
) -> None:
    path = directory / "data"
    data = random_bytes(8 << 20)
    data.tofile(path)
    memory = mmap.mmap(-1, data.size)
    engine = Engine(configure(block_size=4096))
    view = np.frombuffer(memory, np.uint8)
    engine.read(view, path)
    del view
    gc.collect()
    engine.close()
    assert_array_equal(np.frombuffer(memory, np.uint8), data)


def test_nothing_of_a_finished_request_is_held(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    """In an engine that lives on, neither its buffer nor its file, and also when no caller waited for
    it.
    """
    path = directory / "data"
    path.write_bytes(bytes(1000))
    engine.write(b"warm", directory / "other").wait(PATIENCE)
    descriptors = open_descriptors()
    held = []
    for _ in range(50):
        buffer = random_bytes(10_001)
        held.append(weakref.ref(buffer))
        engine.write(buffer, path, 1000)
    del buffer

    def let_go() -> bool:
        engine.write(b"more", directory / "other").wait(PATIENCE)
        gc.collect()
        return all(one() is None for one in held) and open_descriptors() == descriptors

    assert eventually(let_go)


def test_nothing_of_a_failed_request_is_held(engine: Engine, directory: Path) -> None:
    path = directory / "data"
    path.write_bytes(bytes(1000))
    descriptors = open_descriptors()
    buffer = np.zeros(1 << 20, np.uint8)
    held = weakref.ref(buffer)
    with pytest.raises(TruncatedError) as caught:
        engine.read(buffer, path).wait(PATIENCE)
    del buffer, caught
    gc.collect()
    assert eventually(lambda: held() is None and open_descriptors() == descriptors)


def test_a_kept_ticket_of_a_finished_request_keeps_no_file_open(
    engine: Engine, directory: Path
) -> None:
    """Else a program that collects its tickets and waits for them at the end runs out of
    descriptors.
    """
    descriptors = open_descriptors()
    tickets = [engine.write(bytes(5001), directory / str(place)) for place in range(50)]
    for ticket in tickets:
        ticket.wait(PATIENCE)
    assert eventually(lambda: open_descriptors() == descriptors)
    assert [ticket.wait(0) for ticket in tickets] == [5001] * 50


# Files


def test_a_file_closed_or_dropped_in_mid_request_is_written_to_its_end(
    engine: Engine, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    closed, dropped = stalling_directory / "closed", stalling_directory / "dropped"
    data = random_bytes(1_000_001)
    files = [engine.open(path, "rw", size=data.size) for path in (closed, dropped)]
    with stall():
        tickets = [engine.write(data, file) for file in files]
        files[0].close()
        files.clear()
        gc.collect()
    for ticket in tickets:
        ticket.wait(PATIENCE)
    for path in (closed, dropped):
        assert_array_equal(on_disk(path), data)


# Threads and signals


def test_a_wait_lets_other_threads_run(
    engine: Engine, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    path = stalling_directory / "data"
    data = random_bytes(1_000_001)
    outcome: list[object] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            # with the GIL held, no thread could release the buffer, and this would time out
            outcome.append(ticket.wait(PATIENCE))
        except WaitTimeout as error:
            outcome.append(error)

    with engine.open(path, "rw", size=data.size) as file, stall() as let_go:
        ticket = engine.write(data, file)
        waiter = threading.Thread(target=wait)
        waiter.start()
        waiting.wait(PATIENCE)
        steps = 0
        while steps < 10_000:
            os.sched_yield()  # gives the lock away, for the waiter to take it into its wait
            steps += 1
        assert outcome == []
        let_go()
        waiter.join(PATIENCE)
    assert (outcome, steps) == ([data.size], 10_000)
    assert_array_equal(on_disk(path), data)


def test_every_thread_gets_to_work_though_the_first_is_stuck(
    stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    threads = 4
    path = stalling_directory / "data"
    data = random_bytes(threads << 20)

    def stuck() -> int:
        statuses = [task.read_text() for task in Path("/proc/self/task").glob("*/status")]
        return sum(
            status.startswith("Name:\tnvme-offload\n") and "\nState:\tD" in status
            for status in statuses
        )

    config = AioConfig(block_size=1 << 20, thread_count=threads, backend="posix")
    with (
        Engine(config) as engine,
        engine.open(path, "rw", size=data.size) as file,
        stall() as let_go,
    ):
        ticket = engine.write(data, file)
        assert eventually(lambda: stuck() == threads)
        let_go()
        ticket.wait(PATIENCE)
    assert_array_equal(on_disk(path), data)


def test_signals_reach_the_threads_of_python(configure: Callable[..., AioConfig]) -> None:
    """The workers block all signals: a signal delivered to a worker would be handled only when Python
    happens to look.
    """
    others = set(Path("/proc/self/task").iterdir())
    with Engine(configure(thread_count=2)) as engine:
        workers = set(Path("/proc/self/task").iterdir()) - others
        assert len(workers) == engine.config.thread_count
        for worker in workers:
            assert (worker / "comm").read_text() == "nvme-offload\n"
            (blocked,) = (
                int(line.split()[1], 16)
                for line in (worker / "status").read_text().splitlines()
                if line.startswith("SigBlk")
            )
            for number in (
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGALRM,
                signal.SIGCHLD,
                signal.SIGUSR1,
            ):
                assert blocked >> (number - 1) & 1


# Other processes: forks, Ctrl-C and the end of the interpreter are tried in an interpreter of their
# own

PROLOGUE = """
import os, signal, sys, threading
import numpy
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.errors import OffloadError, UsageError

backend, path = sys.argv[1:]
data = numpy.random.default_rng(5).integers(0, 256, 8 << 20, dtype=numpy.uint8)
engine = Engine(AioConfig(backend=backend, direct="auto", block_size=4096, queue_depth=4))
"""


def expected_data() -> Bytes:
    return np.random.default_rng(5).integers(0, 256, 8 << 20, dtype=np.uint8)


def each_on_one_backend(names: tuple[str, ...], cases: list[Any]) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize`, with the backends alternating from case to case."""
    return pytest.mark.parametrize(
        ("backend", *names),
        [
            pytest.param(BACKENDS[number % len(BACKENDS)], *case.values, id=case.id)
            for number, case in enumerate(cases)
        ],
        indirect=["backend"],
    )


@contextlib.contextmanager
def interpreter(script: str, backend: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs *script* after `PROLOGUE`; killed at the end of the context if it has not
    ended by then.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(nvme_offload.__file__).parents[1])}
    arguments = [sys.executable, "-c", PROLOGUE + script, backend, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        arguments, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@each_on_one_backend(
    ("script", "code", "says"),
    [
        pytest.param("ticket = engine.write(data, path)", 0, "", id="everything global"),
        pytest.param("engine.write(data.copy(), path)\ndel data", 0, "", id="everything dropped"),
        pytest.param(
            "file = engine.open(path, 'rw')\nengine.write(data, file)\ndel engine, file, data",
            0,
            "",
            id="engine dropped",
        ),
        pytest.param(
            "with engine:\n    engine.write(data, path)\n    sys.exit(3)", 3, "", id="exit in with"
        ),
        pytest.param("engine.write(data, path)\nsys.exit(3)", 3, "", id="exit"),
        pytest.param(
            "with engine:\n    engine.write(data, path)\n    raise KeyError('mine')",
            1,
            "KeyError: 'mine'",
            id="exception in with",
        ),
        pytest.param(
            "engine.write(data, path)\nraise KeyError('mine')",
            1,
            "KeyError: 'mine'",
            id="exception",
        ),
        pytest.param(
            "cycle = [engine, engine.write(data, path)]\ncycle.append(cycle)\ndel engine, cycle",
            0,
            "",
            id="cycle",
        ),
        pytest.param(
            "import builtins\nbuiltins.kept = (engine, engine.write(data, path))",
            0,
            "",
            id="kept to the last",
        ),
        pytest.param(
            "ticket = engine.write(data, path)\nthreading.Thread(target=ticket.wait, daemon=True).start()",
            0,
            "",
            id="a daemon thread waits",
        ),
        pytest.param(
            "ticket = engine.write(data, path)\nthreading.Thread(target=ticket.wait).start()",
            0,
            "",
            id="a thread waits",
        ),
    ],
)
def test_the_end_of_the_interpreter_waits_for_the_data(
    backend: str, directory: Path, script: str, code: int, says: str
) -> None:
    path = directory / "data"
    with interpreter(script, backend, path) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, errors
    assert errors.strip().endswith(says)
    if not says:
        assert errors == ""
    assert_array_equal(on_disk(path), expected_data())


def test_the_end_of_the_interpreter_waits_for_what_stalls(
    backend: str, stalling_directory: Path, stall: Stall
) -> None:
    path = stalling_directory / "data"
    script = """
file = engine.open(path, "rw", size=data.size)
print("ready", flush=True)
sys.stdin.readline()
ticket = engine.write(data, file)
threads = [threading.Thread(target=ticket.wait, daemon=True) for _ in range(8)]
for thread in threads:
    thread.start()
print("started", flush=True)
"""
    with interpreter(script, backend, path) as process:
        assert process.stdin and process.stdout and process.stderr  # noqa: PT018
        assert process.stdout.readline() == "ready\n"
        with stall():
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "started\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        assert (process.wait(PATIENCE), process.stderr.read()) == (0, "")
    assert_array_equal(on_disk(path), expected_data())


SLOW_CLOSE = """
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int close(int descriptor) {
  struct stat status;
  char byte;
  const char* socket = getenv("ASK_BEFORE_CLOSE");
  if (socket != NULL && fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 0) {
    if (write(atoi(socket), "?", 1) != 1 || read(atoi(socket), &byte, 1) != 1) return -1;
  }
  return (int)syscall(SYS_close, descriptor);
}
"""


def test_other_threads_run_while_a_file_without_a_name_frees_its_space(
    backend: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the GIL held meanwhile no thread would answer."""
    library = tmp_path / "slow_close.so"
    subprocess.run(
        [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "-", "-o", library],
        input=SLOW_CLOSE,
        text=True,
        check=True,
    )
    monkeypatch.setenv("LD_PRELOAD", f"{os.environ.get('LD_PRELOAD', '')}:{library}".lstrip(":"))
    script = """
import socket
file = engine.open_anonymous(os.path.dirname(path), 1 << 20)
here, there = socket.socketpair()
os.environ["ASK_BEFORE_CLOSE"] = str(there.fileno())
thread = threading.Thread(target=file.close)
thread.start()
assert here.recv(1) == b"?"
here.send(b"!")
thread.join()
print("closed")
"""
    with interpreter(script, backend, directory / "data") as process:
        out, errors = process.communicate(timeout=PATIENCE)
    assert (out, errors, process.returncode) == ("closed\n", "", 0)


def test_a_failed_read_at_the_end_of_the_interpreter_is_reported_and_crashes_nothing(
    backend: str, directory: Path
) -> None:
    path = directory / "data"
    path.write_bytes(bytes(1000))
    with interpreter("engine.read(data, path)", backend, path) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith(
        "nvme_offload: unawaited transfer failed: TruncatedError: read of 8 MiB at 0 bytes in "
    )
    assert str(path) in line


FAILS = "from nvme_offload._aio import FaultKind\nengine = Engine(engine.config, _faults=[(0, 100, FaultKind.FAIL, 5)])\n"


@each_on_one_backend(
    ("script", "code", "reported"),
    [
        pytest.param("engine.write(data, path)", 1, True, id="open"),
        pytest.param("engine.write(data, path)\nsys.exit(3)", 3, True, id="another status"),
        pytest.param(
            "def use():\n    one, two = engine, data\n    one.write(two, path)\nuse()\ndel engine, data",
            1,
            True,
            id="dropped",
        ),
        pytest.param(
            "import atexit\natexit.register(print, 'the rest')\nengine.write(data, path)",
            1,
            True,
            id="the rest",
        ),
        pytest.param(
            "try:\n    engine.write(data, path).wait()\nexcept OffloadError:\n    pass",
            0,
            False,
            id="waited for",
        ),
        pytest.param(
            "engine.write(data, path)\ntry:\n    engine.close()\nexcept OffloadError:\n    pass",
            0,
            False,
            id="closed",
        ),
        pytest.param(
            "engine.write(data, path)\nif os.fork() == 0:\n    sys.exit()\nassert os.wait()[1] == 0",
            1,
            True,
            id="forked",
        ),
        pytest.param(
            "engine.write(data, path)\nsys.stderr = None", 1, False, id="no standard error"
        ),
        pytest.param(
            "from nvme_offload.store.store import TensorStore\nstore = TensorStore(os.path.dirname(path), engine=engine)\nstore.put('a', data)\nstore.drain()",
            1,
            True,
            id="store",
        ),
    ],
)
def test_an_unawaited_failed_write_is_a_line_and_a_status(
    backend: str, directory: Path, script: str, code: int, reported: bool
) -> None:
    with interpreter(FAILS + script, backend, directory / "data") as process:
        out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, errors
    assert [
        "unawaited transfer failed: IOFailure: write of " in line for line in errors.splitlines()
    ] == [True] * reported
    assert ("the rest" in out) == ("the rest" in script)


def test_ctrl_c_ends_a_wait_and_not_the_request(
    backend: str, stalling_directory: Path, stall: Stall
) -> None:
    path = stalling_directory / "data"
    script = """
file = engine.open(path, "rw", size=data.size)
print("ready", flush=True)
sys.stdin.readline()
ticket = engine.write(data, file)
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
for wait in (ticket.wait, lambda: ticket.wait(1000), engine.close):
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
sys.stdin.readline()
print(ticket.wait(1000), flush=True)
"""
    with interpreter(script, backend, path) as process:
        assert process.stdin and process.stdout and process.stderr  # noqa: PT018
        assert process.stdout.readline() == "ready\n"
        with stall():
            process.stdin.write("go\n")
            process.stdin.flush()
            assert [process.stdout.readline() for _ in range(3)] == ["interrupted\n"] * 3
        out, errors = process.communicate("go\n", timeout=PATIENCE)
    assert (process.returncode, out, errors) == (0, f"{8 << 20}\n", "")
    assert_array_equal(on_disk(path), expected_data())


def test_a_close_that_ctrl_c_ended_is_made_up_for_at_the_end(
    backend: str, stalling_directory: Path, stall: Stall
) -> None:
    path = stalling_directory / "data"
    script = """
import builtins
builtins.kept = engine
file = engine.open(path, "rw", size=data.size)
print("ready", flush=True)
sys.stdin.readline()
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
ticket = engine.write(data, file)
threading.Thread(target=ticket.wait, daemon=True).start()
signal.setitimer(signal.ITIMER_REAL, 0.2)
engine.close()
"""
    with interpreter(script, backend, path) as process:
        assert process.stdin and process.stdout and process.stderr  # noqa: PT018
        assert process.stdout.readline() == "ready\n"
        with stall():
            process.stdin.write("go\n")
            process.stdin.flush()
            # The traceback is printed before the exit handlers run, which then wait for the stalled
            # write.
            assert any("KeyboardInterrupt" in line for line in iter(process.stderr.readline, ""))
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        assert process.wait(PATIENCE) == -signal.SIGINT
    assert_array_equal(on_disk(path), expected_data())


FORK = """
before = numpy.fromfile(path, numpy.uint8)
target = numpy.zeros_like(data)
engine.write(data, path + ".ready").wait()
file = engine.open(path + ".ready", "rw")
tickets = [engine.read(target, file), engine.write(data, path + ".copy")]
child = os.fork()
if child == 0:
    calls = [
        lambda: engine.write(data, file), lambda: engine.read(target, file), lambda: engine.write(b"", file),
        lambda: engine.write(data, path), lambda: engine.read(target, path), lambda: engine.write(data, path + ".child"),
        lambda: engine.open(path, "r"), lambda: engine.open(path + ".child", "rw"), lambda: engine.open_anonymous(os.path.dirname(path), 4096),
        engine.stats, lambda: tickets[0].wait(1000), lambda: tickets[1].wait(1000),
    ]
    wrong = []
    for place, call in enumerate(calls):
        try:
            call()
            wrong.append((place, "went through"))
        except UsageError:
            pass
        except Exception as error:
            wrong.append((place, repr(error)))
    # Its own engine works.
    mine = numpy.zeros_like(before)
    with Engine(AioConfig(backend=backend, direct="auto", block_size=4096)) as own:
        own.read(mine, path).wait(1000)
    if not (mine == before).all():
        wrong.append("other bytes")
    print("child", wrong, flush=True)
    del tickets, file, engine  # nothing to wait for here, and nothing of the parent's to close
    sys.exit(5)
status = os.waitpid(child, 0)[1]
assert [ticket.wait(1000) for ticket in tickets] == [data.size] * 2
assert (target == data).all()
assert engine.write(data, path).wait(1000) == data.size
engine.close()
print("parent", os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_can_neither_use_nor_hurt_the_engine(
    backend: str, directory: Path, random_bytes: RandomBytes
) -> None:
    path = directory / "data"
    random_bytes(1_000_001).tofile(path)
    with interpreter(FORK, backend, path) as process:
        out, errors = process.communicate(timeout=PATIENCE)
    assert (out, errors, process.returncode) == ("child []\nparent 5\n", "", 0)
    assert_array_equal(on_disk(path), expected_data())
    assert_array_equal(on_disk(directory / "data.copy"), expected_data())
    assert not (directory / "data.child").exists()


POOLS = """
import multiprocessing
if backend == "libaio":  # an import of torch takes seconds
    import torch

def square(number):
    return number * number

with engine, engine.open(path, "rw", size=data.size) as file:
    stop = threading.Event()
    rounds = 0
    def traffic():
        global rounds
        target = numpy.zeros_like(data)
        while not stop.is_set():
            engine.write(data, file).wait()
            target[:] = 0
            engine.read(target, file).wait()
            assert (target == data).all()
            rounds += 1
        traffic.ended = True
    thread = threading.Thread(target=traffic)
    thread.start()
    ticket = engine.write(data, path + ".copy")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(square, range(64)) == [number * number for number in range(64)]
    if backend == "libaio":
        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, index):
                return square(index)

        loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork")
        assert torch.cat(list(loader)).tolist() == [number * number for number in range(64)]
    stop.set()
    thread.join()
    assert traffic.ended and rounds > 0
    assert ticket.wait() == data.size
print("done")
"""


def test_process_pools_and_data_loaders_fork_with_a_busy_engine(
    backend: str, directory: Path
) -> None:
    path = directory / "data"
    with interpreter(POOLS, backend, path) as process:
        out, errors = process.communicate(timeout=PATIENCE)
    assert (out, process.returncode) == ("done\n", 0), errors
    for name in ("data", "data.copy"):
        assert_array_equal(on_disk(directory / name), expected_data())


# What the system has of


def resources() -> dict[str, int]:
    """What this process has of each kind. A thread that was joined, the timer of the test before
    among them, and a queue of libaio may still be there for a moment: more is a leak, less is none.
    """
    return {
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "descriptors": open_descriptors(),
        # of libaio, whose events are mapped
        "queues": Path("/proc/self/maps").read_text().count("[aio]"),
    }


def more_than(before: dict[str, int]) -> dict[str, int]:
    """What this process has more of than *before*."""
    return {kind: have for kind, have in resources().items() if have > before[kind]}


def test_an_engine_that_cannot_be_made_is_a_typed_error(
    limit: Callable[[int, int], AbstractContextManager[None]], backend: str
) -> None:
    before = resources()
    os.close(lowest_free := os.dup(0))
    made, refused = [], []
    with limit(resource.RLIMIT_NOFILE, lowest_free + 3):
        for _ in range(10):
            try:
                made.append(Engine(AioConfig(backend=backend, thread_count=2)))
            # any other error ends the test; a backend that needs no descriptor is made each time
            except OffloadError as error:
                refused.append(str(error))
    for engine in made:
        engine.close()
    assert all(refused)
    assert len(made) + len(refused) == 10
    assert eventually(lambda: not more_than(before)), (before, more_than(before))
