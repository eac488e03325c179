"""Common parts of the commands: options, progress, and exit statuses."""

from __future__ import annotations

import functools
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import click

from nvme_offload.errors import OffloadError
from nvme_offload.units import parse_bytes

BEGAN = time.monotonic()  # the command
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)

directory = click.argument("directory", type=DIRECTORY)
option = functools.partial(click.option, show_default=True)
rounds = click.option("--rounds", type=COUNT, help="Instead of the plan's number.")
note = click.option(
    "--note",
    "notes",
    multiple=True,
    help="A sentence on the circumstances, for the report; may be given again.",
)


def seconds(default: float | None = None) -> Any:
    """The option `--seconds`: how long rounds may take."""
    kind = click.FloatRange(min=0)
    text = "Begin no further round that would not end within this time."
    return option("--seconds", type=kind, default=default, help=text)


def output(text: str) -> Any:
    """The option `--output`, with *text* for help."""
    return click.option("--output", type=click.Path(path_type=Path), help=text)


class Size(click.ParamType):
    """A number of bytes, such as "1GiB"; at least *least*."""

    name = "size"

    def __init__(self, least: str = "0") -> None:
        self._least = least

    def convert(self, value: Any, parameter: Any, context: Any) -> int:
        """The number."""
        try:
            nbytes = parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)
        if nbytes < parse_bytes(self._least):
            self.fail(f"at least {self._least}", parameter, context)
        return nbytes


fio_bytes = option(
    "--fio-bytes",
    type=Size(),
    default="1GB",
    help="Size of two files that fio reads and writes between the runs, for the floor; 0 for none.",
)


class Names(click.ParamType):
    """Names with commas between; each one of *known*, where that is given."""

    name = "names"

    def __init__(self, known: Collection[str] | None = None) -> None:
        self._known = known

    def convert(self, value: Any, parameter: Any, context: Any) -> list[str]:
        """The list of them."""
        names = list(filter(None, value.split(","))) if isinstance(value, str) else value
        for name in names if self._known is not None else ():
            if name not in self._known:
                self.fail(f"{name!r} is none of {', '.join(self._known)}", parameter, context)
        return names


def stop_at_sigterm() -> None:
    """Raise KeyboardInterrupt at SIGTERM, so that finished runs are reported."""
    signal.signal(signal.SIGTERM, _stop)


def say(text: str) -> None:
    """Print a line of progress, with the seconds since the start, on standard error."""
    click.echo(f"{time.monotonic() - BEGAN:5.0f} s  {text}", err=True)


def run(command: click.Command, module: str) -> None:
    """Run *command* as `python -m` *module*: errors of the drive and of the package exit with 1,
    wrong usage as click has it.
    """
    try:
        command.main(prog_name=f"python -m {module}", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (OffloadError, OSError) as error:
        click.echo(f"{module}: {error}", err=True)
        sys.exit(1)


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
