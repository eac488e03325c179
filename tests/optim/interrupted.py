"""One step of an `NVMeOptimizer` that an exception ends at some line, and what the program can do
then: call it again, or load a checkpoint into the same objects.

`python tests/optim/interrupted.py DIR --output FILE` counts the outcomes, and writes a report.
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reference import differing, loss_of, model, smallest, unlike

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from interrupts import Hang, Place, Raising, deadline, places, raising, sample, watched

from nvme_offload.errors import UsageError
from nvme_offload.optim import NVMeOptimizer

_SECONDS = 20.0  # that a trial may take: hundredths of it are usual
_FIRST = 4  # the step that is ended
_LAST = 6

# What is not part of the recovery: it runs before anything is changed, or only computes.
ELSEWHERE = ("units.py", "errors.py", "hardware/", "optimizer_states/compiling.py")


class Mode(NamedTuple):
    """How the optimizer is made. *large*: all states stay in host memory."""

    options: dict[str, Any]
    dtype: torch.dtype = torch.float32
    large: bool = False


_COMPACT = {"state_format": "compact"}
MODES = {
    "plain": Mode({}),
    "plain, in memory": Mode({}, large=True),
    "plain, compact": Mode(_COMPACT, torch.bfloat16),
    "host": Mode({"accumulate": "host"}),
    "host, compact, in memory": Mode({"accumulate": "host", **_COMPACT}, torch.bfloat16, True),
    "in backward": Mode({"step_in_backward": True}),
    "in backward, compact": Mode({"step_in_backward": True, **_COMPACT}, torch.bfloat16),
    "provisional": Mode({"step_in_backward": "provisional"}),
    "provisional, compact": Mode({"step_in_backward": "provisional", **_COMPACT}, torch.bfloat16),
    "overlap": Mode({"overlap_step": True}),
    "overlap, in backward": Mode({"overlap_step": True, "step_in_backward": True}),
    "overlap, provisional": Mode({"overlap_step": True, "step_in_backward": "provisional"}),
}


class Training:
    """A model and its optimizer in *place*."""

    def __init__(self, mode: Mode, place: Path) -> None:
        self.net = model(mode.dtype)
        make: Callable[[int | str], NVMeOptimizer] = lambda memory: NVMeOptimizer(  # noqa: E731
            self.net.parameters(), lr=1e-2, paths=place, host_memory=memory, **mode.options
        )
        self.optimizer = make("64MB") if mode.large else make(_least(mode, place))

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
        """Bring back what was *saved*."""
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
def _uninterrupted(mode: str, place: Path) -> tuple[list[torch.Tensor], Any, tuple[Any, Any]]:
    """Weights and states at the end, and what was saved before the step that others end."""
    training = Training(MODES[mode], place)
    for number in range(_FIRST):
        training.run(number)
    saved = training.saved()
    for number in range(_FIRST, _LAST):
        training.run(number)
    states = copy.deepcopy(training.optimizer.state_dict())
    training.optimizer.close()
    return [parameter.detach().clone() for parameter in training.net.parameters()], states, saved


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
    begins the step anew where anything before that was ended. *doing*: what it has called.
    """

    def __init__(self, training: Training, error: BaseException) -> None:
        self._training = training
        self._error = error
        self.doing = ""
        self.told = 0

    def _call(self, doing: str, call: Callable[[], Any]) -> bool:
        """Whether *call* has returned. Raises: _Refused, and what is not the error."""
        self.doing = doing
        try:
            call()
        except UsageError as refusal:
            # `step` raises the errors of backward(), where other ranks would wait.
            self.told = self.told or int(type(self._error).__name__ in str(refusal))
            if not self.told or "load" not in str(refusal):
                raise
            raise _Refused(str(refusal)) from None
        except BaseException as failure:
            if failure is not self._error:
                raise
            self.told += 1
            return False
        return True

    def run(self, number: int) -> None:
        """Step *number*."""
        while not all(self._call(*one) for one in self._training.calls(number)):
            if self.doing == "step":
                self._call("step again", self._training.optimizer.step)
                return

    def state_dict(self) -> Any:
        """As the optimizer's."""
        result: list[Any] = []
        while not self._call(
            "state_dict", lambda: result.append(self._training.optimizer.state_dict())
        ):
            pass
        return copy.deepcopy(result[0])


def outcome(mode: str, at: Place, error: BaseException, place: Path) -> str:
    """What becomes of a training whose step raises *error* *at* a place: "exact", "refused",
    "unreached", or a line that begins with "wrong" or "hung".
    """
    expected, states, saved = _uninterrupted(mode, place)
    program: Any = None
    raised = Raising()
    try:
        with deadline(_SECONDS):
            with watched():
                training = Training(MODES[mode], place)
            program, result = _Program(training, error), "exact"
            for number in range(_FIRST):
                program.run(number)
            program.state_dict()
            try:
                with raising(at, error) as raised:
                    program.run(_FIRST)
                    program._call("synchronize", training.optimizer.synchronize)
                for number in range(_FIRST + 1, _LAST):
                    program.run(number)
                ended = program.state_dict()
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
                training.load(saved, weights_first=at.line % 2 == 0)
                for number in range(_FIRST, _LAST):
                    program.run(number)
                ended = program.state_dict()
            if raised.where is None:
                return "unreached"
            # backward() logs the error of an update or of a binding, which `step` then makes
            in_backward = {"step_in_backward", "accumulate"} & MODES[mode].options.keys()
            logged = in_backward and isinstance(error, Exception)
            if program.told != 1 and not (logged and not program.told):
                return f"wrong: told {program.told} times of {raised.where}"
            if differing(list(training.net.parameters()), expected):
                return f"wrong: other weights after {raised.where}"
            if different := unlike(ended, states):
                return f"wrong: other states {different[:2]} after {raised.where}"
            program.doing = "close"
            training.optimizer.close()
            return result
    except Hang as hang:
        return f"hung: {program and program.doing} in {hang} after {raised.where}"
    except BaseException as failure:
        return (
            f"wrong: {program and program.doing} raised {type(failure).__name__}: "
            f"{str(failure)[:200]} after {raised.where}"
        )


_REPORT = """# Interrupted steps of NVMeOptimizer

One training step (`zero_grad`, forward, `backward`, `step`) is ended by a KeyboardInterrupt or, alternating, a MemoryError just before a line of the package
runs, in any of its threads. The program then goes on as a user does. It calls `step()` again, or begins the step anew if an earlier call was ended. If the
optimizer refuses, the program loads weights and states into the same objects. It trains to the end, and weights and states are compared, bit for bit, with
the weights and states of a training without an interruption.

- places: lines that the step executes, a line counts again for its second and fifth time
- tried: places in which the exception was raised, spread evenly over the package
- exact: the training went on with the same bits
- refused and restored: one error asked for a checkpoint, and loading it gave the same bits
- wrong: other bits, another exception in place of the original, or a swallowed exception
- hung: a call that did not end within {seconds:.0f} s

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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    rows, faults = [], []
    for mode in MODES:
        all_places = found(mode, arguments.directory)
        chosen = sample(all_places, arguments.most)
        outcomes: Counter[str] = Counter()
        for index, at in enumerate(chosen):
            error = (KeyboardInterrupt, MemoryError)[index % 2]("made up")
            result = outcome(mode, at, error, arguments.directory)
            outcomes[result.split(":")[0]] += 1
            if result.startswith(("wrong", "hung")):
                faults.append(f"- {mode}, {at}: {result}")
        tried = outcomes.total() - outcomes["unreached"]
        rows.append(
            [mode, len(all_places), tried]
            + [outcomes[kind] for kind in ("exact", "refused", "wrong", "hung")]
        )
        print(*rows[-1], flush=True)
    total = [sum(row[column] for row in rows) for column in range(1, 7)]
    rows.append(["all", *total])
    head = ["mode", "places", "tried", "exact", "refused and restored", "wrong", "hung"]
    known = facts(arguments.directory, "tests.optim.interrupted")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    text = _REPORT.format(
        seconds=_SECONDS,
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
