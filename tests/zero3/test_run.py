"""`nvme-offload run` in the place of `enable()`, with the real DeepSpeed."""

from __future__ import annotations

import os
import sys

import pytest
from processes import finished

from nvme_offload.commands.run import STARTUP

pytestmark = pytest.mark.deepspeed
pytest.importorskip("deepspeed")

ENABLED = """
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.zero import partition_parameters
from deepspeed.ops.op_builder import AsyncIOBuilder
from nvme_offload import zero3

def swapper_is_deepspeeds():
    return partition_parameters.AsyncPartitionedParameterSwapper is AsyncPartitionedParameterSwapper

print("found", swapper_is_deepspeeds(), AsyncIOBuilder().load().__name__.partition(".")[0])
zero3.disable()
print("found", swapper_is_deepspeeds())
"""


def found(code):
    path = os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH"))))
    done = finished(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("found")], done.stderr


@pytest.mark.releases
def test_an_import_of_deepspeed_enables():
    lines, said = found(f"import torch\nimport deepspeed\n{ENABLED}")
    assert lines == ["found False nvme_offload", "found True"]
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
