"""Trains a small model with `"overlap_step"`, and prints one JSON object: what
`test_zero3_overlap.py` asks for.

The one argument is a JSON object: "directory"; "case", as `launch.Case` has it; "what", a name of
`main`'s. No update is made before a caller waits for one, except in `AT_ONCE`.
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
from training import Training, Watch, _hash, begin, update_late

FIRST = 2  # steps that are over before anything is looked at
AT_ONCE = ("amid", "beside", "reads", "broken")
# Functions at which an update stops in "amid".
PLACES = (
    *("update", "widened", "swap_in_optimizer_state", "step_sub_group", "store_weights"),
    *("swap_out_optimizer_state", "spend_gradients", "end_period"),
)


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
    if request["what"] not in AT_ONCE:
        update_late()
    made = Made()
    made.watch()
    training = Training(Case(**request["case"]), request["directory"], True, watch)
    what = {
        "amid": amid,
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

    def on_device() -> None:
        with deepspeed.OnDevice(torch.bfloat16, "cpu"):
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
        "OnDevice": on_device,
        "destroyed": engine.destroy,
    }
    return result | {name: sorted(after(act)) for name, act in looks.items()}


def amid(training: Training, made: Made, request: dict[str, Any]) -> dict[str, Any]:
    """Call what programs call, while updates are made in its midst, and after them. Returns: the names
    of the calls whose results or final states differ. With request["neighbour"], the calls are of
    another engine than the updates, in the same tier.
    """
    import deepspeed
    from amid import Amid
    from deepspeed import utils
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    from nvme_offload.zero3.updates import is_worker

    places = [Path(request["directory"], name) for name in ("amid", "after")]
    trainings = [Training(training.case, str(place), True, training.watch) for place in places]
    for place in places:
        place.mkdir(exist_ok=True)  # by another rank
    # the first engine of a training has pending updates, and the last engine is called
    seeds = range(2 if request.get("neighbour") else 1)
    engines = [[trained(one, made, seed=seed) for seed in seeds] for one in trainings]
    mine, called, other = engines[0][0], engines[0][-1], engines[1][-1]
    rank = mine.global_rank
    for engine, place in zip((called, other), places, strict=True):
        engine.save_checkpoint(str(place), tag="first")

    def parameters(*args: Any, **named: Any) -> Any:
        assert not is_worker()  # the program may change the module meanwhile
        return type(mine.module).parameters(mine.module, *args, **named)

    mine.module.parameters = parameters

    def bits(found: Any) -> list[Any]:
        leaves = torch.utils._pytree.tree_leaves(found)
        return [_hash(one) if torch.is_tensor(one) else one for one in leaves]

    def params(engine: Any) -> list[Any]:
        return [param for param in engine.module.parameters() if param.requires_grad]

    def gather(engine: Any) -> Any:
        with GatheredParameters(params(engine)):
            return [param.detach().clone() for param in params(engine)]

    def change(engine: Any) -> None:
        first, *_, last = params(engine)
        with torch.no_grad(), GatheredParameters([last, first], modifier_rank=0):
            first.add_(0.25)
            last.mul_(0.5)

    def enter(engine: Any) -> None:
        with deepspeed.zero.Init(config_dict_or_path=engine.config):
            torch.nn.Linear(8, 8)

    def at_half_rate(engine: Any) -> None:
        for group in engine.optimizer.param_groups:
            group.update(lr=group["lr"] / 2, betas=(0.8, 0.9), weight_decay=0.3)

    def evaluate(engine: Any) -> torch.Tensor:
        with torch.no_grad():
            return forward(training, engine)

    def step(engine: Any) -> None:
        engine.backward(forward(training, engine))
        engine.step()

    def load(engine: Any) -> None:
        engine.load_checkpoint(str(places[engine is other]), tag="first")

    def write(engine: Any) -> None:
        one, two, *_ = params(engine)
        utils.safe_set_full_fp32_param(one, torch.full(one.ds_shape, 0.125))
        utils.safe_set_full_optimizer_state(two, torch.full(two.ds_shape, 0.125), "exp_avg")
        utils.safe_set_full_grad(one, torch.full(one.ds_shape, 0.5))

    def forget(engine: Any) -> list[dict[int, int]]:
        engine.zero_grad()
        engine.optimizer.zero_grad()
        engine.optimizer.finish_updates()
        store = engine.optimizer.gradient_store
        return [dict(store.reduced(index)) for index in everything(engine)]

    def live(engine: Any) -> Any:
        one = trainings[engine is other]
        new = trained(one, made, seed=3)
        final = one._final(new)
        new.destroy()
        return final

    acts: dict[str, Callable[[Any], Any]] = {
        "another": live,
        "shapes": lambda engine: engine._get_zero_param_shapes(),
        "save": lambda engine: engine.save_checkpoint(str(places[engine is other]), tag="then"),
        "load": load,
        "state dict": lambda engine: engine.optimizer.state_dict()["fp32_flat_groups"],
        "weights": lambda engine: engine._zero3_consolidated_16bit_state_dict(),
        "masters": lambda engine: list(map(utils.safe_get_full_fp32_param, params(engine))),
        "gradients": lambda engine: list(map(utils.safe_get_full_grad, params(engine))),
        "write": write,
        "every gradient": lambda engine: utils.safe_update_full_grad_vectorized(
            params(engine), lambda gradient, _: gradient * 1.5
        ),
        "gather": gather,
        "change": change,
        "zero.Init": enter,
        "options": at_half_rate,
        "zero_grad": forget,
        "evaluate": evaluate,
        "step": step,
        "state": lambda engine: len(engine.optimizer.state),
        "refresh": lambda engine: engine.optimizer.refresh_fp32_params(),
        "reset": lambda engine: engine.optimizer.reset_swap_buffers(),
        "partition": lambda engine: engine.empty_partition_cache(),
    }
    watch = Amid(mine.optimizer.tier, PLACES)
    differing: list[str] = []
    stops = iter(range(1 + rank, sys.maxsize, 3))  # another one in each attempt
    shares = (0.01, 0.5, 0.85, 0.95)  # of the calls that the first attempt counts
    count = len(everything(mine)) * (len(PLACES) - 2)
    with watch.watching():
        number, calls = FIRST, 0
        for turn, (name, act) in enumerate(acts.items(), rank):
            first = turn % len(shares)
            for share in (0, *shares[first:], *shares[:first])[: request["attempts"]]:
                for engine in engines[1][::-1]:
                    trainings[1]._step(engine, number, 0)
                    engine.optimizer.finish_updates()
                expected = act(other)
                for engine in engines[0][:0:-1]:
                    trainings[0]._step(engine, number, 0)
                    engine.optimizer.finish_updates()
                found, counted = watch.run(
                    functools.partial(trainings[0]._step, mine, number, 0),
                    next(stops) % count + 1,
                    functools.partial(act, called),
                    int(share * calls) + 1 if share else 0,
                )
                calls = calls if share else counted
                number += 1
                finals = [
                    [one._final(engine) for engine in each]
                    for one, each in zip(trainings, engines, strict=True)
                ]
                if [bits(found), finals[0]] != [bits(expected), finals[1]]:
                    differing.append(name)
    return {"differing": differing}


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
    """Eleven lives, each with request["count"] transfers that fail somewhere between the first
    checkpoint and the end. Returns: the errors by kind, and the transfers whose failures changed the
    end, after a load of that checkpoint.
    """
    import nvme_offload.store.store
    from nvme_offload import OffloadError
    from nvme_offload._aio import FaultKind
    from nvme_offload.io.engine import Engine

    reported = Counter({"early": 0, "an update": 0, "IOFailure": 0})

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
                        requests.append(submitted())
                end = one._final(engine)
                break
            except OffloadError as error:
                if not saved:
                    reported["early"] += 1
                    return None
                of_updates = "in the updates of step" in str(getattr(error, "__notes__", ""))
                reported["an update" if of_updates else type(error).__name__] += 1
                step = 0
        requests.append(submitted())
        engine.destroy()
        return end

    def submitted() -> int:
        """How many requests, of a transfer or more each, the last store has submitted."""
        stats = training.watch.stores[-1].engine.stats()
        return stats.read.requests + stats.write.requests

    requests: list[int] = []  # after the first checkpoint, and in all
    whole = life(0, 0)
    first, last = requests
    transfers = range(first, last, (last - first) // 11 + 1)
    differing = [
        transfer for transfer in transfers if life(transfer, request["count"]) not in (whole, None)
    ]
    return {"differing": differing, "reported": reported, "lives": len(transfers)}


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
