"""`nvme-offload run`: starts a command in whose Python processes DeepSpeed offloads through this
package.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nvme_offload import autoload
from nvme_offload.errors import UnsupportedError, UsageError

# as env(1), nohup(1) and the shell have it
NOT_EXECUTABLE, NOT_FOUND = 126, 127
_OLDEST_TORCH = (2, 5)  # that calls the entry points of "torch.backends"
_TORCH_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def replace_process(command: Sequence[str]) -> int:
    """Become *command*: its exit status, signals and standard streams are this process's own.

    The environment variable NVME_OFFLOAD_AUTOLOAD is "always" for it and all that it starts.

    Returns
    -------
    int
        Where nothing was started: 127 if there is no such command, 126 if it cannot be executed.

    Raises
    ------
    UsageError
        This package is not installed, so that no child would load it, or the environment keeps
        torch from loading it.
    UnsupportedError
        The installed torch is older than 2.5, which has no autoload.
    """
    _check_autoload()
    environment = {**os.environ, autoload.SWITCH: autoload.ALWAYS, "PATH": _path()}
    found = _find(command[0], environment["PATH"])
    if found is None:
        print(f"nvme-offload: {command[0]}: command not found", file=sys.stderr)
        return NOT_FOUND
    try:
        _execute(found, command, environment)
    except OSError as error:
        print(f"nvme-offload: {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_EXECUTABLE


def _path() -> str:
    """Where commands are looked for. An environment that is not activated comes first, so that
    `python` is the one that this package is installed in.
    """
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    return path if own in path.split(os.pathsep) else os.pathsep.join((own, path))


def _find(name: str, path: str) -> str | None:
    if "/" in name:
        return name if Path(name).exists() else None
    return shutil.which(name, path=path)


def _execute(file: str, command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    # Python ignores these from its start on, and what is ignored stays so in the new program
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(file, tuple(command), environment)


def _check_autoload() -> None:
    if os.environ.get(_TORCH_SWITCH, "1") != "1":
        raise UsageError(
            f"{_TORCH_SWITCH}={os.environ[_TORCH_SWITCH]} keeps torch from loading nvme_offload: unset it"
        )
    if not importlib.metadata.entry_points(group="torch.backends", name="nvme_offload"):
        raise UsageError(
            f"nvme-offload is not installed for {sys.executable}, so torch would not load it: install it with pip, or install it again after an upgrade"
        )
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # made in another way than by a wheel
        return
    if tuple(map(int, re.findall(r"\d+", torch)[:2])) < _OLDEST_TORCH:
        raise UnsupportedError(
            f"torch {torch} does not load nvme_offload by itself: install torch 2.5 or newer, or call nvme_offload.zero3.enable() in the script"
        )
