"""Training runs in separate processes, see `launch`; without DeepSpeed these tests are skipped."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


BUILD = """
import json, os

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from cpuinfo import get_cpu_info
from deepspeed.ops.op_builder import CPUAdamBuilder

library = CPUAdamBuilder().load().__file__
print(json.dumps({"library": library, "processor": get_cpu_info()}), file=answers, flush=True)
"""


@pytest.fixture(scope="session")
def cpu_adam(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """DeepSpeed's CPU Adam, compiled before a run with a limit of time needs it. The variable CPU_ADAM
    passes to `training` the library and the processor that DeepSpeed would look for.
    """
    from launch import finish, start

    script = tmp_path_factory.mktemp("adam") / "build.py"
    script.write_text(BUILD)
    with start([], script.parent, script=script) as (process,):
        built = finish(process)
    if built.status != 0:
        reason = (built.complaints or "it says nothing").splitlines()[-1]
        pytest.skip(f"DeepSpeed's CPU Adam cannot be compiled here: {reason}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_ADAM", json.dumps(built.results[0]))
        yield
