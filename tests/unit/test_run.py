"""`nvme-offload run`: the command that it starts has its exit status, signals and streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RUN = [sys.executable, "-m", "nvme_offload.commands", "run"]


@pytest.fixture
def run(installed):
    def start(*command, cwd=None, **environment):
        return subprocess.run(
            [*RUN, *command],
            capture_output=True,
            text=True,
            cwd=cwd,
            input="given\n",
            env={**os.environ, "PYTHONPATH": installed, **environment},
        )

    return start


@pytest.mark.parametrize("dashes", [["--"], []])
def test_arguments_streams_and_status_are_the_command_s_own(run, dashes):
    script = 'cat; echo "$@" >&2; echo $NVME_OFFLOAD_AUTOLOAD; exit 7'
    done = run(*dashes, "sh", "-c", script, "x", "--help", "-n", "--", "a b")
    assert (done.returncode, done.stdout, done.stderr) == (
        7,
        "given\nalways\n",
        "--help -n -- a b\n",
    )


def test_the_command_has_the_process_of_its_own(installed):
    """So signals reach it, and it can be waited for, as without `run`."""
    process = subprocess.Popen(
        [*RUN, "--", "sh", "-c", "echo $$; read _; exit 3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": installed},
    )
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_the_command_finds_signals_as_a_shell_gives_them(run):
    def ignored(said):
        (line,) = [line for line in said.splitlines() if line.startswith("SigIgn")]
        return line

    plain = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    assert ignored(run("cat", "/proc/self/status").stdout) == ignored(plain)


def test_an_environment_that_is_not_activated_comes_first(run):
    code = "import sys; print(sys.executable)"
    assert run("python", "-c", code, PATH="/usr/bin:/bin").stdout == f"{sys.executable}\n"
    mine = Path(sys.executable).parent
    found = run("sh", "-c", "echo $PATH", PATH=f"/usr/bin:/bin:{mine}").stdout
    assert found == f"/usr/bin:/bin:{mine}\n"


@pytest.mark.parametrize(
    ("command", "status", "line"),
    [
        (["no-such-command", "--flag"], 127, "no-such-command: command not found"),
        (["/no/such/command"], 127, "/no/such/command: command not found"),
        (["/etc/passwd"], 126, "/etc/passwd: Permission denied"),
        ([], 2, "Missing argument 'COMMAND [ARGS]...'."),
    ],
)
def test_what_cannot_be_started_ends_as_in_a_shell(run, command, status, line):
    done = run(*command)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"nvme-offload: {line}\n")


def test_what_keeps_torch_from_loading_the_package_is_refused(run, installed):
    done = run("true", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 2
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading nvme_offload: unset it" in (
        done.stderr
    )


@pytest.mark.parametrize(
    ("version", "status", "line"),
    [
        ("2.4.1+cu121", 1, "torch 2.4.1+cu121 does not load nvme_offload by itself"),
        ("2.5.0", 0, ""),
        ("3.0", 0, ""),
    ],
)
def test_a_torch_without_autoload_is_refused(run, installed, tmp_path, version, status, line):
    metadata = tmp_path / "torch-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    done = run("true", PYTHONPATH=os.pathsep.join((str(tmp_path), installed)))
    assert done.returncode == status
    assert line in done.stderr


def test_an_installation_without_the_entry_point_is_refused(run, installed, tmp_path):
    metadata = tmp_path / "nvme_offload-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nvme-offload\nVersion: 0\n")
    # not in the checkout, where a build leaves metadata that Python would find first
    done = run("true", cwd=tmp_path, PYTHONPATH=os.pathsep.join((str(tmp_path), installed)))
    assert done.returncode == 2
    assert f"nvme-offload is not installed for {sys.executable}" in done.stderr
