"""What the benchmarks' commands have in common: SIGTERM ends one as Ctrl-C does, and an error is
one line and an exit status.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

import click

from nvme_offload.errors import OffloadError


def stop_at_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, so that what was measured by then is reported."""
    signal.signal(signal.SIGTERM, _stop)


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
