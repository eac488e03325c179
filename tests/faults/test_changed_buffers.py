"""A tensor that is resized, freed, shared or pointed elsewhere while a request on it is in flight:
in a separate process, since it may crash.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_offload

Stall = Callable[[], AbstractContextManager[Callable[[], None]]]
Server = tuple[subprocess.Popen[str], Path]

CAN_HOLD = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # what this torch can do
RESIZED = ("freed", "larger storage", "larger")

# Runs scripts, a line of JSON each, in new children, and prints their exit statuses. Between "ready"
# and "changed" the drive is stalled: no write finishes, and no request that follows one starts.
SERVER = """
import gc, json, os, sys, threading
import torch
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.errors import OffloadError
from nvme_offload.io.pool import PinnedPool
from nvme_offload.store.store import TensorStore
from nvme_offload.swap.swapper import TensorSwapper

COUNT = 30_001  # of odd length: the last part goes through memory of the engine's
NBYTES = 4 * COUNT

def pattern(seed):
    return torch.arange(seed, seed + COUNT, dtype=torch.int32)

CHANGES = {
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "larger storage": lambda tensor: tensor.untyped_storage().resize_(10 * NBYTES),
    "larger": lambda tensor: tensor.resize_(10 * COUNT),
    "shared": lambda tensor: tensor.share_memory_(),
    "elsewhere": lambda tensor: tensor.set_(),
    "none": lambda tensor: None,
}

def refusal(change, tensor):
    try:
        CHANGES[change](tensor)
        return None
    except RuntimeError as error:
        return str(error)

def outcome(wait):
    try:
        wait()
        return "well"
    except OffloadError as error:
        return type(error).__name__

def meet(word):
    print(word, flush=True)
    sys.stdin.readline()

def report(found):
    print(json.dumps(found), flush=True)

class EngineDoor:
    def __init__(self, engine):
        self.engine = engine
        self.files = {}
    def file(self, name):
        if name not in self.files:
            self.files[name] = self.engine.open(f"{directory}/{name}", "rw", size=NBYTES)
        return self.files[name]
    def write(self, name, tensor, after=()):
        return self.engine.write(tensor, self.file(name), after=after)
    def read(self, name, tensor, after=()):
        return self.engine.read(tensor, self.file(name), after=after)

class StoreDoor:
    def __init__(self, store):
        self.write, self.read = store.put, store.get

class Case:
    def __init__(self, door, direction, change, lent, name):
        self.door, self.direction, self.change, self.name = door, direction, change, name
        self.result = {"door": type(door).__name__, "direction": direction, "change": change, "lent": lent}
        door.write(name, pattern(1)).wait()
        self.array = pattern(2).numpy().copy()
        self.tensor = torch.from_numpy(self.array) if lent != "torch" else pattern(2).clone()
        if lent == "array":
            del self.array
        self.memory = self.tensor.view(-1)  # this memory, also where the tensor is pointed elsewhere
    def start(self, after):
        self.ticket = getattr(self.door, self.direction)(self.name, self.tensor, after=after)
        self.result["refusal"] = refusal(self.change, self.tensor)
    def end(self):
        self.result["ended"] = [outcome(self.ticket.wait), outcome(self.ticket.wait)]
        there = torch.empty(COUNT, dtype=torch.int32)
        self.door.read(self.name, there).wait()
        self.result["in_memory"] = torch.equal(self.memory, pattern(1))
        self.result["on_drive"] = torch.equal(there, pattern(2))
        self.result["refusal_later"] = refusal(self.change, self.tensor)
        return self.result

def run(doors_of, combinations):
    with Engine(config) as engine, TensorStore(directory, config) as store:
        store.reserve(64 * NBYTES)
        doors = [EngineDoor(engine), StoreDoor(store)][:doors_of]
        gates = [pattern(3) for _ in doors]
        for door, gate in zip(doors, gates):
            door.write("gate", gate).wait()
        cases = [Case(door, *combination, f"{number}") for door in doors for number, combination in enumerate(combinations)]
        meet("ready")
        before = {door: door.write("gate", gate) for door, gate in zip(doors, gates)}
        for case in cases:
            case.start([before[case.door]])
        others = [torch.full((COUNT,), 7, dtype=torch.int32) for _ in range(100)]  # would have the memory that was freed
        meet("changed")
        cases = [case.end() for case in cases]
        report({"cases": cases, "others": all(bool((other == 7).all()) for other in others)})

gc.collect()
gc.freeze()  # a child's end need not visit torch's modules
while line := sys.stdin.readline():
    script, backend, directory = json.loads(line)
    config = AioConfig(backend=backend, block_size=4096, queue_depth=4)
    if (child := os.fork()) == 0:
        exec(script)
        sys.exit()
    report(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def server(mount_namespace: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The process, and the file of its standard error."""
    environment = {**os.environ, "PYTHONPATH": str(Path(nvme_offload.__file__).parents[1])}
    complaints = tmp_path_factory.mktemp("server") / "complaints"
    with (
        complaints.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield process, complaints
        finally:
            process.kill()


@pytest.fixture
def ends(
    server: Server, backend: str, stalling_directory: Path, stall: Stall
) -> Callable[[str], Any]:
    """A function that runs a script in a child of the server, and returns its report."""
    process, complaints = server
    assert process.stdin is not None
    assert process.stdout is not None
    put, lines = process.stdin, process.stdout

    def say(line: str) -> None:
        put.write(line + "\n")
        put.flush()

    def run(script: str) -> Any:
        say(json.dumps([script, backend, str(stalling_directory)]))
        assert lines.readline() == "ready\n", complaints.read_text()
        with stall():
            say("go")
            line = lines.readline()
        assert line == "changed\n", complaints.read_text()
        say("go")
        reported, status = lines.readline(), lines.readline()
        assert (status, complaints.read_text()) == ("0\n", "")
        return json.loads(reported)

    return run


@pytest.mark.skipif(not CAN_HOLD, reason="this torch cannot exchange what two storages have")
def test_the_memory_of_a_request_stays(ends: Callable[[str], Any]) -> None:
    script = """
run(2, [(direction, change, lent) for direction in ("read", "write") for change in CHANGES for lent in ("torch", "array")])
"""
    result = ends(script)
    assert result["others"]
    assert len(result["cases"]) == 2 * 2 * 6 * 2
    for case in result["cases"]:
        lost = case["direction"] == "read" and case["change"] == "shared"
        assert case["ended"] == ["BufferChangedError" if lost else "well"] * 2, case
        if case["direction"] == "write":
            assert case["on_drive"], case
        else:
            assert case["in_memory"] == (not lost), case
        resized = case["change"] in RESIZED
        assert case["refusal"] == (
            "Trying to resize storage that is not resizable" if resized else None
        ), case
        if case["change"] != "larger":  # of which torch notes the sizes before it refuses
            assert case["refusal_later"] == (
                case["refusal"] if case["lent"] == "array" else None
            ), case


def test_where_torch_cannot_lend_memory_a_change_is_reported(ends: Callable[[str], Any]) -> None:
    """As an older torch, on memory that something else keeps."""
    script = """
torch.UntypedStorage._swap_data_ptr_ = property()
run(1, [(direction, change, "kept array") for direction in ("read", "write") for change in ("shared", "none")])
"""
    result = ends(script)
    assert result["others"]
    for case in result["cases"]:
        assert (
            case["ended"] == [{"shared": "BufferChangedError", "none": "well"}[case["change"]]] * 2
        ), case


def test_an_unawaited_change_is_raised_at_close(ends: Callable[[str], Any]) -> None:
    script = """
engine = Engine(config)
door = EngineDoor(engine)
door.write("data", pattern(1)).wait()
gate, tensor = pattern(2), pattern(3)
meet("ready")
door.read("data", tensor, after=[door.write("data", gate)])
tensor.share_memory_()
meet("changed")
report(outcome(engine.close))
"""
    assert ends(script) == "BufferChangedError"


def test_a_swapper_whose_memory_is_shared_keeps_every_byte(ends: Callable[[str], Any]) -> None:
    script = """
with TensorStore(directory, config) as store:
    store.reserve(64 * NBYTES)
    swapper = TensorSwapper(store, PinnedPool(3 * (NBYTES + 4096), pin=False))
    used = {name: swapper.create(name, NBYTES) for name in "abc"}
    for seed, tensor in enumerate(used.values()):
        tensor.copy_(pattern(seed).view(torch.uint8))
    meet("ready")
    swapper.release("a", changed=True)
    thread = threading.Thread(target=swapper.create, args=("d", NBYTES))  # where "a" is, once the drive has it
    thread.start()
    while store.stats().puts == 0:
        thread.join(0.001)  # it waits for memory
    used["b"].share_memory_()
    meet("changed")
    thread.join()
    for name in "bcd":
        swapper.release(name, changed=name != "d")
    right = []
    for seed, name in enumerate("abc"):
        right.append(torch.equal(swapper.swap_in(name), pattern(seed).view(torch.uint8)))
        swapper.release(name, changed=False)
    swapper.close()
    report(right)
"""
    assert ends(script) == [True] * 3
