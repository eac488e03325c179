from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_offload.hardware.drive import Drive, describe
from nvme_offload.hardware.drive_warnings import warnings

PCI = "devices/pci0000:00/0000:00:01.1"


class Machine:
    """A made-up machine: procfs and sysfs as trees of files below a temporary directory, laid out
    as Linux lays them out.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc, self.sys = root / "proc", root / "sys"
        (self.proc / "self").mkdir(parents=True)
        (self.sys / "dev/block").mkdir(parents=True)
        (self.sys / "class/block").mkdir(parents=True)
        self.mounts: list[str] = []

    def mount(
        self,
        point: str,
        number: str,
        filesystem: str,
        source: str,
        options: str = "rw",
        superblock: str = "rw",
        optional: str = "shared:1 ",
    ) -> Path:
        where = self.root / point.lstrip("/")
        where.mkdir(parents=True, exist_ok=True)
        escaped = str(where).replace(" ", "\\040")
        self.mounts.append(
            f"{len(self.mounts) + 20} 1 {number} / {escaped} {options} {optional}- {filesystem} {source} {superblock}"
        )
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts) + "\n")
        return where

    def write(self, place: str, **files: object) -> Path:
        directory = self.sys / place
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (directory / name).write_text(f"{value}\n")
        return directory

    def link(self, directory: Path, name: str, target: Path) -> None:
        (directory / name).symlink_to(os.path.relpath(target, directory))

    def block(
        self, place: str, number: str, slaves: tuple[Path, ...] = (), **files: object
    ) -> Path:
        directory = self.write(place, dev=number, **files)
        self.link(self.sys / "dev/block", number, directory)
        self.link(self.sys / "class/block", directory.name, directory)
        (directory / "slaves").mkdir()
        for slave in slaves:
            self.link(directory / "slaves", slave.name, slave)
        return directory

    def nvme(
        self,
        index: int,
        model: str = "Made-Up Drive 2TB",
        speed: str = "16.0 GT/s PCIe",
        width: object = 4,
        node: int = 0,
        celsius: int = 41,
    ) -> Path:
        slot = f"{PCI}/0000:0{index + 1}:00.0"
        link = {"current_link_speed": speed, "current_link_width": width}
        self.write(slot, numa_node=node, vendor="0x144d", **link)
        controller = f"{slot}/nvme/nvme{index}"
        described = {"firmware_rev": "4B2QJXD7", "transport": "pcie"}
        self.write(controller, model=f"{model}      ", **described)
        self.write(f"{controller}/hwmon{index}", temp1_input=celsius * 1000 + 850)
        disk = self.block(f"{controller}/nvme{index}n1", f"259:{index * 10}", size=3907029168)
        schedulers = "[none] mq-deadline kyber"
        self.queue(disk, max_sectors_kb=128, scheduler=schedulers, nr_requests=1023, rotational=0)
        return disk

    def queue(self, block: Path, **changes: object) -> None:
        values = {"logical_block_size": 512, "physical_block_size": 4096, **changes}
        self.write(str(block.relative_to(self.sys) / "queue"), **values)

    def partition(self, disk: Path, index: int) -> Path:
        number = (disk / "dev").read_text().strip()
        place = str(disk.relative_to(self.sys) / f"{disk.name}p{index}")
        return self.block(place, f"{number}{index}", partition=index)

    def describe(self, path: str | Path) -> Drive:
        return describe(path, proc=self.proc, sys=self.sys)

    def on(
        self, number: str = "259:0", kind: str = "ext4", source: str = "/dev/nvme0n1", **more: str
    ) -> Drive:
        """The drive of a directory on a new mount."""
        return self.describe(
            self.mount(more.pop("point", "/local_nvme"), number, kind, source, **more)
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def sound(drive: Drive) -> Drive:
    """*drive*, with free space."""
    return dataclasses.replace(drive, size_bytes=100, free_bytes=50)


def test_nvme_partition_on_four_lanes(machine: Machine) -> None:
    machine.mount("/", "8:1", "ext4", "/dev/sda1")
    machine.partition(machine.nvme(0), 1)
    where = machine.mount(
        "/local_nvme", "259:01", "ext4", "/dev/nvme0n1p1", "rw,noatime", "rw,stripe=32"
    )
    drive = machine.describe(where)
    space = os.statvfs(where)
    expected = Drive(
        path=str(where),
        mount_point=str(where),
        device="/dev/nvme0n1p1",
        filesystem="ext4",
        mount_options=("rw", "noatime", "stripe=32"),
        layers=("partition",),
        physical_devices=("/dev/nvme0n1",),
        model="Made-Up Drive 2TB",
        firmware="4B2QJXD7",
        transport="pcie",
        rotational=False,
        max_block_kib=128,
        scheduler="none",
        size_bytes=space.f_blocks * space.f_frsize,
        free_bytes=drive.free_bytes,  # moves while the test runs
        pcie_link="16.0 GT/s x4",
        link_bytes_per_second=7_876_923_076,
        numa_node=0,
        temperature_celsius=41.85,
        identity=drive.identity,
    )
    assert drive == expected
    assert re.fullmatch("[0-9a-f]{32}", drive.identity)
    assert drive.name == "made-up-drive-2tb"
    assert not drive.is_memory
    assert not drive.is_network
    assert warnings(sound(drive)) == []
    assert json.loads(json.dumps(drive.as_dict())) == drive.as_dict()


def test_a_serial_number_is_known_again_wherever_it_is_mounted(machine: Machine) -> None:
    """By its number, its layers and its filesystem, and by neither its name nor its path; the
    number itself is not shown.
    """
    first, second = machine.nvme(0), machine.nvme(1)
    for index, disk in enumerate((first, second)):
        (disk / "wwid").write_text(f"eui.00000000000000{index}\n")
    machine.block("devices/virtual/block/dm-0", "254:0", slaves=(first,))
    machine.write("devices/virtual/block/dm-0/dm", name="luks", uuid="CRYPT-LUKS2-00-luks")
    one = machine.describe(machine.mount("/one", "259:0", "ext4", "/dev/nvme0n1")).identity
    assert (
        machine.describe(machine.mount("/again", "259:0", "ext4", "/dev/nvme0n1")).identity == one
    )
    others = [
        machine.describe(machine.mount("/two", "259:10", "ext4", "/dev/nvme1n1")),
        machine.describe(machine.mount("/xfs", "259:0", "xfs", "/dev/nvme0n1")),
        machine.describe(machine.mount("/encrypted", "254:0", "ext4", "/dev/mapper/luks")),
    ]
    assert len({one, *(drive.identity for drive in others)}) == 4
    (first / "wwid").write_text("eui.000000000000000f\n")
    assert machine.describe(machine.root / "one").identity != one
    assert not any("eui" in str(value) for value in others[0].as_dict().values())


def test_virtual_disks_and_loops_are_known_by_their_filesystem(
    mounted: Callable[[str], Path],
) -> None:
    one, other = describe(mounted("ext4")), describe(mounted("ext4-4k"))
    assert one.identity == describe(mounted("ext4") / "lost+found").identity != other.identity
    assert one.layers == other.layers == ("loop",)


@pytest.mark.parametrize(
    ("node", "gpu", "reported"),
    [(0, 0, ""), (7, 7, "cpunodebind=7"), (0, 1, "GPUs are on node 1"), (0, -1, "")],
)
def test_other_numa_nodes_are_reported(
    machine: Machine, node: int, gpu: int, reported: str
) -> None:
    machine.nvme(0, node=node)
    for number, cpus in enumerate(("0-1023", "1024-2047")):
        machine.write(f"devices/system/node/node{number}", cpulist=cpus)
    machine.write(
        "bus/pci/devices/0000:41:00.0", vendor="0x10de", numa_node=gpu, **{"class": "0x030200"}
    )
    # its sound
    machine.write(
        "bus/pci/devices/0000:42:00.0", vendor="0x10de", numa_node=3, **{"class": "0x040300"}
    )
    drive = machine.on()
    assert (drive.numa_node, drive.cpu_numa_nodes, drive.gpu_numa_nodes) == (
        node,
        (0,),
        (gpu,) if gpu >= 0 else (),
    )
    said = warnings(sound(drive))
    assert [warning for warning in said if reported and reported in warning] == said


def test_a_link_below_what_drive_and_slot_can_do_is_reported(machine: Machine) -> None:
    machine.nvme(0, width=2)
    machine.write(f"{PCI}/0000:01:00.0", max_link_speed="32.0 GT/s PCIe", max_link_width=4)
    machine.write(PCI, max_link_speed="16.0 GT/s PCIe", max_link_width=16)
    drive = machine.on()
    assert (drive.pcie_link, drive.pcie_link_most) == ("16.0 GT/s x2", "16.0 GT/s x4")
    (reported,) = warnings(sound(drive))
    assert "runs at 16.0 GT/s x2, but drive and slot support 16.0 GT/s x4" in reported


def test_the_deepest_mount_counts_and_the_last_of_equals(machine: Machine) -> None:
    machine.mount("/", "0:50", "overlay", "overlay")
    machine.mount("/data", "0:51", "nfs4", "server:/export")
    machine.mount("/data", "0:52", "tmpfs", "tmpfs")
    machine.mount("/data/deep", "0:53", "xfs", "/dev/sdz1")
    (machine.root / "data/other").mkdir()
    (machine.root / "database").mkdir()
    (machine.root / "data/deep/er").mkdir()
    assert machine.describe(machine.root / "data/other").filesystem == "tmpfs"
    assert machine.describe(machine.root / "data/deep/er").filesystem == "xfs"
    assert machine.describe(machine.root / "database").filesystem == "overlay"


def test_a_symlink_leads_to_the_drive_and_keeps_its_name(machine: Machine) -> None:
    machine.nvme(0)
    where = machine.mount("/mnt/disk", "259:0", "xfs", "/dev/nvme0n1")
    link = machine.root / "local_nvme"
    link.symlink_to(where)
    drive = machine.describe(link)
    assert (drive.path, drive.mount_point, drive.device) == (str(link), str(where), "/dev/nvme0n1")


def test_spaces_in_mount_points_are_unescaped(machine: Machine) -> None:
    machine.nvme(0)
    where = machine.mount("/my fast drive", "259:0", "ext4", "/dev/nvme0n1", optional="")
    assert machine.describe(where).mount_point == str(where)


def test_raid0_of_two_nvme_adds_the_links(machine: Machine) -> None:
    first, second = machine.nvme(0), machine.nvme(1, node=1, celsius=55)
    array = machine.block("devices/virtual/block/md0", "9:0", slaves=(first, second))
    machine.write("devices/virtual/block/md0/md", level="raid0")
    machine.queue(array, max_sectors_kb=1280, logical_block_size=4096)
    drive = machine.on("9:0", "xfs", "/dev/md0")
    assert drive.device == "/dev/md0"
    assert drive.layers == ("raid0",)
    assert drive.physical_devices == ("/dev/nvme0n1", "/dev/nvme1n1")
    assert drive.model == "2x Made-Up Drive 2TB"
    assert drive.firmware == "4B2QJXD7"
    assert drive.pcie_link == "2x 16.0 GT/s x4"
    assert drive.link_bytes_per_second == 2 * 7_876_923_076
    assert drive.max_block_kib == 1280
    assert drive.numa_node is None
    assert drive.temperature_celsius == 55.85
    assert drive.name == "2x-made-up-drive-2tb"


def test_dm_crypt_on_an_nvme_partition(machine: Machine) -> None:
    partition = machine.partition(machine.nvme(0), 3)
    mapped = machine.block("devices/virtual/block/dm-0", "254:0", slaves=(partition,))
    machine.write(
        "devices/virtual/block/dm-0/dm",
        name="luks-data",
        uuid="CRYPT-LUKS2-0123456789abcdef-luks-data",
    )
    machine.queue(mapped, max_sectors_kb=64)
    drive = machine.on("254:0", "ext4", "/dev/mapper/luks-data")
    assert drive.device == "/dev/mapper/luks-data"
    assert drive.layers == ("dm-crypt", "partition")
    assert drive.physical_devices == ("/dev/nvme0n1",)
    assert (drive.max_block_kib, drive.scheduler) == (64, "none")
    assert any(
        "dm-crypt" in warning
        and "cryptsetup refresh" in warning
        and warning.count(" luks-data`") == 1
        for warning in warnings(drive)
    )


def test_lvm_is_not_taken_for_encryption(machine: Machine) -> None:
    machine.block("devices/virtual/block/dm-1", "254:1", slaves=(machine.nvme(0),))
    machine.write("devices/virtual/block/dm-1/dm", name="vg-scratch", uuid="LVM-abc")
    drive = machine.describe(machine.mount("/scratch", "254:1", "xfs", "/dev/mapper/vg-scratch"))
    assert drive.layers == ("lvm",)
    assert not any("dm-crypt" in warning for warning in warnings(drive))


def test_loop_file_leads_to_the_disk_of_its_file(machine: Machine) -> None:
    machine.partition(machine.nvme(0), 1)
    below = machine.mount("/srv", "259:01", "ext4", "/dev/nvme0n1p1")
    loop = machine.block("devices/virtual/block/loop7", "7:7")
    machine.write("devices/virtual/block/loop7/loop", backing_file=below / "disk.img")
    machine.queue(loop, logical_block_size=4096)
    drive = machine.on("7:7", "xfs", "/dev/loop7")
    assert drive.device == "/dev/loop7"
    assert drive.layers == ("loop", "partition")
    assert drive.physical_devices == ("/dev/nvme0n1",)
    assert drive.model == "Made-Up Drive 2TB"
    assert any("losetup --direct-io=on /dev/loop7" in warning for warning in warnings(drive))


def test_a_loop_on_itself_ends(machine: Machine) -> None:
    where = machine.mount("/round", "7:1", "ext4", "/dev/loop1")
    machine.block("devices/virtual/block/loop1", "7:1")
    machine.write("devices/virtual/block/loop1/loop", backing_file=where / "self.img")
    assert machine.describe(where).physical_devices == ()


def test_virtio_disk_has_no_model_and_its_flag_of_rotation_is_not_believed(
    machine: Machine,
) -> None:
    machine.write(
        "devices/pci0000:00/0000:00:02.0",
        numa_node=-1,
        vendor="0x1af4",
        current_link_speed="2.5 GT/s PCIe",
        current_link_width=1,
    )
    disk = machine.block("devices/pci0000:00/0000:00:02.0/virtio1/block/vda", "254:0")
    queue = {
        "scheduler": "none [mq-deadline] kyber bfq",
        "max_sectors_kb": 4096,
        "nr_requests": 256,
    }
    machine.queue(disk, rotational=1, **queue)
    drive = machine.describe(
        machine.mount("/", "254:0", "ext4", "/dev/vda", superblock="rw,discard")
    )
    assert (drive.device, drive.model, drive.name) == ("/dev/vda", "", "vda")
    assert (drive.scheduler, drive.rotational, drive.numa_node) == ("mq-deadline", True, None)
    assert (drive.pcie_link, drive.link_bytes_per_second) == (None, None)
    reported = warnings(sound(drive))
    assert [warning for warning in reported if "nodiscard" in warning] == reported


def test_emulated_nvme_has_no_link(machine: Machine) -> None:
    machine.nvme(0, model="QEMU NVMe Ctrl", speed="2.5 GT/s PCIe", width=1)
    machine.write(f"{PCI}/0000:01:00.0", vendor="0x1b36")
    drive = machine.on()
    assert (drive.model, drive.pcie_link, drive.link_bytes_per_second) == (
        "QEMU NVMe Ctrl",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("speed", "width", "link", "bytes_per_second"),
    [
        ("2.5 GT/s PCIe", 1, "2.5 GT/s x1", 250_000_000),
        ("8.0 GT/s PCIe", 4, "8.0 GT/s x4", 3_938_461_538),
        ("8 GT/s", 2, "8.0 GT/s x2", 1_969_230_769),
        ("32.0 GT/s PCIe", 4, "32.0 GT/s x4", 15_753_846_153),
        ("64.0 GT/s PCIe", 4, "64.0 GT/s x4", 29_500_000_000),
        ("Unknown", 4, None, None),
        ("16.0 GT/s PCIe", 0, None, None),
        ("16.0 GT/s PCIe", 63, None, None),
        ("16.0 GT/s PCIe", "", None, None),
    ],
)
def test_pcie_link(
    machine: Machine, speed: str, width: object, link: str | None, bytes_per_second: int | None
) -> None:
    machine.nvme(0, speed=speed, width=width)
    drive = machine.on()
    assert (drive.pcie_link, drive.link_bytes_per_second) == (link, bytes_per_second)


def test_native_multipath_hides_the_controller_next_to_the_disk(machine: Machine) -> None:
    slot, described = f"{PCI}/0000:01:00.0", {"model": "Made-Up Enterprise", "firmware_rev": "GDC5"}
    controller = machine.write(f"{slot}/nvme/nvme0", transport="pcie", **described)
    link = {"current_link_speed": "16.0 GT/s PCIe", "current_link_width": 4}
    machine.write(slot, numa_node=1, vendor="0x144d", **link)
    subsystem = machine.write("devices/virtual/nvme-subsystem/nvme-subsys0", **described)
    (subsystem / "nvme0").symlink_to(os.path.relpath(controller, subsystem))
    disk = machine.block("devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1", "259:1")
    machine.queue(disk, scheduler="[none]")
    drive = machine.on("259:1", "xfs", "/dev/nvme0n1")
    assert (drive.model, drive.firmware, drive.transport) == ("Made-Up Enterprise", "GDC5", "pcie")
    assert (drive.pcie_link, drive.numa_node) == ("16.0 GT/s x4", 1)


def test_scsi_vendor_belongs_to_the_model(machine: Machine) -> None:
    machine.write(
        "devices/pci0000:00/host0/0:0:0:0", vendor="Msft    ", model="Virtual Disk    ", rev="1.0 "
    )
    machine.block("devices/pci0000:00/host0/0:0:0:0/block/sdb", "8:16")
    machine.write(
        "devices/pci0000:00/host1/1:0:0:0", vendor="ATA     ", model="Made-Up SATA SSD", rev="2B6Q"
    )
    machine.block("devices/pci0000:00/host1/1:0:0:0/block/sdc", "8:32")
    assert (
        machine.describe(machine.mount("/one", "8:16", "ext4", "/dev/sdb")).model
        == "Msft Virtual Disk"
    )
    second = machine.describe(machine.mount("/two", "8:32", "ext4", "/dev/sdc"))
    assert (second.model, second.firmware) == ("Made-Up SATA SSD", "2B6Q")


def test_btrfs_is_found_by_its_source_with_all_its_devices(machine: Machine) -> None:
    first, second = machine.partition(machine.nvme(0), 2), machine.nvme(1)
    devices = machine.write("fs/btrfs/1b4e28ba/devices")
    for member in (first, second):
        (devices / member.name).symlink_to(os.path.relpath(member, devices))
    options = "rw,ssd,discard=async,subvol=/@scratch"
    drive = machine.on("0:43", "btrfs", "/dev/nvme0n1p2", superblock=options)
    assert drive.device == "/dev/nvme0n1p2"
    assert drive.physical_devices == ("/dev/nvme0n1", "/dev/nvme1n1")
    drive = sound(drive)
    reported = warnings(drive)
    assert [warning for warning in reported if "chattr +C" in warning] == reported
    assert (
        warnings(dataclasses.replace(drive, mount_options=(*drive.mount_options, "nodatacow")))
        == []
    )


def test_btrfs_on_a_mapped_device_is_found_by_its_mapped_name(machine: Machine) -> None:
    machine.block("devices/virtual/block/dm-4", "254:4", slaves=(machine.nvme(0),))
    machine.write("devices/virtual/block/dm-4/dm", name="made-up-luks-name", uuid="CRYPT-LUKS2-00")
    drive = machine.on("0:44", "btrfs", "/dev/mapper/made-up-luks-name")
    assert (drive.device, drive.layers, drive.physical_devices) == (
        "/dev/mapper/made-up-luks-name",
        ("dm-crypt",),
        ("/dev/nvme0n1",),
    )


@pytest.mark.parametrize(
    ("kind", "source", "memory", "network", "said"),
    [
        ("nfs4", "filer:/export/scratch", False, True, "network filesystem"),
        ("fuse.sshfs", "me@host:/data", False, True, "network filesystem"),
        ("virtiofs", "shared", False, True, "network filesystem"),
        ("tmpfs", "tmpfs", True, False, "held in memory"),
        ("ramfs", "none", True, False, "held in memory"),
        ("overlay", "overlay", False, False, "docker run -v"),
        ("zfs", "tank/scratch", False, False, "copies on write"),
    ],
)
def test_filesystems_without_a_device(
    machine: Machine, kind: str, source: str, memory: bool, network: bool, said: str
) -> None:
    drive = machine.on("0:60", kind, source)
    assert (drive.device, drive.filesystem, drive.model) == (source, kind, "")
    assert (drive.is_memory, drive.is_network) == (memory, network)
    assert drive.physical_devices == ()
    reported = warnings(sound(drive))
    assert [warning for warning in reported if said in warning] == reported


def test_compressed_memory_disk_is_memory(machine: Machine) -> None:
    machine.block("devices/virtual/block/zram0", "253:0")
    assert machine.on("253:0", "ext4", "/dev/zram0").is_memory


def test_nothing_to_read_is_no_error(tmp_path: Path) -> None:
    drive = describe(tmp_path, proc=tmp_path / "no-proc", sys=tmp_path / "no-sys")
    assert (drive.path, drive.filesystem, drive.device, drive.model, drive.mount_options) == (
        str(tmp_path),
        "unknown",
        "unknown",
        "",
        (),
    )
    assert drive.size_bytes > 0
    assert drive.name == "unknown"


def test_missing_path_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        describe(tmp_path / "absent")


def test_this_machine() -> None:
    drive = describe("/proc")
    assert (drive.filesystem, drive.mount_point, drive.device) == ("proc", "/proc", "proc")
    here = describe(Path(__file__).parent)
    assert Path(__file__).is_relative_to(here.mount_point)
    assert 0 <= here.free_bytes <= here.size_bytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rotational": True, "physical_devices": ("/dev/sda",)}, "rotating disk"),
        ({"transport": "tcp"}, "NVMe over tcp"),
        ({"scheduler": "mq-deadline"}, "echo none | sudo tee /sys/block/nvme0n1/queue/scheduler"),
        ({"mount_options": ("rw", "discard")}, "remount,nodiscard"),
        ({"free_bytes": 9 * 10**9}, "Only 8.38 GiB of 93.1 GiB are free"),
    ],
)
def test_each_warning_comes_alone_and_says_what_to_do(
    machine: Machine, change: dict[str, object], said: str
) -> None:
    machine.nvme(0)
    drive = machine.on()
    roomy = dataclasses.replace(drive, size_bytes=100 * 10**9, free_bytes=10 * 10**9)
    assert warnings(roomy) == []
    (reported,) = warnings(dataclasses.replace(roomy, **change))  # type: ignore[arg-type]
    assert said in reported
    assert reported.endswith(".")
