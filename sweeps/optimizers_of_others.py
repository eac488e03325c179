"""`python -m sweeps.optimizers_of_others DIR --packages P --output FILE`: optimizers of other packages under `NVMeOptimizer`, beside themselves in memory.

Every class of each package is trained for some steps in memory, under `NVMeOptimizer` with all the memory that it wants, and with the least that it does not
refuse. The table says where the bits are the same, which are refused with which words, and which fail without this package as well. The packages are imported
from P, as `pip install --no-deps --target P` leaves them, so that none of them has to be in the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import logging
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvme_offload import NVMeOptimizer
from nvme_offload.errors import OffloadError

from .machine import commit, facts

PACKAGES = (
    *("acfgm", "adabelief_pytorch", "adabound", "adamod", "adamp", "adan_pytorch", "adams", "came_pytorch", "dadaptation", "lion_pytorch", "prodigyopt"),
    *("pytorch_optimizer", "pytorch_ranger", "schedulefree", "torch_optimizer", "transformers.optimization"),
)
SHAPES = ((200, 150), (40, 30), (77,), (300, 100), (16, 8, 3, 3))
STEPS = 12
SECONDS = 90  # that one optimizer may take

Make = Callable[[Any], torch.optim.Optimizer]


class Outcome(NamedTuple):
    """What became of one optimizer. bundles: with the least memory."""

    name: str
    verdict: str
    judged: str
    bundles: int


def optimizers(packages: Sequence[str]) -> Iterator[tuple[str, Make]]:
    """The optimizer classes that the packages have, by name; torch's own are elsewhere."""
    for package in packages:
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            print(f"{package}: {error}", file=sys.stderr)
            continue
        seen = set()
        for name, kind in sorted(vars(module).items()):
            own = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and not kind.__module__.startswith("torch.")
            if own and kind not in seen and kind.__name__ not in ("Optimizer", "BaseOptimizer"):
                seen.add(kind)
                yield f"{package}.{name}", made(kind)


def made(kind: Any) -> Make:
    """The class with its own defaults; where it has none for the learning rate, or for an optimizer inside of it, one that is usual."""
    given = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name == "lr" and not isinstance(parameter.default, float):
            given["lr"] = 1e-3
    make = lambda params: kind(params, **given)  # noqa: E731 -- which is given a name at once
    make.__name__ = kind.__name__
    return make


def weights() -> list[torch.nn.Parameter]:
    """The same at each call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator) / shape[-1] ** 0.5) for shape in SHAPES]


def train(params: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Some steps, down a slope and with noise."""
    torch.manual_seed(0)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for parameter in params:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (parameter.detach() + 0.1 * noise) * (10.0 if step == STEPS // 2 else 1.0)
        optimizer.step()
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()


def same(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether all bits are."""
    return all(torch.equal(one.detach().view(torch.int32), other.detach().view(torch.int32)) for one, other in zip(ones, others, strict=True))


def least(make: Callable[[int], NVMeOptimizer]) -> NVMeOptimizer:
    """What is made with the least memory that is not refused."""
    try:
        return make(4096)
    except OffloadError as refusal:
        if named := re.search(r"at least (\d+)", str(refusal)):
            return make(int(named[1]))
        raise


def judge(name: str, make: Make, directory: str) -> Outcome:
    """Train with *make*'s optimizer in memory and on the drive of *directory*."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("nvme_offload.optim")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    bundles = 0
    try:
        plain = weights()
        try:
            train(plain, make(plain))
        except Exception as error:
            return Outcome(name, f"fails in memory: {type(error).__name__}", "", 0)
        for build in (
            lambda params: NVMeOptimizer(params, make, paths=directory),
            lambda params: least(lambda cap: NVMeOptimizer(params, make, paths=directory, host_memory=cap)),
        ):
            ours = weights()
            with build(ours) as optimizer:
                bundles = len(optimizer._bundles)
                train(ours, optimizer)
            if not same(ours, plain):
                return Outcome(name, "DIFFERS", _judged(heard), bundles)
        return Outcome(name, "bit-equal", _judged(heard), bundles)
    except OffloadError as error:
        return Outcome(name, f"refused: {error}", _judged(heard), bundles)
    except TimeoutError:
        return Outcome(name, f"not judged within {SECONDS} s", _judged(heard), bundles)
    except Exception as error:
        return Outcome(name, f"FAILS: {type(error).__name__}: {error}", _judged(heard), bundles)
    finally:
        log.removeHandler(handler)


def _judged(heard: Sequence[str]) -> str:
    found = re.search(r"updates (.*?) \(", " ".join(heard))
    return found[1] if found else ""


def _late(*_: Any) -> None:
    raise TimeoutError


def report(outcomes: Sequence[Outcome], about: Mapping[str, str]) -> str:
    """The table, as Markdown."""
    counts = {
        kind: sum(one.verdict.startswith(kind) for one in outcomes) for kind in ("bit-equal", "refused", "fails in memory", "not judged", "DIFFERS", "FAILS")
    }
    rows = [f"| {one.name} | {one.verdict} | {one.judged} | {one.bundles or ''} |".replace("\n", " ") for one in outcomes]
    return "\n".join(
        [
            "# Optimizers of other packages under NVMeOptimizer",
            "",
            *(f"- {key}: {value}" for key, value in about.items()),
            f"- torch {torch.__version__} on the CPU, one thread",
            "",
            f"{len(outcomes)} classes, {STEPS} steps each over parameters of {', '.join(map(str, SHAPES))}: "
            + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            + ". Bit-equal: with all states in memory, and with the least `host_memory` that is not refused, to the same class without this package.",
            "",
            "| optimizer | verdict | updates, as judged | bundles |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Judge all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", help="a directory on the drive")
    parser.add_argument("--packages", required=True, help="where pip has put them")
    parser.add_argument("--output", type=Path, help="a Markdown file")
    parser.add_argument("--only", default="", help="those whose names have this")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.path.append(arguments.packages)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _late)
    about = {**facts(Path(arguments.directory), "sweeps.optimizers_of_others"), "commit": commit()}
    outcomes = []
    for name, make in optimizers(PACKAGES):
        if arguments.only not in name:
            continue
        signal.alarm(SECONDS)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # some advertise
                outcomes.append(judge(name, make, arguments.directory))
        except TimeoutError:
            outcomes.append(Outcome(name, f"not judged within {SECONDS} s", "", 0))
        finally:
            signal.alarm(0)
        print(*outcomes[-1], sep=" | ", flush=True)
    if arguments.output:
        arguments.output.write_text(report(outcomes, about), encoding="utf-8")


if __name__ == "__main__":
    main()
