"""What a machine has that training needs, beside drives: host memory and its speed, and GPUs.
Nothing here needs torch or CUDA.
"""

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
from pathlib import Path
from typing import NamedTuple

from .gpu_models import LANE_BYTES_PER_SECOND, LINK_SHARE

# of all threads together: half a GiB stays in the caches of a large processor, and copies seem
# twice as fast
_PROBE_BYTES = 2 << 30


class Gpu(NamedTuple):
    """One GPU; *link_bytes_per_second* of copies from and to registered host memory, None where the
    driver does not tell the link.
    """

    name: str
    memory_bytes: int
    link_bytes_per_second: float | None = None


def gpus() -> list[Gpu]:
    """The GPUs that a training would use, as nvidia-smi tells; [] without it, though `gpu_count`
    may know of some.
    """
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,pcie.link.gen.max,pcie.link.width.max",
        "--format=csv,noheader,nounits",
    ]
    try:
        told = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(told)[: gpu_count()]


def parse_gpus(told: str) -> list[Gpu]:
    """The GPUs in nvidia-smi's answer: name, MiB, PCIe generation, lanes. What is no number there
    ("[N/A]") is not known.
    """
    found = []
    for line in told.splitlines():
        name, *numbers = (field.strip() for field in line.rsplit(",", 3))
        if len(numbers) == 3 and numbers[0].isdecimal():
            memory, generation, lanes = (
                int(number) if number.isdecimal() else 0 for number in numbers
            )
            link = LANE_BYTES_PER_SECOND.get(generation, 0) * lanes * LINK_SHARE
            found.append(Gpu(name, memory << 20, link or None))
    return found


def gpu_count(root: Path = Path("/")) -> int:
    """The GPUs that a training would use here: those of the NVIDIA driver, or those of them that
    CUDA_VISIBLE_DEVICES names.
    """
    # A container may see the driver's entries of all the host's GPUs; a host may lack the devices
    # until something uses them.
    found = (root / "proc/driver/nvidia/gpus").glob("*"), (root / "dev").glob("nvidia[0-9]*")
    present = min(filter(None, (len(list(paths)) for paths in found)), default=0)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or not present:
        return present
    return len(
        list(itertools.takewhile(lambda name: name.strip() not in ("", "-1"), named.split(",")))
    )


def physical_bytes() -> int:
    """Bytes of memory that this machine has, whoever has them."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that processes can still take: what the kernel says of the machine, or of a
    control group around this process where that is less.

    Files that a group has in the page cache and has not used lately count as free, as the kernel
    gives them up first. Source: proc(5) for MemAvailable; memory.max, memory.current and
    memory.stat of cgroup v2, and their names in v1.
    """
    fields = dict(
        line.split(":") for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(min([available, *_left_in_groups(root)]), 0)


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes left below the memory limit of each control group that this process is in, the
    outermost that can be seen here last.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, inside = line.split(":", 2)
            if number == "0":  # v2, alone or beside v1
                top, names = (
                    root / "sys/fs/cgroup",
                    ("memory.max", "memory.current", "inactive_file"),
                )
            elif "memory" in controllers.split(","):
                top, names = (
                    root / "sys/fs/cgroup" / controllers,
                    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
                )
            else:
                continue
            group = Path(inside.strip("/"))
            # In a container the path may be the host's, of which there is only the group that is
            # mounted as the top.
            for around in (group, *group.parents):
                # ValueError: "max", no limit
                with contextlib.suppress(OSError, ValueError, KeyError):
                    limit, used = (
                        int((top / around / name).read_text(encoding="ascii")) for name in names[:2]
                    )
                    stat = dict(
                        line.split()
                        for line in (top / around / "memory.stat")
                        .read_text(encoding="ascii")
                        .splitlines()
                    )
                    yield limit - used + int(stat[names[2]])


def copy_bytes_per_second(seconds: float = 0.2, threads: int | None = None) -> float:
    """How fast the processors that this process may use stream through host memory: bytes read and
    written a second, by large copies of all at once.

    Takes 2 GiB for the time, or a quarter of the memory available, and a little longer than
    *seconds*, since every page must be there first.
    """
    count = threads or len(os.sched_getaffinity(0))
    size = max(min(_PROBE_BYTES, available_bytes() // 4) // count // 2, 1 << 20)
    ready, moved = threading.Barrier(count), [0.0] * count

    def copy(index: int) -> None:
        with mmap.mmap(-1, 2 * size) as memory:
            start = ctypes.addressof(place := ctypes.c_char.from_buffer(memory))
            ctypes.memset(start, 1, 2 * size)
            ready.wait()
            began = now = time.perf_counter()
            copies = 0
            while now - began < seconds:  # memmove lets go of the interpreter's lock
                ctypes.memmove(start + size, start, size)
                copies, now = copies + 1, time.perf_counter()
            moved[index] = copies * 2 * size / (now - began)
            del place  # or the memory could not be closed

    workers = [threading.Thread(target=copy, args=[index]) for index in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(moved)
