"""System calls that a container refuses, each alone, and directories that it hides: training gives
the same numbers, or one typed error names the call and a way around it. None hangs.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from covering import covering
from patience import PATIENCE

import nvme_offload

# Numbers of system calls. Source: syscall(2) of each architecture.
CALLS: dict[str, dict[str, int]] = {
    "x86_64": {
        "fadvise64": 221,
        "fallocate": 285,
        "flock": 73,
        "fstatfs": 138,
        "getrandom": 318,
        "io_destroy": 207,
        "io_getevents": 208,
        "io_setup": 206,
        "io_submit": 209,
        "madvise": 28,
        "membarrier": 324,
        "memfd_create": 319,
        "mlock": 149,
        "ppoll": 271,
        "readlink": 89,
        "renameat2": 316,
        "sched_getaffinity": 204,
        "statfs": 137,
        "statx": 332,
        "sync_file_range": 277,
        "sysinfo": 99,
    },
    "aarch64": {
        "fadvise64": 223,
        "fallocate": 47,
        "flock": 32,
        "fstatfs": 44,
        "getrandom": 278,
        "io_destroy": 1,
        "io_getevents": 4,
        "io_setup": 0,
        "io_submit": 2,
        "madvise": 233,
        "membarrier": 283,
        "memfd_create": 279,
        "mlock": 228,
        "ppoll": 73,
        "readlink": 78,
        "renameat2": 276,
        "sched_getaffinity": 123,
        "statfs": 43,
        "statx": 291,
        "sync_file_range": 84,
        "sysinfo": 179,
    },
}
NUMBERS = CALLS.get(platform.machine(), {})
NATIVE_AIO = {"io_setup", "io_submit", "io_getevents"}
ERRORS = [errno.EPERM, errno.ENOSYS]

# Reads requests, a line of JSON each, and answers each by a line from a new child.
SERVER = """
import contextlib, ctypes, errno, json, logging, os, signal, struct, sys
import torch
import nvme_offload.activations, nvme_offload.optim
from nvme_offload import AioConfig, Engine, NVMeOptimizer, OffloadError, save_on_nvme

torch.set_num_threads(1)
logging.disable(logging.WARNING)  # of the filesystem under the directory

def refuse(call, error, flags=None):
    "*call* fails in this process from now on; with *flags*, only if these are its fourth argument. Source: seccomp(2)."
    load, jump_unless, end = 0x20, 0x15, 0x06
    code = [(load, 0, 0, 0), (jump_unless, 0, 1 if flags is None else 3, call)]
    if flags is not None:
        code += [(load, 0, 0, 16 + 3 * 8), (jump_unless, 0, 1, flags)]
    code += [(end, 0, 0, 0x00050000 | error), (end, 0, 0, 0x7FFF0000)]  # SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(text))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

def hide(directory):
    "An empty directory is mounted over *directory* for this process. Source: mount(2), unshare(2)."
    libc = ctypes.CDLL(None)
    assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
    assert libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None) == 0  # MS_PRIVATE, MS_REC
    assert libc.mount(b"none", directory.encode(), b"tmpfs", 0, None) == 0
    assert not os.listdir(directory)

def losses(make, offload=contextlib.nullcontext):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.Tanh(), torch.nn.Linear(100, 33))
    optimizer, inputs, seen = make(model.parameters()), torch.randn(8, 64), []
    for step in range(4):
        with offload():
            loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        if step == 2 and hasattr(optimizer, "save"):
            optimizer.save("states")
            optimizer.load_state_dict(torch.load("states", mmap=True))
    return seen

expected = losses(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))

def train(config):
    # the least that it takes: everything else is on the drive
    def make(parameters):
        return NVMeOptimizer(parameters, paths=".", host_memory="68KiB", lr=1e-2, aio=config)
    offload = save_on_nvme(".", min_bytes=1, host_memory="1MiB", aio=config)
    found = losses(make, lambda: offload)
    return "right" if found == expected else f"wrong: {found} instead of {expected}"

def transfer(config):
    data = bytes(range(256)) * 1200 + b"end"
    back = bytearray(len(data))
    with Engine(config) as engine:
        engine.write(data, "data", 13).wait()
        engine.read(back, "data", 13).wait()
        with engine.open("data", "rw", size=1 << 20) as file:
            file.sync()
    return "right" if back == data else "wrong bytes"

def sweep(config):
    import pathlib
    from nvme_offload.tune.trial import Rig
    with Rig(pathlib.Path("."), 64 << 20, config.direct):
        return "right"

for line in sys.stdin:
    request = json.loads(line)
    if (child := os.fork()) == 0:
        signal.alarm(request["patience"])
        os.chdir(request["directory"])
        for directory in request["hide"]:
            hide(directory)
        if request["refuse"]:
            refuse(*request["refuse"])
        try:
            answer = globals()[request["program"]](AioConfig(**{"direct": "auto", "block_size": 65536, **request["config"]}))
        except OffloadError as error:
            answer = f"{type(error).__name__}: {error}"
        except BaseException as error:
            answer = f"bare {type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0:
        print(json.dumps(f"ended by signal {status}"), flush=True)
"""

Ask = Callable[..., str]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    if not NUMBERS:
        pytest.skip(f"the numbers of system calls on {platform.machine()} are not known here")
    environment = {**os.environ, "PYTHONPATH": str(Path(nvme_offload.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def ask(server: subprocess.Popen[str], tmp_path: Path) -> Ask:
    """A function that runs *program* in a child in which a system call is refused; its answer."""

    def run(
        program: str, refuse: Sequence[int] = (), hide: Sequence[str] = (), **config: Any
    ) -> str:
        request = {
            "program": program,
            "refuse": refuse,
            "hide": hide,
            "config": config,
            "directory": str(tmp_path),
            "patience": int(PATIENCE),
        }
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return str(json.loads(server.stdout.readline()))

    return run


@covering(pairs=False, error=ERRORS, call=sorted(set(NUMBERS) - NATIVE_AIO))
def test_training_does_without(ask: Ask, call: str, error: int) -> None:
    assert ask("train", [NUMBERS[call], error]) == "right"


@covering(pairs=False, error=ERRORS, call=sorted(set(NUMBERS) - NATIVE_AIO))
def test_every_backend_does_without(ask: Ask, call: str, error: int, backend: str) -> None:
    assert ask("transfer", [NUMBERS[call], error], backend=backend, direct=False) == "right"


@covering(error=ERRORS, call=sorted(NATIVE_AIO & set(NUMBERS)))
def test_native_aio_that_is_refused_is_reported_with_a_way_around(
    ask: Ask, call: str, error: int
) -> None:
    answer = ask("train", [NUMBERS[call], error])
    assert answer.startswith(f"UnsupportedError: native AIO is refused here: {call}:")
    assert 'use backend="posix"' in answer
    assert ask("train", [NUMBERS[call], error], backend="posix") == "right"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("flags", [2, 7], ids=["start", "wait"])
def test_an_error_of_write_back_fails_the_write(ask: Ask, flags: int, error: int) -> None:
    """*flags*: SYNC_FILE_RANGE_WRITE alone, which starts the write-back, or all three."""
    answer = ask("transfer", [NUMBERS["sync_file_range"], error, flags], direct=False)
    kind = "NoSpaceError" if error == errno.ENOSPC else "IOFailure"
    assert answer.startswith(f"{kind}: write of ")
    assert os.strerror(error) in answer


@pytest.mark.parametrize("hide", [["/proc"], ["/sys"], ["/proc", "/sys"]], ids="+".join)
@pytest.mark.parametrize("program", ["train", "transfer", "sweep"])
def test_nothing_needs_proc_or_sys(ask: Ask, program: str, hide: list[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("hiding a directory needs root")
    assert ask(program, hide=hide) == "right"
