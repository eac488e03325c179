"""What Linux tells of a process: memory by kind, its peak, what it moved to and from drives. Pure
but for the functions that open /proc.

Source: proc_pid_status(5), proc_pid_smaps(5), proc_pid_io(5), proc_pid_clear_refs(5).
"""

from __future__ import annotations

import collections
import contextlib
import re
from pathlib import Path
from typing import NamedTuple

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(?P<path>.*)")
_LARGE_BYTES = 64 << 20


class Memory(NamedTuple):
    """Bytes that are resident. *locked* and *pinned* are among the others; memory that a GPU's
    driver pins may be in neither.
    """

    resident: int
    peak: int
    anonymous: int
    file: int
    shared: int
    locked: int
    pinned: int


class Traffic(NamedTuple):
    """Bytes from and to drives, whatever asked for them in this process."""

    read: int
    written: int


_STATUS_FIELDS = ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")


def parse_status(text: str) -> Memory | None:
    """What /proc/PID/status says; None of a process that has ended."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        return None
    return Memory(*(int(fields.get(name, "0 kB").split()[0]) * 1024 for name in _STATUS_FIELDS))


def parse_io(text: str) -> Traffic:
    """What /proc/PID/io says."""
    fields = dict(line.split(":") for line in text.splitlines())
    return Traffic(int(fields["read_bytes"]), int(fields["write_bytes"]))


def parse_smaps(text: str) -> dict[str, int]:
    """Resident bytes in /proc/PID/smaps by what they are: files by kind, and anonymous memory that
    is locked, in large mappings or in small ones.
    """
    totals: collections.Counter[str] = collections.Counter()
    path, resident, locked = "", 0, 0
    for line in [*text.splitlines(), "0-0 end 0 0 0"]:
        if match := _MAPPING.fullmatch(line):
            if resident:
                totals[_kind(path, resident, locked)] += resident
            path, resident, locked = match["path"], 0, 0
        elif line.startswith("Rss:"):
            resident = int(line.split()[1]) * 1024
        elif line.startswith("Locked:"):
            locked = int(line.split()[1]) * 1024
    return dict(totals.most_common())


def _kind(path: str, resident: int, locked: int) -> str:
    if locked:
        return "locked"
    if path.startswith("/dev/"):
        return "of a device or shared"
    if path.startswith("/"):
        return "libraries and files"
    if path == "[heap]":
        return "heap"
    return (
        "anonymous, mappings of 64 MiB and more"
        if resident >= _LARGE_BYTES
        else "anonymous, smaller"
    )


def memory_of(process: int | str) -> Memory | None:
    """Of a process by its number, or "self"; None when it has ended."""
    try:
        return parse_status(Path(f"/proc/{process}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def traffic() -> Traffic:
    """Of this process so far."""
    try:
        return parse_io(Path("/proc/self/io").read_text())
    except OSError:  # a kernel without it
        return Traffic(0, 0)


def restart_peak() -> None:
    """Let the peak begin anew from what is resident now; where the kernel cannot, it goes on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
