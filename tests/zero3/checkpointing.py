"""Trains small models as `training.py` does, from and to checkpoints, and prints one JSON object a
line for each life of an engine.

The one argument is a JSON object as `training.main` takes it, with "lives" instead of "cases":
objects with the fields of `Life`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from launch import Case
from models import MODELS, Chain
from training import Training, Watch, _hash, begin

MODELS["wide"] = lambda: Chain(*(torch.nn.Linear(1024, 1024) for _ in range(16)), features=1024)


@dataclasses.dataclass
class Life:
    """One engine: its configuration, the checkpoint that it loads before step *first*, and the
    saves until step *last*.

    saves: pairs of a step, before which to save, and a directory. full: a directory, on a drive
    that is filled up between two saves to it. universal: a directory to convert to a universal
    checkpoint first. weights: of which directory to compare the weights, as DeepSpeed's tools read
    them, with the engine's. model: where to write the 16-bit weights. failing: the last rank fails
    in a save more, to the first directory. breaking: saves there again, each with something
    missing. looks: at all weights and states around each save, which waits for pending updates.
    """

    name: str
    case: Case
    ours: bool = True
    first: int = 0
    last: int = 4
    load: str = ""
    saves: list[list[Any]] = dataclasses.field(default_factory=list)
    full: str = ""
    universal: str = ""
    load_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: str = ""
    model: str = ""
    failing: bool = False
    breaking: bool = False
    looks: bool = False


def main(request: dict[str, Any]) -> None:
    answers, deepspeed = begin(request)
    for fields in request["lives"]:
        life = Life(**{**fields, "case": Case(**fields["case"])})
        try:
            result = live(life, request["directory"])
        except Exception as error:
            traceback.print_exc()
            result = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps({"name": life.name, **result}), file=answers, flush=True)
        gc.collect()
        gc.freeze()  # what this case has imported: the next collections need not visit it
    deepspeed.comm.destroy_process_group()


def live(life: Life, directory: str) -> dict[str, Any]:
    from nvme_offload import zero3

    (zero3.enable if life.ours else zero3.disable)()
    if life.universal:
        convert(Path(life.universal))
    training = Training(life.case, directory, life.ours, Watch())
    engine = training._engine(7 if life.load else 0)  # values that are not loaded differ
    result: dict[str, Any] = {"differ": []}
    if life.load:
        with memory_growth(result, "loading"):
            path, client_state = engine.load_checkpoint(life.load, **life.load_arguments)
        if path is None:
            raise FileNotFoundError(life.load)
        result["client_state"] = client_state.get("reported")
    result["begin"] = training._final(engine)
    for step in range(life.first, life.last):
        for when, place in life.saves:
            if step == when:
                before = training._final(engine) if life.looks else None
                with memory_growth(result, "saving"):
                    engine.save_checkpoint(place, tag="tag", client_state={"reported": step})
                if place == life.weights and when == life.saves[-1][0]:
                    result["differ"] += compare_weights(engine, place)
                if life.looks and training._final(engine) != before:
                    result["differ"].append(f"saving at {step} changed something")
        if step == life.last - 1 and life.full:
            result["full"] = save_to_full_drive(engine, Path(life.full))
        if step == life.last - 1 and life.failing:
            result["failing"] = save_with_failing_rank(engine, Path(life.saves[0][1]))
        if step == life.last - 1 and life.breaking:
            result["breaking"] = save_with_something_missing(engine, Path(life.saves[0][1]))
        training._step(engine, step, 0)
    if life.model:
        engine.save_16bit_model(life.model)
        result["16bit"] = {
            name: _hash(tensor)
            for name, tensor in torch.load(Path(life.model) / "pytorch_model.bin").items()
        }
    result["end"] = training._final(engine)
    result |= {
        "reported": training.reported,
        "global_steps": engine.global_steps,
        "rates": [group["lr"] for group in getattr(engine.optimizer, "param_groups", [])],
    }
    engine.destroy()
    return result


def save_to_full_drive(engine: Any, place: Path) -> dict[str, Any]:
    """Save, fill the drive up, and try to save again."""
    engine.save_checkpoint(str(place), tag="tag")
    before = contents(place)
    with (place / "filling").open("wb") as filling, contextlib.suppress(OSError):
        while True:
            filling.write(b"x" * 4096)
            filling.flush()
    found = {}
    try:
        engine.save_checkpoint(str(place), tag="tag")
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    (place / "filling").unlink()
    return {**found, "untouched": contents(place) == before}


def save_with_failing_rank(engine: Any, place: Path) -> dict[str, Any]:
    """Try to save, while the last rank cannot write."""
    from deepspeed import comm

    from nvme_offload.errors import IOFailure
    from nvme_offload.io import archive

    def fail(*_: Any) -> None:
        raise IOFailure(
            5, "Input/output error", operation="write", path="nowhere", offset=0, nbytes=1, done=0
        )

    before, write = contents(place), archive.write
    comm.barrier()
    if engine.global_rank == comm.get_world_size() - 1:
        archive.write = fail
    found = {}
    try:
        engine.save_checkpoint(str(place), tag="tag")
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    archive.write = write
    comm.barrier()
    return {**found, "untouched": contents(place) == before}


def save_with_something_missing(engine: Any, place: Path) -> dict[str, Any]:
    """The messages about saves without some states, by cause: another DeepSpeed, or a fault of
    this package.
    """
    from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    from nvme_offload.zero3.stage3 import Stage3

    def states(tree: Any) -> dict[Any, Any]:
        found: dict[Any, Any] = tree[OPTIMIZER_STATE_DICT]["state"]
        return found

    def tensors(state: dict[str, Any]) -> list[str]:
        return [key for key, value in state.items() if torch.is_tensor(value) and value.dim()]

    made, kept, kind = Stage3._rigid_state_dict, type(engine)._save_zero_checkpoint, type(engine)
    losses = {
        "all states": lambda tree: states(tree).clear(),
        "the states of one sub-group": lambda tree: states(tree).popitem(),
        "one state of one": lambda tree: states(tree)[0].pop(tensors(states(tree)[0])[-1]),
        "a part of a state": lambda tree: states(tree)[0].update(
            {tensors(states(tree)[0])[0]: torch.zeros(3)}
        ),
        "one master": lambda tree: tree[FP32_FLAT_GROUPS].pop(),
        "all masters": lambda tree: tree.pop(FP32_FLAT_GROUPS),
        "a part of a master": lambda tree: tree[FP32_FLAT_GROUPS].__setitem__(0, torch.zeros(3)),
        "everything": lambda tree: tree.clear(),
    }

    def losing(lose: Any) -> Any:
        def rigid_state_dict(self: Any) -> Any:
            tree = made(self)
            lose(tree)
            return tree

        return rigid_state_dict

    class Other(TorchCheckpointEngine):  # another one, of whose files we know nothing
        pass

    ways: dict[str, Any] = {
        name: lambda lose=lose: setattr(Stage3, "_rigid_state_dict", losing(lose))
        for name, lose in losses.items()
    }
    ways["the method renamed"] = lambda: delattr(Stage3, "_rigid_state_dict")
    ways["the file"] = lambda: setattr(kind, "_save_zero_checkpoint", lambda *_, **__: None)
    before, reported, plain = contents(place), {}, engine.checkpoint_engine
    other = Other(plain.config_params) if hasattr(plain, "config_params") else Other()
    for writer in (plain, other):
        engine.checkpoint_engine = writer
        for name, damage in ways.items():
            damage()
            try:
                engine.save_checkpoint(
                    str(place) if writer is plain else f"{place} other", tag="tag"
                )
                said = "it was saved"
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            Stage3._rigid_state_dict, kind._save_zero_checkpoint = made, kept
            reported[name if writer is plain else f"{name}, by another writer"] = said
        engine.checkpoint_engine = plain
    return {
        "reported": reported,
        "untouched": contents(place) == before,
        "shown": [str(path) for path in place.parent.glob(f"{place.name} other/latest")],
    }


@contextlib.contextmanager
def memory_growth(result: dict[str, Any], key: str) -> Iterator[None]:
    """Note under *key* by how many bytes the memory of this process was at most larger meanwhile
    than at the beginning.
    """

    def kilobytes(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1])

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    yield
    result[key] = (kilobytes("VmHWM") - before) * 1024


def contents(place: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in place.rglob("*")
        if path.is_file() and path.name != "filling"
    }


def convert(place: Path) -> None:
    """Make *place*/universal of *place*/tag."""
    from deepspeed.checkpoint import ds_to_universal

    settings = {
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
        "inject_missing_state": True,
    }
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(place / "tag"), output_folder=str(place / "universal"), **settings
        )
    )
    (place / "latest_universal").write_text("universal")


def compare_weights(engine: Any, place: str) -> list[str]:
    """Which weights are not those that *engine* has, as DeepSpeed's tool finds them in the
    checkpoint.
    """
    from deepspeed import utils, zero
    from deepspeed.utils.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
    )

    found = get_fp32_state_dict_from_zero_checkpoint(place, "tag")
    own = Path(place) / f"converted {engine.global_rank}"  # the others write theirs meanwhile
    convert_zero_checkpoint_to_fp32_state_dict(place, str(own), max_shard_size=None, tag="tag")
    (converted,) = (torch.load(path) for path in own.glob("*.bin"))
    wrong = []
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            wanted = utils.safe_get_full_fp32_param(parameter)
        else:
            with zero.GatheredParameters([parameter]):
                wanted = parameter.data.clone()
        for kind, weights in (("memory", found), ("the file", converted)):
            if not torch.equal(weights[name].float(), wanted.float()):
                wrong.append(f"{name} in {kind}")
    return wrong


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
