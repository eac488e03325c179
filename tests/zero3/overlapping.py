"""Trains a small model with `"overlap_step"`, and prints one JSON object: what
`test_zero3_overlap.py` asks for.

The one argument is a JSON object: "directory"; "case", as `launch.Case` has it; "what", a name of
`main`'s. No update is made before a caller waits for one, except in "beside", "reads" and "broken".
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from launch import Case
from training import Training, Watch, begin, update_late

FIRST = 2  # steps that are over before anything is looked at


class Made(list[int]):
    """The sub-groups that were updated since it was cleared, in order."""

    def watch(self) -> None:
        from nvme_offload.zero3.overlap import Overlap

        make = Overlap._make

        def watched(overlap: Any, index: int, *rest: Any) -> None:
            make(overlap, index, *rest)
            self.append(index)

        Overlap._make = watched  # type: ignore[method-assign]

    def at(self, look: Callable[[], Any]) -> list[int]:
        """Those made since the step before, after *look*."""
        look()
        return list(self)


def main(request: dict[str, Any]) -> None:
    answers, deepspeed = begin(request)
    watch = Watch()
    watch.enable([])
    if request["what"] not in ("beside", "reads", "broken"):
        update_late()
    made = Made()
    made.watch()
    training = Training(Case(**request["case"]), request["directory"], True, watch)
    what = {
        "gate": gate,
        "order": order,
        "look": look,
        "beside": beside,
        "fault": fault,
        "broken": broken,
        "destroy": destroy,
        "end": end,
        "optimizers": optimizers,
        "growth": growth,
        "reads": reads,
    }
    result = what[request["what"]](training, made, request)
    print(json.dumps(result), file=answers, flush=True)
    deepspeed.comm.destroy_process_group()
    if request["what"] == "end":
        sys.exit()  # which frees the engine


def trained(training: Training, made: Made, steps: int = FIRST, seed: int = 0) -> Any:
    """An engine after some *steps*, with the updates of the last step pending."""
    engine = training._engine(seed)
    for step in range(steps):
        made.clear()
        training._step(engine, step, 0)
    return engine


def stepped(training: Training, engine: Any, made: Made, step: int) -> list[int]:
    """The parameters updated when the *step*th step returned."""
    engine.optimizer.finish_updates()
    made.clear()
    training._step(engine, step, 0)
    return list(made)


def everything(engine: Any) -> list[int]:
    return list(range(len(engine.optimizer.fp16_groups)))


def sub_groups(engine: Any, module: torch.nn.Module) -> list[int]:
    optimizer = engine.optimizer
    return sorted(
        optimizer.grad_position[optimizer.get_param_id(param)][0] for param in module.parameters()
    )


def forward(training: Training, engine: Any, step: int = 9) -> torch.Tensor:
    return training._loss(engine, torch.Generator().manual_seed(step))


def growth(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    """The lines of the package that each step runs, with its updates and the forward pass that waits
    for them, in all and in `Ahead`; the first comes before the order of use is learned.
    """
    from nvme_offload.zero3.overlap import Ahead

    ahead = {one.__code__ for one in vars(Ahead).values() if inspect.isfunction(one)}
    lines: Counter[bool] = Counter()

    @functools.cache
    def is_ours(file: str) -> bool:
        return "nvme_offload" in Path(file).parts

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not is_ours(frame.f_code.co_filename):
            return None
        lines[frame.f_code in ahead] += event == "line"
        return trace

    engine = trained(training, made, 1)
    counts = []
    for step in range(1, 4):
        lines.clear()
        threading.settrace(trace)
        sys.settrace(trace)
        training._step(engine, step, 0)
        engine.optimizer.finish_updates()
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        counts.append({"ahead": lines[True], "all": lines.total()})
    return {"sub-groups": len(everything(engine)), "lines": counts}


def reads(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    """The bytes that each step reads, with `"overlap_step"` and without. Updates and layers take a
    time that is another in each step.
    """
    from nvme_offload.zero3.stage3 import Stage3
    from nvme_offload.zero3.updates import is_worker

    step_sub_group = Stage3.step_sub_group

    def taking_time(stage3: Any, *args: Any) -> None:
        if is_worker():
            time.sleep(random.random() * 0.004)
        step_sub_group(stage3, *args)

    Stage3.step_sub_group = taking_time  # type: ignore[method-assign]
    found = {}
    for name, overlaps in (("with", True), ("without", False)):
        case = training.case.but(section={**training.case.section, "overlap_step": overlaps})
        place = Path(request["directory"], name)
        place.mkdir()
        each = Training(case, str(place), True, training.watch)
        engine = each._engine(0)
        for layer in engine.module.layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(random.random() * 0.004))
        swapper = engine.optimizer.tier.swapper
        before, found[name] = 0, []
        for step in range(case.steps):
            each._step(engine, step, 0)
            so_far = swapper.stats().bytes_read
            found[name].append(so_far - before)
            before = so_far
        engine.destroy()
    return found


def gate(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    engine = trained(training, made, 4)  # DeepSpeed's trace is complete by then
    result: dict[str, Any] = {"made after step": stepped(training, engine, made, 4), "layers": []}
    seen: list[list[int]] = []
    needed: list[int] = []
    for layer in engine.module.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(sorted(made)))
        needed = sorted(needed + sub_groups(engine, layer))
        result["layers"].append(needed)
    loss = forward(training, engine)
    result["made at layers"] = list(seen)
    groups = engine.optimizer.fp16_groups
    result["left in flight"] = sum(
        param.ds_status.name == "INFLIGHT" for group in groups for param in group
    )
    engine.backward(loss)
    result["after the backward pass"] = sorted(made)
    engine.step()
    engine.optimizer.finish_updates()
    return {
        **result,
        "all": everything(engine),
        "order": sorted(made[-len(groups) :]),
        "elements": [sum(param.ds_numel for param in group) for group in groups],
    }


def order(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    """The sub-groups in the order of their updates, of each step that is overlapped."""
    engine = trained(training, made, 1)
    made.clear()
    for step in range(1, training.case.steps):
        training._step(engine, step, 0)  # its forward pass waits for the updates of the one before
    engine.optimizer.finish_updates()
    count = len(everything(engine))
    orders = [made[start : start + count] for start in range(0, len(made), count)]
    return {"all": everything(engine), "orders": orders}


def look(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    import deepspeed
    from deepspeed import utils

    engine = trained(training, made, 4)
    params = list(engine.module.parameters())
    of_5 = engine.optimizer.fp16_groups[5]
    step = 4

    def after(act: Callable[[], Any]) -> list[int]:
        nonlocal step
        assert stepped(training, engine, made, step) == []
        step += 1
        return made.at(act)

    def gather() -> None:
        with deepspeed.zero.GatheredParameters(of_5):
            of_5[0].sum()

    def enter() -> None:
        with deepspeed.zero.Init(config_dict_or_path=training.config):
            pass

    result: dict[str, Any] = {"all": everything(engine), "gathered": after(gather)}
    # twice it is used first, and then is the first in the order of updates
    for _ in range(2):
        forward(training, engine)
        result["then"] = after(gather)
    looks = {
        # a part of a save, which shows DeepSpeed other lists of sub-groups than updates need
        "shapes": engine._get_zero_param_shapes,
        "saved": lambda: engine.save_checkpoint(str(Path(request["directory"], "kept"))),
        "fragment": lambda: utils.safe_get_full_fp32_param(params[0]),
        "state": lambda: engine.optimizer.state,
        "zero.Init": enter,
        "destroyed": engine.destroy,
    }
    return result | {name: sorted(after(act)) for name, act in looks.items()}


def beside(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    """Read a frozen parameter while an update has states in use: where there is room for it, and
    where there is none before the update is over.
    """
    from nvme_offload.errors import OutOfHostMemoryError
    from nvme_offload.swap.swapper import TensorSwapper
    from nvme_offload.zero3.overlap import Overlap
    from nvme_offload.zero3.stage3 import Stage3
    from nvme_offload.zero3.updates import is_worker

    # each wait lets one update go, so that it can be counted how many are over then
    inside, waited, go = threading.Event(), threading.Event(), threading.Semaphore(0)
    step_sub_group, swap_in = Stage3.step_sub_group, TensorSwapper.swap_in
    start, block = Overlap.start, Overlap._block
    full = False

    def stepping(stage3: Any, *args: Any) -> None:
        if is_worker():
            inside.set()
            go.acquire()
        step_sub_group(stage3, *args)

    def starting(*args: Any) -> None:
        while go.acquire(blocking=False):
            pass
        waited.clear()
        inside.clear()
        made.clear()
        start(*args)

    def waiting(updates: Any, is_true: Any) -> None:
        waited.set()
        go.release()
        block(updates, is_true)

    def swapping_in(swapper: Any, name: str, **named: Any) -> Any:
        if full and not waited.is_set() and threading.current_thread() is threading.main_thread():
            raise OutOfHostMemoryError("no memory next to an update")
        return swap_in(swapper, name, **named)

    engine = trained(training, made)
    engine.optimizer.finish_updates()
    Stage3.step_sub_group = stepping  # type: ignore[method-assign]
    Overlap.start, Overlap._block = starting, waiting  # type: ignore[method-assign]
    TensorSwapper.swap_in = swapping_in  # type: ignore[method-assign]
    param = next(param for param in engine.module.parameters() if not param.requires_grad)
    before = param.nvme_swapper.partition(param)
    result: dict[str, Any] = {"all": everything(engine)}
    for full in (False, True):
        training._step(engine, FIRST + full, 0)
        inside.wait()
        same = bool((param.nvme_swapper.partition(param) == before).all())
        result["full" if full else "room"] = [same, len(made)]
        go.release(len(result["all"]))  # for those that are left
    return result | {"end": training._final(engine)}


def failing_reads() -> Callable[[], None]:
    """Make every read of a drive fail, until the returned function is called."""
    from nvme_offload import IOFailure
    from nvme_offload.store.store import TensorStore
    from nvme_offload.store.transfer import Transfer

    start = TensorStore.start

    def fail(store: TensorStore, transfer: Transfer, buffer: Any) -> Any:
        if transfer.writes:
            return start(store, transfer, buffer)
        raise IOFailure(
            5, "Input/output error", operation="read", path="there", offset=0, nbytes=1, done=0
        )

    TensorStore.start = fail  # type: ignore[method-assign]

    def mend() -> None:
        TensorStore.start = start  # type: ignore[method-assign]

    return mend


def raised(act: Callable[[], Any]) -> BaseException:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def fault(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    place = str(Path(request["directory"], "kept"))
    engine = trained(training, made)
    engine.save_checkpoint(place, tag="tag")
    for step in (FIRST, FIRST + 1):
        training._step(engine, step, 0)
    whole = training._final(engine)
    engine.load_checkpoint(place, tag="tag")
    engine.optimizer.clock._steps = FIRST - 1
    training._step(engine, FIRST, 0)  # immediately after a load
    training._step(engine, FIRST + 1, 0)
    mend = failing_reads()
    acts = {"step": engine.step, "forward": lambda: forward(training, engine)}
    if request["reported"] == "step":
        engine.micro_steps = engine.gradient_accumulation_steps() - 1
        acts["step"] = engine.optimizer.step
    error = raised(acts[request["reported"]])
    mend()
    result: dict[str, Any] = {"error": type(error).__name__}
    if hasattr(error, "__notes__"):
        result["notes"] = error.__notes__
    last = engine.optimizer.fp16_groups[-1]

    def gather() -> None:
        with GatheredParameters(last):
            pass

    then = {
        "step": engine.optimizer.step,
        "forward": lambda: forward(training, engine),
        "save": lambda: engine.save_checkpoint(place + "2", tag="tag"),
        "gather": gather,
    }
    result["then"] = {name: type(raised(act)).__name__ for name, act in then.items()}
    engine.load_checkpoint(place, tag="tag")
    for step in (FIRST, FIRST + 1):
        training._step(engine, step, 0)
    result |= {"whole": whole, "end": training._final(engine)}
    engine.destroy()
    return result


def broken(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    """Of each of request["transfers"], with request["count"] that fail from there on: what was
    reported, and whether the end, gone on to from a checkpoint, is that without.
    """
    import nvme_offload.store.store
    from nvme_offload import OffloadError
    from nvme_offload._aio import FaultKind
    from nvme_offload.io.engine import Engine

    reported: Counter[str] = Counter()

    def life(first: int, count: int) -> dict[str, Any] | None:
        """The end; none where an error came before there was a checkpoint."""
        directory = Path(request["directory"], str(first))  # of another tier and store each
        directory.mkdir()
        place = str(directory / "kept")
        nvme_offload.store.store.Engine = functools.partial(  # type: ignore[attr-defined,misc]
            Engine, _faults=[(first, count, FaultKind.FAIL, errno.EIO)] if count else []
        )
        one = Training(Case(**request["case"]), str(directory), True, training.watch)
        engine, saved, step = one._engine(0), False, 0
        while True:
            try:
                if saved and step == 0:
                    engine.load_checkpoint(place, tag="tag")  # on whose reads more may fail
                    step = 1
                while step < 5:
                    one._step(engine, step, 0)
                    step += 1
                    if not saved:
                        engine.save_checkpoint(place, tag="tag")
                        saved = True
                end = one._final(engine)
                break
            except OffloadError as error:
                if not saved:
                    reported["early"] += 1
                    return None
                of_updates = "in the updates of step" in str(getattr(error, "__notes__", ""))
                reported["an update" if of_updates else type(error).__name__] += 1
                step = 0
        engine.destroy()
        return end

    whole = life(0, 0)
    differing = [
        transfer
        for transfer in request["transfers"]
        if life(transfer, request["count"]) not in (whole, None)
    ]
    return {"differing": differing, "reported": reported}


def destroy(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    engine = trained(training, made)
    mend = failing_reads()
    error = raised(engine.destroy)
    mend()
    return {"error": type(error).__name__}


def end(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    engine = trained(training, made, 3)
    made.clear()
    globals()["kept"] = engine  # it is alive when the process ends, with pending updates
    return {"made": stepped(training, engine, made, 3)}


def optimizers(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    """How many of two steps were overlapped, with optimizers that something was done to."""

    def count(change: Callable[[Any], Any]) -> int:
        training.watch.traffic()
        engine = training._engine(0)
        kept = change(engine.optimizer.optimizer)
        for step in range(2):
            training._step(engine, step, 0)
        engine.destroy()
        del kept
        overlapped: int = training.watch.traffic()["overlapped"]
        return overlapped

    def hooked_after_a_step() -> int:
        calls: list[Any] = []
        engine = trained(training, made)
        optimizer = engine.optimizer.optimizer
        handle = optimizer.register_step_pre_hook(lambda *args: calls.append(args))
        engine.optimizer.finish_updates()
        handle.remove()
        engine.destroy()
        return len(calls)

    def replace(optimizer: Any) -> None:
        step = optimizer.step
        optimizer.step = lambda: step()

    return {
        "scheduled": count(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)),
        "hooked": count(lambda optimizer: optimizer.register_step_pre_hook(lambda *_: None)),
        "replaced": count(replace),
        "hooked after a step": hooked_after_a_step(),
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
