"""Trains a small model through steps that are cut short, and prints one JSON object: what
`test_recovery.py` asks for.

The one argument is a JSON object: "directory"; "case", as `launch.Case` has it; "cut": "passes" for
an exception in the user's code, at "most" of its places in forward and backward, "write" for a drive
on which no write succeeds meanwhile, "interrupt" for Ctrl-C in the optimizer, after its first update,
"fragment" for a fragment function with an unknown key, "lines" for an exception at "most" of the lines
of the package that a step executes, from the "first" on, "warm" steps after a load, "none" for nothing.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from launch import Case

sys.path.append(str(Path(__file__).parents[1]))
from interrupts import Hang, deadline, first_place, places, raising, sample, watched
from training import Training, Watch

ENOUGH_SECONDS = 600  # for a step, on a busy machine
FIRST = 2  # the step before which the checkpoint is saved, and which is cut short


def main(request: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import deepspeed

    watch = Watch()
    watch.enable(request.get("faults", []))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    training = Training(Case(**request["case"]), request["directory"], True, watch)
    place = str(Path(request["directory"], "checkpoint"))
    cuts = {
        "passes": functools.partial(at_passes, most=request.get("most", 0)),
        "lines": functools.partial(
            at_lines,
            most=request.get("most", 0),
            first=request.get("first", 0),
            warm=request.get("warm", 0),
        ),
        "write": in_a_write,
        "none": undisturbed,
        "interrupt": by_ctrl_c,
        "fragment": by_a_fragment,
    }
    result = cuts[request["cut"]](training, place)
    print(json.dumps(result), file=answers, flush=True)
    deepspeed.comm.destroy_process_group()


def begin(training: Training, place: str) -> Any:
    """An engine that has saved at FIRST."""
    engine = training._engine(0)
    for step in range(FIRST):
        training._step(engine, step, 0)
    engine.save_checkpoint(place, tag="tag")
    return engine


def finish(training: Training, engine: Any, last: int = FIRST + 2) -> dict[str, Any]:
    """What training comes to from FIRST on."""
    for step in range(FIRST, last):
        training._step(engine, step, 0)
    return training._final(engine)


def reference(training: Training, engine: Any, place: str) -> tuple[dict[str, Any], list[str]]:
    """The results of one step after a load, and its faults: it must equal the run that continues,
    unless that has last gradients.
    """
    passes = getattr(engine.module, "passes", 0)
    on = finish(training, engine, FIRST + 1)
    load(engine, place, passes)
    whole = finish(training, engine, FIRST + 1)
    return whole, [] if whole == on or training.case.section.get(
        "missing_gradients"
    ) == "last" else ["a load with nothing before it: other bits"]


def load(engine: Any, place: str, passes: int) -> None:
    """Load the checkpoint into the same engine; and restore the user's part, the number of *passes*
    that some models count.
    """
    engine.load_checkpoint(place, tag="tag")
    if hasattr(engine.module, "passes"):
        engine.module.passes = passes


def at_passes(training: Training, place: str, *, most: int) -> dict[str, Any]:
    """An exception in the user's code, at *most* of its places in the forward and backward passes of a
    step, in a separate step each.
    """
    engine = begin(training, place)
    passes = getattr(engine.module, "passes", 0)
    whole, wrong = reference(training, engine, place)
    errors = itertools.cycle((KeyboardInterrupt, RuntimeError))
    visited: list[str] = []
    cut = 0

    def visit(where: str) -> None:
        visited.append(where)
        if len(visited) == cut:
            raise next(errors)

    for layer in engine.module.layers:
        layer.register_forward_pre_hook(lambda *_: visit("forward"))
        layer.register_forward_hook(
            lambda layer, inputs, output: output.register_hook(lambda _: visit("backward")) and None
        )
    training._step(engine, FIRST, 0)
    seen = collections.Counter[str]()
    for cut in sample(range(1, len(visited) + 1), most):
        load(engine, place, passes)
        visited.clear()
        try:
            training._step(engine, FIRST, 0)
            raise AssertionError("nothing was raised")
        except (KeyboardInterrupt, RuntimeError):
            seen[visited[-1]] += 1
        failure, cut = f"{visited[-1]} {cut}", 0
        load(engine, place, passes)
        if finish(training, engine, FIRST + 1) != whole:
            wrong.append(f"{failure}: other bits")
    return {"seen": seen, "wrong": wrong}


def at_lines(training: Training, place: str, *, most: int, first: int, warm: int) -> dict[str, Any]:
    """An exception at the first line of the package that a step executes, and at *most* others from the *first* on,
    *warm* steps after a load. The step is then repeated: it comes to the same bits, or is refused, and a load restores them.
    """
    with watched():
        engine = begin(training, place)
    passes = getattr(engine.module, "passes", 0)
    cut = FIRST + warm

    def go_on(last: int) -> dict[str, Any]:
        load(engine, place, passes)
        return finish(training, engine, last)

    entered = False
    step = engine.step

    def entering() -> None:
        nonlocal entered
        entered = True
        step()

    engine.step = entering

    def repeated() -> str:
        """How the step goes on after an exception in it."""
        try:
            if entered:
                step()
            else:
                if passes:
                    engine.module.passes = counted
                training._step(engine, cut, 0)
            return "exact" if training._final(engine) == whole else "other bits"
        except (MemoryError, KeyboardInterrupt):
            refusal = ""  # of the thread that makes updates, which came late
        except OffloadError as error:
            refusal = "" if "only partly applied" in str(error) else str(error)
        if refusal:
            return f"refused: {refusal}"
        return "refused and restored" if go_on(cut + 1) == whole else "refused, not restored"

    from nvme_offload import OffloadError

    whole = go_on(cut + 1)
    go_on(cut)
    found = places(lambda: training._step(engine, cut, 0))
    go_on(cut)
    earliest = first_place(lambda: training._step(engine, cut, 0))
    seen, wrong = collections.Counter[str](), []
    for number, line in enumerate([earliest, *sample(found, most, first)]):
        error = (KeyboardInterrupt(), MemoryError())[number % 2]
        came: BaseException | None = None
        go_on(cut)
        counted = getattr(engine.module, "passes", 0)
        entered = False
        with deadline(ENOUGH_SECONDS), raising(line, error) as raised:
            try:
                training._step(engine, cut, 0)
            except Hang:
                raise
            except BaseException as caught:
                came = caught
        if raised.where is None:
            seen["not reached"] += 1  # a line of a thread, whose pace differs
            continue
        same = False
        if came is None:
            try:
                same = training._final(engine) == whole
            except (MemoryError, KeyboardInterrupt) as caught:
                came = caught  # of the thread that makes updates, after the step has returned
        outcome = "exact" if same else repeated()
        if came is not None and came is not error:
            outcome = f"{came!r} in place of it, then {outcome}"
        seen[outcome] += 1
        if outcome not in ("exact", "refused and restored"):
            wrong.append(f"{type(error).__name__} at {line} ({raised.where}): {outcome}")
    return {"places": len(found), "seen": seen, "wrong": wrong}


def in_a_write(training: Training, place: str) -> dict[str, Any]:
    """No write succeeds meanwhile: as where the drive is full."""
    from nvme_offload import IOFailure

    engine = begin(training, place)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        finish(training, engine)
        raised = ""
    except IOFailure as error:
        raised = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    engine.load_checkpoint(place, tag="tag")
    return {"raised": raised, "end": finish(training, engine)}


def undisturbed(training: Training, place: str) -> dict[str, Any]:
    return {"end": finish(training, begin(training, place))}


def by_ctrl_c(training: Training, place: str) -> dict[str, Any]:
    from nvme_offload import OffloadError

    engine = begin(training, place)
    inner = engine.optimizer.optimizer
    step = inner.step

    def interrupted() -> None:
        step()
        signal.raise_signal(signal.SIGINT)

    inner.step = interrupted
    try:
        finish(training, engine)
        raised = False
    except KeyboardInterrupt:
        raised = True
    refused = []
    for use in (engine.optimizer.step, engine.optimizer.state_dict):
        try:
            use()
        except OffloadError as error:
            refused.append("only partly applied" in str(error))
    del inner.step
    engine.load_checkpoint(place, tag="tag")
    return {"raised": raised, "refused": refused, "end": finish(training, engine)}


def by_a_fragment(training: Training, place: str) -> dict[str, Any]:
    """A logger asks for Adam's states of an optimizer that has others, between backward and step
    and after it.
    """
    from deepspeed import utils

    engine = begin(training, place)
    raised = []
    backward = engine.backward

    def log(loss: Any) -> None:
        backward(loss)
        for parameter in engine.module.parameters():
            for ask in (utils.safe_get_full_optimizer_state, utils.safe_get_local_optimizer_state):
                try:
                    ask(parameter, "exp_avg_squared")
                except KeyError as error:
                    raised.append(str(error))
        try:
            utils.safe_set_full_fp32_param(
                next(iter(engine.module.parameters())),
                next(iter(engine.module.parameters())).new_zeros(3),
            )
        except (AssertionError, RuntimeError) as error:
            raised.append(str(error))

    engine.backward = log
    end = finish(training, engine)
    return {"raised": len(raised), "end": end}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
