"""What a sweep writes is whole or not there, whenever the sweep is killed, and nothing else is
left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from profiles import profile

import nvme_offload

ROOT = Path(nvme_offload.__file__).parents[1]
PROFILE = profile(runs=4).to_json()
SCRIPT = f"""
import sys
from pathlib import Path
from nvme_offload.hardware.profile import Profile
from nvme_offload.tune import results
from nvme_offload.tune.progress import Progress
profile = Profile.from_json({PROFILE!r})
results.write_report(profile, "drive", Path(sys.argv[1]), Progress(sys.stderr))
"""


def test_a_report_is_whole_or_not_there(
    tmp_path: Path, kill_points: Callable[[Path], tuple[dict[str, str], Path]]
) -> None:
    place = tmp_path / "reports"
    place.mkdir()
    # of a sweep of another drive that was killed
    (place / ".other-2026-01-02.0123abcd.partial" / "charts").mkdir(parents=True)
    (place / ".mine.partial").mkdir()
    environment, images = kill_points(place)
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(place)],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=True,
    )
    mine, report = sorted(place.iterdir())
    assert mine.name == ".mine.partial"
    whole = {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file()
    }
    assert f"{report.name}/report.html" in whole
    seen = []
    for image in sorted(entry for entry in images.iterdir() if entry.is_dir()):
        shown = [
            path
            for path in image.rglob("*")
            if path.is_file() and not path.relative_to(image).parts[0].startswith(".")
        ]
        seen.append({str(path.relative_to(image)): path.read_bytes() for path in shown})
        assert seen[-1] in ({}, whole)
        assert whole == seen[-1] or not (image / report.name).exists()
    assert len(seen) > 2 * len(whole)
    assert whole in seen  # the last syncs are of the complete report


# Each write in a separate process, which a SIGTERM comes to before the call with its number,
# until there is no such call.
STOPPED = f"""
import ctypes, json, os, shutil, signal, sys, threading
from pathlib import Path
from nvme_offload.ds_config import edit as ds_config
from nvme_offload.hardware import profile_shelf
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.profile import Profile
from nvme_offload.tune import cli, results
from nvme_offload.tune.progress import Progress

what, root, listener, step = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
profile = Profile.from_json({PROFILE!r})
signal.signal(signal.SIGTERM, cli._stop)
os.environ["XDG_CONFIG_HOME"] = str(root / "shelf")
config = root / "config.json"
config.write_text("")
if what == "hard link":
    os.link(config, root / "name.json")


def listen(ready):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    ready.set()
    threading.Event().wait()


def write():
    if what == "shelf":
        profile_shelf.keep(profile)
    elif what == "report":
        results.write_report(profile, "drive", root / "reports", Progress(None))
    else:
        with results._uninterrupted():
            ds_config.apply(config, AioConfig(block_size=2 << 20))


for number in range(0, 10_000, step):
    for place in ("reports", "shelf"):
        shutil.rmtree(root / place, ignore_errors=True)
    config.write_text(json.dumps({{"aio": {{"block_size": 1 << 20}}}}))
    child = os.fork()
    if child == 0:
        if listener == "thread":  # the kernel delivers the signal to a thread that does not block it
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            ready = threading.Event()
            threading.Thread(target=listen, args=(ready,), daemon=True).start()
            ready.wait()
        os.environ["KILL_POINTS_SIGNAL"] = str(number)
        write()
        while ctypes.CDLL(None).getenv(b"KILL_POINTS_SENT"):
            pass  # it is on its way
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()), config.read_text()]), flush=True)
    if status == 0:
        break
"""


@pytest.mark.parametrize(
    ("what", "step", "listener"),
    [
        ("config", 1, "main"),
        ("config", 1, "thread"),
        ("hard link", 1, "main"),
        ("shelf", 1, "thread"),
        pytest.param("report", 12, "thread", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_sweep_that_is_stopped_leaves_nothing_aside(
    tmp_path: Path,
    kill_points: Callable[[Path], tuple[dict[str, str], Path]],
    what: str,
    step: int,
    listener: str,
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    environment, _ = kill_points(place)
    command = [sys.executable, "-W", "ignore", "-c", STOPPED, what, str(place), listener, str(step)]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    ends = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [status for status, _, _ in ends] == [143] * (len(ends) - 1) + [0]
    assert len(ends) > 2
    whole = ends[-1][1]
    untouched = [name for name in whole if "/" not in name]
    for _, names, config in ends:
        assert names in (whole, untouched)
        assert json.loads(config)["aio"]["block_size"] in (1 << 20, 2 << 20)
