"""One step of an `NVMeOptimizer` that an exception ends at some line, and what the program can do
then: call it again, or load a checkpoint into the same objects.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reference import differing, loss_of, model, smallest, unlike

sys.path.append(str(Path(__file__).parents[1]))
from interrupts import Hang, Place, Raising, deadline, places, raising, watched

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
            if program.told != 1:
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
