"""Runs a variant as a process of its own, and watches its memory from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from . import process
from .plan import Plan, Variant
from .runs import Run, Sample, assemble

_SAMPLING_SECONDS = 0.05
_PATIENCE_SECONDS = 15
_ROOT = Path(__file__).parents[2]
_NOISE = ("Exception ignored", "[W", "[E", "  ", "Traceback")
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before each line of a traceback


def train(
    plan: Plan,
    variant: Variant,
    number: int,
    directory: Path,
    *,
    cold: bool = False,
    weights: bool = True,
) -> Run:
    """Run *variant* once with *directory* for its files, which are removed.

    cold: nothing is compiled yet, and there is one step.
    """
    with tempfile.TemporaryDirectory(prefix="sweeps-training-", dir=directory) as name:
        work = Path(name)
        job = {
            "ours": variant.ours,
            "ds_config": variant.ds_config_at(str(work / "offload")),
            "directory": str(directory),
            "model": plan.model.config,
            **{key: getattr(plan.model, key) for key in ("hidden", "blocks", "tokens", "batch")},
            "steps": 1 if cold else plan.steps,
            "weights": weights and not cold,
        }
        (work / "offload").mkdir()
        (work / "job.json").write_text(json.dumps(job))
        environment = _environment()
        if cold:
            environment["TORCH_EXTENSIONS_DIR"] = str(work / "extensions")
        return _run(work, environment, variant.name, number, plan.timeout_seconds)


def _run(
    work: Path, environment: dict[str, str], variant: str, number: int, timeout_seconds: float
) -> Run:
    reading, writing = os.pipe()
    events: list[dict[str, Any]] = []
    samples: list[Sample] = []
    with (work / "log").open("w+") as log, os.fdopen(reading) as told:
        command = [
            sys.executable,
            "-m",
            "sweeps.training.trainee",
            str(work / "job.json"),
            str(writing),
        ]
        started = time.monotonic()
        child = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            pass_fds=(writing,),
            preexec_fn=os.setpgrp,
        )
        os.close(writing)
        listener = threading.Thread(target=_listen, args=(told, events))
        listener.start()
        try:
            ended = _watch(child, samples, started + timeout_seconds)
        finally:
            _end(child)
            listener.join()
        error = _error(child.returncode, log, None if ended else timeout_seconds)
    return assemble(variant, number, started, error, events, samples)


def _watch(child: subprocess.Popen[bytes], samples: list[Sample], deadline: float) -> bool:
    """Sample the memory of *child* until it has ended, which is the answer, or until the
    deadline.
    """
    while time.monotonic() < deadline:
        memory = process.memory_of(child.pid)
        if memory is not None:
            samples.append(Sample(time.monotonic(), memory))
        try:
            child.wait(_SAMPLING_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return True
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """End *child* where it has not: kindly at first, since one that compiles an extension holds a
    lock file that others would wait for forever.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_PATIENCE_SECONDS)


def _listen(told: TextIO, events: list[dict[str, Any]]) -> None:
    for line in told:
        try:
            events.append(json.loads(line))
        except ValueError:  # cut short by the end of the process
            return


def _error(status: int, log: TextIO, timeout_seconds: float | None) -> str | None:
    if timeout_seconds is not None:
        return f"not done after {timeout_seconds:g} s"
    if status == 0:
        return None
    if status == -signal.SIGKILL:
        return "killed by SIGKILL, as the kernel does when memory runs out"
    log.seek(0)
    text = log.read()
    sys.stderr.write(text[-6000:])
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"{last_words(text)} ({how})"


def last_words(log: str) -> str:
    """The line of *log* that says what went wrong: the exception of the last traceback, or the last
    line that is no frame of one.
    """
    lines = [line for line in (_RANK.sub("", line) for line in log.splitlines()) if line.strip()]
    tracebacks = [index for index, line in enumerate(lines) if line.startswith("Traceback")]
    after = lines[tracebacks[-1] + 1 :] if tracebacks else []
    said = next((line for line in after if not line.startswith(" ")), None)
    if said is None:
        said = next(
            (line for line in reversed(lines) if not line.startswith(_NOISE)), "it said nothing"
        )
    return said.strip()[:300]


def _environment() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    path = os.pathsep.join(filter(None, [os.environ.get("PATH"), str(Path(sys.executable).parent)]))
    # ninja may be beside the interpreter alone; but another one than the shell finds would compile
    # everything anew, since their logs differ by version.
    return {**os.environ, **ranks, "PATH": path, "PYTHONUNBUFFERED": "1"}
