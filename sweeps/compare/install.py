"""Install the peers of a comparison into this Python: `python -m sweeps.compare.install`.

From the package index, or with --wheels from a directory. Installed packages stay unchanged, and no
dependencies are installed, so torch and numpy keep their versions. A peer that cannot be installed
is reported and skipped, as it is by the comparison.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

from ..command import DIRECTORY

# an error of the build itself, which pip repeats in other words below
_REASON = re.compile(r"\s*\w+Error: ")
_LIBRARIES = "/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu:/usr/lib64:/usr/lib"


class _Peer(NamedTuple):
    """The *packages* with *module*; *hindrance* returns why it would not work here, or "". builds:
    compiles against this torch.
    """

    module: str
    packages: tuple[str, ...]
    hindrance: Callable[[], str] = str
    builds: bool = False


def _without_cuda() -> str:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "it needs CUDA's driver, libcuda.so.1, for host memory too"
    return ""


_DEEPSPEED_NEEDS = (
    *("hjson", "msgpack", "ninja", "py-cpuinfo", "einops"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
)
_PEERS = (
    _Peer("safetensors", ("safetensors",)),
    _Peer(
        "kvikio",
        ("kvikio-cu12", "libkvikio-cu12", "rapids-logger==0.3.*", "cuda-pathfinder"),
        _without_cuda,
    ),
    # Its setup looks for static libraries in other directories than Debian's, and writes to .bashrc
    # unless the home is temporary.
    _Peer("tensornvme", ("tensornvme",), builds=True),
    _Peer("deepspeed", ("deepspeed", *_DEEPSPEED_NEEDS)),
)


@click.command()
@click.option("--wheels", type=DIRECTORY, help="Install the packages from this directory only.")
def main(wheels: Path | None) -> None:
    """Install the missing peers of a comparison."""
    for peer in _PEERS:
        if importlib.util.find_spec(peer.module) is not None:
            click.echo(f"{peer.module}: already installed")
        elif hindrance := peer.hindrance():
            click.echo(f"{peer.module}: skipped, {hindrance}")
        else:
            click.echo(f"{peer.module}: {_install(peer, wheels)}")


def _install(peer: _Peer, wheels: Path | None) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    command.append("--no-deps")
    if wheels is not None:
        command += ["--no-index", "--find-links", str(wheels)]
    environment = dict(os.environ)
    with contextlib.ExitStack() as undo:
        if peer.builds:
            command.append("--no-build-isolation")
            environment["HOME"] = undo.enter_context(tempfile.TemporaryDirectory())
            environment["LIBRARY_PATH"] = ":".join(
                filter(None, (environment.get("LIBRARY_PATH"), _LIBRARIES))
            )
            if not any((Path(place) / "liburing.a").exists() for place in _LIBRARIES.split(":")):
                environment["DISABLE_URING"] = "1"  # otherwise it would download the source
            environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        ran = subprocess.run(
            [*command, *peer.packages], env=environment, capture_output=True, text=True
        )
    if ran.returncode == 0:
        return "installed"
    said = ran.stderr.splitlines() or ["nothing"]
    reasons = (
        [line.strip() for line in said if _REASON.match(line)]
        or [line for line in said if "error" in line.lower()]
        or said
    )
    return f"skipped, pip reports: {reasons[-1][:200]}"


if __name__ == "__main__":
    main(prog_name="python -m sweeps.compare.install")
