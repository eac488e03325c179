"""The contract with DeepSpeed: whatever name of it is missing is named by `enable`, which then
replaces nothing; newer and older releases.
"""

from __future__ import annotations

import ast
import enum
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_offload import UnsupportedError, zero3
from nvme_offload.zero3 import contract

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)
pytestmark = pytest.mark.deepspeed
# without an import, which takes a second of every worker that collects tests
VERSION = importlib.metadata.version("deepspeed")
USES = list(contract.uses(VERSION))
ROOT = Path(__file__).parents[2]


def forget(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Rename the attributes *names* in the source that the check reads."""
    pattern = re.compile(rf"\.({'|'.join(names)})\b")
    source = contract._source
    monkeypatch.setattr(contract, "_source", lambda owner: pattern.sub(r".\1_x", source(owner)))
    contract._source.cache_clear = source.cache_clear  # type: ignore[attr-defined]


def remove(monkeypatch: pytest.MonkeyPatch, use: contract.Use) -> None:
    """Take *use* away from the DeepSpeed that is loaded."""
    owner = contract.owner_at(use.owner)
    for holder in owner.__mro__ if inspect.isclass(owner) else (owner,):
        if use.name in vars(holder) and holder is not object:
            if isinstance(holder, enum.EnumMeta):
                monkeypatch.setattr(
                    contract,
                    "owner_at",
                    lambda place: type("Status", (), {}) if place == use.owner else owner_of(place),
                )
            else:
                monkeypatch.delattr(holder, use.name)
    if use.parameters is None:
        forget(monkeypatch, use.name.replace(f"_{getattr(owner, '__name__', '')}__", "__"))


owner_of = contract.owner_at


@pytest.fixture
def untouched() -> Iterator[None]:
    """Sees that a refusal left DeepSpeed as it was."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    before = dict(OpBuilder._loaded_ops)
    yield
    assert zero3._replaced == []
    assert before == OpBuilder._loaded_ops
    assert logging.getLogger("nvme_offload").handlers == []


@pytest.mark.releases
def test_the_release_that_is_installed_has_all_of_it():
    contract.check()


OWNERS = sorted({use.owner for use in USES})


@pytest.mark.parametrize("owner", OWNERS)
def test_what_is_missing_is_named(owner, monkeypatch):
    uses = [use for use in USES if use.owner == owner]
    for use in uses:
        remove(monkeypatch, use)
    for use in uses:
        # every class has an __init__
        expected = f"{use} takes" if use.name == "__init__" else f"{use} is missing"
        assert expected in contract._fault(use)


# A class that is missing takes all its names with it, and the message lists only some.
ALONE = [
    use for use in USES if use.name != "__init__" and f"{use.owner}:{use.name}" not in set(OWNERS)
]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("use", ALONE[::40], ids=str)
def test_nothing_is_replaced_where_something_is_missing(use, monkeypatch):
    remove(monkeypatch, use)
    with pytest.raises(UnsupportedError) as refusal:
        zero3.enable()
    assert f"{use} is missing" in str(refusal.value)
    assert f"DeepSpeed {VERSION} does not match what" in str(refusal.value)
    assert f"pip install deepspeed=={contract.NEWEST}" in str(refusal.value)


OVERRIDDEN = [
    use
    for use in USES
    if use.owner.endswith("_Stage3") and use.parameters is not None and "..." not in use.parameters
]


@pytest.mark.usefixtures("untouched")
def test_another_signature_is_named(monkeypatch):
    def other(self: Any, something_else: Any) -> None: ...

    for use in OVERRIDDEN:
        monkeypatch.setattr(contract.owner_at(use.owner), use.name, other)
    for use in OVERRIDDEN:
        assert f"{use} takes (something_else) and not (" in contract._fault(use)
    with pytest.raises(UnsupportedError, match=re.escape("takes (something_else) and not (")):
        zero3.enable()


@pytest.mark.usefixtures("untouched")
def test_a_method_that_nothing_calls_any_more_is_named(monkeypatch):
    forget(monkeypatch, "_rigid_state_dict")
    with pytest.raises(
        UnsupportedError, match=r"nothing calls DeepSpeedZeroOptimizer_Stage3\._rigid_state_dict"
    ):
        zero3.enable()


@pytest.mark.usefixtures("untouched")
def test_what_is_called_on_a_swapper_and_ours_lacks_is_named(monkeypatch):
    from nvme_offload.zero3.optimizer_swapper import OptimizerSwapper

    monkeypatch.delattr(OptimizerSwapper, "purge_state")
    with pytest.raises(UnsupportedError, match="it calls purge_state on optimizer_swapper"):
        zero3.enable()


@pytest.mark.releases
def test_a_newer_release_is_held_to_the_contract_and_warned_of(monkeypatch, caplog):
    monkeypatch.setattr("deepspeed.__version__", "0.99.0")
    if any(contract._fault(use) for use in contract.uses("0.99.0")):
        pytest.skip("the release that is installed is not as the newest that was tried")
    contract.check()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert (
        f"DeepSpeed 0.99.0 is newer than {contract.NEWEST}, the newest that was tested"
        in record.message
    )


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("version", ["0.16.8", "0.9.10", "0.15.4+abc"])
def test_an_older_release_than_any_that_was_tried_is_refused(version, monkeypatch):
    monkeypatch.setattr("deepspeed.__version__", version)
    with pytest.raises(
        UnsupportedError,
        match=rf"^zero3 needs DeepSpeed {re.escape(contract.OLDEST)} or newer, and this is {re.escape(version)}: ",
    ):
        zero3.enable()


def test_the_requirement_is_the_oldest_that_was_tried():
    assert f'"deepspeed>={zero3.OLDEST_DEEPSPEED}"' in (ROOT / "pyproject.toml").read_text()
    assert not zero3.is_too_old(zero3.OLDEST_DEEPSPEED)
    assert not zero3.is_too_old("0.20.0.dev1")


def overridden(made: type, name: str) -> set[str]:
    """The names of DeepSpeed's class *name* that *made*, or a class between the two, defines."""
    names = [kind.__name__ for kind in made.__mro__]
    ours, (base, *_) = made.__mro__[: names.index(name)], made.__mro__[names.index(name) :]
    found = {attribute for kind in ours for attribute in vars(kind) if hasattr(base, attribute)}
    assert {"destroy", "step"} <= found
    return {attribute for attribute in found if not hasattr(object, attribute)} - {
        "__module__",
        "__annotations__",
        "__dict__",
        "__weakref__",
    }


@pytest.mark.releases
def test_every_override_is_in_the_contract():
    from nvme_offload.zero3 import replacing, stage3, stage_1_and_2

    named = {use.name for use in USES if use.owner.endswith("_Stage3")}
    assert overridden(stage3.Stage3, "DeepSpeedZeroOptimizer_Stage3") <= named
    named = {use.name for use in USES if use.owner.endswith(":DeepSpeedZeroOptimizer")}
    assert overridden(stage_1_and_2.Stages1And2, "DeepSpeedZeroOptimizer") <= named
    for place, name in replacing._functions:
        assert name in {use.name for use in USES if use.owner == place}


def attributes_that_are_used() -> Iterator[tuple[str, str, str]]:
    """In all modules except `compat` and `contract`: file, last name of the object, and attribute."""
    for path in (ROOT / "nvme_offload" / "zero3").glob("*.py"):
        for node in (
            ast.walk(ast.parse(path.read_text()))
            if path.name not in ("compat.py", "contract.py")
            else ()
        ):
            if isinstance(node, ast.Attribute):
                yield path.name, ast.unparse(node.value).rpartition(".")[2], node.attr
            elif (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("getattr", "setattr", "hasattr")
                and isinstance(node.args[1], ast.Constant)
            ):
                yield path.name, ast.unparse(node.args[0]).rpartition(".")[2], node.args[1].value


def names_of_deepspeed() -> set[str]:
    """What objects of DeepSpeed's classes have, in the modules of the contract."""
    found = set()
    for module in {
        importlib.import_module(owner.partition(":")[0]) for owner in {use.owner for use in USES}
    }:
        kinds = [
            kind
            for value in vars(module).values()
            if inspect.isclass(value)
            for kind in value.__mro__
            if kind.__module__.startswith("deepspeed")
        ]
        found |= {name for kind in kinds for name in vars(kind)}
        found |= set(re.findall(r"\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(module)))
    return found


# Variable names for DeepSpeed's objects in the sources; self where a class derives from DeepSpeed's,
# or a function becomes a method of it.
HELD = {
    "accelerator",
    "dist",
    "engine",
    "fragment",
    "get_accelerator()",
    "original",
    "param",
    "stage3",
}
HEIRS = {
    "stage3.py",
    "stage3_access.py",
    "stage3_gradients.py",
    "stage3_sub_groups.py",
    "stages.py",
    "tiered.py",
}
# Attributes of torch's parameters, documented ones of DeepSpeed's engine, and other objects of these
# names: our engine, torch's streams, Lightning's trainer.
ELSEWHERE = {"module", "DeepSpeedEngine", "close", "config", "open", "read", "write", "synchronize"}


def test_every_attribute_of_deepspeeds_that_is_used_is_in_the_contract():
    listed = {use.name for version in contract.TESTED for use in contract.uses(version)} | {
        name for names in contract._SWAPPERS.values() for name in names
    }
    torchs = {
        *dir(torch.Tensor),
        *dir(torch.nn.Module),
        *dir(torch.optim.Optimizer),
        "param_groups",
        "state",
        "defaults",
    }
    theirs = names_of_deepspeed()
    nodes = [
        node
        for path in (ROOT / "nvme_offload").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    unlisted = {
        (file, holder, name)
        for file, holder, name in attributes_that_are_used()
        if name not in listed | torchs | ELSEWHERE
        if (holder in HELD and (name in theirs or name not in ours))
        or (holder in ("self", "super()") and file in HEIRS and name in theirs)
    }
    assert unlisted == set()


def test_deepspeed_is_imported_by_names_of_the_contract_alone():
    known = {
        (use.owner.partition(":")[0], use.name)
        for version in contract.TESTED
        for use in contract.uses(version)
    }
    known |= {tuple(owner.split(":")) for owner in contract.CONTRACT if ":" in owner}
    known |= {("deepspeed", "comm")}
    for path in (ROOT / "nvme_offload" / "zero3").glob("*.py"):
        for module, names in re.findall(
            r"^\s*from (deepspeed[\w.]*) import (\([^)]*\)|.+)$", path.read_text(), re.MULTILINE
        ):
            for name in filter(None, re.split(r"[\s,()]+", names.split("  #")[0])):
                if name == "as":
                    break
                assert (module, name) in known, (path.name, module, name)


@pytest.mark.slow
def test_checkpoints_pass_on_the_oldest_release():
    """By `make test-deepspeed`, which runs everything that may differ, on all releases."""
    environment = {
        **os.environ,
        "PATIENCE": "600",  # a training that hangs fails its test within the limit of this one
        "ARGS": "-k test_checkpoint",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [ROOT / "tools" / "test-deepspeed", sys.executable, contract.OLDEST],
        capture_output=True,
        text=True,
        env=environment,
    )
    if not (ROOT / "build" / "deepspeed" / contract.OLDEST / "deepspeed").is_dir():
        pytest.skip(f"DeepSpeed {contract.OLDEST} cannot be installed here")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_what_a_class_only_reads_is_not_taken_for_what_it_sets():
    """Older releases of `stage3` lack the names of parameters, which a base class reads."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    assert contract.mentions(ZeROOptimizer, "param_names")
    assert not contract.sets(ZeROOptimizer, "param_names")
    assert contract.sets(
        contract.owner_at("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"), "module"
    )
