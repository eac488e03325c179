"""Warnings about properties of a drive that cost speed or distort its measurement."""

from __future__ import annotations

from collections.abc import Iterator

from ..units import format_bytes
from .drive import Drive

_OVERLAY_FILESYSTEMS = {"overlay", "aufs", "fuse.fuse-overlayfs"}
_NEARLY_FULL = 0.10


def warnings(drive: Drive) -> list[str]:
    """The warnings about *drive*: each is a sentence on the effect and one on the remedy."""
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
    if drive.rotational and not any(disk.startswith(("vd", "xvd")) for disk in disks):
        yield (
            f"{drive.device} reports that it is a rotating disk, which is far too slow to train from. "
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
            "Run `chattr +C` on an empty directory and offload to that, or mount with nodatacow; ignore this if the directory has that flag already."
        )
    if drive.filesystem in ("zfs", "bcachefs"):
        yield (
            f"{drive.filesystem} copies on write: rewriting the same file fragments it, and direct I/O may pass through its cache. "
            "Prefer ext4 or XFS on a separate partition for offloading."
        )
    if "discard" in drive.mount_options:
        yield (
            f"{drive.mount_point} is mounted with discard: the drive erases blocks as soon as a file is deleted, which stalls other transfers on many drives. "
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
            f"The drive's PCIe link runs at {drive.pcie_link}, but drive and slot support {drive.pcie_link_most}. "
            "Look for a shared or shorter slot, a riser, or a power saving setting in the firmware."
        )
    node, cpus, gpus = drive.numa_node, drive.cpu_numa_nodes, drive.gpu_numa_nodes
    if node is not None and cpus and node not in cpus:
        yield (
            f"The drive is on NUMA node {node}, and this process may only run on {_nodes(cpus)}: every byte crosses sockets. "
            f"Start training with `numactl --cpunodebind={node}`, or give a drive of that node."
        )
    if node is not None and gpus and node not in gpus:
        yield (
            f"The drive is on NUMA node {node}, and the GPUs are on {_nodes(gpus)}: transfers between them cross sockets. "
            "Prefer a drive on a GPU's node."
        )


def _nodes(numbers: tuple[int, ...]) -> str:
    return f"node{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
