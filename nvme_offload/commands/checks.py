"""The checks of `nvme-offload doctor`: each is a function that returns its findings with a remedy."""

from __future__ import annotations

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
    """The result of a check: "ok"; "note", for information; "warning", it works but could be better;
    "problem", it does not work. remedy: "" if none is needed.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


class Precisions(NamedTuple):
    """The 16-bit precisions for which the CPU has instructions; *vectors* are the widest that torch uses,
    such as "AVX2".
    """

    vectors: str
    bf16: bool
    fp16: bool


def all_of(paths: Sequence[str], config: Path | None = None) -> Iterator[Finding]:
    """Every check, and then the checks of *paths*; *config* is the DeepSpeed configuration to train
    with.
    """
    yield Finding(
        "nvme_offload",
        "ok",
        f"{__version__}, Python {platform.python_version()}, Linux {platform.release()}",
    )
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
    yield processor(
        precisions(),
        gpu_count() > 0,
        "" if config is None else precision_of(ds_config.read(config)),
    )
    yield deepspeed_version(_version("deepspeed"))
    yield compilers(gpu_count() > 0)
    for path in paths:
        yield from drive(path, opens_files=missing is None)
    if not paths:
        yield Finding(
            "drive",
            "note",
            "not checked",
            "give --path DIR, a directory on the drive to offload to",
        )


def text(found: Sequence[Finding]) -> str:
    """A line for each finding, and one for its remedy."""
    width = max(len(each.name) for each in found)
    lines = []
    for each in found:
        lines.append(f"{_MARKS[each.status]}  {each.name.ljust(width)}  {each.found}")
        lines += textwrap.wrap(
            each.remedy,
            140,
            initial_indent=" " * (width + 11) + "-> ",
            subsequent_indent=" " * (width + 14),
        )
    problems, warnings = (
        sum(each.status == status for each in found) for status in ("problem", "warning")
    )
    if problems:
        lines += ["", f"{problems} of these must be put right before anything can be offloaded."]
    else:
        lines += ["", "It works." + (f" {warnings} of these could be better." if warnings else "")]
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
        needed = name == "libaio"
        otherwise = (
            "nothing works without it, but for the slow posix backend"
            if needed
            else 'libaio does as well; leave "backend" as it is'
        )
        return Finding(name, "problem" if needed else "note", str(error), otherwise)
    return Finding(name, "ok", "works")


def aio_requests(most: int | None, in_use: int | None) -> Finding:
    """Whether the kernel's limit fs.aio-max-nr, of the whole machine, suffices for the queues of the
    ranks.
    """
    if most is None or in_use is None:
        return Finding("aio-max-nr", "note", "the kernel does not report it")
    free = most - in_use
    found = f"{free} of {most} requests are free"
    remedy = "sudo sysctl fs.aio-max-nr=1048576, and the same line in /etc/sysctl.d to keep it"
    if free < 256:
        return Finding("aio-max-nr", "problem", found, remedy)
    return (
        Finding("aio-max-nr", "warning", found, remedy)
        if free < 16384
        else Finding("aio-max-nr", "ok", found)
    )


def locked_memory(locked_bytes: int, limit: int) -> Finding:
    """Whether memory can be locked; a trial locked *locked_bytes*."""
    allowed = "no limit" if limit == resource.RLIM_INFINITY else f"a limit of {format_bytes(limit)}"
    if locked_bytes >= _LOCKED_BYTES:
        small = limit != resource.RLIM_INFINITY and limit < 1 << 30 and os.geteuid() != 0
        if not small:
            return Finding("memlock", "ok", f"memory can be locked, {allowed}")
    return Finding(
        "memlock",
        "warning",
        f"{format_bytes(locked_bytes)} could be locked, {allowed}; without a GPU unlocked memory may be swapped out, and DeepSpeed's buffers must be locked",
        "ulimit -l unlimited (in /etc/security/limits.conf: memlock unlimited); in a container --ulimit memlock=-1",
    )


def huge_pages(enabled: str | None) -> Finding:
    """Whether the kernel grants huge pages; *enabled* is its setting, "always [madvise] never"."""
    if enabled is None:
        return Finding("huge pages", "note", "this kernel has no transparent huge pages")
    if "[never]" in enabled:
        return Finding(
            "huge pages",
            "warning",
            "off: pinning and every transfer take longer",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return Finding("huge pages", "ok", f"granted ({enabled.partition('[')[2].partition(']')[0]})")


def gpu_registration() -> Finding:
    """Whether host memory can be registered with CUDA: copies of other memory are five times slower."""
    count = gpu_count()
    if not count:
        return Finding(
            "GPU", "note", "none, or its driver does not show it here", "in a container: --gpus all"
        )
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus())) or "NVIDIA"
    try:
        from nvme_offload.io.pool import PinnedPool

        pool = PinnedPool(1 << 20, pin=True)
        pinned = pool.pinned
        pool.close()
    except (OffloadError, ImportError, MemoryError) as error:
        return Finding(
            "GPU",
            "warning",
            f"{count}x {names}; memory cannot be registered with it: {error}",
            "install a CUDA build of torch that matches the driver",
        )
    if pinned != "cuda":
        return Finding(
            "GPU",
            "warning",
            f"{count}x {names}, which torch does not see",
            "install a CUDA build of torch that matches the driver",
        )
    return Finding("GPU", "ok", f"{count}x {names}; host memory registers with it")


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
        return Finding(
            "packing",
            "warning",
            f"several times as slow as it could be on the GPU: {'; '.join(faults)}",
            "install gcc and Python's headers (python3-dev), or the Triton that belongs to this torch",
        )
    return Finding("packing", "ok", "on the GPU, by Triton")


def torch_version(version: str | None) -> Finding:
    """Whether torch is installed."""
    return (
        Finding("torch", "ok", version)
        if version
        else Finding(
            "torch", "warning", "not installed; nvme-sweep works without", "pip install torch"
        )
    )


def precisions() -> Precisions | None:
    """The precisions that torch reports to DeepSpeed; None without torch.

    Source: deepspeed/accelerator/cpu_accelerator.py (`is_fp16_supported`). ATEN_CPU_CAPABILITY and
    ONEDNN_MAX_CPU_ISA lower the answer.
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
    """Whether the CPU suits training without a GPU; *wanted* is the precision of a configuration, or
    "".
    """
    if native is None:
        return Finding("processor", "note", "not checked: torch is not installed")
    lacking = [name for name, there in (("bf16", native.bf16), ("fp16", native.fp16)) if not there]
    found = f"{native.vectors}, {'without' if lacking else 'with'} instructions for {' and '.join(lacking or ('bf16', 'fp16'))}"
    meant = {"bf16": "bf16 is many times slower than fp32", "fp16": "DeepSpeed refuses fp16"}
    costs = [meant[name] for name in lacking if wanted in ("", name)]
    if has_gpu or not costs:
        return Finding("processor", "ok", found)
    remedy = (
        'enable "bf16" in place of "fp16", or train on a GPU'
        if wanted == "fp16"
        else "train on a GPU, or in fp32"
    )
    return Finding(
        "processor",
        "problem" if wanted == "fp16" else "warning",
        f"{found}: without a GPU {', and '.join(costs)}",
        remedy,
    )


def precision_of(config: Mapping[str, Any]) -> str:
    """The precision of a DeepSpeed configuration: "bf16", "fp16", or "fp32" if neither is enabled; "" for
    "auto".
    """
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
        return Finding(
            "DeepSpeed",
            "note",
            "not installed; everything but zero3 works without",
            'pip install "nvme-offload[deepspeed]"',
        )
    remedy = f"pip install deepspeed=={NEWEST_DEEPSPEED}"
    if is_too_old(version):
        return Finding(
            "DeepSpeed", "warning", f"{version}; zero3 needs {OLDEST_DEEPSPEED} or newer", remedy
        )
    if is_too_new(version):
        return Finding(
            "DeepSpeed",
            "warning",
            f"{version}; zero3 was tried up to {NEWEST_DEEPSPEED}, and says at enable() what another lacks",
            remedy,
        )
    return Finding("DeepSpeed", "ok", version)


def compilers(has_gpu: bool, which: Callable[[str], str | None] = shutil.which) -> Finding:
    """Whether DeepSpeed can compile its ops at their first use; offloading needs CPU Adam."""
    wanted = {
        "c++": "g++ (Debian: build-essential)",
        "ninja": "ninja (pip install ninja, on the PATH)",
    } | ({"nvcc": "the CUDA toolkit"} if has_gpu else {})
    lacking = {name: remedy for name, remedy in wanted.items() if which(name) is None}
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        lacking["Python.h"] = "Python's headers (Debian: python3-dev)"
    if lacking:
        found = (
            f"{', '.join(lacking)} not found: DeepSpeed cannot build its CPU Adam at the first step"
        )
        return Finding(
            "compilers",
            "warning",
            found,
            f"install {', '.join(lacking.values())}; or use an optimizer of torch, and its ops prebuilt (DS_BUILD_CPU_ADAM=1)",
        )
    return Finding(
        "compilers",
        "ok",
        f"{', '.join(wanted)} for the ops that DeepSpeed builds at their first use",
    )


def drive(path: str, *, opens_files: bool = True) -> Iterator[Finding]:
    """What *path* sits on, direct I/O on it if this process *opens_files*, and its profile."""
    name = f"drive {path}"
    try:
        seen = describe(path)
    except OSError as error:
        yield Finding(
            name,
            "problem",
            f"cannot be examined: {error.strerror}",
            "give a directory on the drive",
        )
        return
    what = ", ".join(filter(None, (seen.filesystem, seen.device, seen.model, *seen.layers)))
    yield Finding(
        name, "problem" if seen.is_memory else "ok", f"{what}; {format_bytes(seen.free_bytes)} free"
    )
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
    return Finding(
        name,
        "warning",
        found,
        f"nvme-sweep {shlex.quote(path)}, while no other process uses the drive",
    )


def direct_io(path: str, name: str) -> Finding:
    """Whether a file can be made in the directory *path* and bypasses the page cache; it is removed."""
    from nvme_offload.io.engine import Engine

    try:
        with Engine(AioConfig(backend="posix", direct="auto")) as engine:
            file = engine.open_anonymous(path, 1 << 20)
            direct, alignment = file.direct, file.offset_alignment
            file.close()
    except (OffloadError, OSError) as error:
        return Finding(
            name,
            "problem",
            f"no file can be made: {error}",
            "make a directory there that you own, and give that",
        )
    if not direct:
        return Finding(
            name,
            "warning",
            "no O_DIRECT: everything passes the page cache",
            "use ext4, XFS or btrfs on a local drive",
        )
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
