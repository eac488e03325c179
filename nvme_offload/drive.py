"""What a path sits on: filesystem, device and disks, as the kernel tells them, and what that means for offloading."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .units import format_bytes

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
# With or without "fuse." in front.
_NETWORK_FILESYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "vboxsf", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "orangefs", "wekafs"),
    *("sshfs", "s3fs", "mountpoint-s3", "gcsfuse", "blobfuse2", "juicefs", "rclone", "davfs", "ceph-fuse"),
}
_OVERLAY_FILESYSTEMS = {"overlay", "aufs", "fuse.fuse-overlayfs"}
_NEARLY_FULL = 0.10
_FS_IOC_GETFSUUID = 0x80111500  # _IOR(0x15, 0, struct fsuuid2) of linux/fs.h, since Linux 6.9: a length and 16 bytes
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # a PCI vendor, and the class of what shows or computes pictures

# PCI vendors whose devices are software (virtio, QEMU): the link that they report is made up and limits nothing.
_EMULATED_PCI_VENDORS = {"0x1af4", "0x1b36"}

# Share of a PCIe lane's transfers that carries data, after line coding (8b/10b, 128b/130b) or, at 64 GT/s, framing (236 of a flit's 256 bytes).
_LANE_EFFICIENCY = {2.5: 8 / 10, 5.0: 8 / 10, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 236 / 256}


@dataclasses.dataclass(frozen=True)
class Drive:
    """What a path sits on. None and "" stand for what the kernel did not tell.

    path: as given, made absolute. device: "/dev/nvme0n1p1", "/dev/mapper/data", or the source of a filesystem without a block device.
    layers: what lies between filesystem and disks, from the top: "partition", "dm-crypt", "lvm", "raid0", "loop". physical_devices: the disks below.
    size_bytes, free_bytes: of the filesystem; free is what this user may still write. max_block_kib: the largest request that the kernel does not split.
    pcie_link, link_bytes_per_second: as negotiated now, in each direction; the sum over all disks. pcie_link_most: what drive and slot are made for.
    rotational, scheduler, queue_requests, temperature_celsius: of the worst disk. numa_node: where all disks share one.
    cpu_numa_nodes, gpu_numa_nodes: of the processors that this process may use, and of the NVIDIA GPUs of the machine.
    identity: a hash of what tells this drive, with its layers and filesystem, from others; the same after a reboot.
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
    logical_block_bytes: int | None
    physical_block_bytes: int | None
    max_block_kib: int | None
    scheduler: str | None
    queue_requests: int | None
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
        """A short name for directories: the model or else the device, of letters, digits and hyphens."""
        return short_name(self.model, self.device)

    @property
    def is_memory(self) -> bool:
        """Whether there is no drive at all: the files live in memory."""
        in_memory = [re.match(r"/dev/(ram|zram)\d", device) is not None for device in self.physical_devices]
        return self.filesystem in _MEMORY_FILESYSTEMS or (bool(in_memory) and all(in_memory))

    @property
    def is_network(self) -> bool:
        """Whether the files live on another machine."""
        return self.filesystem.removeprefix("fuse.") in _NETWORK_FILESYSTEMS

    def as_dict(self) -> dict[str, Any]:
        """The plain values of a profile's `drive`, with lists as JSON has them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}


def short_name(model: str, device: str) -> str:
    """What `Drive.name` is for a drive with that model and device."""
    slug = re.sub(r"[^a-z0-9]+", "-", (model or device.removeprefix("/dev/")).lower()).strip("-")
    return slug[:48].strip("-") or "drive"


def describe(path: str | Path, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Drive:
    """Say what *path* sits on.

    proc, sys: where procfs and sysfs are mounted. Whatever they lack (a container, a filesystem without a device) is left out of the answer.
    Raises: OSError when *path* itself cannot be looked at.
    Source: proc_pid_mountinfo(5); the kernel's Documentation/ABI, stable/sysfs-block.
    """
    absolute = Path(path).absolute()
    space = os.statvfs(absolute)
    sys = sys.resolve()
    mount = _mount_of(absolute.resolve(), proc)
    blocks = _blocks_of(mount, sys)
    layers: list[str] = []
    disks = [disk for block in blocks for disk in _disks_below(block, proc, sys, layers)]
    lineages = [_lineage(disk, sys) for disk in disks]
    links = [_pcie_link(lineage) for lineage in lineages]
    whole = [block.parent if (block / "partition").exists() else block for block in blocks]
    disk_queues, top_queues = [disk / "queue" for disk in disks], [block / "queue" for block in whole]
    temperatures = [value for lineage in lineages if (value := _temperature(lineage)) is not None]
    nodes = {_number(_first(lineage, "numa_node")) for lineage in lineages}
    node = nodes.pop() if len(nodes) == 1 else None
    rotational = [flag for queue in disk_queues if (flag := _number(_text(queue / "rotational"))) is not None]
    device = _device_name(blocks[0]) if blocks else mount.source or mount.filesystem
    return Drive(
        path=str(absolute),
        mount_point=mount.point,
        device=device,
        filesystem=mount.filesystem,
        mount_options=mount.options,
        layers=tuple(dict.fromkeys(layers)),
        physical_devices=tuple(dict.fromkeys(map(_device_name, disks))),
        model=_joined([_model(lineage) for lineage in lineages]),
        firmware=_alternatives([_first(lineage, "firmware_rev", "rev") for lineage in lineages]),
        transport=_alternatives([_first(lineage, "transport") for lineage in lineages]),
        rotational=any(rotational) if rotational else None,
        logical_block_bytes=_largest(top_queues, "logical_block_size"),
        physical_block_bytes=_largest(top_queues, "physical_block_size"),
        max_block_kib=_smallest(top_queues, "max_sectors_kb"),
        scheduler=_alternatives([_scheduler(queue) for queue in disk_queues]),
        queue_requests=_smallest(disk_queues, "nr_requests"),
        size_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
        pcie_link=_joined([link.text for link in links if link]) or None,
        link_bytes_per_second=sum(link.bytes_per_second for link in links if link) if links and all(links) else None,
        numa_node=node if node is not None and node >= 0 else None,
        temperature_celsius=max(temperatures, default=None),
        pcie_link_most=_joined([most for lineage in lineages if (most := _most_of_link(lineage))]) or None,
        cpu_numa_nodes=_cpu_nodes(sys),
        gpu_numa_nodes=_gpu_nodes(sys),
        identity=_identity(absolute, device, mount, layers, lineages),
    )


def warnings(drive: Drive) -> list[str]:
    """What about *drive* costs speed or makes a measurement mean something else: a sentence on what it means and one on what to do, for each."""
    return list(_warnings(drive))


def _warnings(drive: Drive) -> Iterator[str]:
    disks = [device.removeprefix("/dev/") for device in drive.physical_devices]
    if drive.is_memory:
        yield (
            f"{drive.path} is held in memory ({drive.filesystem}), so offloading to it frees nothing. "
            "Give a directory on an NVMe drive; `findmnt -t ext4,xfs` lists candidates."
        )
    if drive.is_network:
        yield (
            f"{drive.path} is on a network filesystem ({drive.filesystem} from {drive.device}): its speed is the network's, shared with others. "
            "Give a directory on a drive of this machine."
        )
    if drive.transport in ("tcp", "rdma", "fc"):
        yield (
            f"{drive.device} is reached over a network (NVMe over {drive.transport}), whose speed others share. "
            "Prefer a drive in this machine, or sweep again under the load that training will meet."
        )
    if drive.filesystem in _OVERLAY_FILESYSTEMS:
        yield (
            f"{drive.path} is in a container's overlay, whose first write to a file copies it and whose files vanish with the container. "
            "Mount a directory of the host's drive into the container, for example `docker run -v /local_nvme:/local_nvme`, and give that."
        )
    # Virtual disks claim to rotate, or not, as their host happens to be configured.
    if drive.rotational and not any(disk.startswith(("vd", "xvd")) for disk in disks):
        yield (
            f"{drive.device} says that it is a rotating disk, which is far too slow to train from. "
            "Give a directory on an NVMe drive, unless this is a virtual disk that misreports itself."
        )
    if "dm-crypt" in drive.layers:
        yield (
            f"{drive.device} is encrypted (dm-crypt): the CPU encrypts every byte, which competes with training and often limits the speed below the drive's. "
            f"Use an unencrypted partition if your rules allow it; otherwise try "
            f"`cryptsetup refresh --perf-no_read_workqueue --perf-no_write_workqueue {drive.device.rpartition('/')[2]}` and sweep again."
        )
    if "loop" in drive.layers:
        yield (
            f"{drive.device} is a file mounted as a disk (loop): every transfer passes two filesystems, and the page cache unless direct I/O is on. "
            f"Give a directory on the drive itself, or run `losetup --direct-io=on {drive.device}` and sweep again."
        )
    if drive.filesystem == "btrfs" and "nodatacow" not in drive.mount_options:
        yield (
            "btrfs copies on write and checksums: rewriting the same file fragments it and slows down with time. "
            "Run `chattr +C` on an empty directory of its own for offloading, or mount with nodatacow; ignore this if the directory has that flag already."
        )
    if drive.filesystem in ("zfs", "bcachefs"):
        yield (
            f"{drive.filesystem} copies on write: rewriting the same file fragments it, and direct I/O may pass through its cache. "
            "Prefer ext4 or XFS on a partition of its own for offloading."
        )
    if "discard" in drive.mount_options:
        yield (
            f"{drive.mount_point} is mounted with discard: deleting a file tells the drive to erase at once, which stalls other transfers on many drives. "
            f"Run `mount -o remount,nodiscard {drive.mount_point}` and let fstrim.timer do it weekly."
        )
    if drive.size_bytes and drive.free_bytes < _NEARLY_FULL * drive.size_bytes:
        yield (
            f"Only {format_bytes(drive.free_bytes)} of {format_bytes(drive.size_bytes)} are free: flash writes slowly when nearly full. "
            "Free at least a tenth of the drive, run `fstrim` on it and sweep again."
        )
    if drive.scheduler not in (None, "none") and any(disk.startswith("nvme") for disk in disks):
        yield (
            f"The kernel sorts requests for this NVMe drive with the {drive.scheduler} scheduler, which costs CPU time and gains nothing on flash. "
            f"Run `echo none | sudo tee {' '.join(f'/sys/block/{disk}/queue/scheduler' for disk in disks)}` and sweep again."
        )

    if drive.pcie_link_most and drive.pcie_link and drive.pcie_link_most != drive.pcie_link:
        yield (
            f"The drive's PCIe link runs at {drive.pcie_link}, and drive and slot are made for {drive.pcie_link_most}: something between them holds it back. "
            "Look for a shared or shorter slot, a riser, or a power saving setting in the firmware."
        )
    if drive.numa_node is not None and drive.cpu_numa_nodes and drive.numa_node not in drive.cpu_numa_nodes:
        yield (
            f"The drive is on NUMA node {drive.numa_node}, and this process may only run on {_nodes(drive.cpu_numa_nodes)}: every byte crosses sockets. "
            f"Start training with `numactl --cpunodebind={drive.numa_node}`, or give a drive of that node."
        )
    if drive.numa_node is not None and drive.gpu_numa_nodes and drive.numa_node not in drive.gpu_numa_nodes:
        yield (
            f"The drive is on NUMA node {drive.numa_node}, and the GPUs are on {_nodes(drive.gpu_numa_nodes)}: what goes between them crosses sockets. "
            "Prefer a drive on a GPU's node."
        )


def _nodes(numbers: tuple[int, ...]) -> str:
    return f"node{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


class _Mount(NamedTuple):
    identity: str
    device_number: str
    point: str
    options: tuple[str, ...]
    filesystem: str
    source: str


class _Link(NamedTuple):
    text: str
    bytes_per_second: int


def _mount_of(path: Path, proc: Path) -> _Mount:
    """The mount that shows at *path*, which is absolute and without symlinks."""
    mounts = list(_mounts(proc))
    identity = _mount_identity(path, proc)
    exact = [mount for mount in mounts if mount.identity == identity]
    around = [mount for mount in mounts if path.is_relative_to(mount.point)]
    if exact or around:
        # Of several mounts on one point the last one listed lies on top, and max() keeps the first of equals.
        return exact[-1] if exact else max(reversed(around), key=lambda mount: len(Path(mount.point).parts))
    device = path.stat().st_dev if path.exists() else 0
    return _Mount("", f"{os.major(device)}:{os.minor(device)}", "", (), "unknown", "")


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in (_text(proc / "self/mountinfo") or "").split("\n"):
        # The optional fields between the options and the lone hyphen vary in number.
        before, hyphen, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not hyphen or len(fields) < 6 or len(rest) < 3:
            continue
        options = [_unescape(option) for option in f"{fields[5]},{rest[2]}".split(",")]
        yield _Mount(fields[0], fields[2], _unescape(fields[4]), tuple(dict.fromkeys(options)), rest[0], _unescape(rest[1]))


def _mount_identity(path: Path, proc: Path) -> str | None:
    """The kernel's own answer, right also where one mount hides another; None where this procfs does not say."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        match = re.search(r"^mnt_id:\s*(\d+)", _text(proc / f"self/fdinfo/{descriptor}") or "", re.MULTILINE)
    finally:
        os.close(descriptor)
    return match[1] if match else None


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _blocks_of(mount: _Mount, sys: Path) -> list[Path]:
    """The sysfs directories of the devices that *mount* is on: one, several for btrfs, none for a filesystem without a device."""
    block = sys / "dev/block" / mount.device_number
    if block.exists():
        return [block.resolve()]
    # btrfs gives every subvolume an anonymous device number; what it was mounted from is the way to its disk.
    if not mount.source.startswith("/dev/"):
        return []
    name = Path(mount.source).resolve().name
    mapped = [entry for entry in (sys / "class/block").glob("dm-*") if _text(entry / "dm/name") == name]
    for candidate in (sys / "class/block" / name, *mapped):
        if candidate.exists():
            members = [member for entry in (sys / "fs/btrfs").glob(f"*/devices/{candidate.name}") for member in sorted(entry.parent.iterdir())]
            return [member.resolve() for member in members] or [candidate.resolve()]
    return []


def _disks_below(block: Path, proc: Path, sys: Path, layers: list[str], depth: int = 0) -> list[Path]:
    """The disks under *block*, noting each layer passed. A loop device may sit on itself by way of a bind mount, hence the limit on depth."""
    if depth > 16:
        return []
    if (block / "partition").exists():
        layers.append("partition")
        return _disks_below(block.parent, proc, sys, layers, depth + 1)
    slaves = block / "slaves"
    below = [slave.resolve() for slave in sorted(slaves.iterdir())] if slaves.is_dir() else []
    if below:
        layers.append(_layer(block))
    elif backing_file := _text(block / "loop/backing_file"):
        layers.append("loop")
        below = _blocks_of(_mount_of(Path(backing_file), proc), sys)
    if not below:
        return [block]
    return [disk for lower in below for disk in _disks_below(lower, proc, sys, layers, depth + 1)]


def _layer(block: Path) -> str:
    kinds = {"CRYPT": "dm-crypt", "LVM": "lvm", "mpath": "multipath"}
    if identity := _text(block / "dm/uuid"):
        return kinds.get(identity.partition("-")[0], "device mapper")
    return _text(block / "md/level") or re.sub(r"\d+$", "", block.name)


def _device_name(block: Path) -> str:
    mapped = _text(block / "dm/name")
    return f"/dev/mapper/{mapped}" if mapped else "/dev/" + block.name.replace("!", "/")


def _lineage(disk: Path, sys: Path) -> list[Path]:
    """*disk* and the devices that it hangs from, nearest first."""
    lineage = [disk, *disk.parents]
    # With native NVMe multipath a disk hangs from a virtual subsystem, and the controllers with their PCI slots beside it.
    if disk.parent.name.startswith("nvme-subsys"):
        controllers = sorted(entry.resolve() for entry in disk.parent.glob("nvme*") if (entry / "transport").exists())
        lineage += [ancestor for controller in controllers[:1] for ancestor in (controller, *controller.parents)]
    return [ancestor for ancestor in lineage if ancestor.is_relative_to(sys / "devices")]


def _model(lineage: list[Path]) -> str:
    for device in lineage:
        if model := _text(device / "model"):
            vendor = _text(device / "vendor") or ""
            # SATA disks carry the bus instead of a vendor there, and PCI devices a number.
            return model if vendor in ("", "ATA") or vendor.startswith("0x") else f"{vendor} {model}"
    return ""


def _pcie_link(lineage: list[Path]) -> _Link | None:
    if not (lineage and lineage[0].name.startswith("nvme")):
        return None  # Other disks share their controller's link.
    for device in lineage:
        speed_text, width = _text(device / "current_link_speed"), _number(_text(device / "current_link_width"))
        if speed_text is None or width is None:
            continue
        match = re.match(r"(\d+(?:\.\d+)?) GT/s", speed_text)
        speed = float(match[1]) if match else 0.0
        if speed not in _LANE_EFFICIENCY or not 1 <= width <= 32 or _text(device / "vendor") in _EMULATED_PCI_VENDORS:
            return None
        return _Link(f"{speed} GT/s x{width}", int(speed * 1e9 * width * _LANE_EFFICIENCY[speed] / 8))
    return None


def _most_of_link(lineage: list[Path]) -> str | None:
    """The fastest link that both ends are made for; None where this one is not shown (see `_pcie_link`)."""
    slots = [device for device in lineage if (device / "current_link_speed").exists()]
    if _pcie_link(lineage) is None or not slots:
        return None
    ends = [device for device in (slots[0], slots[0].parent) if (device / "max_link_speed").exists()]  # the drive, and the port above it
    speeds = [float(match[1]) for device in ends if (match := re.match(r"(\d+(?:\.\d+)?) GT/s", _text(device / "max_link_speed") or ""))]
    widths = [width for device in ends if (width := _number(_text(device / "max_link_width")))]
    return f"{min(speeds)} GT/s x{min(widths)}" if speeds and widths else None


def _cpu_nodes(sys: Path) -> tuple[int, ...]:
    """The NUMA nodes of the processors that this process may use; none where there is but one node to tell of."""
    nodes = {int(place.name[4:]): _cpus(_text(place / "cpulist") or "") for place in (sys / "devices/system/node").glob("node[0-9]*")}
    usable = os.sched_getaffinity(0)
    return tuple(sorted(node for node, cpus in nodes.items() if cpus & usable)) if len(nodes) > 1 else ()


def _cpus(text: str) -> set[int]:
    """The numbers in a list as the kernel writes it: "0-3,8"."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _gpu_nodes(sys: Path) -> tuple[int, ...]:
    devices = list((sys / "bus/pci/devices").glob("*"))
    gpus = [device for device in devices if _text(device / "vendor") == _NVIDIA and (_text(device / "class") or "").startswith(_DISPLAY)]
    return tuple(sorted({node for gpu in gpus if (node := _number(_text(gpu / "numa_node"))) is not None and node >= 0}))


def _identity(path: Path, device: str, mount: _Mount, layers: list[str], lineages: list[list[Path]]) -> str:
    """A hash, since a serial number is nobody else's business.

    Disks that tell their serial number are known by it. Others, virtual disks and loop devices are known by their filesystem, whose number the
    copies of a disk image share: there the machine counts as well.
    """
    serials = [_serial(lineage) for lineage in lineages]
    between = [layer for layer in dict.fromkeys(layers) if layer != "partition"]
    if serials and all(serials) and "loop" not in layers:
        known = ["disks", *sorted(map(str, serials)), *between, mount.filesystem]
    else:
        machine = _text(Path("/etc/machine-id")) or ""
        known = ["filesystem", _filesystem_uuid(path) or f"{device} at {mount.point}", *between, mount.filesystem, machine]
    return hashlib.sha256("\0".join(known).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _serial(lineage: list[Path]) -> str | None:
    if lineage[0].name.startswith(("vd", "xvd")) or any(_text(device / "vendor") in _EMULATED_PCI_VENDORS for device in lineage):
        return None  # what a host names its virtual disks is no serial number
    return _first(lineage[:3], "wwid", "serial")  # of the disk, its controller or its target


def _filesystem_uuid(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        answer = fcntl.ioctl(descriptor, _FS_IOC_GETFSUUID, bytes(17))
        return answer[1 : 1 + answer[0]].hex() or None
    except OSError:  # an older kernel, or a filesystem without a number
        return None
    finally:
        os.close(descriptor)


def _temperature(lineage: list[Path]) -> float | None:
    for device in lineage:
        for pattern in ("hwmon*/temp1_input", "hwmon/hwmon*/temp1_input"):
            for sensor in sorted(device.glob(pattern)):
                if (millidegrees := _number(_text(sensor))) is not None:
                    return millidegrees / 1000
    return None


def _scheduler(queue: Path) -> str | None:
    text = _text(queue / "scheduler")
    match = re.search(r"\[([^]]+)\]", text or "")
    return match[1] if match else text


def _first(lineage: list[Path], *names: str) -> str | None:
    return next((text for device in lineage for name in names if (text := _text(device / name))), None)


def _joined(texts: list[str]) -> str:
    """Each different text once, with its count: "2x 16.0 GT/s x4"."""
    counts = {text: texts.count(text) for text in texts if text}
    return " + ".join(text if count == 1 else f"{count}x {text}" for text, count in counts.items())


def _alternatives(texts: list[str | None]) -> str | None:
    return ", ".join(dict.fromkeys(text for text in texts if text)) or None


def _largest(queues: list[Path], name: str) -> int | None:
    return max((value for queue in queues if (value := _number(_text(queue / name))) is not None), default=None)


def _smallest(queues: list[Path], name: str) -> int | None:
    return min((value for queue in queues if (value := _number(_text(queue / name))) is not None), default=None)


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    """What the file says, or None where there is no such file, as on any kernel but the one at hand."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return None
