"""The filesystem, device and disks under a path, from procfs and sysfs."""

from __future__ import annotations

import collections
import dataclasses
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import sysfs

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK_FILESYSTEM = re.compile(
    r"(fuse\.)?(nfs|nfs4|cifs|smb3|smbfs|9p|virtiofs|vboxsf|afs|ceph|lustre|glusterfs|beegfs|gpfs|orangefs|wekafs"
    r"|sshfs|s3fs|mountpoint-s3|gcsfuse|blobfuse2|juicefs|rclone|davfs|ceph-fuse)"
)
# _IOR(0x15, 0, struct fsuuid2) of linux/fs.h, since Linux 6.9: a length and 16 bytes
_FS_IOC_GETFSUUID = 0x80111500


@dataclasses.dataclass(frozen=True)
class Drive:
    """The filesystem, device and disks under a path. None and "" mean that the kernel does not
    report the value.

    Attributes
    ----------
    path, mount_point : str
        As given, made absolute; of the filesystem.
    device : str
        "/dev/nvme0n1p1", "/dev/mapper/data"; the source of a filesystem without a block device.
    filesystem : str
        Type, as in /proc/mounts.
    mount_options : tuple of str
        Of the mount and of the filesystem.
    layers : tuple of str
        Between filesystem and disks, from the top: "partition", "dm-crypt", "lvm", "raid0", "loop".
    physical_devices : tuple of str
        The disks.
    model, firmware, transport, scheduler : str
        Of the disks, as one text.
    rotational : bool
        Of any disk.
    max_block_kib : int
        Largest request that the kernel does not split, in KiB.
    size_bytes, free_bytes : int
        Of the filesystem; free for this user.
    pcie_link, pcie_link_most : str
        As negotiated now ("16.0 GT/s x4"), and the fastest that drive and slot support.
    link_bytes_per_second : int
        Payload rate of the link in each direction, summed over the disks.
    numa_node : int
        Of the disks, where they share one.
    temperature_celsius : float
        Of the hottest disk.
    cpu_numa_nodes, gpu_numa_nodes : tuple of int
        Nodes of the CPUs that this process may use, and of the machine's NVIDIA GPUs.
    identity : str
        A hash that identifies drive, layers and filesystem. The same after a reboot.
    """

    path: str
    mount_point: str
    device: str
    filesystem: str
    mount_options: tuple[str, ...]
    layers: tuple[str, ...]
    physical_devices: tuple[str, ...]
    model: str
    firmware: str | None
    transport: str | None
    rotational: bool | None
    max_block_kib: int | None
    scheduler: str | None
    size_bytes: int
    free_bytes: int
    pcie_link: str | None
    link_bytes_per_second: int | None
    numa_node: int | None
    temperature_celsius: float | None
    pcie_link_most: str | None = None
    cpu_numa_nodes: tuple[int, ...] = ()
    gpu_numa_nodes: tuple[int, ...] = ()
    identity: str = ""

    @property
    def name(self) -> str:
        """See `short_name`."""
        return short_name(self.model, self.device)

    @property
    def is_memory(self) -> bool:
        """Whether the files live in memory (tmpfs, a RAM disk)."""
        devices = self.physical_devices
        in_memory = [re.match(r"/dev/(ram|zram)\d", device) is not None for device in devices]
        return self.filesystem in _MEMORY_FILESYSTEMS or (bool(in_memory) and all(in_memory))

    @property
    def is_network(self) -> bool:
        """Whether the files live on another machine."""
        return _NETWORK_FILESYSTEM.fullmatch(self.filesystem) is not None

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON types: the `drive` of a profile."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }


def short_name(model: str, device: str) -> str:
    """Make a name for directories from a disk's *model*, or else from its *device*: lower-case
    letters, digits and hyphens, at most 48 characters; "drive" where nothing is left.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", (model or device.removeprefix("/dev/")).lower()).strip("-")
    return slug[:48].strip("-") or "drive"


def filesystem_space(path: str | Path) -> os.statvfs_result:
    """Size and free space of the filesystem of *path*; as much as a filesystem can have where a
    container refuses the call. Raises: OSError. Source: statvfs(3).
    """
    try:
        return os.statvfs(path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
    Path(path).stat()
    blocks = 1 << 40
    return os.statvfs_result((4096, 4096, blocks, blocks, blocks, blocks, blocks, blocks, 0, 255))


def describe(path: str | Path, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Drive:
    """Examine what *path*, which exists, is on, now. *proc* and *sys* are the mount points of
    procfs and sysfs. Raises: OSError. Source: proc_pid_mountinfo(5); the kernel's
    Documentation/ABI, stable/sysfs-block.
    """
    absolute, shorter = Path(path).absolute(), Path(os.path.abspath(path))  # noqa: PTH100
    if shorter.resolve() == absolute.resolve():
        absolute = shorter  # without "..", unless a symlink makes that another place
    status = filesystem_space(absolute)
    sys = sys.resolve()
    mount = _mount_of(absolute.resolve(), proc)
    layers: list[str] = []
    try:
        blocks = _blocks_of(mount, sys)
        disks = [disk for block in blocks for disk in _disks_below(block, proc, sys, layers)]
        lineages = [sysfs.lineage_of(disk, sys) for disk in disks]
    except OSError:  # a container hides a part of /sys, or refuses to list or follow its links
        blocks, disks, lineages = [], [], []
    queues = [disk / "queue" for disk in disks]
    # a partition has the queue of its disk
    whole = [block.parent if (block / "partition").exists() else block for block in blocks]
    links = [sysfs.pcie_link(lineage) for lineage in lineages]
    rates = [link.bytes_per_second for link in links if link]
    warmth = [each for each in map(sysfs.temperature, lineages) if each is not None]
    nodes = {sysfs.number(sysfs.first(lineage, "numa_node")) for lineage in lineages}
    node = nodes.pop() if len(nodes) == 1 else None
    rotational = _numbers(queues, "rotational")
    device = _device_name(blocks[0]) if blocks else mount.source or mount.filesystem

    def of_disks(*names: str) -> str | None:
        return _alternatives([sysfs.first(lineage, *names) for lineage in lineages])

    return Drive(
        path=str(absolute),
        mount_point=mount.point,
        device=device,
        filesystem=mount.filesystem,
        mount_options=mount.options,
        layers=tuple(dict.fromkeys(layers)),
        physical_devices=tuple(dict.fromkeys(map(_device_name, disks))),
        model=_joined(map(sysfs.model, lineages)),
        firmware=of_disks("firmware_rev", "rev"),
        transport=of_disks("transport"),
        rotational=any(rotational) if rotational else None,
        max_block_kib=min(_numbers([b / "queue" for b in whole], "max_sectors_kb"), default=None),
        scheduler=_alternatives(map(sysfs.scheduler, queues)),
        size_bytes=status.f_blocks * status.f_frsize,
        free_bytes=status.f_bavail * status.f_frsize,
        pcie_link=_joined(link and link.text for link in links) or None,
        link_bytes_per_second=sum(rates) if rates and all(links) else None,
        numa_node=node if node is not None and node >= 0 else None,
        temperature_celsius=max(warmth, default=None),
        pcie_link_most=_joined(map(sysfs.most_of_link, lineages)) or None,
        cpu_numa_nodes=sysfs.cpu_nodes(sys),
        gpu_numa_nodes=sysfs.gpu_nodes(sys),
        identity=_identity(absolute, device, mount, layers, lineages),
    )


class _Mount(NamedTuple):
    identity: str
    device_number: str
    point: str
    options: tuple[str, ...]
    filesystem: str
    source: str


def _mount_of(path: Path, proc: Path) -> _Mount:
    """The mount that is visible at *path*, which is absolute and without symlinks."""
    mounts = list(_mounts(proc))
    identity = _mount_identity(path, proc)
    exact = [mount for mount in mounts if mount.identity == identity]
    around = [mount for mount in mounts if path.is_relative_to(mount.point)]
    if exact or around:
        # Of several mounts on one mount point the last listed is on top; sorting keeps their order.
        deepest = exact or sorted(around, key=lambda mount: len(Path(mount.point).parts))
        return deepest[-1]
    device = path.stat().st_dev if path.exists() else 0
    return _Mount("", f"{os.major(device)}:{os.minor(device)}", "", (), "unknown", "")


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in (sysfs.read(proc / "self/mountinfo") or "").split("\n"):
        # A variable number of optional fields precedes the lone hyphen.
        before, hyphen, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not hyphen or len(fields) < 6 or len(rest) < 3:
            continue
        options = [_unescape(option) for option in f"{fields[5]},{rest[2]}".split(",")]
        point, source = _unescape(fields[4]), _unescape(rest[1])
        kept = tuple(dict.fromkeys(options))
        yield _Mount(fields[0], fields[2], point, kept, rest[0], source)


def _mount_identity(path: Path, proc: Path) -> str | None:
    """The mount id from the kernel, right also where one mount hides another."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        match = re.search(
            r"^mnt_id:\s*(\d+)", sysfs.read(proc / f"self/fdinfo/{descriptor}") or "", re.MULTILINE
        )
    finally:
        os.close(descriptor)
    return match[1] if match else None


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _blocks_of(mount: _Mount, sys: Path) -> list[Path]:
    """The sysfs directories of the block devices of *mount*: one, several for btrfs, or none."""
    block = sys / "dev/block" / mount.device_number
    if block.exists():
        return [block.resolve()]
    # btrfs gives each subvolume an anonymous device number: find the disk by the mount source.
    if not mount.source.startswith("/dev/"):
        return []
    name = Path(mount.source).resolve().name
    mapped = (sys / "class/block").glob("dm-*")
    mapped = (entry for entry in mapped if sysfs.read(entry / "dm/name") == name)
    for candidate in (sys / "class/block" / name, *mapped):
        if candidate.exists():
            members = [
                member
                for entry in (sys / "fs/btrfs").glob(f"*/devices/{candidate.name}")
                for member in sorted(entry.parent.iterdir())
            ]
            return [member.resolve() for member in members] or [candidate.resolve()]
    return []


def _disks_below(
    block: Path, proc: Path, sys: Path, layers: list[str], depth: int = 0
) -> list[Path]:
    """The disks below *block*; appends the layers on the way."""
    if depth > 16:  # with a bind mount a loop device can back itself
        return []
    if (block / "partition").exists():
        layers.append("partition")
        return _disks_below(block.parent, proc, sys, layers, depth + 1)
    slaves = block / "slaves"
    below = [slave.resolve() for slave in sorted(slaves.iterdir())] if slaves.is_dir() else []
    if below:
        layers.append(_layer(block))
    elif backing_file := sysfs.read(block / "loop/backing_file"):
        layers.append("loop")
        below = _blocks_of(_mount_of(Path(backing_file), proc), sys)
    if not below:
        return [block]
    return [disk for lower in below for disk in _disks_below(lower, proc, sys, layers, depth + 1)]


def _layer(block: Path) -> str:
    kinds = {"CRYPT": "dm-crypt", "LVM": "lvm", "mpath": "multipath"}
    if identity := sysfs.read(block / "dm/uuid"):
        return kinds.get(identity.partition("-")[0], "device mapper")
    return sysfs.read(block / "md/level") or re.sub(r"\d+$", "", block.name)


def _device_name(block: Path) -> str:
    mapped = sysfs.read(block / "dm/name")
    return f"/dev/mapper/{mapped}" if mapped else "/dev/" + block.name.replace("!", "/")


def _identity(
    path: Path, device: str, mount: _Mount, layers: list[str], lineages: list[list[Path]]
) -> str:
    """A hash, which keeps serial numbers private."""
    serials = [sysfs.serial(lineage) for lineage in lineages]
    between = [layer for layer in dict.fromkeys(layers) if layer != "partition"]
    if serials and all(serials) and "loop" not in layers:
        known = ["disks", *sorted(map(str, serials)), *between, mount.filesystem]
    else:
        # virtual disks and loop devices; copies of a disk image share the UUID
        machine = sysfs.read(Path("/etc/machine-id")) or ""
        uuid = _filesystem_uuid(path) or f"{device} at {mount.point}"
        known = ["filesystem", uuid, *between, mount.filesystem, machine]
    return hashlib.sha256("\0".join(known).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _filesystem_uuid(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        answer = fcntl.ioctl(descriptor, _FS_IOC_GETFSUUID, bytes(17))
        return answer[1 : 1 + answer[0]].hex() or None
    except OSError:  # an older kernel, or a filesystem without a UUID
        return None
    finally:
        os.close(descriptor)


def _joined(texts: Iterable[str | None]) -> str:
    """The distinct texts with their counts: "2x 16.0 GT/s x4"."""
    counts = collections.Counter(filter(None, texts))
    return " + ".join(text if count == 1 else f"{count}x {text}" for text, count in counts.items())


def _alternatives(texts: Iterable[str | None]) -> str | None:
    return ", ".join(dict.fromkeys(filter(None, texts))) or None


def _numbers(queues: list[Path], name: str) -> list[int]:
    """The attribute *name* of the queues that have it as a number."""
    found = (sysfs.number(sysfs.read(queue / name)) for queue in queues)
    return [value for value in found if value is not None]
