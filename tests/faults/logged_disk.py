"""A disk that keeps a log: a FUSE filesystem of one file, `disk`, for a loop device to be made of.
Every write and every flush goes to the log, in order.

Run as `logged_disk.py IMAGE MOUNTPOINT LOG` with the right to mount; it says "ready", and ends when
it is unmounted. The image is only read.

Source: linux/fuse.h, version 7.31 of the protocol.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS, _RELEASE, _FSYNC = (
    1,
    2,
    3,
    4,
    14,
    15,
    16,
    17,
    18,
    20,
)
_FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _DESTROY, _BATCH_FORGET = (
    25,
    26,
    27,
    28,
    29,
    36,
    38,
    42,
)
_HEADER = struct.Struct("<IIQQIIIHH")
# offset and bytes of a write, which follow; of a flush, two times _FLUSHED
_RECORD = struct.Struct("<QQ")
_FLUSHED = (1 << 64) - 1
_MOST_BYTES = 1 << 20
_ROOT, _DISK = 1, 2


class Write(NamedTuple):
    """*data* that came to *offset*."""

    offset: int
    data: bytes


def read_log(log: bytes) -> Iterator[Write | None]:
    """The writes, and None for each flush."""
    at = 0
    while at < len(log):
        offset, nbytes = _RECORD.unpack_from(log, at)
        at += _RECORD.size
        if offset == _FLUSHED:
            yield None
        else:
            yield Write(offset, log[at : at + nbytes])
            at += nbytes


def serve(image: Path, mountpoint: Path, log: Path) -> None:
    disk = bytearray(image.read_bytes())
    # PR_SET_PDEATHSIG: not without the one who wanted it
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    channel = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={channel},rootmode=40000,user_id=0,group_id=0".encode()
    if (
        ctypes.CDLL(None, use_errno=True).mount(
            b"logged", os.fsencode(mountpoint), b"fuse", 0, options
        )
        != 0
    ):
        sys.exit(f"no FUSE here: {os.strerror(ctypes.get_errno())}")
    print("ready", flush=True)
    with log.open("wb", buffering=0) as file:
        while True:
            try:
                request = os.read(channel, _MOST_BYTES + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return  # ENODEV: unmounted
            _, operation, unique, node, *_ = _HEADER.unpack_from(request)
            if operation in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            answer = _answer(operation, node, memoryview(request)[_HEADER.size :], disk, file.write)
            code, data = (-answer, b"") if isinstance(answer, int) else (0, answer)
            os.write(channel, struct.pack("<IiQ", 16 + len(data), code, unique) + data)


def _answer(
    operation: int, node: int, body: memoryview, disk: bytearray, record: object
) -> bytes | int:
    if operation == _INIT:
        big_writes, max_pages = 1 << 5, 1 << 22
        return struct.pack(
            "<IIIIHHIIHHI",
            7,
            31,
            0,
            big_writes | max_pages,
            16,
            12,
            _MOST_BYTES,
            1,
            _MOST_BYTES // 4096,
            0,
            0,
        ) + bytes(28)
    if operation == _LOOKUP:
        return (
            struct.pack("<QQQQII", _DISK, 0, 3600, 3600, 0, 0) + _attributes(_DISK, disk)
            if bytes(body) == b"disk\0"
            else errno.ENOENT
        )
    if operation in (_GETATTR, _SETATTR):
        return struct.pack("<QII", 3600, 0, 0) + _attributes(node, disk)
    if operation in (_OPEN, _OPENDIR):
        return bytes(16)
    if operation == _READ:
        _, offset, nbytes = struct.unpack_from("<QQI", body)
        return bytes(disk[offset : offset + nbytes])
    if operation == _WRITE:
        _, offset, nbytes = struct.unpack_from("<QQI", body)
        data = bytes(body[40 : 40 + nbytes])
        disk[offset : offset + nbytes] = data
        record(_RECORD.pack(offset, nbytes) + data)  # type: ignore[operator]
        return struct.pack("<II", nbytes, 0)
    if operation == _FSYNC:
        record(_RECORD.pack(_FLUSHED, _FLUSHED))  # type: ignore[operator]
        return b""
    if operation == _STATFS:
        return struct.pack("<QQQQQIIII", 1, 0, 0, 2, 0, 4096, 255, 4096, 0) + bytes(24)
    return b"" if operation in (_FLUSH, _RELEASE, _READDIR, _RELEASEDIR, _DESTROY) else errno.ENOSYS


def _attributes(node: int, disk: bytearray) -> bytes:
    mode, size = (stat.S_IFDIR | 0o755, 0) if node == _ROOT else (stat.S_IFREG | 0o600, len(disk))
    return struct.pack(
        "<QQQQQQIIIIIIIIII", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
    )


if __name__ == "__main__":
    serve(*map(Path, sys.argv[1:]))
