"""Check the installed portable wheel: every backend moves bytes, it uses the processor's vectors, and it
loads no library except libc and libgcc_s.

Needs no other package. Run it from a directory outside the repository, so that the installed package
is imported.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nvme_offload
from nvme_offload import _aio


def moves_bytes(backend: str, directory: str) -> str:
    """Write and read with checksums through *backend*; "works", or why the kernel refuses it."""
    written = bytes(range(256)) * (1 << 14)
    back = bytearray(len(written))
    try:
        with nvme_offload.Engine(nvme_offload.AioConfig(backend=backend, direct="auto")) as engine:
            file = engine.open_anonymous(directory, len(written))
            ticket = engine.write(written, file, checksum=True)
            ticket.wait()
            engine.read(back, file, checksum=ticket.checksum or False).wait()
    except nvme_offload.UnsupportedError as error:
        if "this build" in str(error):
            raise
        return f"refused by this kernel: {error}"
    assert back == written
    return "works"


def processor_flags() -> set[str]:
    """The features of the processor, as Linux names them."""
    flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0]
    return set(flags.split())


def processor_vectors() -> str:
    """The widest vectors of which Linux names all instructions: a name of `_aio.Vectors`."""
    flags = processor_flags()
    if not {"avx2", "fma"} <= flags:
        return "BASELINE"
    return "AVX512" if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags else "AVX2"


def main() -> None:
    """Print a line per backend. Raises: SystemExit if the wheel loads other libraries or is compiled
    for less than this processor.
    """
    with tempfile.TemporaryDirectory(dir=".") as directory:
        for backend in ("libaio", "io_uring", "posix"):
            print(
                f"Python {sys.version_info[0]}.{sys.version_info[1]}: {backend} {moves_bytes(backend, directory)}"
            )
    found, expected = _aio.widest_vectors().name, processor_vectors()
    if found != expected:
        raise SystemExit(f"the wheel uses {found}, the processor has {expected}")
    mapped = {
        Path(line.split()[-1])
        for line in Path("/proc/self/maps").read_text().splitlines()
        if ".so" in line
    }
    carried = [path for path in mapped if path.parent.name == "nvme_offload.libs"]
    if carried or any(path.name.startswith("libstdc++") for path in mapped):
        raise SystemExit(f"the wheel needs libraries: {', '.join(map(str, sorted(mapped)))}")


if __name__ == "__main__":
    main()
