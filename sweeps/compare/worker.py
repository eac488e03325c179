"""A worker process with one or more sides: `python -m sweeps.compare.worker DIR`. It reads a line of
JSON per task from standard input and answers with a line.

Separate processes isolate crashes and hangs.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvme_offload.errors import OffloadError, UnsupportedError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine

from ..peers import sides
from ..peers.buffers import Shared, allocated, require_filled
from ..peers.deepspeed_op import DeepSpeedOp
from ..peers.job import DIRECTIONS, Job
from ..peers.page_cache import evict
from ..peers.stopwatch import Stopwatch
from . import checkpoints, state

READ_SEED = 0  # of the file to read
_LARGE_BYTES = 1 << 20
_UNCHECKED = {"fio"}  # its memory is in another process
_OWN_FILES = {"tensornvme"}  # writes its own file and checks it


class Worker:
    """The sides of this process, each made on first use."""

    def __init__(self, directory: Path, direct: bool) -> None:
        self._place = Shared(directory, direct)
        self._peers: dict[str, sides.Peer] = {}
        self._checkpoints: dict[str, checkpoints.Checkpoint] = {}

    def prepare(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Load the side's libraries and return its version."""
        names = [self._peer(asked["transfer"]).version] if asked["transfer"] else []
        if asked["checkpoint"]:
            names.append(self._checkpoint(asked["checkpoint"]).version)
            self._warm_up(asked)
        gc.collect()
        gc.freeze()  # later collections skip the objects of libraries
        return {"version": ", ".join(dict.fromkeys(filter(None, names)))}

    def _warm_up(self, asked: dict[str, Any]) -> None:
        """Write and read a small file: the first use imports and compiles."""
        side, path = (
            self._checkpoint(asked["checkpoint"]),
            self._place.directory / f"{asked['side']}.first",
        )
        try:
            side.save(state.build(_LARGE_BYTES), path, asked["setting"])
            state.require_same(
                side.load(path, _LARGE_BYTES, asked["setting"]), _LARGE_BYTES, asked["side"]
            )
        finally:
            path.unlink(missing_ok=True)

    def transfer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Move bytes between memory and the shared files; check every byte with "verify"."""
        setting, buffers = asked["setting"], self._place.buffers
        base = asked["transfer"]
        request_bytes, requests = asked["request_bytes"], asked["requests"]
        nbytes = request_bytes * requests
        job = Job(
            asked["direction"],
            setting.get("backend", "libaio"),
            min(setting.get("block_size", _LARGE_BYTES), request_bytes),
            setting.get("queue_depth", 1),
            setting.get("thread_count", 1),
            setting.get("memory", "huge"),
            request_bytes,
            requests,
            setting.get("sequential", False),
        )
        buffers.nbytes, buffers.seed = nbytes, asked["seed"]
        # Fill the source of writes, and the contents of a side's own file.
        buffers.to_fill = {
            number
            for number, direction in enumerate(job.directions)
            if direction == "write" or base in _OWN_FILES
        }
        peer = self._peer(base)
        try:
            if base not in _UNCHECKED:
                for number in range(len(DIRECTIONS[job.direction])):
                    # allocate before the clock starts
                    buffers.get(job.memory, number)
            for direction in job.directions:
                evict(self._place.path(direction))
            measurement = peer.run(self._place, job)
            if asked["verify"] and base not in _UNCHECKED:
                self._verify(job, base, asked["seed"])
        finally:
            if not asked["keep"]:
                buffers.release()
                _trim()
        return measurement._asdict()

    def checkpoint(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Save or load a file of tensors; check every tensor with "verify"."""
        setting, nbytes = asked["setting"], asked["nbytes"]
        side = self._checkpoint(asked["checkpoint"])
        path = self._place.directory / f"{asked['side']}.{nbytes}.new"
        written = self._place.directory / f"{side.format}.{nbytes}"
        moved = sum(shape.nbytes for shape in state.shapes(nbytes))
        try:
            if asked["direction"] == "write":
                tensors = state.build(nbytes)
                path.unlink(missing_ok=True)
                _make_room(moved)
                with Stopwatch() as watch:
                    side.save(tensors, path, setting)
                del tensors
                if asked["verify"]:
                    evict(path)
                    state.require_same(side.load(path, nbytes, setting), nbytes, asked["side"])
                path.replace(written)
            else:
                if not written.exists():
                    side.save(state.build(nbytes), written, setting)
                    _trim()
                evict(written)
                _make_room(moved)
                with Stopwatch() as watch:
                    tensors = side.load(written, nbytes, setting)
                if asked["verify"]:
                    state.require_same(tensors, nbytes, asked["side"])
                del tensors
        finally:
            if not asked["keep"]:
                path.unlink(missing_ok=True)
            _trim()
        return watch.measurement(moved)._asdict()

    def _verify(self, job: Job, base: str, seed: int) -> None:
        buffers = self._place.buffers
        for number, direction in enumerate(job.directions):
            if direction == "read" and base not in _OWN_FILES:
                require_filled(buffers.get(job.memory, number), READ_SEED, base)
            else:
                require_filled(buffers.get(job.memory, number), seed + number, base)
        if "write" in job.directions and base not in _OWN_FILES:
            evict(self._place.path("write"))
            found = allocated("huge", job.file_bytes)
            with Engine(AioConfig(direct="auto")) as engine:
                engine.read(found, self._place.path("write")).wait()
            require_filled(found, seed + len(job.directions) - 1, base)

    def _peer(self, name: str) -> sides.Peer:
        if name not in self._peers:
            self._peers[name] = peer = sides.make(name)
            if isinstance(peer, DeepSpeedOp):
                self._place.buffers.op = self._place.buffers.op or peer
        return self._peers[name]

    def _checkpoint(self, name: str) -> checkpoints.Checkpoint:
        if name not in self._checkpoints:
            self._checkpoints[name] = checkpoints.make(name)
        return self._checkpoints[name]


def _make_room(nbytes: int) -> None:
    """Allocate and free that much memory, so that the timed part need not reclaim the page cache."""
    allocated("huge", nbytes)[:: mmap.PAGESIZE] = 0


def _trim() -> None:
    """Return free memory to the kernel, so that each task starts from the same state. Source:
    malloc_trim(3).
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    """Answer every line until the end of standard input."""
    # the command handles Ctrl-C and closes our standard input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries and compilers print there
    worker = Worker(Path(sys.argv[1]), sys.argv[2] == "direct")
    verbs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "prepare": worker.prepare,
        "transfer": worker.transfer,
        "checkpoint": worker.checkpoint,
    }
    gc.disable()  # no collection in a timed part
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = verbs[asked["verb"]](asked)
        except UnsupportedError as error:
            answer = {"unsupported": str(error)}
        # errors of other libraries are answers
        except (
            OffloadError,
            OSError,
            RuntimeError,
            AssertionError,
            ValueError,
            TypeError,
            MemoryError,
        ) as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
