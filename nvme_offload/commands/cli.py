"""`nvme-offload`: the command. What it says is found by `plan` and `doctor`; here are its options,
its exit status, and how it ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from nvme_offload import __version__
from nvme_offload.errors import OffloadError, UsageError
from nvme_offload.units import parse_bytes

NOT_SO = 3  # the exit status where the answer is no


def _bytes(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    try:
        amount = None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None
    if amount is not None and str(value).strip().isdigit() and amount < 1 << 20:
        message = f"{value} is {amount} bytes: give a unit, such as {value}GB"
        raise click.BadParameter(message, context, option)
    return amount


def main() -> int:
    """Run the command; returns 0 for a good answer, 3 for a bad one, 1 after a failure, 2 for what
    was asked wrongly, 130 after Ctrl-C, 143 after SIGTERM.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            # not at once: what is aside is removed
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        status = command.main(
            args=sys.argv[1:] or ["--help"], prog_name="nvme-offload", standalone_mode=False
        )
    except click.Abort:
        _say("nvme-offload: stopped")
        return 130
    except click.ClickException as error:
        _say(f"nvme-offload: {_one_line(error.format_message())}")
        return error.exit_code
    except (OffloadError, OSError, MemoryError) as error:
        _say(f"nvme-offload: {_one_line(str(error) or type(error).__name__)}")
        return 2 if isinstance(error, UsageError) else 1
    return status if isinstance(status, int) else 0


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="nvme-offload")
def command() -> None:
    """What to know before a training starts: which way to train fits and is the fastest, and
    whether this machine can.

    To find the settings for a drive, see nvme-sweep.
    """


_paths_option = click.option(
    "--path",
    "paths",
    metavar="DIR",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="A directory on a drive to offload to. Repeatable.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@command.command()
@click.option("--params", metavar="COUNT", help="Parameters of the model, such as 7B or 350M.")
@click.option(
    "--model",
    "model_path",
    metavar="FILE",
    type=Path,
    help="Or its Hugging Face config.json, or the directory with one.",
)
@_paths_option
@click.option(
    "--gpus",
    metavar="N",
    type=click.IntRange(0, 1024),
    help="GPUs of a machine; 0 to train without.  [default: those here]",
)
@click.option(
    "--gpu", "gpu_name", metavar="NAME", help="What they are, such as H100.  [default: as here]"
)
@click.option(
    "--gpu-memory",
    metavar="SIZE",
    callback=_bytes,
    help="Memory of each, such as 80GB.  [default: as here]",
)
@click.option(
    "--host-memory",
    metavar="SIZE",
    callback=_bytes,
    help="Memory of a machine that training may take.  [default: available here]",
)
@click.option(
    "--ranks",
    metavar="N",
    type=click.IntRange(1, 1024),
    help="Processes on a machine.  [default: one for each GPU, else 1]",
)
@click.option(
    "--nodes",
    metavar="N",
    type=click.IntRange(1, 100_000),
    default=1,
    show_default=True,
    help="Machines alike.",
)
@click.option(
    "--seq",
    metavar="N",
    type=click.IntRange(1),
    help="Tokens of a sequence, to predict compute and activations too.",
)
@click.option(
    "--micro-batch",
    metavar="N",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Sequences of a rank in a step.",
)
@click.option(
    "--budget",
    metavar="SIZE",
    callback=_bytes,
    help='"host_memory" of a rank for what is offloaded.  [default: what there is]',
)
@click.option(
    "--no-zero-init",
    is_flag=True,
    help="Every rank makes the whole model before it is partitioned (no zero.Init).",
)
@click.option(
    "--write",
    metavar="FILE",
    type=Path,
    help="Write the DeepSpeed config of the fastest plan that fits; a file that is there stays.",
)
@_json_option
def plan(
    params: str | None,
    model_path: Path | None,
    paths: Sequence[str],
    gpus: int | None,
    gpu_name: str | None,
    gpu_memory: int | None,
    host_memory: int | None,
    ranks: int | None,
    nodes: int,
    seq: int | None,
    micro_batch: int,
    budget: int | None,
    no_zero_init: bool,
    write: Path | None,
    as_json: bool,
) -> int:
    """What goes where for a model under ZeRO 1, 2 and 3, on GPU, CPU and NVMe: bytes of a rank,
    seconds of a step, and which is the fastest that fits.

    The speed of a drive is that of its profile: run nvme-sweep on it first. What is not given is
    taken from this machine.

    Exit status: 0 something fits, 3 nothing does, 1 failed, 2 wrong usage.
    """
    from nvme_offload.files import commit
    from nvme_offload.hardware.machine import Gpu, gpu_count
    from nvme_offload.planning import model as models
    from nvme_offload.planning import plan as planning
    from nvme_offload.planning.placement import World

    from . import table, unknown_family

    if (params is None) == (model_path is None):
        raise click.UsageError("give the model: --params COUNT or --model FILE")
    if write is not None and write.exists():
        raise click.UsageError(f"{write} exists: give another name, or move it away")
    model = (
        models.of_config(model_path, unknown_family.build)
        if model_path is not None
        else models.of_count(params or "")
    )
    # what is asked of another machine is not timed on this one, so that it is answered alike
    described = host_memory is not None or gpu_name is not None
    machine, here = planning.this_machine(paths, probe_seconds=0.0 if described else 0.2)
    gpu = machine.gpu
    if gpus == 0:
        gpu = None
    elif gpus or gpu_name or gpu_memory:
        known = gpu or Gpu("GPU", 0)
        gpu = Gpu(
            gpu_name or known.name,
            gpu_memory
            or (gpu_name and _memory_of(gpu_name))
            or (0 if gpu_name else known.memory_bytes),
            None if gpu_name else known.link_bytes_per_second,
        )
        if not gpu.memory_bytes:
            raise click.UsageError(
                "how much memory such a GPU has is not known here: give --gpu-memory"
            )
    elif gpu is None and gpu_count():
        raise click.UsageError(
            "there are GPUs, and nvidia-smi does not tell their memory: give --gpus and --gpu-memory"
        )
    machine = dataclasses.replace(
        machine, gpu=gpu, host_bytes=machine.host_bytes if host_memory is None else host_memory
    )
    world = World(ranks or (here if gpus is None else max(gpus, 1)), nodes, not no_zero_init)
    work = planning.Work(seq or 0, micro_batch)
    found = planning.plans(model, machine, world, work, budget)
    chosen = planning.fastest(found)
    config = planning.ds_config(chosen, machine, work) if chosen else None
    if write is not None and config is not None:
        commit.write_file(write, json.dumps(config, indent=2) + "\n")
    if as_json:
        _print(
            json.dumps(table.as_json(model, machine, world, work, found, chosen, config), indent=2)
        )
    else:
        _print(table.text(model, machine, world, work, found, chosen))
        if write is not None and config is not None:
            _print(f"\nWrote {write}: set learning rate and batch size.")
    return 0 if chosen else NOT_SO


def _memory_of(gpu_name: str) -> int | None:
    from nvme_offload.hardware import gpu_models

    known = gpu_models.find(gpu_name)
    return known.memory_bytes if known else None


@command.command()
@_paths_option
@click.option(
    "--config",
    metavar="FILE",
    type=Path,
    help="The DeepSpeed config to train with: can this machine train in its precision?",
)
@_json_option
def doctor(paths: Sequence[str], config: Path | None, as_json: bool) -> int:
    """What of this package works on this machine, why the rest does not, and what to do about it.

    Looks at kernel interfaces, limits, processor, GPUs, DeepSpeed and its compilers and, with
    --path, at the drives. Changes nothing.

    Exit status: 0 it works, perhaps not as well as it could; 3 something that is needed does not; 1
    failed, 2 wrong usage.
    """
    from nvme_offload.ds_config import edit as ds_config

    from . import checks

    found = list(checks.all_of(paths, config and ds_config.locate(config)))
    works = not any(each.status == "problem" for each in found)
    if as_json:
        _print(
            json.dumps(
                {"works": works, "checks": [dataclasses.asdict(each) for each in found]}, indent=2
            )
        )
    else:
        _print(checks.text(found))
    return 0 if works else NOT_SO


@command.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument(
    "started", metavar="COMMAND [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED
)
def run(started: tuple[str, ...]) -> int:
    """Start a launcher or a trainer with nvme_offload.zero3.enable() in effect in every Python
    process of it that imports DeepSpeed. The script needs no line of code.

    \b
    Examples:
      nvme-offload run -- deepspeed --num_gpus=2 train.py --deepspeed ds_config.json
      nvme-offload run -- torchrun --nproc-per-node=2 train.py --deepspeed ds_config.json
      nvme-offload run -- accelerate launch --config_file accelerate.yaml train.py
      nvme-offload run -- llamafactory-cli train train.yaml
      nvme-offload run -- python train.py

    What the DeepSpeed configuration puts on "device": "nvme" then goes through this package. A
    configuration that has the section "nvme_offload" does not need this command. The "--" may be
    left out. COMMAND must use the Python environment that this package is installed in.

    Exit status, signals and standard streams are those of COMMAND; 127 if there is no such
    command, 126 if it cannot be executed.
    """
    from .run import replace_process

    return replace_process(started)


def _print(text: str) -> None:
    try:
        click.echo(text)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _one_line(message: str) -> str:
    return " ".join(message.split())


if __name__ == "__main__":
    sys.exit(main())
