"""`nvme-offload run` starts a command whose Python processes offload DeepSpeed through this
package.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# the exit statuses of env(1), nohup(1) and the shell
NOT_EXECUTABLE, NOT_FOUND = 126, 127
STARTUP = Path(__file__).parent / "startup"  # its sitecustomize.py enables


def replace_process(command: Sequence[str]) -> int:
    """Replace this process by *command*, which keeps its process id and standard streams.
    PYTHONPATH of all its processes begins with `STARTUP`. Returns 127 if there is no such command,
    126 if it cannot be executed.
    """
    environment = {
        **os.environ,
        "PATH": _path(),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH")))),
    }
    # Python ignores these signals from its start on, and a new program inherits that
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], tuple(command), environment)
    except (FileNotFoundError, ValueError):  # an empty name raises ValueError
        said, status = "command not found", NOT_FOUND
    except OSError as error:
        said, status = str(error.strerror), NOT_EXECUTABLE
    print(f"nvme-offload: {command[0]}: {said}", file=sys.stderr)
    return status


def _path() -> str:
    """PATH, beginning with this Python's directory, so that `python` is this interpreter."""
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    return path if own in path.split(os.pathsep) else os.pathsep.join((own, path))
