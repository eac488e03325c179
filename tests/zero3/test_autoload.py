"""A configuration in the place of `enable()`, in processes in which torch calls the hook."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.deepspeed
pytest.importorskip("deepspeed")

FIRST = {"deepspeed first": "import deepspeed, torch", "torch first": "import torch, deepspeed"}
ORDERS = [
    pytest.param(name, marks=() if name == "torch first" else pytest.mark.slow) for name in FIRST
]
COMMON = """
import importlib.machinery, importlib.util, multiprocessing, os, sys
{first}
from deepspeed.runtime.config import DeepSpeedConfig
from nvme_offload import zero3

PLAIN, OURS = {{"train_batch_size": 1}}, {{"train_batch_size": 1, "nvme_offload": {{}}}}

def enabled():
    import deepspeed.runtime.zero.stage3 as stage3
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder
    ours = stage3.DeepSpeedZeroOptimizer_Stage3.__module__.startswith("nvme_offload")
    assert ours == bool(zero3._replaced) == AsyncIOBuilder().load().__name__.startswith("nvme_offload")
    assert ours == hasattr(OpBuilder.jit_load, "__wrapped__")
    return ours
"""


def run(code: str, installed: str, first: str = "torch first", **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMON.format(first=FIRST[first]) + code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": installed, "DS_ACCELERATOR": "cpu", **environment},
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("reported")], done.stderr


ours_by_then = """
assert type(deepspeed.__spec__) is importlib.machinery.ModuleSpec
assert type(sys.modules["deepspeed.runtime.config"].__loader__) is importlib.machinery.SourceFileLoader
parse = getattr(DeepSpeedConfig.__init__, "__wrapped__", None)
print("reported", [bool(zero3._replaced)], parse is not None)
DeepSpeedConfig(PLAIN)
print("reported", [bool(zero3._replaced)])
DeepSpeedConfig(OURS)
print("reported", [enabled()], DeepSpeedConfig.__init__ is parse)
child = os.fork()
if child == 0:
    os._exit(40 + enabled())
print("reported", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.releases
@pytest.mark.parametrize("first", ORDERS)
def test_a_configuration_with_the_section_enables(installed, first):
    reported, said = run(ours_by_then, installed, first)
    assert reported == [
        "reported [False] True",
        "reported [False]",
        "reported [True] True",
        "reported 41",
    ]
    assert "nvme_offload" not in said


@pytest.mark.slow
def test_a_spawned_child_enables_by_itself(installed, tmp_path):
    script = tmp_path / "spawning.py"
    script.write_text(
        COMMON.format(first="import multiprocessing")
        + """
def child(queue):
    DeepSpeedConfig(OURS)
    queue.put(enabled())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print("reported", queue.get(), bool(zero3._replaced))
    process.join()
"""
    )
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": installed, "DS_ACCELERATOR": "cpu"},
    )
    assert "reported True False\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "switch"),
    [
        ("", "0"),
        ("zero3.enable()\nzero3.disable()\n", ""),
    ],
    ids=["switched off", "disabled"],
)
def test_what_was_turned_off_stays_off(installed, code, switch):
    code += "DeepSpeedConfig(OURS)\nprint('reported', bool(zero3._replaced))"
    reported, _ = run(code, installed, NVME_OFFLOAD_AUTOLOAD=switch)
    assert reported == ["reported False"]


def test_a_configuration_with_the_section_is_refused_where_enabling_fails(installed):
    code = """
import nvme_offload.errors
for attempt in range(2):
    try:
        DeepSpeedConfig(OURS)
    except nvme_offload.errors.UnsupportedError as error:
        print("reported", bool(zero3._replaced), error)
print("reported", DeepSpeedConfig(PLAIN).train_batch_size)
"""
    # an extension that does not load, as with an old libstdc++
    broken = "import sys; sys.modules['nvme_offload._aio'] = None; " + FIRST["torch first"]
    done = subprocess.run(
        [sys.executable, "-c", COMMON.format(first=broken) + code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": installed, "DS_ACCELERATOR": "cpu"},
    )
    *refused, last = [line for line in done.stdout.splitlines() if line.startswith("reported")]
    assert len(refused) == 2, done.stderr
    for line in refused:
        assert "reported False" in line
        assert "nvme_offload cannot be enabled" in line
        assert "remove the section or set NVME_OFFLOAD_AUTOLOAD=0" in line
    assert last == "reported 1"


def test_a_section_of_another_name_is_questioned_and_a_stage_without_offload_refused(installed):
    code = """
ZERO = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
DeepSpeedConfig({**PLAIN, "zero_optimization": ZERO, "offload": {"host_memory": "8GB"}})
STAGE_0 = {"nvme_offload": {}, "zero_optimization": {**ZERO, "stage": 0}}
for changes in ({"host_memory": "8GB"}, STAGE_0):
    for attempt in range(2):
        try:
            DeepSpeedConfig({**PLAIN, "zero_optimization": ZERO, **changes})
        except Exception as error:
            print("reported", type(error).__name__, bool(zero3._replaced))
"""
    reported, said = run(code, installed)
    assert reported == ["reported UsageError False"] * 2 + ["reported UnsupportedError True"] * 2
    assert "nothing reads 'offload' in the DeepSpeed configuration" in said
