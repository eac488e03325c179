"""The hook of `import torch`: its cost in a process that never imports DeepSpeed. Its effect on
DeepSpeed is in `tests/zero3/test_autoload.py`.
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


def run(code: str, path: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BEFORE + code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_hook_loads_nothing_but_itself(installed):
    code = """
autoload.install()
loaded = {name for name in sys.modules if name.partition(".")[0] in ("torch", "deepspeed", "numpy", "nvme_offload")}
print(*sorted(loaded))
"""
    assert run(code, installed).split() == ["nvme_offload", "nvme_offload.autoload"]


def test_other_imports_are_found_as_before(installed):
    code = """
autoload.install()
import colorsys, importlib.util
print(type(colorsys.__spec__).__name__, importlib.util.find_spec("no_such_module_at_all"))
"""
    assert run(code, installed) == "ModuleSpec None\n"


def test_the_switch_leaves_the_import_system_alone(installed):
    code = "autoload.install(); print(sys.meta_path == before)"
    assert run(code, installed, NVME_OFFLOAD_AUTOLOAD="0") == "True\n"
    assert run(code, installed) == "False\n"


@pytest.mark.parametrize("loading", [False, True], ids=["installed before", "installed by it"])
def test_an_import_of_deepspeed_that_fails_can_be_tried_again(installed, tmp_path, loading):
    """DeepSpeed imports torch, which installs the hook in the middle of the import."""
    package = tmp_path / "deepspeed"
    (package / "runtime").mkdir(parents=True)
    hook = "from nvme_offload import autoload\nautoload.install()\n" if loading else ""
    (package / "__init__.py").write_text(hook + "from .runtime import config\n")
    (package / "runtime" / "config.py").write_text("import no_such_module_at_all\n")
    code = f"""{"" if loading else "autoload.install()"}
for _ in range(2):
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        print(error.name)
"""
    said = run(code, os.pathsep.join((str(tmp_path), installed)))
    assert said == "no_such_module_at_all\n" * 2


def test_torch_calls_the_hook(installed):
    pytest.importorskip("torch")
    code = "import torch\nprint([type(f).__module__ for f in sys.meta_path if f not in before])"
    assert run(code, installed) == "['nvme_offload.autoload']\n"


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
    assert run(code, installed) == (
        "[] set() True\nmodule 'nvme_offload' has no attribute 'nothing'\n"
    )
