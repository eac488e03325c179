"""The checks of `nvme-offload doctor`: each is a function that returns its findings with a remedy."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import importlib.metadata
import os
import platform
import re
import resource
import shlex
import shutil
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nvme_offload import __version__
from nvme_offload.ds_config import edit as ds_config
from nvme_offload.errors import OffloadError, UnsupportedError
from nvme_offload.hardware import profile_shelf, sysfs
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.drive_warnings import warnings as drive_warnings
from nvme_offload.hardware.machine import available_bytes, gpu_count, gpus
from nvme_offload.hardware.profile import Profile
from nvme_offload.hardware.profile_grade import grade
from nvme_offload.units import format_bytes, format_speed
from nvme_offload.zero3 import NEWEST_DEEPSPEED, OLDEST_DEEPSPEED, is_too_new, is_too_old

Status = Literal["ok", "note", "warning", "problem"]

_LOCKED_BYTES = 64 << 20
_MARKS = {"ok": "ok     ", "note": "note   ", "warning": "warning", "problem": "PROBLEM"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check: "ok"; "note", for information; "warning", it works but could be
    better; "problem", it does not work.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


class Precisions(NamedTuple):
    """The 16-bit precisions for which the CPU has instructions; *vectors* are the widest, such as
    "AVX2".
    """

    vectors: str
    bf16: bool
    fp16: bool


def all_of(paths: Sequence[str], config: Path | None = None) -> Iterator[Finding]:
    """Every check, then the checks of *paths*; *config* is the DeepSpeed configuration to train
    with.
    """
    versions = f"{__version__}, Python {platform.python_version()}, Linux {platform.release()}"
    yield Finding("nvme_offload", "ok", versions)
    missing = extension()
    if missing is not None:
        yield missing
    else:
        yield backend("libaio")
    yield aio_requests(_number("/proc/sys/fs/aio-max-nr"), _number("/proc/sys/fs/aio-nr"))
    if missing is None:
        yield backend("io_uring")
        yield locked_memory(_lock(), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield huge_pages(sysfs.read(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    yield Finding("host memory", "ok", f"{format_bytes(available_bytes())} available")
    if missing is None:
        yield gpu_registration()
    yield torch_version(_version("torch"))
    if missing is None:
        yield packing()
    wanted = "" if config is None else precision_of(ds_config.read(config))
    yield processor(precisions(), gpu_count() > 0, wanted)
    yield deepspeed_version(_version("deepspeed"))
    yield compilers(gpu_count() > 0)
    for path in paths:
        yield from drive(path, opens_files=missing is None)
    if not paths:
        remedy = "give --path DIR, a directory on the drive to offload to"
        yield Finding("drive", "note", "not checked", remedy)


def text(found: Sequence[Finding]) -> str:
    """A line for each finding, and one for its remedy."""
    width = max(len(each.name) for each in found)
    first, rest = " " * (width + 11) + "-> ", " " * (width + 14)
    lines = []
    for each in found:
        lines.append(f"{_MARKS[each.status]}  {each.name.ljust(width)}  {each.found}")
        lines += textwrap.wrap(each.remedy, 140, initial_indent=first, subsequent_indent=rest)
    count = collections.Counter(each.status for each in found)
    if problems := count["problem"]:
        lines += ["", f"{problems} of these must be put right before anything can be offloaded."]
    else:
        better = f" {count['warning']} of these could be better." if count["warning"] else ""
        lines += ["", f"It works.{better}"]
    return "\n".join(lines)


def extension() -> Finding | None:
    """The finding where the compiled part does not load; without it some checks cannot run."""
    try:
        importlib.import_module("nvme_offload.extension")
    except UnsupportedError as error:
        found, _, remedy = str(error).partition("; ")
        return Finding("extension", "problem", found, remedy)
    return None


def backend(name: str) -> Finding:
    """Whether an engine runs on that kernel interface."""
    from nvme_offload.io.engine import Engine

    try:
        Engine(AioConfig(backend=name)).close()
    except UnsupportedError as error:
        if name == "libaio":
            remedy = "nothing works without it, but for the slow posix backend"
            return Finding(name, "problem", str(error), remedy)
        return Finding(name, "note", str(error), 'libaio does as well; leave "backend" as it is')
    return Finding(name, "ok", "works")


def aio_requests(most: int | None, in_use: int | None) -> Finding:
    """Whether the kernel's limit fs.aio-max-nr, of the whole machine, suffices for the queues of
    the ranks.
    """
    if most is None or in_use is None:
        return Finding("aio-max-nr", "note", "the kernel does not report it")
    free = most - in_use
    found = f"{free} of {most} requests are free"
    remedy = "sudo sysctl fs.aio-max-nr=1048576, and the same line in /etc/sysctl.d to keep it"
    if free >= 16384:
        return Finding("aio-max-nr", "ok", found)
    return Finding("aio-max-nr", "problem" if free < 256 else "warning", found, remedy)


def locked_memory(locked_bytes: int, limit: int) -> Finding:
    """Whether memory can be locked; a trial locked *locked_bytes*."""
    allowed = "no limit" if limit == resource.RLIM_INFINITY else f"a limit of {format_bytes(limit)}"
    if locked_bytes >= _LOCKED_BYTES:
        small = limit != resource.RLIM_INFINITY and limit < 1 << 30 and os.geteuid() != 0
        if not small:
            return Finding("memlock", "ok", f"memory can be locked, {allowed}")
    found = f"{format_bytes(locked_bytes)} could be locked, {allowed}; without a GPU unlocked memory may be swapped out, and DeepSpeed's buffers must be locked"
    remedy = "ulimit -l unlimited (in /etc/security/limits.conf: memlock unlimited); in a container --ulimit memlock=-1"
    return Finding("memlock", "warning", found, remedy)


def huge_pages(enabled: str | None) -> Finding:
    """Whether the kernel grants huge pages; *enabled* is its setting, "always [madvise] never"."""
    if enabled is None:
        return Finding("huge pages", "note", "this kernel has no transparent huge pages")
    if "[never]" in enabled:
        remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding(
            "huge pages", "warning", "off: pinning and every transfer take longer", remedy
        )
    return Finding("huge pages", "ok", f"granted ({enabled.partition('[')[2].partition(']')[0]})")


def gpu_registration() -> Finding:
    """Whether host memory can be registered with CUDA: copies of other memory are five times slower."""
    count = gpu_count()
    if not count:
        remedy = "in a container: --gpus all"
        return Finding("GPU", "note", "none, or its driver does not show it here", remedy)
    found = f"{count}x {', '.join(dict.fromkeys(gpu.name for gpu in gpus())) or 'NVIDIA'}"
    remedy = "install a CUDA build of torch that matches the driver"
    try:
        from nvme_offload.io.pool import PinnedPool

        pool = PinnedPool(1 << 20, pin=True)
        pinned = pool.pinned
        pool.close()
    except (OffloadError, ImportError, MemoryError) as error:
        found = f"{found}; memory cannot be registered with it: {error}"
        return Finding("GPU", "warning", found, remedy)
    if pinned != "cuda":
        return Finding("GPU", "warning", f"{found}, which torch does not see", remedy)
    return Finding("GPU", "ok", f"{found}; host memory registers with it")


def packing() -> Finding:
    """Whether states are packed by Triton on the GPUs."""
    try:
        import torch

        from nvme_offload.optimizer_states.on_gpu import fault
    except ImportError:
        return Finding("packing", "note", "not checked: torch is not installed")
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not devices:
        return Finding("packing", "note", "on processors: torch sees no GPU")
    try:
        faults = sorted({why for device in devices if (why := fault(device)) is not None})
    except torch.cuda.OutOfMemoryError:
        return Finding("packing", "note", "not checked: a GPU has no memory left for a trial")
    if faults:
        found = f"several times as slow as it could be on the GPU: {'; '.join(faults)}"
        remedy = "install gcc and Python's headers (python3-dev), or the Triton that belongs to this torch"
        return Finding("packing", "warning", found, remedy)
    return Finding("packing", "ok", "on the GPU, by Triton")


def torch_version(version: str | None) -> Finding:
    """Whether torch is installed."""
    if version:
        return Finding("torch", "ok", version)
    found = "not installed; nvme-sweep works without"
    return Finding("torch", "warning", found, "pip install torch")


def precisions() -> Precisions | None:
    """The precisions that torch reports to DeepSpeed; None without torch. ATEN_CPU_CAPABILITY and
    ONEDNN_MAX_CPU_ISA lower the answer. Source: deepspeed/accelerator/cpu_accelerator.py.
    """
    try:
        import torch
    except ImportError:
        return None
    mkldnn = torch.ops.mkldnn
    return Precisions(
        torch.backends.cpu.get_cpu_capability(),
        mkldnn._is_mkldnn_bf16_supported(),
        mkldnn._is_mkldnn_fp16_supported(),
    )


def processor(native: Precisions | None, has_gpu: bool, wanted: str) -> Finding:
    """Whether the CPU suits training without a GPU; *wanted* is the precision of a configuration,
    or "".
    """
    if native is None:
        return Finding("processor", "note", "not checked: torch is not installed")
    lacking = [name for name, there in (("bf16", native.bf16), ("fp16", native.fp16)) if not there]
    found = f"{native.vectors}, {'without' if lacking else 'with'} instructions for {' and '.join(lacking or ('bf16', 'fp16'))}"
    meant = {"bf16": "bf16 is many times slower than fp32", "fp16": "DeepSpeed refuses fp16"}
    costs = [meant[name] for name in lacking if wanted in ("", name)]
    if has_gpu or not costs:
        return Finding("processor", "ok", found)
    found = f"{found}: without a GPU {', and '.join(costs)}"
    if wanted == "fp16":
        remedy = 'enable "bf16" in place of "fp16", or train on a GPU'
        return Finding("processor", "problem", found, remedy)
    return Finding("processor", "warning", found, "train on a GPU, or in fp32")


def precision_of(config: Mapping[str, Any]) -> str:
    """The precision of a DeepSpeed configuration: "bf16", "fp16", or "fp32"; "" for "auto"."""
    enabled = {
        name: section.get("enabled", True)
        for name in ("bf16", "fp16")
        if isinstance(section := config.get(name), dict)
    }
    named = next((name for name, value in enabled.items() if value is True), "")
    return named or ("" if "auto" in enabled.values() else "fp32")


def deepspeed_version(version: str | None) -> Finding:
    """Whether this release of DeepSpeed is supported by `zero3`."""
    if version is None:
        without = "not installed; everything but zero3 works without"
        return Finding("DeepSpeed", "note", without, 'pip install "nvme-offload[deepspeed]"')
    remedy = f"pip install deepspeed=={NEWEST_DEEPSPEED}"
    if is_too_old(version):
        found = f"{version}; zero3 needs {OLDEST_DEEPSPEED} or newer"
        return Finding("DeepSpeed", "warning", found, remedy)
    if is_too_new(version):
        found = f"{version}; zero3 was tried up to {NEWEST_DEEPSPEED}, and says at enable() what another lacks"
        return Finding("DeepSpeed", "warning", found, remedy)
    return Finding("DeepSpeed", "ok", version)


def compilers(has_gpu: bool, which: Callable[[str], str | None] = shutil.which) -> Finding:
    """Whether DeepSpeed can compile its ops at their first use; offloading needs CPU Adam."""
    wanted = {"c++": "g++ (Debian: build-essential)"}
    wanted["ninja"] = "ninja (pip install ninja, on the PATH)"
    if has_gpu:
        wanted["nvcc"] = "the CUDA toolkit"
    lacking = {name: remedy for name, remedy in wanted.items() if which(name) is None}
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacking["Python.h"] = "Python's headers (Debian: python3-dev)"
    if not lacking:
        there = f"{', '.join(wanted)} for the ops that DeepSpeed builds at their first use"
        return Finding("compilers", "ok", there)
    found = f"{', '.join(lacking)} not found: DeepSpeed cannot build its CPU Adam at the first step"
    remedy = f"install {', '.join(lacking.values())}; or use an optimizer of torch, and its ops prebuilt (DS_BUILD_CPU_ADAM=1)"
    return Finding("compilers", "warning", found, remedy)


def drive(path: str, *, opens_files: bool = True) -> Iterator[Finding]:
    """What *path* sits on, direct I/O on it if this process *opens_files*, and its profile."""
    name = f"drive {path}"
    try:
        seen = describe(path)
    except OSError as error:
        found = f"cannot be examined: {error.strerror}"
        yield Finding(name, "problem", found, "give a directory on the drive")
        return
    what = ", ".join(filter(None, (seen.filesystem, seen.device, seen.model, *seen.layers)))
    free = format_bytes(seen.free_bytes)
    yield Finding(name, "problem" if seen.is_memory else "ok", f"{what}; {free} free")
    if opens_files:
        yield direct_io(path, name)
    for warning in drive_warnings(seen):
        found, _, remedy = warning.partition(". ")
        yield Finding(name, "warning", found, remedy)
    try:
        profile = profile_shelf.find(path)
    except (OffloadError, OSError) as error:
        found = re.split("[:;] run ", str(error))[0]
        yield Finding(name, "warning", found, f"nvme-sweep {shlex.quote(path)}")
        return
    yield of_profile(profile, path, name)


def of_profile(profile: Profile, path: str, name: str) -> Finding:
    """The profile of the drive of *path*; a warning if its evidence is weak or poor."""
    speeds = ", ".join(
        f"{phase} {format_speed(best.gb_per_s)}" for phase, best in profile.performance.items()
    )
    evidence = grade(profile)
    found = f"swept {profile.created[:10]}: {speeds} GB/s; the evidence is {evidence}"
    if evidence.name == "good":
        return Finding(name, "ok", found)
    remedy = f"nvme-sweep {shlex.quote(path)}, while no other process uses the drive"
    return Finding(name, "warning", found, remedy)


def direct_io(path: str, name: str) -> Finding:
    """Whether a file can be made in the directory *path* and bypasses the page cache; it is removed."""
    from nvme_offload.io.engine import Engine

    try:
        with Engine(AioConfig(backend="posix", direct="auto")) as engine:
            file = engine.open_anonymous(path, 1 << 20)
            direct, alignment = file.direct, file.offset_alignment
            file.close()
    except (OffloadError, OSError) as error:
        remedy = "make a directory there that you own, and give that"
        return Finding(name, "problem", f"no file can be made: {error}", remedy)
    if not direct:
        found = "no O_DIRECT: everything passes the page cache"
        return Finding(name, "warning", found, "use ext4, XFS or btrfs on a local drive")
    return Finding(name, "ok", f"O_DIRECT, aligned to {alignment} bytes")


def _lock() -> int:
    from nvme_offload.io.engine import Memory

    try:
        return Memory(_LOCKED_BYTES, in_child=False).lock()
    except MemoryError:
        return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _number(path: str) -> int | None:
    return sysfs.number(sysfs.read(Path(path)))
