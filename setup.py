"""Builds `nvme_offload._aio`, the C++ core; everything else about the package stands in
pyproject.toml.

Two switches, both environment variables: NVME_OFFLOAD_WERROR=1 makes compiler warnings errors,
NVME_OFFLOAD_SANITIZE=address,undefined (or thread) builds with sanitizers.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

AIO = Path(__file__).parent / "aio"
# dist_info is the first command that only a build runs: stopping there keeps the message free of
# the build's own output.
BUILDING = bool(
    {"dist_info", "bdist_wheel", "editable_wheel", "build", "build_ext", "develop", "install"}
    & set(sys.argv[1:])
)


def compiles(code: str) -> bool:
    """Whether the compiler that will build the extension gets through the preprocessing of
    *code*.
    """
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    flags = [
        flag
        for name in ("CPPFLAGS", "CFLAGS", "CXXFLAGS")
        for flag in shlex.split(os.environ.get(name, ""))
    ]
    try:
        return (
            subprocess.run(
                [*compiler, *flags, "-E", "-x", "c++", "-"],
                input=code,
                text=True,
                capture_output=True,
            ).returncode
            == 0
        )
    except OSError:
        return False


def require_build_tools() -> None:
    """End with one line that says what to install, where something that the build needs is
    missing.
    """
    if not compiles("#include <string>"):
        sys.exit(
            "nvme-offload: no working C++ compiler; install g++ (Debian, Ubuntu) or gcc-c++ (Fedora, RHEL), or set CXX"
        )
    if not compiles("#include <libaio.h>"):
        sys.exit(
            "nvme-offload: libaio.h not found; install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora, RHEL)"
        )


class BuildAlways(build_ext):
    """build_ext that compiles everything: objects left by another switch look current to
    setuptools, and are not.
    """

    def finalize_options(self) -> None:
        """Set the defaults, and force."""
        super().finalize_options()
        self.force = True


def extensions() -> list[object]:
    """The one extension; with the io_uring backend where liburing's headers are."""
    import pybind11
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension

    has_uring = compiles("#include <liburing.h>")
    has_xxhash = compiles("#include <xxhash.h>")
    # -O3: gcc vectorises the loops of codec.cpp; without contraction, which only some of the processors do, so that all give the same bits.
    # -isystem: warnings are about our code, not about pybind11's and Python's.
    flags = [
        "-O3",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Wconversion",
        *(f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))),
    ]
    if os.environ.get("NVME_OFFLOAD_WERROR"):
        flags.append("-Werror")
    link_flags = []
    macros = [
        (f"NVME_OFFLOAD_HAVE_{name}", "1")
        for name, found in (("URING", has_uring), ("XXHASH", has_xxhash))
        if found
    ]
    if sanitizers := os.environ.get("NVME_OFFLOAD_SANITIZE"):
        link_flags = [f"-fsanitize={sanitizers}"]
        flags += [*link_flags, "-O1", "-g", "-fno-omit-frame-pointer"]
        macros.append(("NVME_OFFLOAD_SANITIZED", "1"))
    ParallelCompile(default=0).install()
    return [
        Pybind11Extension(
            "nvme_offload._aio",
            [os.path.relpath(path, AIO.parent) for path in sorted(AIO.glob("*.cpp"))],
            cxx_std=17,
            define_macros=macros,
            # the last has dlsym before glibc 2.34
            libraries=["aio", *(["uring"] if has_uring else []), "dl"],
            extra_compile_args=flags,
            extra_link_args=link_flags,
        )
    ]


if BUILDING:
    require_build_tools()
setup(ext_modules=extensions() if BUILDING else [], cmdclass={"build_ext": BuildAlways})
