"""Programs that tests run to their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from patience import PATIENCE


def finished(command: Sequence[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """What *command* said, and its status; *options* as of `subprocess.run`."""
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, **{"timeout": PATIENCE, **options}
    )


def in_fork(call: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """What *call* printed in a fork of this process, and the status: 1 after an exception, whose
    traceback is in `stderr`. A new interpreter would import torch again.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
            child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))
            status = 1
            try:
                sys.stdout, sys.stderr = out, err
                call()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                out.flush()
                err.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read())
    return subprocess.CompletedProcess(call.__name__, status, *said)
