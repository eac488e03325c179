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


def compiles(code: str, *flags: str) -> bool:
    """Whether the compiler that will build the extension accepts *code* with *flags*."""
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    for name in ("CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS"):
        compiler += shlex.split(os.environ.get(name, ""))
    try:
        return (
            subprocess.run(
                [*compiler, *flags, "-x", "c++", "-"], input=code, text=True, capture_output=True
            ).returncode
            == 0
        )
    except OSError:
        return False


def require_compiler() -> None:
    """End with one line that says what to install, where there is no compiler."""
    if not compiles("#include <string>", "-E"):
        sys.exit(
            "nvme-offload: no working C++ compiler; install g++ (Debian, Ubuntu), gcc-c++ (Fedora, RHEL) "
            "or, without root, conda-forge's cxx-compiler, or set CXX"
        )


def static_library_flags() -> list[str]:
    """The linker's flags to include libstdc++ in the extension, so that it also loads next to an
    older libstdc++ than the compiler's; none where the compiler has no libstdc++.a.

    libgcc stays shared: its unwinder ends Python's daemon threads, and goes through our functions.
    """
    flags = ["-static-libstdc++", "-Wl,--exclude-libs,libstdc++.a"]
    code = "#include <iostream>\nvoid f() { std::cout << 1; throw 1; }"
    linked = compiles(code, "-shared", "-fPIC", "-o", os.devnull, *flags)
    return flags if linked else []


class BuildAlways(build_ext):
    """build_ext that compiles everything: objects left by another switch look current to
    setuptools, and are not.
    """

    def finalize_options(self) -> None:
        """Set the defaults, and force."""
        super().finalize_options()
        self.force = True


def extensions() -> list[object]:
    """The one extension. It needs no library but libc; with checksums where xxhash.h is found."""
    import pybind11
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension

    # -O3: gcc vectorises the loops of codec.cpp; without contraction, which only some of the processors do, so that all give the same bits.
    # -fno-math-errno: gcc vectorises square roots only where they do not set errno.
    # -isystem: warnings are about our code, not about pybind11's and Python's.
    flags = [
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-Wall",
        "-Wextra",
        "-Wconversion",
        *(f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))),
    ]
    if os.environ.get("NVME_OFFLOAD_WERROR"):
        flags.append("-Werror")
    if conda := os.environ.get("CONDA_PREFIX"):
        flags.append(f"-idirafter{conda}/include")  # for xxhash.h
    link_flags = []
    macros = []
    if sanitizers := os.environ.get("NVME_OFFLOAD_SANITIZE"):
        link_flags = [f"-fsanitize={sanitizers}"]
        flags += [*link_flags, "-O1", "-g", "-fno-omit-frame-pointer"]
        macros.append(("NVME_OFFLOAD_SANITIZED", "1"))
    elif link_flags := static_library_flags():
        # Share neither pybind11's tables nor its exceptions with modules that have another C++
        # library, such as torch's.
        macros += [
            ("PYBIND11_COMPILER_TYPE", '"_nvme_offload"'),
            ("PYBIND11_EXPORT_EXCEPTION", ""),
        ]
    ParallelCompile(default=0).install()
    return [
        Pybind11Extension(
            "nvme_offload._aio",
            [os.path.relpath(path, AIO.parent) for path in sorted(AIO.glob("*.cpp"))],
            cxx_std=17,
            define_macros=macros,
            libraries=["dl"],  # for dlsym before glibc 2.34
            extra_compile_args=flags,
            extra_link_args=link_flags,
        )
    ]


if BUILDING:
    require_compiler()
setup(ext_modules=extensions() if BUILDING else [], cmdclass={"build_ext": BuildAlways})
