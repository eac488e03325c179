"""Fixtures of the whole suite: every backend, every filesystem at hand, requests that surely are in
flight, and seeded bytes to move.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

sys.path.append(str(Path(__file__).parent))  # for `ports`

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.config import BACKENDS, AioConfig

if TYPE_CHECKING:
    from nvme_offload.io.engine import Engine

# as tools/deepspeed-ops has it: another clone's tests, with other flags, would compile all again
os.environ.setdefault(
    "TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / "build" / "extensions")
)

Mount = Callable[[str], Path]

# name -> (type, bytes of a sector, MiB); mkfs.xfs makes nothing below 300 MiB.
IMAGES = {
    "ext4": ("ext4", 512, 320),
    "xfs": ("xfs", 512, 320),
    "btrfs": ("btrfs", 512, 320),
    "ext4-4k": ("ext4", 4096, 320),
    "ext4-full": ("ext4", 512, 16),
    "tmpfs": ("tmpfs", 0, 320),
}
FILESYSTEMS = ("plain", "ext4", "xfs", "btrfs", "ext4-4k", "tmpfs")

CLONE_NEWNS = 0x00020000  # linux/sched.h; Python 3.12 has it in os

# _IOWR('X', 119 and 120, int) of linux/fs.h
FIFREEZE = 0xC0045877
FITHAW = 0xC0045878


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that this file reads."""
    with contextlib.suppress(ImportError):  # tests/gpu do without it
        from hypothesis import HealthCheck, settings

        # By default an example fails that takes longer than 200 ms, and data that take long to draw.
        # CI tries the same examples in every run: others are for those who can look into a failure.
        settings.register_profile(
            "untimed",
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize="CI" in os.environ,
            database=None if "CI" in os.environ else settings.default.database,
        )
        settings.load_profile("untimed")
    # A job in the background of a shell, or under nohup, ignores signals, and so would every
    # interpreter that a test starts and sends them to.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # As in the activated environment: use its ninja. Another version would compile DeepSpeed's ops
    # again.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Images of containers often set this. Without bytecode every interpreter that a test starts
    # compiles torch and DeepSpeed again, which takes longer than most tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Python 3.12 and later warn of a fork in a process with threads, such as an engine's: tests
    # fork on purpose in the interpreters that they start.
    os.environ["PYTHONWARNINGS"] = "ignore:This process (pid=:DeprecationWarning"
    config.addinivalue_line(
        "markers",
        f"every_filesystem: run the test on {', '.join(FILESYSTEMS)}; without it on the plain one only",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `filesystem` its values by the test's marker."""
    if "filesystem" in metafunc.fixturenames:
        everywhere = metafunc.definition.get_closest_marker("every_filesystem") is not None
        metafunc.parametrize("filesystem", FILESYSTEMS if everywhere else FILESYSTEMS[:1])


# The files that take longest, the slow tests of most of them minutes.
LONGEST = (
    *("test_zero3_overlap.py", "test_packaging.py", "test_systems.py", "test_checkpoint.py"),
    *("test_transformers_doors.py", "test_deepspeed_doors.py", "test_recovery.py"),
    *("test_stage_1_and_2.py", "test_parity.py", "test_interrupts.py", "test_weights_alone.py"),
    "test_ranks.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are found: imports and thousands of items have none."""
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, and then with the folders whose files do: xdist hands
    out whole files in this order, and short files keep all workers busy until the end.
    """

    def place(item: pytest.Item) -> int:
        parts = (*LONGEST, "zero3", "optim")
        return min((parts.index(part) for part in item.path.parts if part in parts), default=99)

    items.sort(key=place)


_modules_set_aside = 0


@pytest.fixture(autouse=True)
def imported_is_set_aside() -> None:
    """Exclude the objects of imported modules from garbage collection: many tests collect, and torch
    has millions of objects.
    """
    global _modules_set_aside
    if len(sys.modules) > _modules_set_aside:  # also what the test before has imported
        gc.collect()
        gc.freeze()
        _modules_set_aside = len(sys.modules)


@pytest.fixture(scope="module", autouse=True)
def no_hook_of_all_modules_stays() -> Iterator[None]:
    """Remove hooks of every module that a file has left, as exceptions between any two lines may:
    torch.compile warns of them in another file.
    """
    yield
    modules: Any = sys.modules.get("torch.nn.modules.module")
    if modules is not None:
        modules._global_forward_pre_hooks.clear()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: tensors are small in tests, and threads on busy cores wait for each
    other.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def without_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user without profiles, for the tests and for the programs that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session")
def mount_namespace() -> None:
    """Mounts of this process's own: they go with the last process in the namespace, so nothing
    stays behind when this one is killed.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        pytest.skip(f"mounting needs root: {os.strerror(ctypes.get_errno())}")
    _command("mount", "--make-rprivate", "/")


@pytest.fixture(scope="session")
def filesystems(mount_namespace: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """A function from a name of `IMAGES` to where that filesystem is mounted: made when first asked
    for, unmounted when the session ends.
    """
    root = tmp_path_factory.mktemp("filesystems")
    made: dict[str, Path | str] = {}
    with contextlib.ExitStack() as stack:

        def mount(name: str) -> Path:
            if name not in made:
                try:
                    made[name] = stack.enter_context(_mounted(*IMAGES[name], root, name))
                except subprocess.CalledProcessError as error:
                    made[name] = f"{error.cmd[0]} failed: {error.stderr.strip()}"
                except OSError as error:
                    made[name] = str(error)
            place = made[name]
            if isinstance(place, str):
                pytest.skip(f"no {name} here: {place}")
            return place

        yield mount


@pytest.fixture
def mounted(filesystems: Mount) -> Iterator[Mount]:
    """As `filesystems`, for one test: its files are deleted with it, so that no test finds another's
    files.
    """
    found: dict[Path, set[Path]] = {}

    def mount(name: str) -> Path:
        place = filesystems(name)
        found.setdefault(place, set(place.iterdir()))
        return place

    yield mount
    for place, there in found.items():
        for left in set(place.iterdir()) - there:
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()


@contextlib.contextmanager
def _mounted(kind: str, sector_bytes: int, mebibytes: int, root: Path, name: str) -> Iterator[Path]:
    for tool in ("mount",) if kind == "tmpfs" else ("mount", "losetup", f"mkfs.{kind}"):
        if shutil.which(tool) is None:
            raise FileNotFoundError(f"{tool} is not installed")
    point = root / name
    point.mkdir()
    if kind == "tmpfs":
        _command("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(point))
    else:
        with tempfile.NamedTemporaryFile(dir=root) as image:
            image.truncate(mebibytes << 20)
            device = _command(
                "losetup", "--show", "--find", "--sector-size", str(sector_bytes), image.name
            ).strip()
            try:
                _command(f"mkfs.{kind}", "-q", device)
                _command("mount", device, str(point))
            finally:
                # The kernel puts this off until the filesystem is unmounted; the device and the
                # image's space then go with the mount.
                _command("losetup", "--detach", device)
    try:
        yield point
    finally:
        # Lazily: the traceback of a failed test may hold a file open, and must not leave the mount
        # behind.
        _command("umount", "--lazy", str(point))


def _command(*arguments: str) -> str:
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def nothing_is_compiled() -> None:
    """Whatever the tests before this one have compiled in this process: then steps are not run
    under anything.
    """
    from nvme_offload.optimizer_states import compiling

    compiling._used = False
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.utils.counters.clear()


@pytest.fixture(scope="session")
def deepspeeds_op() -> Path:
    """The folder with DeepSpeed's own op in it, compiled."""
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    found = [
        path.parents[1]
        for path in root.glob("**/async_io/async_io.so")
        if (path.parents[1] / "pin_memory" / "pin_memory.so").exists()
    ]
    if not found or importlib.util.find_spec("deepspeed") is None:
        pytest.skip(f"DeepSpeed's op is not built under {root}: tools/deepspeed-ops does that")
    if (lock := found[0] / "async_io" / "lock").exists():
        pytest.skip(f"DeepSpeed's op is being built, or its build was killed: then remove {lock}")
    return found[0]


@pytest.fixture
def directory(filesystem: str, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory on *filesystem*, gone with everything in it after the test."""
    if filesystem == "plain":
        yield request.getfixturevalue("tmp_path")
    else:
        with tempfile.TemporaryDirectory(
            dir=request.getfixturevalue("mounted")(filesystem)
        ) as place:
            yield Path(place)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that this machine can run."""
    name: str = request.param
    if lacking := _what_lacks(name):
        pytest.skip(f"no {name} here: {lacking}")
    return name


@functools.cache
def _what_lacks(backend: str) -> str:
    from nvme_offload.io.engine import Engine

    try:
        Engine(AioConfig(backend=backend)).close()
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.fixture
def configure(backend: str, directory: Path) -> Callable[..., AioConfig]:
    """A function from settings to an `AioConfig` of *backend*, with direct I/O demanded wherever
    *directory* can do it.
    """
    direct = True if _takes_direct_io(directory) else "auto"

    def config(**settings: object) -> AioConfig:
        return AioConfig(**{"backend": backend, "direct": direct, **settings})  # type: ignore[arg-type]

    return config


def _takes_direct_io(directory: Path) -> bool:
    # tmpfs accepts the flag since Linux 6.6 but uses the page cache; the engine treats it as a
    # filesystem without O_DIRECT.
    if _command("stat", "--file-system", "--format=%T", str(directory)).strip() == "tmpfs":
        return False
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture
def engine(configure: Callable[..., AioConfig]) -> Iterator[Engine]:
    """An engine of two workers with small blocks; closed after the test, which fails on an error
    that it did not wait for.
    """
    from nvme_offload.io.engine import Engine

    with Engine(configure(block_size=64 << 10, queue_depth=8, thread_count=2)) as made:
        yield made


@pytest.fixture
def stalling_directory(mounted: Mount) -> Iterator[Path]:
    """A directory for the files of `stall`."""
    with tempfile.TemporaryDirectory(dir=mounted("ext4")) as place:
        yield Path(place)


@pytest.fixture
def stall(stalling_directory: Path) -> Callable[[], AbstractContextManager[Callable[[], None]]]:
    """A context in which writes into *stalling_directory* stall, so that a request is in flight for
    certain and for as long as a test needs it.

    Its value is a function that releases them, as the end of the context does. Open files before and
    close engines after it: creating a file stalls as well, and a stalled request that is waited for
    inside never ends.
    """

    @contextlib.contextmanager
    def stalled() -> Iterator[Callable[[], None]]:
        descriptor = os.open(stalling_directory, os.O_RDONLY)
        frozen = True

        def thaw() -> None:
            nonlocal frozen
            if frozen:
                frozen = False
                fcntl.ioctl(descriptor, FITHAW, 0)

        try:
            fcntl.ioctl(descriptor, FIFREEZE, 0)
            try:
                yield thaw
            finally:
                thaw()
        finally:
            os.close(descriptor)

    return stalled


@pytest.fixture
def random_bytes() -> Callable[[int], npt.NDArray[np.uint8]]:
    """A function from a count to that many bytes, other ones at each call and the same ones at each
    run.
    """
    generator = np.random.default_rng(20)
    return lambda count: generator.integers(0, 256, count, dtype=np.uint8)


@pytest.fixture
def limit() -> Callable[[int, int], AbstractContextManager[None]]:
    """A context that lowers this process's soft limit *kind* (a `resource.RLIMIT_...`) to
    *value*.
    """
    import resource

    @contextlib.contextmanager
    def lowered(kind: int, value: int) -> Iterator[None]:
        before = resource.getrlimit(kind)
        resource.setrlimit(kind, (value, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(kind, before)

    return lowered


@pytest.fixture(scope="session")
def kill_points_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`kill_points.c`, compiled."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile tests/kill_points.c with")
    library = tmp_path_factory.mktemp("kill_points") / "kill_points.so"
    _command(
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(library),
        str(Path(__file__).with_name("kill_points.c")),
        "-ldl",
    )
    return library


@pytest.fixture
def kill_points(
    kill_points_library: Path, tmp_path: Path
) -> Callable[[Path], tuple[dict[str, str], Path]]:
    """A function from a directory to the environment of a program, and to where the copies come
    that it makes of the directory.

    There is one for each call that changes something in the directory, in order, with the contents
    that a kill of the program before that call would leave.
    """

    def of(directory: Path) -> tuple[dict[str, str], Path]:
        images = Path(tempfile.mkdtemp(prefix="images-", dir=tmp_path))
        # a sanitizer's comes first
        libraries = f"{os.environ.get('LD_PRELOAD', '')}:{kill_points_library}".lstrip(":")
        preload = {
            "LD_PRELOAD": libraries,
            "KILL_POINTS_ROOT": str(directory),
            "KILL_POINTS_IMAGES": str(images),
        }
        return preload, images

    return of
