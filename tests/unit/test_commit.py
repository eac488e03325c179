"""A committed file has its old or its new contents, whenever its writer is killed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_offload.files import commit

KillPoints = Callable[[Path], tuple[dict[str, str], Path]]

OLD, NEW = b"old " * 3000, b"new " * 2000
SCRIPTS = {
    "write_file": "commit.write_file(place / 'file', NEW)",
    "new_file": """
with commit.new_file(place / "file") as aside, aside.open("wb") as file:
    file.write(NEW)
    file.flush()
    os.fsync(file.fileno())
""",
    "directory": """
with commit.partial_directory(place / "directory") as aside:
    (aside / "one").write_bytes(NEW)
    (aside / "two").write_bytes(NEW)
    commit.sync_tree(aside)
    commit.publish_directory(aside, place / "directory", over=True)
""",
    "two renames": """
commit._exchanged = lambda *_: False  # as on NFS
with commit.partial_directory(place / "directory") as aside:
    (aside / "one").write_bytes(NEW)
    (aside / "two").write_bytes(NEW)
    commit.sync_tree(aside)
    left = commit.publish_directory(aside, place / "directory", over=True)
    left and commit.remove(left)
""",
}


def states(script: str, place: Path, kill_points: KillPoints) -> list[Path]:
    """What a kill would leave of *place*, for every call of *script* that changes something there,
    and the files that the script leaves.
    """
    environment, images = kill_points(place)
    text = f"import os\nfrom pathlib import Path\nfrom nvme_offload.files import commit\nplace, NEW = Path({str(place)!r}), {NEW!r}\n{script}"
    subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **environment},
        check=True,
        cwd=Path(commit.__file__).parents[1],
    )
    found = sorted(image for image in images.iterdir() if image.is_dir())
    assert len(found) >= 6, "the calls were not seen"
    return [*found, place]


@pytest.mark.parametrize("script", ["write_file", "new_file"])
def test_a_file_is_the_old_one_or_the_new_one(
    tmp_path: Path, kill_points: KillPoints, script: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "file").write_bytes(OLD)
    seen = [(image / "file").read_bytes() for image in states(SCRIPTS[script], place, kill_points)]
    turn = seen.index(NEW)
    assert seen == [OLD] * turn + [NEW] * (len(seen) - turn)
    assert turn >= 3
    assert [entry.name for entry in place.iterdir()] == ["file"]


@pytest.mark.parametrize("script", ["directory", "two renames"])
@pytest.mark.parametrize("there", [True, False])
def test_a_directory_is_the_old_one_or_the_new_one(
    tmp_path: Path, kill_points: KillPoints, script: str, there: bool
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    if there:
        (place / "directory").mkdir()
        for name in ("one", "two", "three"):
            (place / "directory" / name).write_bytes(OLD)
    seen = []
    for image in states(SCRIPTS[script], place, kill_points):
        commit.recover_directory(image / "directory")
        found = image / "directory"
        seen.append(
            {file.name: file.read_bytes() for file in found.iterdir()} if found.exists() else {}
        )
    before = dict.fromkeys(("one", "two", "three"), OLD) if there else {}
    after = {"one": NEW, "two": NEW}
    turn = seen.index(after)
    assert seen == [before] * turn + [after] * (len(seen) - turn)
    assert turn >= 6
    assert [entry.name for entry in place.iterdir()] == ["directory"]


def test_what_a_killed_writer_left_goes_with_the_next_commit_and_what_is_in_use_stays(
    tmp_path: Path,
) -> None:
    left, other = tmp_path / ".file.0123abcd.partial", tmp_path / ".file.not ours.partial"
    left.write_text("left")
    other.write_text("theirs")
    (tmp_path / ".file.00000000.partial").mkdir()
    with commit.partial_directory(tmp_path / "file") as aside:
        commit.write_file(tmp_path / "file", "text")
        assert aside.is_dir()
        assert sorted(tmp_path.iterdir()) == sorted([aside, other, tmp_path / "file"])
    assert sorted(tmp_path.iterdir()) == sorted([other, tmp_path / "file"])


@pytest.mark.parametrize("script", ["write_file", "new_file", "directory"])
def test_what_a_kill_at_any_call_left_goes_with_the_next_commit(
    tmp_path: Path, kill_points: KillPoints, script: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    left = 0
    for image in states(SCRIPTS[script], place, kill_points):
        left += any(entry.name.startswith(".") for entry in image.iterdir())
        if script != "directory":
            commit.write_file(image / "file", NEW)
        else:
            with commit.partial_directory(image / "directory") as aside:
                replaced = commit.publish_directory(aside, image / "directory", over=True)
            assert replaced is None or not replaced.exists()
        assert [entry.name for entry in image.iterdir()] == [
            "directory" if script == "directory" else "file"
        ]
    assert left >= 3


def test_a_process_that_a_signal_ends_removes_what_it_has_aside(tmp_path: Path) -> None:
    with (
        commit.partial_directory(tmp_path / "other") as other,
        commit.partial_directory(tmp_path / "directory") as aside,
    ):
        (aside / "one").write_bytes(NEW)
        commit.remove_unfinished()
        assert list(tmp_path.iterdir()) == []
        assert not other.exists()
    commit.remove_unfinished()


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        commit.write_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_not_shown_over_another_unasked(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with commit.partial_directory(tmp_path / "there") as aside:
        (aside / "new").touch()
        with pytest.raises(FileExistsError):
            commit.publish_directory(aside, tmp_path / "there")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
