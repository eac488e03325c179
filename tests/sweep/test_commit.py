"""A sweep's report is whole or not there, whenever the sweep is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nvme_offload

ROOT = Path(nvme_offload.__file__).parents[1]
SCRIPT = f"""
import sys
from pathlib import Path
from nvme_offload.profile import Profile
from nvme_offload.sweep import results
from nvme_offload.sweep.progress import Progress
profile = Profile.load({str(ROOT / "reports" / "vda-2026-11-21" / "profile.json")!r})
results.write_report(profile, "drive", Path(sys.argv[1]), Progress(sys.stderr))
"""


def test_a_report_is_whole_or_not_there(tmp_path: Path, kill_points: Callable[[Path], tuple[dict[str, str], Path]]) -> None:
    place = tmp_path / "reports"
    place.mkdir()
    environment, images = kill_points(place)
    subprocess.run([sys.executable, "-c", SCRIPT, str(place)], cwd=ROOT, env={**os.environ, **environment}, check=True)
    (report,) = place.iterdir()
    whole = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert f"{report.name}/report.html" in whole
    seen = []
    for image in sorted(entry for entry in images.iterdir() if entry.is_dir()):
        shown = [path for path in image.rglob("*") if path.is_file() and not path.relative_to(image).parts[0].startswith(".")]
        seen.append({str(path.relative_to(image)): path.read_bytes() for path in shown})
        assert seen[-1] in ({}, whole)
        assert whole == seen[-1] or not (image / report.name).exists()
    assert len(seen) > 2 * len(whole)
    assert whole in seen  # the last syncs are of what is shown
