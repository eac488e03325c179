"""The same trial in several processes, which contend for the drive as in training."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from nvme_offload.errors import OffloadError
from nvme_offload.hardware.profile import Setting
from nvme_offload.io.closing import Closing

from .space import MAX_BYTES_IN_FLIGHT
from .trial import REQUEST_BYTES, Load, Rig, measure
from .verdict import Result

# from sending an order to its start time: the ranks poll for orders every 2 ms
LEAD_SECONDS = 0.005
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# The parent's own path, before anything is imported: "-c" and "-m" would look in the working
# directory first, which may be the drive's.
_START = "import sys; sys.path[:] = {path!r}; from nvme_offload.tune.ranks import main; main({descriptor})"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def request_bytes(count: int) -> int:
    """The bytes of each request of *count* ranks, so that all together use less than 1 GB of
    memory, and not less than a block in `space.grid`.
    """
    return min(REQUEST_BYTES, 1 << ((MAX_BYTES_IN_FLIGHT // count // 2).bit_length() - 1))


class Ranks(Closing):
    """*count* processes, each with its own `Rig`, behind the interface of one `Rig`: sizes and
    speeds are sums. They end with `close`, with this process, and with the thread that made this
    object.

    Raises: as `Rig`; ChildProcessError when a rank died. After an exception only `close` may be
    called.
    """

    def __init__(
        self,
        count: int,
        directory: Path,
        file_bytes: int,
        direct: bool | Literal["auto"] = True,
        engine: str = "native",
    ) -> None:
        self._ranks: dict[Connection, subprocess.Popen[bytes]] = {}
        try:
            # stays blocked in the ranks: they end with the sweep, without messages
            with _blocked(SIGNALS):
                for _ in range(count):
                    self._start()
            self.direct: bool = all(
                self._order("open", directory, file_bytes, direct, request_bytes(count), engine)
            )
            self.file_bytes = count * file_bytes
        except BaseException:
            self.close()
            raise

    def fill(self, setting: Setting, seconds: float | None, report: Callable[[int], None]) -> float:
        """As `Rig.fill`, in all ranks concurrently."""
        filled = self._order("fill", setting, seconds, report=report)
        self.file_bytes = sum(file_bytes for _, file_bytes in filled)
        return float(sum(speed for speed, _ in filled))

    def run(self, setting: Setting, phase: str, seconds: float) -> Result:
        """As `Rig.run`, in all ranks concurrently: all count the same window."""
        self._order("load", setting, phase)
        result = measure(self._pump, phase, seconds)
        self._order("finish")
        return result

    def block_seconds(self, setting: Setting, phase: str, seconds: float) -> list[float]:
        """As `latency.block_seconds`, in all ranks concurrently."""
        found = self._order("block_seconds", setting, phase, seconds)
        return list(itertools.chain.from_iterable(found))

    def close(self) -> None:
        """End the processes; the kernel frees their files and memory."""
        for process in self._ranks.values():
            process.kill()
        for connection, process in self._ranks.items():
            process.wait()
            connection.close()
        self._ranks = {}

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            start = _START.format(path=sys.path, descriptor=theirs.fileno())
            self._ranks[ours] = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def _pump(self, seconds: float) -> tuple[Result, Result]:
        """The points of all ranks together, at the mean of their times."""
        by_rank = self._order("pump", time.monotonic() + LEAD_SECONDS, seconds)
        first, last = (
            Result(
                sum(one.read_bytes for one in each),
                sum(one.write_bytes for one in each),
                statistics.fmean(one.seconds for one in each),
            )
            for each in zip(*by_rank, strict=True)
        )
        return first, last

    def _order(
        self,
        name: str,
        *arguments: Any,
        report: Callable[[int], None] | None = None,
    ) -> list[Any]:
        asked = list(self._ranks)
        for connection in asked:
            with contextlib.suppress(ConnectionError):  # its last message may still be readable
                connection.send((name, arguments))
        answers: dict[Connection, Any] = {}
        progress = dict.fromkeys(asked, 0)
        while len(answers) < len(asked):
            for ready in wait([connection for connection in asked if connection not in answers]):
                connection = cast("Connection", ready)
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionError):
                    self._raise_rank_died(connection)
                if kind == "failure":
                    raise value
                if kind == "answer":
                    answers[connection] = value
                elif report is not None:
                    progress[connection] = value
                    report(sum(progress.values()))
        return [answers[connection] for connection in asked]

    def _raise_rank_died(self, connection: Connection) -> NoReturn:
        status = self._ranks[connection].wait()
        number, count = list(self._ranks).index(connection), len(self._ranks)
        how = f"ended with status {status}"
        if status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        memory = ": is there the memory for so many?" if status == -signal.SIGKILL else ""
        raise ChildProcessError(f"rank {number} of {count} {how}{memory}")


class _Rank:
    """The side of a rank: one method for each order."""

    _rig: Rig
    _load: Load

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pumping = False

    def serve(self) -> NoReturn:
        """Answer orders until the connection ends, and keep the queues full between orders."""
        while True:
            while self._pumping and not self._connection.poll():
                self._load.turn()
            name, arguments = self._connection.recv()
            # what this class does not define is an order to the rig
            order = getattr(self if hasattr(self, name) else self._rig, name)
            self._connection.send(("answer", order(*arguments)))

    def open(self, *arguments: Any) -> bool:
        self._rig = Rig(*arguments)
        return self._rig.direct

    def fill(self, setting: Setting, seconds: float | None) -> tuple[float, int]:
        speed = self._rig.fill(
            setting, seconds, lambda done: self._connection.send(("progress", done))
        )
        return speed, self._rig.file_bytes

    def load(self, setting: Setting, phase: str) -> None:
        self._load = Load(self._rig, setting, phase)

    def pump(self, begin: float, seconds: float) -> tuple[Result, Result]:
        self._pumping = True
        return self._load.pump(begin, seconds)

    def finish(self) -> None:
        self._pumping = False
        self._load.finish()


def main(descriptor: int) -> NoReturn:
    """Run a rank for the process at the other end of *descriptor*."""
    # in case the parent dies before the connection reports it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    connection = Connection(descriptor)
    rank = _Rank(connection)
    try:
        rank.serve()
    except (EOFError, ConnectionError):
        pass
    except (OffloadError, OSError, MemoryError) as error:
        with contextlib.suppress(ConnectionError):
            connection.send(("failure", error))
    os._exit(0)  # without waiting for pending requests; the parent ends the other ranks


@contextlib.contextmanager
def _blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
