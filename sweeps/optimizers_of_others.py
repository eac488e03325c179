"""`python -m sweeps.optimizers_of_others DIR --packages P --output FILE`: optimizers of other
packages under `NVMeOptimizer`, compared with the same classes in memory.

Every class of each package is trained for some steps in memory, under `NVMeOptimizer` with
unlimited memory, with the least memory that it accepts, and with that and provisional updates in
the backward pass, some of which clipping undoes. The table names bit-equal classes, refused ones
with the message, and classes that fail without this package too. The packages are imported from P
(`pip install --no-deps --target P`), so they need not be in the environment. Each class has a
separate process and a time limit.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import inspect
import logging
import multiprocessing
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling each class's kernels would take minutes

import torch

from nvme_offload import NVMeOptimizer
from nvme_offload.errors import OffloadError
from nvme_offload.optim import UpdateStats, bucketing

from .machine import commit, facts
from .report import columns, document, escaped, listed

PACKAGES = """
    acfgm adabelief_pytorch adabound adam_mini adamod adamp adan_pytorch adams came_pytorch
    dadaptation galore_torch lion_pytorch muon prodigyopt prodigyplus pytorch_optimizer
    pytorch_ranger schedulefree sophia_opt timm.optim torch_optimizer torchao.optim
    bitsandbytes.optim heavyball transformers.optimization
""".split()  # noqa: SIM905
SHAPES = ((200, 150), (40, 30), (77,), (300, 100), (16, 8, 3, 3))
STEPS = 12
CLIPPED = (7, 8)  # steps whose gradients are changed after the backward pass
SECONDS = 90  # time limit of an optimizer
# Arguments without a default, which a user must give too.
ARGUMENTS: dict[str, Any] = {
    "lr": 1e-3,
    "num_iterations": 100,
    "num_data": 100,
    "base_optimizer": torch.optim.AdamW,
}
OF_CLASSES: dict[str, dict[str, Any]] = {  # classes that refuse their own default
    r"bitsandbytes\.optim\.(LARS|SGD|PytorchLARS)": {"momentum": 0.9},
    r"came_pytorch\.": {"lr": 1e-3},
}
VERDICTS = (
    "bit-equal",
    "refused",
    "fails in memory",
    "not the same twice in memory",
    "not judged",
    "DIFFERS",
    "FAILS",
)

Make = Callable[[Any], torch.optim.Optimizer]


class Way(NamedTuple):
    """How an optimizer is used: *matrices* only; *groups* of matrices and others; a *closure* for
    `step`; gradients with a *graph*; in a process group of one (*ranks*).
    """

    name: str
    matrices: bool = False
    groups: bool = False
    closure: bool = False
    graph: bool = False
    ranks: bool = False


WAYS = (
    Way(""),
    Way("matrices alone", matrices=True),
    Way("groups with use_muon", groups=True),
    Way("a closure", closure=True),
    Way("gradients with a graph", graph=True),
    Way("matrices alone, a process group", matrices=True, ranks=True),
    Way("groups with use_muon, a process group", groups=True, ranks=True),
)


class Outcome(NamedTuple):
    """The result of one optimizer. buckets: with the least memory. in_backward: the most buckets
    updated provisionally in a step; undone: the most undone in a step.
    """

    name: str
    verdict: str
    judged: str = ""
    buckets: int = 0
    in_backward: int = 0
    undone: int = 0


def optimizers(packages: Sequence[str]) -> Iterator[tuple[str, Make]]:
    """The optimizer classes of the packages, by name, without torch's own."""
    for package in packages:
        try:
            module = _imported(package)
        except Exception as error:
            print(f"{package}: {error}", file=sys.stderr)
            continue
        seen = set()
        for name, kind in sorted(vars(module).items()):
            own = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
            own = own and not kind.__module__.startswith("torch.")
            if own and kind not in seen and kind.__name__ not in ("Optimizer", "BaseOptimizer"):
                seen.add(kind)
                full = f"{package}.{name}"
                more = [given for start, given in OF_CLASSES.items() if re.match(start, full)]
                yield full, made(kind, *more)


def _imported(package: str) -> Any:
    # timm would import its models for this, and they torchvision
    if package == "timm.optim":
        outer, models = types.ModuleType("timm"), types.ModuleType("timm.models")
        outer.__path__ = [
            str(Path(folder) / "timm")
            for folder in sys.path
            if (Path(folder) / "timm" / "optim").is_dir()
        ]
        models.group_parameters = models.group_with_matcher = None  # type: ignore[attr-defined]
        sys.modules.update({"timm": outer, "timm.models": models})
    return importlib.import_module(package)


def made(kind: Any, more: Mapping[str, Any] | None = None) -> Make:
    """A factory: the class with its defaults and *more*, and for arguments without a default
    `ARGUMENTS`, an inner optimizer, or names of parameters.
    """
    wanted = inspect.signature(kind).parameters
    given = {
        name: ARGUMENTS[name]
        for name, parameter in wanted.items()
        if name in ARGUMENTS
        and (
            parameter.default is inspect.Parameter.empty
            or type(parameter.default).__name__ == "_RequiredParameter"
        )
    }
    inner = "optimizer" in wanted or next(iter(wanted)) == "base_optimizer"
    if inner:
        given.pop("base_optimizer", None)

    def make(params: Any) -> torch.optim.Optimizer:
        if inner:
            return kind(torch.optim.AdamW(params), **given)
        if "named_parameters" in wanted:
            return kind([(str(index), one) for index, one in enumerate(_flat(params))], **given)
        return kind(params, **given, **(more or {}))

    make.__name__ = kind.__name__
    return make


def _flat(params: Sequence[Any]) -> list[torch.Tensor]:
    return [
        one for entry in params for one in (entry["params"] if isinstance(entry, dict) else [entry])
    ]


def weights(way: Way) -> list[torch.nn.Parameter]:
    """Parameters, equal at each call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for shape in SHAPES if len(shape) == 2 or not way.matrices]
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator) / shape[-1] ** 0.5)
        for shape in shapes
    ]


def given_to(params: Sequence[torch.nn.Parameter], way: Way) -> Any:
    """The argument *params* of the optimizer."""
    if not way.groups:
        return list(params)
    matrices = [parameter for parameter in params if parameter.dim() == 2]
    others = [parameter for parameter in params if parameter.dim() != 2]
    return [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]


def train(
    params: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    way: Way,
    counted: list[Any] | None = None,
) -> None:
    """Train some noisy steps; append the statistics of each to *counted*."""
    torch.manual_seed(0)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        noises = [0.1 * torch.randn(parameter.shape, generator=generator) for parameter in params]
        scale = 10.0 if step == STEPS // 2 else 1.0

        def closure(noises: Sequence[torch.Tensor] = noises, scale: float = scale) -> torch.Tensor:
            gradients = []
            for parameter, noise in zip(params, noises, strict=True):
                own = parameter if way.graph else parameter.detach()
                gradients.append((own + noise) * scale)
                parameter.grad = gradients[-1] if way.graph or way.closure else None
            if not (way.graph or way.closure):  # from a backward pass, bit for bit the same
                pairs = zip(params, gradients, strict=True)
                torch.stack([(one * gradient).sum() for one, gradient in pairs]).sum().backward()
            return torch.stack([parameter.square().sum() for parameter in params]).sum()

        closure()
        if step in CLIPPED:
            for parameter in params:
                parameter.grad = parameter.grad * 0.5 if way.graph else parameter.grad.mul_(0.5)
        optimizer.step(closure) if way.closure else optimizer.step()
        if isinstance(optimizer, NVMeOptimizer) and counted is not None:
            counted.append(optimizer.stats())
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()


def same(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether all bits are equal."""
    return all(
        torch.equal(one.detach().view(torch.int32), other.detach().view(torch.int32))
        for one, other in zip(ones, others, strict=True)
    )


def plainly(make: Make, way: Way) -> list[torch.nn.Parameter]:
    """Train parameters in memory."""
    if way.ranks and not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    params = weights(way)
    train(params, make(given_to(params, way)), way)
    return params


def trained(
    make: Make, directory: str, cap: int | str, way: Way, in_backward: Any = False
) -> tuple[list[torch.nn.Parameter], list[UpdateStats]]:
    """Train parameters with this *cap*, or with the least that a refusal names; and the statistics
    of each step.
    """
    for _ in range(5):
        params = weights(way)
        counted: list[UpdateStats] = []
        try:
            with NVMeOptimizer(
                given_to(params, way),
                make,
                paths=directory,
                host_memory=cap,
                step_in_backward=in_backward,
            ) as optimizer:
                train(params, optimizer, way, counted)
                return params, counted
        except OffloadError as refusal:
            if not (named := re.search(r"at least (\d+)", str(refusal))):
                raise
            cap = int(named[1])
    raise TimeoutError


def judge(name: str, make: Make, directory: str) -> Outcome:
    """Train with *make*'s optimizer in memory and on the drive of *directory*."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("nvme_offload.optim")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    way = _way_of(make)
    counts = (0, 0, 0)
    if isinstance(way, str):
        return Outcome(name, f"fails in memory: {way}")
    if not way.groups:  # all trials have the same options
        bucketing.examine = _once(bucketing.examine)
    by = f" ({way.name})" if way.name else ""
    try:
        plain = plainly(make, way)
        if not same(plainly(make, way), plain):
            return Outcome(name, f"not the same twice in memory{by}")
        for cap, in_backward in (("auto", False), (4096, False), (4096, "provisional")):
            ours, stats = trained(make, directory, cap, way, in_backward)
            counts = (
                max(one.buckets for one in stats),
                max(one.updated_in_backward for one in stats),
                max(one.rolled_back for one in stats),
            )
            if not same(ours, plain):
                what = ", provisional" if in_backward else ""
                return Outcome(name, f"DIFFERS{by}{what}", _judged(heard), *counts)
        return Outcome(name, f"bit-equal{by}", _judged(heard), *counts)
    except OffloadError as error:
        return Outcome(name, f"refused{by}: {error}", _judged(heard), *counts)
    except Exception as error:
        return Outcome(name, f"FAILS{by}: {type(error).__name__}: {error}", _judged(heard), *counts)


def _way_of(make: Make) -> Way | str:
    """The first way in which it trains in memory, or the first error."""
    said = ""
    for way in WAYS:
        try:
            plainly(make, way)
        except Exception as error:
            lines = str(error).strip().splitlines()
            said = said or f"{type(error).__name__}: {lines[0] if lines else ''}"
        else:
            return way
    return said


def _once(examine: Any) -> Any:
    """*examine* with a cache: one class with one set of options is examined once."""
    found: dict[Any, Any] = {}

    @functools.wraps(examine)
    def asked(name: str, make: Make, *facts: Any, **more: Any) -> Any:
        key = repr((facts, more))
        if key not in found:
            found[key] = examine(name, make, *facts, **more)
        return found[key]

    return asked


def _judged(heard: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(re.findall(r"updates (.*?) \(", " ".join(heard))))


def apart(name: str, make: Make, directory: str) -> Outcome:
    """Run `judge` in a separate process, for at most `SECONDS`."""
    context = multiprocessing.get_context("fork")
    ours, its = context.Pipe(duplex=False)

    def work() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some print advertisements
        its.send(judge(name, make, directory))

    process = context.Process(target=work)
    process.start()
    its.close()
    try:
        return (
            ours.recv() if ours.poll(SECONDS) else Outcome(name, f"not judged within {SECONDS} s")
        )
    except EOFError:
        process.join(5)
        return Outcome(name, f"FAILS: its process ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def report(outcomes: Sequence[Outcome], about: Mapping[str, str]) -> str:
    """The table, as Markdown."""
    counts = {kind: sum(one.verdict.startswith(kind) for one in outcomes) for kind in VERDICTS}
    cells = {
        "optimizer": lambda one: one.name,
        "verdict": lambda one: " ".join(escaped(one.verdict).split())[:500],
        "updates, as judged": lambda one: one.judged,
        "buckets": lambda one: one.buckets or "",
        "in backward": lambda one: one.in_backward or "",
        "undone": lambda one: one.undone or "",
    }
    return document(
        "# Optimizers of other packages under NVMeOptimizer",
        listed({**about, "computing": f"torch {torch.__version__} on the CPU, one thread"}),
        f"{len(outcomes)} classes, {STEPS} steps each over parameters of {', '.join(map(str, SHAPES))}: "
        + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        + ". Bit-equal: with all states in memory, with the least `host_memory` that is not refused, and with that and provisional updates in the backward "
        "pass, to the same class without this package. In backward: the buckets that were updated there in a step, at most; undone: those that the clipping of "
        f"steps {' and '.join(map(str, CLIPPED))}, counted from 0, undid. Fails in memory: without this package, whichever of these ways it is used: "
        + ", ".join(way.name or "parameters alone" for way in WAYS)
        + ".",
        columns(outcomes, cells),
    )


def main() -> None:
    """Judge all classes and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", help="a directory on the drive")
    parser.add_argument("--packages", required=True, help="directory of the packages")
    parser.add_argument("--output", type=Path, help="a Markdown file")
    parser.add_argument("--only", default="", help="only classes whose names match this expression")
    parser.add_argument("--jobs", type=int, default=1, help="at a time")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.path.append(arguments.packages)
    torch.set_num_threads(1)
    found = sorted(
        (one.name, one.version)
        for one in importlib.metadata.distributions(path=[arguments.packages])
    )
    about = {**facts(Path(arguments.directory), "sweeps.optimizers_of_others"), "commit": commit()}
    about["packages"] = ", ".join(f"{name} {version}" for name, version in found)
    chosen = [
        (name, make) for name, make in optimizers(PACKAGES) if re.search(arguments.only, name)
    ]
    began, outcomes = time.monotonic(), []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(lambda one: apart(*one, arguments.directory), chosen):
            outcomes.append(outcome)
            print(*outcome, sep=" | ", flush=True)
    about["took"] = f"{(time.monotonic() - began) / 60:.0f} minutes, {arguments.jobs} at a time"
    if arguments.output:
        arguments.output.write_text(report(outcomes, about), encoding="utf-8")


if __name__ == "__main__":
    main()
