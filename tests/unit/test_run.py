"""`nvme-offload run`: exit status, signals and streams are the command's, and the Python
processes that it starts call `enable()` when they import DeepSpeed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import finished

from nvme_offload.commands.run import STARTUP

ROOT = str(Path(__file__).parents[2])
RUN = [sys.executable, "-m", "nvme_offload.commands", "run"]


def run(*command, path=(), **environment):
    return finished(
        [*RUN, *command],
        input="given\n",
        env={**os.environ, "PYTHONPATH": os.pathsep.join((*map(str, path), ROOT)), **environment},
    )


@pytest.mark.parametrize("dashes", [["--"], []])
def test_arguments_streams_and_status_are_the_command_s_own(dashes):
    script = 'cat; echo "$@" >&2; exit 7'
    done = run(*dashes, "sh", "-c", script, "x", "--help", "-n", "--", "a b")
    assert (done.returncode, done.stdout, done.stderr) == (
        7,
        "given\n",
        "--help -n -- a b\n",
    )


def test_the_command_replaces_the_process():
    """So signals reach it, and it can be waited for, as without `run`."""
    process = subprocess.Popen(
        [*RUN, "--", "sh", "-c", "echo $$; read _; exit 3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_the_command_finds_signals_as_a_shell_gives_them():
    def ignored(said):
        (line,) = [line for line in said.splitlines() if line.startswith("SigIgn")]
        return line

    plain = finished(["cat", "/proc/self/status"]).stdout
    assert ignored(run("cat", "/proc/self/status").stdout) == ignored(plain)


def test_an_environment_that_is_not_activated_comes_first():
    code = "import sys; print(sys.executable)"
    assert run("python", "-c", code, PATH="/usr/bin:/bin").stdout == f"{sys.executable}\n"
    mine = Path(sys.executable).parent
    found = run("sh", "-c", "echo $PATH", PATH=f"/usr/bin:/bin:{mine}").stdout
    assert found == f"/usr/bin:/bin:{mine}\n"


@pytest.mark.parametrize(
    ("command", "status", "line"),
    [
        (["no-such-command", "--flag"], 127, "no-such-command: command not found"),
        ([""], 127, ": command not found"),
        (["/no/such/command"], 127, "/no/such/command: command not found"),
        (["/etc/passwd"], 126, "/etc/passwd: Permission denied"),
        ([], 2, "Missing argument 'COMMAND [ARGS]...'."),
    ],
)
def test_what_cannot_be_started_ends_as_in_a_shell(command, status, line):
    done = run(*command)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"nvme-offload: {line}\n")


FAKE = """
import sys
print(__spec__.loader.__class__.__name__, "torch" in sys.modules, "nvme_offload" in sys.modules)
"""


def fake_modules(place, deepspeed=FAKE):
    """A DeepSpeed, and this package's `enable`, that say when they run."""
    (place / "deepspeed.py").write_text(deepspeed)
    zero3 = place / "nvme_offload" / "zero3"
    zero3.mkdir(parents=True)
    (zero3.parent / "__init__.py").touch()
    (zero3 / "__init__.py").write_text("def enable():\n    print('enabled')\n")


def python(code, place):
    # the interpreter alone: `run` itself needs the real package
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(STARTUP), str(place)))}
    return finished([sys.executable, "-W", "error", "-c", code], cwd=place, env=environment)


def test_an_import_of_deepspeed_enables(tmp_path):
    fake_modules(tmp_path)
    code = """
import importlib.util
assert importlib.util.find_spec("deepspeed") is not None  # as Accelerate asks
import deepspeed
import deepspeed
assert importlib.util.find_spec("no_such_module_at_all") is None
"""
    done = python(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "SourceFileLoader False False\nenabled\n"


def test_a_process_without_deepspeed_loads_nothing(tmp_path):
    fake_modules(tmp_path)
    code = (
        "import sys; print(*({'torch', 'numpy', 'nvme_offload', 'deepspeed'} & set(sys.modules)))"
    )
    assert python(code, tmp_path).stdout == "\n"


def test_an_import_of_deepspeed_that_fails_can_be_tried_again(tmp_path):
    fake_modules(tmp_path, "import no_such_module_at_all")
    code = """
for _ in range(2):
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        print(error.name)
"""
    assert python(code, tmp_path).stdout == "no_such_module_at_all\n" * 2


def test_the_sitecustomize_that_is_hidden_runs(tmp_path):
    fake_modules(tmp_path)
    (tmp_path / "sitecustomize.py").write_text("mine = 'mine'\n")
    done = python("import sitecustomize, deepspeed; print(sitecustomize.mine)", tmp_path)
    assert done.stdout.splitlines()[1:] == ["enabled", "mine"]


def test_run_reaches_every_python_process(tmp_path):
    """Also a process that another one starts, in another directory."""
    child = "import sys; print(any(type(f).__name__ == '_EnablingFinder' for f in sys.meta_path))"
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {child!r}], cwd='/'))"
    assert run("python", "-c", code).stdout == "True\n"
