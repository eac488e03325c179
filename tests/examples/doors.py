"""Runs of the scripts in `examples/` by the commands that their users type, each in processes of
its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_offload
from nvme_offload.ds_config import edit as ds_config

sys.path.append(str(Path(__file__).parents[1] / "zero3"))
import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGE = str(Path(nvme_offload.__file__).parents[1])
PLAIN_GLOO = str(Path(__file__).with_name("plain_gloo"))
AIO = {
    "block_size": 64 << 10,
    "queue_depth": 8,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip where a framework is not installed, and say which."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def place_with_drives(tmp_path_factory: Any) -> Path:
    """A directory for a module's tests, with subdirectories that stand for drives: the package does
    not create them.
    """
    place: Path = tmp_path_factory.mktemp("doors")
    for name in ("drive", "drive0", "drive1"):
        (place / name).mkdir()
    return place


def configuration(name: str, drive: Path, to: Path, **section: Any) -> Path:
    """The file *name* of the examples with *drive* in the place of /local_nvme and *section* for
    "nvme_offload", edited as the sweep does.
    """
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    config = json.loads(text.replace("/local_nvme", str(drive)))
    config["nvme_offload"] |= section
    path = to / name
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    ds_config.apply(path, AIO)
    return path


@dataclasses.dataclass
class Ended:
    """What a command said, and how it ended."""

    status: int
    said: str

    @property
    def losses(self) -> list[str]:
        """What a script printed for each step."""
        return re.findall(r"^step \d+: loss \S+$", self.said, re.MULTILINE)


def run(
    *commands: Sequence[str | os.PathLike[str]],
    accelerator: str = "cpu",
    timeout: float = 500,
    forks: bool = True,
    **environment: str,
) -> list[Ended]:
    """Run *commands* concurrently, as on one machine each, and wait for all. Where it *forks*, all
    their processes come from an interpreter that has imported torch and DeepSpeed.
    """
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(_started(command, accelerator, environment, forks))
            for command in commands
        ]
        ended = []
        for process, output in processes:
            status = process.wait(timeout)
            output.seek(0)
            ended.append(Ended(status, output.read()))
    return ended


def run_well(*commands: Sequence[str | os.PathLike[str]], **options: Any) -> list[Ended]:
    """`run`, and all went well."""
    ended = run(*commands, **options)
    for each in ended:
        assert each.status == 0, each.said[-6000:]
    return ended


def moved(said: str) -> tuple[float, float]:
    """The GB read and written in a line of `StepStats`."""
    found = re.search(r"read (\S+) GB and wrote (\S+) GB", said)
    assert found is not None, said[-3000:]
    return float(found[1]), float(found[2])


@contextlib.contextmanager
def _started(
    command: Sequence[str | os.PathLike[str]],
    accelerator: str,
    environment: dict[str, str],
    forks: bool,
) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    variables = {
        **{
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        },
        "PYTHONPATH": os.pathsep.join(
            filter(
                None, [PLAIN_GLOO * (accelerator == "cpu"), PACKAGE, os.environ.get("PYTHONPATH")]
            )
        ),
        "DS_ACCELERATOR": accelerator,
        "OMP_NUM_THREADS": "1",  # how a sum is cut over threads is part of its result
        **environment,
    }
    command = [*map(os.fspath, command)]
    if forks and accelerator == "cpu" and command[0] == sys.executable:
        command[0], variables = str(forked.PYTHON), forked.launching(variables)
    # A file, not a pipe: a process that fills a pipe blocks while another pipe is read.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            cwd=EXAMPLES,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process, output
        finally:
            with contextlib.suppress(ProcessLookupError):  # a launcher's ranks are in its session
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def devices(accelerator: str) -> int:
    """How many ranks can have a device each; on the CPU two."""
    return 2 if accelerator == "cpu" else torch.cuda.device_count()
