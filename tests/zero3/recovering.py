"""Trains a small model through steps that are cut short, and prints one JSON object: what
`test_recovery.py` asks for.

The one argument is a JSON object: "directory"; "case", as `launch.Case` has it; "cut": "calls" for
an exception at "each" calls of every kind that a step makes, in a separate step each, "passes" for the calls
of the user's code, and of swapper and store, in forward and backward, "write" for a drive on which
no write succeeds meanwhile, "interrupt" for Ctrl-C in the optimizer, "fragment" for a fragment
function with an unknown key, "lines" for an exception at "most" of the lines of the package that a
step executes, from the "first" on, "warm" steps after a load, "none" for nothing.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from launch import Case

sys.path.append(str(Path(__file__).parents[1]))
from interrupts import Hang, deadline, first_place, places, raising, sample, watched
from torch.overrides import TorchFunctionMode
from training import Training, Watch

ENOUGH_SECONDS = 600  # for a step, on a busy machine
FIRST = 2  # the step before which the checkpoint is saved, and which is cut short
CALLS = {
    "TensorSwapper": ("create", "discard", "prefetch", "release", "step", "swap_in"),
    "TensorStore": ("delete", "finish", "start"),
}


class Cut(NamedTuple):
    """The *occurrence*th call of a *kind*, of which none is the ""th; *number* chooses the error."""

    kind: str = ""
    occurrence: int = 0
    number: int = 0


class Cuts(TorchFunctionMode):  # type: ignore[misc]  # untyped
    """Raises at one call while it is armed: the calls into swapper, store, optimizer and torch are
    counted, the first two also as they return.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut = Cut()
        self.counting = False
        self.calls = collections.Counter[str]()
        self.where = ""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # with which torch itself puts back at the end of a no_grad what no load can
        if function.__name__ != "_set_grad_enabled":
            self.count("torch")
        return function(*args, **(kwargs or {}))

    def count(self, where: str) -> None:
        if not self.counting:
            return
        self.calls[where] += 1
        if (where, self.calls[where]) == self.cut[:2]:
            self.where = where
            raise self.error()

    def error(self) -> BaseException:
        from nvme_offload import IOFailure

        io = IOFailure(
            5, "Input/output error", operation="write", path="nowhere", offset=0, nbytes=1, done=0
        )
        return (io, KeyboardInterrupt(), RuntimeError("made up"))[self.cut.number % 3]

    def around(
        self, where: str, function: Callable[..., Any], twice: bool = True
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **named: Any) -> Any:
            self.count(where)
            result = function(*args, **named)
            if twice:
                self.count(f"{where} returns")
            return result

        return counted

    @contextlib.contextmanager
    def armed(self, cut: Cut) -> Iterator[None]:
        self.cut, self.where, self.counting = cut, "", True
        self.calls.clear()
        try:
            yield
        finally:
            self.counting = False


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
    each = request.get("each", 0)
    cuts = {
        "calls": functools.partial(at_calls, each=each),
        "passes": functools.partial(at_passes, each=each),
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


def other(end: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """The names that differ between both."""
    return [
        f"{key} {name}"
        for key in whole
        for name in whole[key]
        if end[key][name] != whole[key][name]
    ]


def count_calls(cuts: Cuts) -> None:
    """Have *cuts* count the calls into swapper and store."""
    from nvme_offload.store import store
    from nvme_offload.swap import swapper

    for owner in (swapper.TensorSwapper, store.TensorStore):
        for name in CALLS[owner.__name__]:
            setattr(owner, name, cuts.around(f"{owner.__name__}.{name}", getattr(owner, name)))


# the context of a step that is cut
Armed = Callable[[Cut], contextlib.AbstractContextManager[None]]


def one_by_one(
    training: Training,
    place: str,
    each: int,
    arm: Callable[[Any, Cuts], tuple[Armed, Callable[[], list[str]]]],
) -> dict[str, Any]:
    """Cut a step at *each* calls of every kind, spread evenly, and load and go on after each. *arm* also has
    the expected message of an engine after an exception.
    """
    engine = begin(training, place)
    passes = getattr(engine.module, "passes", 0)
    whole, wrong = reference(training, engine, place)
    cuts = Cuts()
    count_calls(cuts)
    armed, faults = arm(engine, cuts)
    with armed(Cut()):
        training._step(engine, FIRST, 0)
    planned = [
        (kind, occurrence)
        for kind, count in sorted(cuts.calls.items())
        for occurrence in sample(range(1, count + 1), each)
    ]
    load(engine, place, passes)
    seen = collections.Counter[str]()
    for number, (kind, occurrence) in enumerate(planned):
        came = "nothing"  # the swapper keeps the failure of a transfer for who needs the value
        try:
            with armed(Cut(kind, occurrence, number)):
                training._step(engine, FIRST, 0)
        except BaseException as error:
            if not cuts.where:
                raise
            came = type(error).__name__
        failure = f"{kind} {occurrence}: {came}"
        seen[cuts.where or "not reached"] += 1
        seen["partly"] += bool(engine.optimizer.partly_changed)
        wrong += [f"{failure}: {fault}" for fault in faults()]
        try:
            load(engine, place, passes)
            if others := other(finish(training, engine, FIRST + 1), whole):
                wrong.append(f"{failure}: other bits of {others}")
        except Exception as error:
            wrong.append(f"{failure}: then {type(error).__name__}: {error}")
            traceback.print_exc()
            break  # nor will anything after it
    return {"seen": +seen, "wrong": wrong}


def at_passes(training: Training, place: str, each: int) -> dict[str, Any]:
    """An exception at *each* calls of every kind that the forward and backward passes of a step make: of
    the user's hooks, the swapper's or the store's.
    """

    def arm(engine: Any, cuts: Cuts) -> tuple[Armed, Callable[[], list[str]]]:
        for layer in engine.module.layers:
            layer.register_forward_pre_hook(lambda *_: cuts.count("forward"))
            layer.register_forward_hook(
                lambda layer, inputs, output: (
                    output.register_hook(lambda _: cuts.count("backward")) and None
                )
            )
        step = engine.step

        def past(*args: Any, **named: Any) -> None:
            cuts.counting = False  # what raises in there is another test's
            step(*args, **named)
            cuts.counting = True

        @contextlib.contextmanager
        def armed(cut: Cut) -> Iterator[None]:
            engine.step = past
            try:
                with cuts.armed(cut):
                    yield
            finally:
                del engine.step

        return armed, list

    return one_by_one(training, place, each, arm)


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


def at_calls(training: Training, place: str, each: int) -> dict[str, Any]:
    """An exception at *each* calls of every kind that a step makes, in a separate step each."""
    from nvme_offload import OffloadError

    def arm(engine: Any, cuts: Cuts) -> tuple[Armed, Callable[[], list[str]]]:
        inner = engine.optimizer.optimizer
        inner.step = cuts.around("optimizer.step", inner.step)
        step = engine.optimizer.step

        @contextlib.contextmanager
        def armed(cut: Cut) -> Iterator[None]:
            def stepping(*args: Any, **named: Any) -> None:
                # the mode sees torch's functions
                with cuts.armed(cut), cuts:
                    step(*args, **named)

            engine.optimizer.step = stepping
            try:
                yield
            finally:
                del engine.optimizer.step

        def faults() -> list[str]:
            found = []
            for refused in (
                (engine.optimizer.step, engine.optimizer.state_dict)
                if engine.optimizer.partly_changed
                else ()
            ):
                try:
                    refused()
                    found.append(f"{refused.__name__} went on")
                except OffloadError as refusal:
                    if "only partly applied" not in str(refusal):
                        found.append(str(refusal))
            return found

        return armed, faults

    return one_by_one(training, place, each, arm)


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
    engine = begin(training, place)
    inner = engine.optimizer.optimizer
    inner.step = lambda: signal.raise_signal(signal.SIGINT)
    try:
        finish(training, engine)
        raised = False
    except KeyboardInterrupt:
        raised = True
    del inner.step
    engine.load_checkpoint(place, tag="tag")
    return {"raised": raised, "end": finish(training, engine)}


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
