"""Host memory, its speed, and GPUs, without torch and CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from .gpu_models import LANE_BYTES_PER_SECOND, LINK_SHARE

# Of all threads together. Half a GiB would stay in the caches of a large CPU.
_PROBE_BYTES = 2 << 30


class Gpu(NamedTuple):
    """One GPU: its name from the driver, its memory, and the copy speed between it and pinned host
    memory, estimated from the PCIe link; None if unknown.
    """

    name: str
    memory_bytes: int
    link_bytes_per_second: float | None = None


def gpus() -> list[Gpu]:
    """The GPUs that training would use, from nvidia-smi; [] without nvidia-smi."""
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,pcie.link.gen.max,pcie.link.width.max",
        "--format=csv,noheader,nounits",
    ]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 20}
    try:
        output = subprocess.run(command, stdin=subprocess.DEVNULL, **options).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(output)[: gpu_count()]


def parse_gpus(output: str) -> list[Gpu]:
    """Parse nvidia-smi's CSV: name, MiB, PCIe generation, lanes; "[N/A]" where unknown."""
    found = []
    for line in output.splitlines():
        name, *numbers = (field.strip() for field in line.rsplit(",", 3))
        if len(numbers) == 3 and numbers[0].isdecimal():
            memory, generation, lanes = (
                int(number) if number.isdecimal() else 0 for number in numbers
            )
            link = LANE_BYTES_PER_SECOND.get(generation, 0) * lanes * LINK_SHARE
            found.append(Gpu(name, memory << 20, link or None))
    return found


def gpu_count(root: Path = Path("/")) -> int:
    """The number of GPUs of the NVIDIA driver, or in CUDA_VISIBLE_DEVICES; 0 without the driver."""
    # procfs in a container may list all GPUs of the host; on a host the device nodes may not exist
    # until first use.
    found = (root / "proc/driver/nvidia/gpus").glob("*"), (root / "dev").glob("nvidia[0-9]*")
    present = min(filter(None, (len(list(paths)) for paths in found)), default=0)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or not present:
        return present
    names = (name.strip() for name in named.split(","))
    return len(list(itertools.takewhile(lambda name: name not in ("", "-1"), names)))


def physical_bytes() -> int:
    """Memory of this machine in bytes, used or not."""
    return _meminfo(Path("/"), "MemTotal") or _pages("SC_PHYS_PAGES")


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that processes can still allocate: MemAvailable, or less where a control group limits it.

    The inactive page cache of a group counts as available, because the kernel reclaims it first.
    Without /proc the page cache does not count. Source: proc(5); the kernel's cgroup-v2 and v1 memory.
    """
    available = _meminfo(root, "MemAvailable")
    if available is None:
        available = _pages("SC_AVPHYS_PAGES")
    return max(min([available, *_left_in_groups(root)]), 0)


def anonymous_bytes() -> int:
    """Memory of this process that is no file's, in bytes; 0 without /proc. Source: proc(5)."""
    return _kibibytes(Path("/proc/self/status"), "RssAnon") or 0


def _meminfo(root: Path, name: str) -> int | None:
    """A field of /proc/meminfo in bytes; None without /proc."""
    return _kibibytes(root / "proc/meminfo", name)


def _kibibytes(path: Path, name: str) -> int | None:
    """A field of a file of *proc*, which is in kB there, in bytes; None without the file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) * 1024


def _pages(name: str) -> int:
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def usable_cpus() -> frozenset[int]:
    """The CPUs that this process may use; all where a container refuses sched_getaffinity(2)."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(range(os.cpu_count() or 1))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes left below the memory limit of each control group of this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        number, controllers, inside = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if number == "0":  # v2, alone or in hybrid mode
            names = "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top /= controllers
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = Path(inside.strip("/"))
        # In a container the path may be the host's, of which only the mounted group is visible,
        # as the top.
        for around in (group, *group.parents):
            # ValueError: "max" is no limit
            with contextlib.suppress(OSError, ValueError, KeyError):
                text = [(top / around / n).read_text("ascii") for n in (*names[:2], "memory.stat")]
                stat = dict(line.split() for line in text[2].splitlines())
                yield int(text[0]) - int(text[1]) + int(stat[names[2]])


def resident_bytes() -> int:
    """Bytes of memory that this process takes; 0 without /proc. Source: proc_pid_statm(5)."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def release_heap() -> None:
    """Return freed memory to the kernel: glibc keeps it, and ever more of it if allocations have many
    sizes. Source: malloc_trim(3), mallopt(3).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(ctypes.c_size_t(0))


def copy_bytes_per_second(seconds: float = 0.2, threads: int | None = None) -> float:
    """Measure the memory bandwidth of large copies: bytes read and written per second by *threads*, by
    default one per usable CPU. Allocates 2 GiB, or a quarter of the available memory.
    """
    count = threads or len(usable_cpus())
    size = max(min(_PROBE_BYTES, available_bytes() // 4) // count // 2, 1 << 20)
    ready = threading.Barrier(count)

    def copy(_: int) -> float:
        with mmap.mmap(-1, 2 * size) as memory:
            start = ctypes.addressof(place := ctypes.c_char.from_buffer(memory))
            ctypes.memset(start, 1, 2 * size)
            ready.wait()
            began = now = time.perf_counter()
            copies = 0
            while now - began < seconds:  # memmove releases the GIL
                ctypes.memmove(start + size, start, size)
                copies, now = copies + 1, time.perf_counter()
            del place  # the export would keep mmap from closing
        return copies * 2 * size / (now - began)

    with ThreadPoolExecutor(count) as workers:
        return sum(workers.map(copy, range(count)))
