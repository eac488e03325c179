"""Training runs in separate processes, see `launch`; without DeepSpeed these tests are skipped."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import finished

# for launch, models and training, which a script imports too
sys.path.append(str(Path(__file__).parent))

TRAINS = {
    "test_checkpoint_faults.py",
    "test_checkpoint_power_loss.py",
    "test_faults.py",
    "test_nodes.py",
    "test_zero3_overlap.py",
    "test_parity.py",
    "test_recovery.py",
    "test_stage_1_and_2.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what trains, and skip it where DeepSpeed is not installed."""
    missing = importlib.util.find_spec("deepspeed") is None
    for item in items:
        if item.path.name in TRAINS and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.deepspeed)
            if missing:
                item.add_marker(pytest.mark.skip(reason="DeepSpeed is not installed"))


@pytest.fixture(scope="session")
def cpu_adam() -> Iterator[None]:
    """DeepSpeed's CPU Adam, compiled before a run with a limit of time needs it. The variable CPU_ADAM
    tells `training` what DeepSpeed would find out about the library and the processor.
    """
    code = """
import json
from cpuinfo import get_cpu_info
from deepspeed.ops.op_builder import CPUAdamBuilder
library = CPUAdamBuilder().load().__file__
print(json.dumps({"library": library, "processor": get_cpu_info()}))
"""
    done = finished([sys.executable, "-c", code], env={**os.environ, "DS_ACCELERATOR": "cpu"})
    if done.returncode != 0:
        pytest.skip(
            f"DeepSpeed's CPU Adam cannot be compiled here: {(done.stderr or 'it says nothing').splitlines()[-1]}"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_ADAM", done.stdout.splitlines()[-1])
        yield
