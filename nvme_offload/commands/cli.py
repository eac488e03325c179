"""`nvme-offload`: the command, its options and exit status."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from nvme_offload import __version__
from nvme_offload.errors import OffloadError, UsageError
from nvme_offload.planning.passes import ACTIVATIONS
from nvme_offload.planning.placement import INFERENCE, STRATEGIES, Door
from nvme_offload.planning.traffic import STATE_BYTES
from nvme_offload.units import parse_bytes

DOORS = get_args(Door)
EXIT_NEGATIVE = 3


def _bytes(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Parse the size *value*; 0 and small numbers without a unit are refused."""
    if value is None:
        return None
    _refuse_bare(value, "bytes", "TB" if option.name == "drive_rated" else "GB", context, option)
    try:
        amount = parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None
    if amount < 1:
        raise click.BadParameter(f"{value} is not a size: give one above 0", context, option)
    return amount


def _count(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    _refuse_bare(value, "parameters", "B" if option.name == "params" else "M", context, option)
    return value


def _refuse_bare(
    value: str | None, unit: str, meant: str, context: click.Context, option: click.Parameter
) -> None:
    """Refuse a small number without a unit."""
    try:
        bare = float(value or 0)
    except ValueError:
        return
    if 0 < bare < 1 << 20:
        raise click.BadParameter(
            f"{value} without a unit is {value} {unit}: did you mean {value}{meant}?",
            context,
            option,
        )


def _way(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is None or value in (*DOORS, *(each.title for each in (*STRATEGIES, *INFERENCE))):
        return value
    raise click.BadParameter(
        f"{value!r} is not a way: give {', '.join(DOORS)}, or a title that `nvme-offload plan --all` shows",
        context,
        option,
    )


def main() -> int:
    """Run the command; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            # an exception, so that temporary files are removed
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        status = command.main(
            args=sys.argv[1:] or ["--help"], prog_name="nvme-offload", standalone_mode=False
        )
        return status if isinstance(status, int) else 0
    except click.Abort:
        said, status = "stopped", 130
    except click.ClickException as error:
        said, status = error.format_message(), error.exit_code
    except (OffloadError, OSError, MemoryError) as error:
        said, status = str(error) or type(error).__name__, 2 if isinstance(error, UsageError) else 1
    click.echo(f"nvme-offload: {' '.join(said.split())}", err=True)
    return status


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="nvme-offload")
def command() -> None:
    """Plan a training, check this machine, or start a launcher with offload.

    To find the settings for a drive, use nvme-sweep.
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


# The options of `plan`, in the order of its help: names, type, help.
_SIZE: dict[str, Any] = {"metavar": "SIZE", "callback": _bytes}
_FILE: dict[str, Any] = {"metavar": "FILE", "type": Path}
_DIRECTORY: dict[str, Any] = {"metavar": "DIR", "multiple": True}
_FLAG: dict[str, Any] = {"is_flag": True}
_COUNT: dict[str, Any] = {"metavar": "COUNT", "callback": _count}


def _number(default: int | None, least: int = 1, most: int | None = None) -> dict[str, Any]:
    shown = {} if default is None else {"default": default, "show_default": True}
    return {"metavar": "N", "type": click.IntRange(least, most), **shown}


def _choice(*values: str, **more: Any) -> dict[str, Any]:
    return {"type": click.Choice(values), **more}


_PLAN_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--params", _COUNT, "Number of parameters, such as 7B or 350M."),
    ("--model model_path", _FILE, "Instead: a Hugging Face config.json, or a directory with one."),
    ("--path paths", _DIRECTORY, "A directory on a drive to offload to. Repeatable."),
    ("--drive-read", _SIZE, "Instead of --path: read speed of a drive per second, such as 3.5GB."),
    ("--drive-write", _SIZE, "Its write speed per second."),
    (
        "--drive-mixed",
        _SIZE,
        "Its speed at concurrent reads and writes.  [default: half the time each]",
    ),
    ("--drive-free", _SIZE, "Its free bytes, such as 1TB.  [default: enough]"),
    (
        "--drive-rated",
        _SIZE,
        "Bytes that it is rated to write (TBW in its data sheet), such as 1200TB.",
    ),
    ("--gpus", _number(None, 0, 1024), "GPUs per machine, or 0.  [default: those here, or 1]"),
    (
        "--gpu gpu_name",
        {"metavar": "NAME"},
        "Their model, such as H100.  [default: of this machine]",
    ),
    ("--gpu-memory", _SIZE, "Memory of each, such as 80GB.  [default: of that model]"),
    ("--host-memory", _SIZE, "Host memory that training may take.  [default: of this machine]"),
    ("--host-speed", _SIZE, "Bytes a second that CPUs copy.  [default: measured here, else 50GB]"),
    ("--ranks", _number(None, 1, 1024), "Processes per machine.  [default: one per GPU, else 1]"),
    ("--nodes", _number(1, 1, 100_000), "Identical machines."),
    ("--trainable", _COUNT, "Number of trained parameters, such as 40M for LoRA.  [default: all]"),
    ("--seq", _number(2048), "Tokens per sequence."),
    ("--micro-batch", _number(1), "Sequences per rank and forward pass."),
    ("--accumulate", _number(1), "Forward and backward passes per step."),
    (
        "--activations",
        _choice(*ACTIVATIONS, default="checkpoint", show_default=True),
        "Saved activations: on the GPU, checkpointed, or either of these on the drive (save_on_nvme).",
    ),
    (
        "--way",
        {"metavar": "WAY", "callback": _way},
        "Only: zero (ZeRO without a drive), deepspeed (its own NVMe offload), zero3 (nvme_offload.zero3), plain (PyTorch), "
        "or a title in the table, such as 'NVMeOptimizer, compact, in backward'.  [default: any]",
    ),
    (
        "--state-format",
        _choice(*STATE_BYTES),
        "Only this format of the states on a drive.  [default: any]",
    ),
    ("--budget", _SIZE, '"host_memory" per rank.  [default: from the available memory]'),
    ("--no-zero-init", _FLAG, "Every rank creates the whole model before it is partitioned."),
    ("--inference", _FLAG, "Plan forward passes only."),
    ("--write", _FILE, "Write the DeepSpeed config of the fastest fitting way with DeepSpeed."),
    ("--all every", _FLAG, "Show all ways to train, not only six."),
)


def _plan_options(function: Callable[..., int]) -> Callable[..., int]:
    function = _json_option(function)
    for names, kind, said in reversed(_PLAN_OPTIONS):
        function = click.option(*names.split(), **kind, help=said)(function)
    return function


@command.command()
@_plan_options
def plan(**given: Any) -> int:
    """Predict which ways to train fit, and how fast they are.

    Prints the answer in a sentence, code or configuration to paste, and a table of the ways that
    matter: ZeRO 1 to 3 on GPU and CPU, DeepSpeed's own NVMe offload, nvme_offload.zero3 and
    NVMeOptimizer, in each state format. The speed of a drive comes from its profile: run nvme-sweep
    on it first. If --gpu, --gpu-memory, --host-memory, --host-speed or --drive-... describe a
    machine, nothing is measured on this one.

    Exit status: 0 if something fits, 3 if nothing fits, 1 after a failure, 2 after wrong usage.
    """
    from nvme_offload.files import commit
    from nvme_offload.planning import paste
    from nvme_offload.planning import plan as planning
    from nvme_offload.planning.advice import cheapest_change

    from . import table
    from .question import asked

    write: Path | None = given["write"]
    if write is not None and write.exists():
        raise click.UsageError(f"{write} exists: give another name, or move it away")
    question = asked(given)
    found = question.answers()
    chosen = planning.fastest(found)
    if write is not None and chosen is not None and chosen.strategy.door == "plain":
        chosen = planning.fastest([plan for plan in found if plan.strategy.door != "plain"])
        if chosen is None:
            raise click.UsageError(
                "no way of DeepSpeed fits, only NVMeOptimizer, which takes no config: leave out --write"
            )
    change = None if chosen else cheapest_change(question)
    if write is not None and chosen is not None:
        config = paste.ds_config(chosen, question)
        commit.write_file(write, json.dumps(config, indent=2) + "\n")
    if given["as_json"]:
        _print(json.dumps(table.as_json(question, found, chosen, change), indent=2))
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        _print(table.text(question, found, chosen, change, width, given["every"]))
        if write is not None and chosen is not None:
            _print(f"\nWrote {write}: set the learning rate.")
    return 0 if chosen else EXIT_NEGATIVE


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
    """Check that this machine is ready, and name the remedies.

    Checks kernel interfaces, limits, CPU, GPUs, DeepSpeed and its compilers and, with --path, the
    drives. Changes nothing.

    Exit status: 0 if it works, possibly with warnings; 3 if a necessary part does not work; 1 after
    a failure, 2 after wrong usage.
    """
    from nvme_offload.ds_config import edit as ds_config

    from . import checks

    found = list(checks.all_of(paths, config and ds_config.locate(config)))
    works = not any(each.status == "problem" for each in found)
    if as_json:
        reported = {"works": works, "checks": [dataclasses.asdict(each) for each in found]}
        _print(json.dumps(reported, indent=2))
    else:
        _print(checks.text(found))
    return 0 if works else EXIT_NEGATIVE


@command.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument(
    "started", metavar="COMMAND [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED
)
def run(started: tuple[str, ...]) -> int:
    """Start a launcher or a trainer with nvme_offload.zero3.

    Calls nvme_offload.zero3.enable() in each Python process of COMMAND that imports DeepSpeed. The
    script is unchanged.

    \b
    Examples:
      nvme-offload run -- deepspeed --num_gpus=2 train.py --deepspeed ds_config.json
      nvme-offload run -- torchrun --nproc-per-node=2 train.py --deepspeed ds_config.json
      nvme-offload run -- accelerate launch --config_file accelerate.yaml train.py
      nvme-offload run -- llamafactory-cli train train.yaml
      nvme-offload run -- python train.py

    What the DeepSpeed configuration puts on "device": "nvme" then goes through this package. An
    import of DeepSpeed fails if this package does not work with it. The "--" may be left out.
    COMMAND must use the Python environment that this package is installed in, and must keep
    PYTHONPATH, which this command extends.

    COMMAND keeps its exit status, signals and standard streams; 127 if there is no such command,
    126 if it cannot be executed.
    """
    from .run import replace_process

    return replace_process(started)


def _print(text: str) -> None:
    try:
        click.echo(text)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
