"""The SMART log of an NVMe drive, asked of the kernel itself: no tool needs to be installed, but the
kernel answers root alone.

Source: the kernel's include/uapi/linux/nvme_ioctl.h; NVM Express base specification 1.4, figure 194
(SMART / Health Information, log page 02h).
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import os
import struct

_ADMIN_COMMAND = 0xC0484E41  # _IOWR('N', 0x41, struct nvme_passthru_cmd)
_GET_LOG_PAGE, _SMART, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
LOG_BYTES = 512
UNIT_BYTES = 512_000  # in which drives count what is written
_TIMEOUT_MILLISECONDS = 2000


@dataclasses.dataclass(frozen=True)
class SmartLog:
    """What the log says.

    Attributes
    ----------
    critical_warning : int
        A bit for each thing that it warns of.
    temperature_celsius : float or None
        Of the whole drive; None where it reports none.
    wear : float
        The share of its rated life that is used.
    written_bytes : int
        In its life.
    warm_seconds : int
        In its life, above the temperatures that it calls too warm; it counts in minutes.
    throttled_seconds : int
        In its life, in which it slowed itself down for its heat, lightly or heavily.
    """

    critical_warning: int
    temperature_celsius: float | None
    wear: float
    written_bytes: int
    warm_seconds: int
    throttled_seconds: int


def read(device: str) -> SmartLog | None:
    """Ask a drive for its log.

    Parameters
    ----------
    device : str
        The disk, such as "/dev/nvme0n1".

    Returns
    -------
    SmartLog or None
        None where it is no NVMe drive, or this user may not ask.
    """
    if not device.startswith("/dev/nvme"):
        return None
    page = ctypes.create_string_buffer(LOG_BYTES)
    command = struct.pack(
        "<BBHIIIQQIIIIIIIIII",
        *(_GET_LOG_PAGE, 0, 0, _ALL_NAMESPACES, 0, 0, 0),
        *(ctypes.addressof(page), 0, LOG_BYTES, _SMART | (LOG_BYTES // 4 - 1) << 16),
        *(0, 0, 0, 0, 0, _TIMEOUT_MILLISECONDS, 0),
    )
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = fcntl.ioctl(descriptor, _ADMIN_COMMAND, bytearray(command))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return parse(page.raw) if status == 0 else None


def parse(page: bytes) -> SmartLog:
    """Take the log apart.

    Parameters
    ----------
    page : bytes
        The 512 bytes of the log page.

    Returns
    -------
    SmartLog
        Its values in this package's units.
    """
    (kelvin,) = struct.unpack_from("<H", page, 1)
    warm, hot = struct.unpack_from("<II", page, 192)
    throttled = struct.unpack_from("<II", page, 224)
    return SmartLog(
        critical_warning=page[0],
        temperature_celsius=kelvin - 273.0 if kelvin else None,
        wear=page[5] / 100,
        written_bytes=int.from_bytes(page[48:64], "little") * UNIT_BYTES,
        warm_seconds=60 * (warm + hot),
        throttled_seconds=sum(throttled),
    )
