"""The SMART log of an NVMe drive, by ioctl: no tool needs to be installed, but only root may read it.

Source: the kernel's include/uapi/linux/nvme_ioctl.h; NVM Express base specification 1.4, figure 194
(SMART / Health Information, log page 02h).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

from .profile import Health

_ADMIN_COMMAND = 0xC0484E41  # _IOWR('N', 0x41, struct nvme_passthru_cmd)
_GET_LOG_PAGE, _SMART, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
LOG_BYTES = 512
UNIT_BYTES = 512_000  # drives count written data in these units
_TIMEOUT_MILLISECONDS = 2000

_CRITICAL = (  # by bit
    "its spare area is low",
    "its temperature is out of range",
    "it is no longer reliable",
    "it is read-only",
    "its backup of memory failed",
)


def read(device: str) -> Health | None:
    """The log of *device*; None if it is not an NVMe drive, or this user may not read it."""
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


def parse(page: bytes) -> Health:
    """Parse the 512 bytes of the log page."""
    (kelvin,) = struct.unpack_from("<H", page, 1)
    warm_minutes = sum(struct.unpack_from("<II", page, 192))
    throttled = sum(struct.unpack_from("<II", page, 224))
    return Health(
        source="SMART log",
        temperature_celsius=kelvin - 273.0 if kelvin else None,
        wear=page[5] / 100,
        written_bytes=int.from_bytes(page[48:64], "little") * UNIT_BYTES,
        # a drive that does not count them counts the minutes above its warning temperatures
        throttled_seconds=throttled or 60 * warm_minutes,
        critical="; ".join(text for bit, text in enumerate(_CRITICAL) if page[0] & 1 << bit),
    )
