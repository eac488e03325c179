"""One step of an `NVMeOptimizer` that an exception ends at some line, and the program's recovery:
call it again, or load a checkpoint into the same objects.

`python tests/optim/interrupted.py DIR --output FILE` counts the outcomes, and writes a report.
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reference import loss_of, model, smallest, unlike

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from interrupts import Hang, Place, Raising, deadline, places, raising, watched

from nvme_offload.errors import UsageError
from nvme_offload.optim import NVMeOptimizer, provisional

ON_CPUS = {"cpu", "cuda"}  # of `provisional.BESIDE_ON`
_SECONDS = 600  # that a trial may take: hundredths of one are usual
_FIRST = 4  # the step that is ended in the first trial of a training
_STEPS = 2  # of a trial: the step that is ended, and the next one
_TRIALS = 8  # that `outcomes` makes in one training

# Code without recovery: it runs before any change, or only computes.
ELSEWHERE = ("units.py", "errors.py", "hardware/", "optimizer_states/compiling.py")


class Mode(NamedTuple):
    """How the optimizer is made. *memory*: in which all states stay."""

    options: dict[str, Any]
    dtype: torch.dtype = torch.float32
    memory: str = ""


_COMPACT = {"state_format": "compact"}
MODES = {
    "plain": Mode({}),
    "plain, in memory": Mode({}, memory="64MB"),
    "plain, compact": Mode(_COMPACT, torch.bfloat16),
    "host": Mode({"accumulate": "host"}),
    "host, compact, in memory": Mode({"accumulate": "host", **_COMPACT}, torch.bfloat16, "64MB"),
    "in backward": Mode({"step_in_backward": True}),
    "in backward, compact": Mode({"step_in_backward": True, **_COMPACT}, torch.bfloat16),
    "provisional": Mode({"step_in_backward": "provisional"}),
    "provisional, compact": Mode({"step_in_backward": "provisional", **_COMPACT}, torch.bfloat16),
    "provisional, in memory": Mode({"step_in_backward": "provisional"}, memory="700kB"),
    "overlap": Mode({"overlap_step": True}),
    "overlap, in backward": Mode({"overlap_step": True, "step_in_backward": True}),
    "overlap, provisional": Mode({"overlap_step": True, "step_in_backward": "provisional"}),
    "overlap, provisional, in memory": Mode(
        {"overlap_step": True, "step_in_backward": "provisional"}, memory="700kB"
    ),
}


class Training:
    """A model and its optimizer in *place*."""

    def __init__(self, mode: Mode, place: Path) -> None:
        self.net = model(mode.dtype)
        make: Callable[[int | str], NVMeOptimizer] = lambda memory: NVMeOptimizer(  # noqa: E731
            self.net.parameters(), lr=1e-2, paths=place, host_memory=memory, **mode.options
        )
        self.optimizer = make(mode.memory or _least(mode, place))

    def calls(self, number: int) -> list[tuple[str, Callable[[], Any]]]:
        """What a program calls for step *number*, in order."""
        self.loss: Any = None

        def forward() -> None:
            self.loss = loss_of(self.net, number)

        def backward() -> None:
            loss, self.loss = self.loss, None
            loss.backward()

        return [
            ("zero_grad", self.optimizer.zero_grad),
            ("forward", forward),
            ("backward", backward),
            ("step", self.optimizer.step),
        ]

    def run(self, number: int) -> None:
        """Step *number*."""
        for _, call in self.calls(number):
            call()

    def saved(self) -> tuple[Any, Any]:
        """Copies of weights and states."""
        return copy.deepcopy(self.net.state_dict()), copy.deepcopy(self.optimizer.state_dict())

    def load(self, saved: tuple[Any, Any], *, weights_first: bool) -> None:
        """Restore the *saved* weights and states."""
        weights, states = saved
        if weights_first:
            self.net.load_state_dict(weights)
        self.optimizer.load_state_dict(states)
        if not weights_first:
            self.net.load_state_dict(weights)


_least_bytes: dict[str, int] = {}


def _least(mode: Mode, place: Path) -> int:
    """The least host memory that *mode* takes."""
    if repr(mode) not in _least_bytes:
        net = model(mode.dtype)

        def make(memory: int) -> NVMeOptimizer:
            made = NVMeOptimizer(
                net.parameters(), lr=1e-2, paths=place, host_memory=memory, **mode.options
            )
            _least_bytes[repr(mode)] = memory
            return made

        smallest(make).close()
    return _least_bytes[repr(mode)]


@functools.cache
def _uninterrupted(mode: str, place: Path) -> list[tuple[Any, Any]]:
    """Weights and states before each step of a training without an exception."""
    training = Training(MODES[mode], place)
    result = []
    for number in range(_FIRST + _STEPS * _TRIALS + 1):
        result.append(training.saved())
        training.run(number)
    training.optimizer.close()
    return result


def found(mode: str, place: Path) -> Sequence[Place]:
    """The places of one step of *mode*."""
    with watched():
        training = Training(MODES[mode], place)
    for number in range(_FIRST):
        training.run(number)
    training.optimizer.state_dict()

    def whole() -> None:
        training.run(_FIRST)
        training.optimizer.synchronize()

    result = places(whole, but=ELSEWHERE)
    training.optimizer.close()
    return result


class _Refused(Exception):
    """The optimizer says that a checkpoint has to be loaded."""


class _Program:
    """Trains to the end, as a program does that goes on after *error*: it calls `step` again, and
    begins the step anew where an exception ended an earlier part. *doing*: the last call.
    """

    def __init__(self, training: Training, error: BaseException) -> None:
        self._training = training
        self._error = error
        self.doing = ""
        self.reported = 0

    def _call(self, doing: str, call: Callable[[], Any]) -> bool:
        """Whether *call* has returned. Raises: _Refused, and any error but the injected one."""
        self.doing = doing
        try:
            call()
        except UsageError as refusal:
            # `step` raises the errors of backward(), where other ranks would wait.
            self.reported = self.reported or int(type(self._error).__name__ in str(refusal))
            if not self.reported or "load" not in str(refusal):
                raise
            raise _Refused(str(refusal)) from None
        except BaseException as failure:
            if failure is not self._error:
                raise
            self.reported += 1
            return False
        return True

    def run(self, number: int) -> None:
        """Step *number*."""
        while not all(self._call(*one) for one in self._training.calls(number)):
            if self.doing == "step":
                self._call("step again", self._training.optimizer.step)
                return

    def saved(self) -> tuple[Any, Any]:
        """Copies of weights and states."""
        result: list[tuple[Any, Any]] = []
        while not self._call("state_dict", lambda: result.append(self._training.saved())):
            pass
        return result[0]


def _modes() -> tuple[bool, bool, bool]:
    """What would change later results of this thread, if it were left: whether inference mode,
    gradients and the functions of tensors' subclasses are enabled.
    """
    enabled = torch._C._is_torch_function_enabled()
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), enabled


class Trials:
    """A training in which one step after another is ended by an exception."""

    def __init__(self, mode: str, place: Path) -> None:
        self._options = MODES[mode].options
        self._expected = _uninterrupted(mode, place)
        with watched():
            self._training = Training(MODES[mode], place)
        for number in range(_FIRST):
            self._training.run(number)
        self._training.optimizer.state_dict()
        self._next = _FIRST

    def outcome(self, at: Place, error: BaseException) -> str:
        """What becomes of the training when its next step raises *error* *at* a place: "exact",
        "refused", "unreached", or a line that begins with "wrong" or "hung". The training cannot be
        used any more after one of the last two.
        """
        training, first, last = self._training, self._next, self._next + _STEPS
        self._next = last
        program, result = _Program(training, error), "exact"
        raised = Raising()
        try:
            with deadline(_SECONDS):
                try:
                    with raising(at, error) as raised:
                        program.run(first)
                        program._call("synchronize", training.optimizer.synchronize)
                    for number in range(first + 1, last):
                        program.run(number)
                    ended = program.saved()
                except _Refused:
                    result = "refused"
                    for _ in range(2):
                        program.doing = "step, which should be refused,"
                        try:
                            training.optimizer.step()
                        except UsageError as refusal:
                            if "load" not in str(refusal):
                                raise
                        else:
                            return f"wrong: refused once and then not after {raised.where}"
                    program.doing = "load"
                    training.load(self._expected[first], weights_first=at.line % 2 == 0)
                    for number in range(first, last):
                        program.run(number)
                    ended = program.saved()
                if (modes := _modes()) != (False, True, True):
                    return f"wrong: modes {modes} after {raised.where}"
                if raised.where is None:
                    return "unreached"
                # backward() logs the error of an update or of a binding, which `step` then makes
                in_backward = {"step_in_backward", "accumulate"} & self._options.keys()
                logged = in_backward and isinstance(error, Exception)
                if program.reported != 1 and not (logged and not program.reported):
                    return f"wrong: raised {program.reported} times after {raised.where}"
                if different := unlike([*ended], [*self._expected[last]]):
                    return f"wrong: other values {different[:2]} after {raised.where}"
                return result
        except Hang as hang:
            return f"hung: {program.doing} in {hang} after {raised.where}"
        except BaseException as failure:
            return (
                f"wrong: {program.doing} raised {type(failure).__name__}: "
                f"{str(failure)[:200]} after {raised.where}"
            )

    def close(self) -> str:
        """How closing failed, as `outcome`; "" if it did not."""
        try:
            with deadline(_SECONDS):
                self._training.optimizer.close()
                return ""
        except Hang as hang:
            return f"hung: close in {hang}"
        except BaseException as failure:
            return f"wrong: close raised {type(failure).__name__}: {str(failure)[:200]}"


def outcome(mode: str, at: Place, error: BaseException, place: Path) -> str:
    """What becomes of a new training that raises *error* *at* a place; see `Trials.outcome`."""
    trials = Trials(mode, place)
    result = trials.outcome(at, error)
    return result if result.startswith(("wrong", "hung")) else trials.close() or result


def outcomes(mode: str, tried: Sequence[Place], place: Path) -> Iterator[tuple[Place, str]]:
    """The outcomes of places, some of them one after another in one training. A place that the
    training does not reach is tried again in a new one.
    """
    for first in range(0, len(tried), _TRIALS):
        yield from _outcomes_of_training(mode, tried[first : first + _TRIALS], place)


def _outcomes_of_training(
    mode: str, tried: Sequence[Place], place: Path
) -> Iterator[tuple[Place, str]]:
    trials, before = Trials(mode, place), []
    for at in tried:
        error = (KeyboardInterrupt, MemoryError)[(at.line + at.occurrence) % 2]("made up")
        result = trials.outcome(at, error)
        if result == "unreached":
            result = outcome(mode, at, error, place)
        elif result.startswith(("wrong", "hung")):
            result += f", with {type(error).__name__} and after {[*map(str, before)]}"
            trials, before = Trials(mode, place), []
        else:
            before.append(at)
        yield at, result
    if result := trials.close():
        yield at, f"{result}, after {[*map(str, before)]}"


def _in_process(
    end: float, directory: Path, training: tuple[str, Sequence[Place]]
) -> tuple[str, list[tuple[Place, str]]]:
    """The mode and the outcomes of one training in a process of a pool; none after *end*."""
    provisional.BESIDE_ON = ON_CPUS
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    mode, tried = training
    if time.monotonic() > end:
        return mode, []
    place = directory / str(os.getpid())
    place.mkdir(exist_ok=True)
    return mode, [*outcomes(mode, tried, place)]


_REPORT = """# Interrupted steps of NVMeOptimizer

One training step (`zero_grad`, forward, `backward`, `step`) is ended by a KeyboardInterrupt or, alternating, a MemoryError just before a line of the package
runs, in any of its threads. The program then goes on as a user does. It calls `step()` again, or begins the step anew if an earlier call was ended. If the
optimizer refuses, the program loads weights and states into the same objects. It trains on, and weights and states are compared, bit for bit, with the
weights and states of a training without an interruption.

- places: lines that the step executes, a line counts again for its second and fifth time
- tried: places in which the exception was raised, chosen at random
- exact: the training went on with the same bits
- refused and restored: one error asked for a checkpoint, and loading it gave the same bits
- wrong: other bits, another exception in place of the original, or a swallowed exception
- hung: a call that did not end within {seconds:.0f} s
- not reached: the step did not execute the line this time

One training tries {trials} places, in every second step. Weights and states are compared after the step that follows. A new training tries a place that this
one does not reach.

{table}

A place in the middle of a change of the swapper's or the store's tables is refused. So is a place between the first change of a parameter and its record.
{faults}
- date: {date}
- machine: {machine}
- command: {command}
- commit: {commit}
"""


def main() -> None:
    """Try every mode, and write the report."""
    import subprocess

    from sweeps.machine import facts
    from sweeps.report import table

    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, help="on the drive to offload to")
    parser.add_argument("--output", type=Path, help="the report")
    parser.add_argument("--most", type=int, default=1 << 30, help="places to try in each mode")
    parser.add_argument("--minutes", type=float, help="when to stop")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the places")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    provisional.BESIDE_ON = ON_CPUS
    logging.disable(logging.CRITICAL)
    chooser, end = random.Random(arguments.seed), time.monotonic() + (arguments.minutes or 1e9) * 60
    counts: dict[str, Counter[str]] = {mode: Counter() for mode in MODES}
    trainings, faults = [], []
    for mode in MODES:
        all_places = [*found(mode, arguments.directory)]
        counts[mode]["places"] = len(all_places)
        chooser.shuffle(all_places)
        chosen = all_places[: arguments.most]
        trainings += [(mode, chosen[at : at + _TRIALS]) for at in range(0, len(chosen), _TRIALS)]
    chooser.shuffle(trainings)
    work = (end, arguments.directory)
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        results = pool.imap_unordered(functools.partial(_in_process, *work), trainings)
        for number, (mode, result) in enumerate(results, 1):
            for at, one in result:
                counts[mode][one.split(":")[0]] += 1
                if one.startswith(("wrong", "hung")):
                    faults.append(f"- {mode}, {at}: {one}")
                    print(faults[-1], flush=True)
            if number % 100 == 0:
                print(number, "of", len(trainings), "trainings", flush=True)
    kinds = ("exact", "refused", "wrong", "hung")
    rows: list[list[Any]] = [
        [mode, count["places"], sum(count[kind] for kind in kinds)]
        + [count[kind] for kind in (*kinds, "unreached")]
        for mode, count in counts.items()
    ]
    total = [sum(row[column] for row in rows) for column in range(1, 8)]
    rows.append(["all", *total])
    head = ["mode", "places", "tried", "exact", "refused and restored", "wrong", "hung"]
    head.append("not reached")
    known = facts(arguments.directory, "tests.optim.interrupted")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    text = _REPORT.format(
        seconds=_SECONDS,
        trials=_TRIALS,
        table=table(head, rows),
        faults="".join(f"\n{fault}" for fault in faults),
        date=known["date"],
        machine=", ".join(f"{key} {known[key]}" for key in known if key not in ("date", "command")),
        command=" ".join(["python tests/optim/interrupted.py", *sys.argv[1:]]),
        commit=commit.stdout.strip(),
    )
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    sys.stdout.flush()
    os._exit(1 if faults else 0)  # what hangs still has the thread


if __name__ == "__main__":
    main()
