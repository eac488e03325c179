"""The hook of `import torch`: what it costs the process that never imports DeepSpeed, and what it
leaves behind. What it does with DeepSpeed is in `tests/zero3/test_autoload.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEFORE = """
import sys
from nvme_offload import autoload
before = list(sys.meta_path)
"""


def run(code: str, installed: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BEFORE + code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": installed, **environment},
    )


def run_well(code: str, installed: str, **environment: str) -> str:
    done = run(code, installed, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_hook_loads_nothing_but_itself(installed):
    code = """
autoload.install()
loaded = {name for name in sys.modules if name.partition(".")[0] in ("torch", "deepspeed", "numpy", "nvme_offload")}
print(*sorted(loaded))
"""
    assert run_well(code, installed).split() == ["nvme_offload", "nvme_offload.autoload"]


def test_other_imports_are_found_as_before(installed):
    code = """
autoload.install()
import colorsys, importlib.util
print(type(colorsys.__spec__).__name__, importlib.util.find_spec("no_such_module_at_all"))
"""
    assert run_well(code, installed) == "ModuleSpec None\n"


def test_the_switch_leaves_the_import_system_alone(installed):
    code = "autoload.install(); print(sys.meta_path == before)"
    assert run_well(code, installed, NVME_OFFLOAD_AUTOLOAD="0") == "True\n"
    assert run_well(code, installed) == "False\n"


@pytest.mark.parametrize("loading", [False, True], ids=["installed before", "installed by it"])
def test_an_import_of_deepspeed_that_fails_can_be_tried_again(installed, tmp_path, loading):
    """DeepSpeed imports torch, so that the hook may come in the midst of its import."""
    package = tmp_path / "deepspeed"
    package.mkdir()
    hook = "from nvme_offload import autoload\nautoload.install()\n"
    fails = "import no_such_module_at_all\n"
    (package / "__init__.py").write_text(hook + fails if loading else fails)
    code = f"""{"" if loading else "autoload.install()"}
for _ in range(2):
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        print(error.name, sys.meta_path != before)
"""
    said = run_well(code, os.pathsep.join((str(tmp_path), installed)))
    assert said == "no_such_module_at_all True\n" * 2


def test_a_deepspeed_without_what_is_looked_for_is_a_warning(installed, tmp_path):
    (tmp_path / "deepspeed.py").write_text("mine = True\n")
    code = "autoload.install()\nimport deepspeed\nprint(deepspeed.mine, sys.meta_path == before)"
    done = run(code, os.pathsep.join((str(tmp_path), installed)))
    assert (done.returncode, done.stdout) == (0, "True True\n")
    assert "DeepSpeed goes on with its own offload, since nvme_offload could not be enabled" in (
        done.stderr
    )
    assert "NVME_OFFLOAD_AUTOLOAD=0 leaves it out" in done.stderr
    assert done.stderr.count("\n") == 1


def test_torch_calls_the_hook(installed):
    pytest.importorskip("torch")
    code = "import torch\nprint([type(f).__module__ for f in sys.meta_path if f not in before])"
    assert run_well(code, installed) == "['nvme_offload.autoload']\n"


def test_public_names_are_there_on_first_use(installed):
    code = """
import nvme_offload
missing = [name for name in nvme_offload.__all__ if not hasattr(nvme_offload, name)]
print(missing, set(nvme_offload.__all__) - set(dir(nvme_offload)), nvme_offload.errors.UsageError is nvme_offload.UsageError)
try:
    nvme_offload.nothing
except AttributeError as error:
    print(error)
"""
    assert run_well(code, installed) == (
        "[] set() True\nmodule 'nvme_offload' has no attribute 'nothing'\n"
    )
