"""`nvme-offload run` in the place of `enable()`, with the real DeepSpeed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nvme_offload.commands.run import STARTUP

pytestmark = pytest.mark.deepspeed
pytest.importorskip("deepspeed")

ENABLED = """
from deepspeed.runtime.zero import partition_parameters
from deepspeed.ops.op_builder import AsyncIOBuilder
from nvme_offload import zero3

swapper = partition_parameters.AsyncPartitionedParameterSwapper
names = swapper.__module__, AsyncIOBuilder().load().__name__
print("found", *(name.partition(".")[0] for name in names))
zero3.disable()
print("found", partition_parameters.AsyncPartitionedParameterSwapper.__module__)
"""


def found(code):
    path = os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("found")], done.stderr


@pytest.mark.releases
@pytest.mark.parametrize("first", ["torch", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_an_import_of_deepspeed_enables(first):
    lines, said = found(f"import {first}\nimport deepspeed\n{ENABLED}")
    assert lines == [
        "found nvme_offload nvme_offload",
        "found deepspeed.runtime.swap_tensor.partitioned_param_swapper",
    ]
    assert "nvme_offload" not in said


def test_an_import_of_deepspeed_fails_where_enabling_does():
    """So that a configuration never gets an offload that it did not ask for."""
    code = """
import sys
sys.modules["nvme_offload._aio"] = None  # as an extension that does not load
for _ in range(2):
    try:
        import deepspeed
    except Exception as error:
        print("found", type(error).__name__)
"""
    lines, _ = found(code)
    assert len(lines) == 2
    assert len(set(lines)) == 1
