"""The line before DeepSpeed compiles an op."""

from __future__ import annotations

import functools
import logging
import types
from pathlib import Path

import pytest

from nvme_offload.zero3.compiling import jit_load

pytest.importorskip("torch")


def test_a_compile_is_announced_and_what_is_built_is_not(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, "nvme_offload")
    reported = []

    def build(self, verbose=True):
        """As torch's `load`: the library is in the build directory afterwards."""
        # torch may have something to say of CUDA, too
        ours = [one.message for one in caplog.records if one.name.startswith("nvme_offload")]
        reported.append((ours, verbose))
        Path(tmp_path, self.name, f"{self.name}.so").touch()
        return self.name

    load = functools.partial(jit_load, build)
    builder = types.SimpleNamespace(name="some_op")
    assert load(builder, verbose=False) == "some_op"
    line = (
        "compiling DeepSpeed's some_op: takes minutes, once; "
        f"the result is kept in {tmp_path / 'some_op'}"
    )
    assert reported == [([line], False)]
    assert load(builder) == "some_op"
    assert reported[1:] == [([line], True)]


def test_a_lock_of_a_killed_compilation_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    builder = types.SimpleNamespace(name="some_op")
    (lock := tmp_path / "some_op" / "lock").parent.mkdir()
    lock.touch()
    assert jit_load(lambda builder: "waited", builder) == "waited"
    [found] = caplog.messages
    assert found.startswith("waiting for another process that compiles DeepSpeed's some_op: ")
    assert found.endswith(f"so remove {lock}")
