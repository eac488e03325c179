"""Runs Python programs that train in separate processes, forked off an interpreter that has
imported torch and DeepSpeed: a new interpreter takes seconds for that.

`start` gives what `subprocess.Popen` would, as far as tests need it. A program runs as `__main__`
and ends as every interpreter does, with its threads joined and its `atexit` functions called. Its
objects are freed only where it ends with `sys.exit`: the freeing of all of torch's takes 0.4 s. Not
for programs that look at how they import, at their memory, or that a library is preloaded into.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# The modules that the programs, and DeepSpeed during training, import.
PRELOADED = (
    *("pytest", "setuptools"),
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed.runtime.zero.muon.original_muon",
    "deepspeed.module_inject.auto_ep_layer",
)
# Not for users' programs, which have to import every module that they name.
OURS = tuple(f"nvme_offload.zero3.{name}" for name in ("checkpoint", "overlap", "stages"))
# Variables that are read at an import, or before the first.
AT_IMPORT = (
    *("DS_", "LD_", "MALLOC_", "MKL_", "NVME_OFFLOAD_", "OMP_", "PYTHON", "TORCH", "CUDA_"),
    "FORKED_PYTHON",
)
PYTHON = Path(__file__).with_name("forked_python.py")
_starting = threading.Lock()


class Program:
    """A program under way: its *pid*, and `returncode` once `wait` has seen its end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(connection.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; of a program that a signal ended, minus its number. Raises:
        subprocess.TimeoutExpired.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(64))
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired, BlockingIOError):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it immediately."""
        self.send_signal(signal.SIGKILL)


def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: IO[str],
    stderr: IO[str],
) -> Program:
    """Start the program of *arguments*: a script, or options of `python`, and its arguments."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server(env))
    with tempfile.TemporaryFile("w+") as request, Path("/proc/self/ns/mnt").open() as mounts:
        # In a file: arguments may be longer than a message.
        json.dump({"arguments": list(arguments), "env": dict(env), "cwd": str(cwd)}, request)
        request.flush()
        passed = (request, stdout, stderr, mounts)
        files = array.array("i", [file.fileno() for file in passed])
        connection.sendmsg([b"start"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        return Program(connection)


def server(env: Mapping[str, str]) -> str:
    """Where an interpreter listens that has imported all with the variables *env*."""
    imports = {
        name: value
        for name, value in env.items()
        # torch sets that one, in some tests
        if name.startswith(AT_IMPORT) and name != "TORCHINDUCTOR_CACHE_DIR"
    }
    with _starting:
        return _server(json.dumps(imports, sort_keys=True), _inherited())


def launching(env: Mapping[str, str]) -> dict[str, str]:
    """*env* for the program `PYTHON`, which has a user's program forked in place of starting an
    interpreter. The processes that the program starts are forked, too.
    """
    env = {**env, "FORKED_PYTHON": str(PYTHON)}
    return {**env, "FORKED_SERVER": server(env)}


def _inherited() -> str:
    """The state that a process inherits, besides variables: its limits, cores and control group."""
    limits = [
        resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    ]
    return repr((limits, os.sched_getaffinity(0), Path("/proc/self/cgroup").read_text()))


@functools.cache
def _server(imports: str, _: str) -> str:
    address = str(Path(tempfile.mkdtemp(prefix="forked-"), "socket"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    os.set_inheritable(listener.fileno(), True)
    others = {name: value for name, value in os.environ.items() if not name.startswith(AT_IMPORT)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::FutureWarning", __file__, str(listener.fileno())],
        env={**others, **json.loads(imports)},
        stdin=subprocess.PIPE,  # its end of file shows the server that this process has ended, in any way
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
    )
    listener.close()

    @atexit.register
    def end() -> None:
        process.kill()
        process.wait()
        Path(address).unlink()
        Path(address).parent.rmdir()

    return address


def serve(listener: socket.socket) -> list[str]:
    """Fork programs off this process, and report their ends, until standard input ends; in each of
    them, return its arguments. A program ends with the process that asked for it.
    """
    ends: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    clients: dict[int, int] = {}  # the pidfd of each one's program, by the connection
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(sys.stdin, select.POLLIN)
    while True:
        # one at a time: the numbers of closed descriptors are given again
        (descriptor, _), *_ = poll.poll()
        if descriptor == sys.stdin.fileno():
            sys.exit()
        if descriptor in clients:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ends[clients[descriptor]][0], signal.SIGKILL)
            poll.unregister(descriptor)
            continue
        if descriptor != listener.fileno():
            pid, connection = ends.pop(descriptor)
            del clients[connection.fileno()]
            with contextlib.suppress(KeyError):
                poll.unregister(connection)
            poll.unregister(descriptor)
            os.close(descriptor)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with connection, contextlib.suppress(ConnectionError):  # the client is gone
                connection.send(str(status).encode())
            continue
        connection, _ = listener.accept()
        _, files, _, _ = socket.recv_fds(connection, 64, 4)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            listener.close()
            for other, (_, there) in ends.items():
                os.close(other)
                there.close()
            connection.close()
            return become(*files)
        for file in files:
            os.close(file)
        connection.send(str(pid).encode())
        end = os.pidfd_open(pid)
        ends[end], clients[connection.fileno()] = (pid, connection), end
        poll.register(end, select.POLLIN)
        poll.register(connection, select.POLLHUP)


def become(request: int, stdout: int, stderr: int, mounts: int) -> list[str]:
    """Turn this process into the requested one, and return its arguments."""
    # Tests may have entered another namespace since the first program was started.
    if os.fstat(mounts).st_ino != Path("/proc/self/ns/mnt").stat().st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(mounts, 0):
            raise OSError(ctypes.get_errno(), "no mount namespace")
    os.close(mounts)
    with os.fdopen(request) as file:
        file.seek(0)
        wanted = json.load(file)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    arguments: list[str] = wanted["arguments"]
    sys.executable = os.environ.get("FORKED_PYTHON", sys.executable)
    sys.orig_argv = [sys.executable, *arguments]
    return arguments


def run(arguments: list[str]) -> None:
    """Run the program of *arguments* as an interpreter does."""
    if "FORKED_PYTHON" in os.environ and "sitecustomize" in sys.modules:
        runpy.run_path(str(sys.modules["sitecustomize"].__file__))
    while arguments[0] in ("-u", "-W"):
        if arguments[0] == "-u":
            for file in (sys.stdout, sys.stderr):
                file.reconfigure(write_through=True)
        arguments = arguments[1 + (arguments[0] == "-W") :]
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[1], vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import importlib

    for module in (*PRELOADED, *(OURS if "FORKED_PYTHON" not in os.environ else ())):
        # Which a release of DeepSpeed may lack.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # imported modules stay: collections need not visit them
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
    # The beginning of Py_FinalizeEx.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(0)
