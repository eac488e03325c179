"""The `Question` of the options of `nvme-offload plan`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from nvme_offload.hardware import gpu_models
from nvme_offload.hardware.machine import Gpu, gpu_count, physical_bytes
from nvme_offload.planning import model as models
from nvme_offload.planning import plan as planning
from nvme_offload.planning.advice import Question
from nvme_offload.planning.model import Model
from nvme_offload.planning.passes import Work
from nvme_offload.planning.placement import World
from nvme_offload.planning.plan import Drive, Machine

from .config_json import model_of

_DESCRIBES = (
    *("gpu_name", "gpu_memory", "host_memory", "host_speed"),
    *("drive_read", "drive_write", "drive_mixed", "drive_free"),
)
PROBE_SECONDS = 0.2  # to measure copies in host memory


def asked(given: Mapping[str, Any]) -> Question:
    """The question of the options *given*, by name. If options describe a machine, the defaults of
    the others are constant, so that the answer is the same in every run. Raises: click.UsageError;
    UsageError.
    """
    for path in given["paths"]:
        if not Path(path).is_dir():
            what = "is not a directory" if Path(path).exists() else "does not exist"
            raise click.UsageError(
                f"{path!r} {what}: give a directory on the drive, or describe a drive by --drive-read and --drive-write"
            )
    for option, value in (
        ("--state-format", given["state_format"]),
        ("--trainable", given["trainable"]),
        ("--accumulate", given["accumulate"] > 1),
    ):
        if given["inference"] and value:
            raise click.UsageError(f"--inference plans forward passes only: leave out {option}")
    model = _model(given)
    if given["trainable"] is not None:
        trainable = models.of_count(given["trainable"]).parameters
        if trainable > model.parameters:
            raise click.UsageError("--trainable is at most the number of all parameters")
        model = dataclasses.replace(model, trainable=trainable)
    described = any(given[name] is not None for name in _DESCRIBES)
    here, ranks_here = planning.this_machine(
        given["paths"], probe_seconds=0.0 if described else PROBE_SECONDS
    )
    drives = _drives(given, here)
    if given["drive_rated"]:
        if not drives:
            raise click.UsageError("--drive-rated describes no drive: give --path, or its speeds")
        drives = tuple(dataclasses.replace(one, rating=given["drive_rated"]) for one in drives)
    gpu = _gpu(given, here)
    machine = Machine(
        gpu,
        given["host_memory"] or (physical_bytes() if described else here.host_bytes),
        float(given["host_speed"] or here.host_bytes_per_second),
        drives,
    )
    gpus = given["gpus"]
    if gpus is None:
        gpus = 1 if given["gpu_name"] or given["gpu_memory"] else ranks_here
    ranks = given["ranks"] or max(gpus, 1)
    if gpu is not None and ranks > gpus:
        raise click.UsageError(f"--ranks {ranks} needs as many GPUs: give --gpus {ranks}")
    world = World(ranks, given["nodes"], not given["no_zero_init"])
    work = Work(given["seq"], given["micro_batch"], given["accumulate"], given["activations"])
    options = (given[name] for name in ("budget", "state_format", "way", "inference"))
    question = Question(model, machine, world, work, *options)
    if not question.strategies:
        other = f"--state-format {each}" if (each := given["state_format"]) else "--inference"
        how = "with" if each or given["inference"] else "without"
        raise click.UsageError(f"{given['way']!r} is no way {how} {other}")
    return question


def _model(given: Mapping[str, Any]) -> Model:
    if (given["params"] is None) == (given["model_path"] is None):
        raise click.UsageError("give the model: --params COUNT or --model FILE")
    if given["model_path"] is not None:
        return model_of(given["model_path"])
    return models.of_count(given["params"])


def _drives(given: Mapping[str, Any], here: Machine) -> tuple[Drive, ...]:
    read, write = given["drive_read"], given["drive_write"]
    others = given["drive_mixed"], given["drive_free"]
    if not any((read, write, *others)):
        return here.drives
    if given["paths"]:
        raise click.UsageError(
            "--path is a drive of this machine, and --drive-… describes another: give one of the two"
        )
    if not (read and write):
        raise click.UsageError("a drive is described by both --drive-read and --drive-write")
    mixed, free = others
    speeds = read / 1e9, write / 1e9, mixed / 1e9 if mixed else None
    return (planning.drive_described(*speeds, free),)


def _gpu(given: Mapping[str, Any], here: Machine) -> Gpu | None:
    count, name, memory = given["gpus"], given["gpu_name"], given["gpu_memory"]
    if count == 0:
        if name or memory:
            raise click.UsageError("--gpus 0 trains without GPUs: leave out --gpu and --gpu-memory")
        return None
    if name is not None:
        known = gpu_models.find(name)
        memory = memory or (known.memory_bytes(name) if known else None)
        if memory is None and known:
            bare = re.sub(r"[\s-]*\d+\s*GB?\b", "", name, flags=re.IGNORECASE)
            choices = " or ".join(f'--gpu "{bare} {size}GB"' for size in known.sizes)
            raise click.UsageError(
                f"{name} is sold with different memory: give {choices}, or --gpu-memory"
            )
        if memory is None:
            raise click.UsageError(
                f"the memory of a GPU {name!r} is not known here: give --gpu-memory, such as 8GB. Known are {', '.join(gpu_models.MODELS)}"
            )
        return Gpu(name, memory, known.link_bytes_per_second if known else None)
    if memory:
        return (here.gpu or Gpu("of unknown kind", 0))._replace(memory_bytes=memory)
    if here.gpu is None and count:
        raise click.UsageError("no GPU is visible here: give --gpu, such as --gpu H100")
    if here.gpu is None and gpu_count():
        raise click.UsageError(
            "there are GPUs, and nvidia-smi does not report their memory: give --gpus and --gpu-memory"
        )
    return here.gpu
