"""`python -m sweeps.formats.quality DIR --packages P --output FILE`: final losses of "compact"
compared with "exact" and with 8-bit optimizers of other packages.

Each case is trained with exact states, in "compact", in "compact" with 8 bits for all options, and
with the 8-bit AdamW of bitsandbytes and torchao, where these can be imported from P. The table has
final losses as a multiple of exact's.

With --bfloat16, weights and gradients are bfloat16, and the formats are "compact" and "compact24",
which differ only in the masters of such weights. Then "exact" is this package's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvme_offload import NVMeOptimizer
from nvme_offload.optimizer_states import widening

from ..machine import commit, facts
from ..report import document, listed, table

LIMIT = 1.1  # of exact's loss
Make = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
MakeWith = Callable[[Mapping[str, Any], Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
Train = Callable[[Make, int], float]


class Case(NamedTuple):
    """A training problem: *train* returns the final loss with an optimizer from the given factory,
    for a seed.
    """

    name: str
    kind: Any
    options: Mapping[str, Any]
    train: Train
    seeds: int = 1


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def regression(
    make: Make, seed: int, *, steps: int = 300, decay: bool = False, near: bool = False
) -> float:
    """Least squares over the whole batch with nearly linear targets: only the rounding of states is
    random. near: weights start within 0.02 of the solution instead of at zero.
    """
    generator = _generator(seed)
    inputs = torch.randn(256, 128, generator=generator) * torch.logspace(0, -1.5, 128)
    goal = torch.randn(128, 8, generator=generator)
    targets = inputs @ goal + 0.01 * torch.randn(256, 8, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(128, 8))
    if near:
        weight.data = goal + 0.02 * torch.randn(128, 8, generator=generator)
    optimizer = make([weight])
    base = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        if decay:
            optimizer.param_groups[0]["lr"] = base * (1 - step / steps)
        optimizer.zero_grad()
        (inputs @ weight - targets).square().mean().backward()
        optimizer.step()
    return float((inputs @ weight.detach() - targets).square().mean())


def decades(make: Make, seed: int, *, steps: int = 300) -> float:
    """A quadratic whose gradients differ by up to eight decades, mixed within every block."""
    generator = _generator(seed)
    scale = torch.logspace(0, -8, 256).repeat(4)[torch.randperm(1024, generator=generator)]
    goal = torch.randn(1024, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(1024))
    optimizer = make([weight])
    base = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = base * (1 - step / steps)
        weight.grad = scale * (weight.detach() - goal)
        optimizer.step()
    return float((weight.detach() - goal).square().mean()) + 1e-6


def _sentences(
    count: int, length: int, generator: torch.Generator, words: int = 200
) -> torch.Tensor:
    """Sentences of a language of word pairs, most of which are rare."""
    following = torch.randint(0, words, (words, 4), generator=_generator(0))
    rows = [
        torch.multinomial(
            1 / torch.arange(1, words + 1).float(), count, replacement=True, generator=generator
        )
    ]
    for _ in range(length - 1):
        choice = torch.multinomial(
            torch.tensor([0.6, 0.2, 0.15, 0.05]), count, replacement=True, generator=generator
        )
        rows.append(following[rows[-1], choice])
    return torch.stack(rows, 1)


def language(make: Make, seed: int, *, steps: int = 250) -> float:
    """A small transformer over a language of pairs."""
    torch.manual_seed(seed)
    embedding, head = torch.nn.Embedding(200, 64), torch.nn.Linear(64, 200)
    block = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = torch.nn.ModuleList([embedding, block, head])
    optimizer = make(list(model.parameters()))
    base = optimizer.param_groups[0]["lr"]
    generator = _generator(seed)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(15)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            head(block(embedding(batch[:, :-1]), mask, is_causal=True)).flatten(0, 1),
            batch[:, 1:].flatten(),
        )

    for step in range(steps):
        optimizer.param_groups[0]["lr"] = base * min(1, (step + 1) / 40) * (1 - step / steps)
        optimizer.zero_grad()
        loss(_sentences(16, 16, generator)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss(_sentences(512, 16, _generator(999))))


def rows(make: Make, seed: int, *, steps: int = 600) -> float:
    """An embedding with rare gradients for most rows and zeros in between; the loss is over the
    rare half.
    """
    generator = _generator(seed)
    goal = torch.randn(1000, 16, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(1000, 16))
    optimizer = make([weight])
    base = optimizer.param_groups[0]["lr"]
    chance = 1 / torch.arange(1, 1001).float()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = base * (1 - step / steps)
        optimizer.zero_grad()
        chosen = torch.multinomial(chance, 64, replacement=True, generator=generator)
        (torch.nn.functional.embedding(chosen, weight) - goal[chosen]).square().mean().backward()
        optimizer.step()
    return float((weight.detach() - goal)[500:].square().mean())


def long(make: Make, seed: int, *, steps: int = 20_000) -> float:
    """A small network that fits a function from noisy samples over many steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = make(list(model.parameters()))
    base = optimizer.param_groups[0]["lr"]
    generator = _generator(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = base * (1 - step / steps)
        optimizer.zero_grad()
        x = torch.randn(32, 8, generator=generator)
        y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(32, 1, generator=generator)
        (model(x) - y).square().mean().backward()
        optimizer.step()
    x = torch.randn(4096, 8, generator=_generator(999))
    with torch.no_grad():
        return float((model(x) - x.sin().sum(1, keepdim=True)).square().mean())


def cases() -> list[Case]:
    """All cases."""
    adam, sgd = torch.optim.AdamW, torch.optim.SGD
    to_zero = functools.partial(regression, decay=True)
    # A weight of 1 in 24 bits changes by 3e-5 at least.
    in_small_steps = functools.partial(regression, steps=3000, near=True)

    def of_adam(name: str, train: Train, seeds: int = 1, **options: Any) -> Case:
        return Case(name, adam, options, train, seeds)

    plain: dict[str, Any] = {"weight_decay": 0.0}
    found = []
    for beta in (momenta := (0.9, 0.95, 0.97, 0.98, 0.99)):
        name = f"regression, AdamW, beta1 {beta}"
        found.append(of_adam(name, regression, lr=1e-2, betas=(beta, 0.999), **plain))
    for beta in momenta:
        options = {"lr": 0.05 * (1 - beta) / 0.1, "momentum": beta}
        found.append(Case(f"regression, SGD, momentum {beta}", sgd, options, regression))
    return [
        *found,
        of_adam("regression, AdamW, decay to zero", to_zero, lr=1e-2, **plain),
        of_adam("regression, AdamW, steps of 1e-5", in_small_steps, lr=1e-5, **plain),
        of_adam("gradients over 8 decades, eps 1e-15", decades, lr=0.1, eps=1e-15, **plain),
        of_adam("gradients over 8 decades, eps 1e-8", decades, lr=0.1, **plain),
        of_adam("language model", language, 3, lr=3e-3),
        of_adam("language model, beta1 0.98", language, lr=3e-3, betas=(0.98, 0.999)),
        of_adam("rare rows", rows, lr=3e-2, **plain),
        of_adam("20,000 steps", long, lr=3e-3, **plain),
    ]


def ours(
    state_format: str,
    directory: str,
    kind: Any,
    options: Mapping[str, Any],
    params: Sequence[torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """An `NVMeOptimizer`."""
    return NVMeOptimizer(
        params, kind, paths=directory, host_memory="16MiB", state_format=state_format, **options
    )  # type: ignore[arg-type]


def always_8_bits(
    directory: str, kind: Any, options: Mapping[str, Any], params: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """compact without its checks of the options and of the range of states."""
    with _without_limits():
        optimizer = ours("compact", directory, kind, options, params)
    step = optimizer.step

    def narrow(closure: Any = None) -> Any:  # a step checks, too
        with _without_limits():
            return step(closure)

    optimizer.step = narrow  # type: ignore[method-assign]
    return optimizer


@contextlib.contextmanager
def _without_limits() -> Iterator[None]:
    kept = widening._LARGEST_BETA, widening._LEAST_EPS, widening._RANGE
    widening._LARGEST_BETA, widening._LEAST_EPS, widening._RANGE = 1.0, 0.0, 0.0
    try:
        yield
    finally:
        widening._LARGEST_BETA, widening._LEAST_EPS, widening._RANGE = kept


def in_bfloat16(
    make: MakeWith,
    options: Mapping[str, Any],
    params: Sequence[torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """An optimizer of bfloat16 copies of *params*, with gradients in bfloat16. After each step
    *params* get the values of the copies, so losses belong to bfloat16 weights, computed in
    float32.
    """
    working = [torch.nn.Parameter(parameter.detach().bfloat16()) for parameter in params]
    optimizer = make(options, working)

    def take(*_: Any) -> None:
        for parameter, weight in zip(params, working, strict=True):
            weight.grad = None if parameter.grad is None else parameter.grad.bfloat16()
            parameter.grad = None

    def give(*_: Any) -> None:
        for parameter, weight in zip(params, working, strict=True):
            parameter.data.copy_(weight.detach())

    give()
    optimizer.register_step_pre_hook(take)
    optimizer.register_step_post_hook(give)
    return optimizer


def peers() -> dict[str, Any]:
    """The 8-bit AdamW of other packages, by name; import errors are printed."""
    found: dict[str, Any] = {}
    try:
        import bitsandbytes

        found["bitsandbytes"] = functools.partial(bitsandbytes.optim.AdamW8bit, min_8bit_size=256)
    except Exception as error:
        print("bitsandbytes:", error, file=sys.stderr)
    try:
        from torchao.optim import AdamW8bit

        found["torchao"] = AdamW8bit
    except Exception as error:
        print("torchao:", error, file=sys.stderr)
    return found


def measured(case: Case, make: MakeWith) -> list[float] | str:
    """The final losses of the case's seeds, or the error."""
    try:
        return [
            case.train(lambda params: make(case.options, params), seed)
            for seed in range(case.seeds)
        ]
    except Exception as error:
        return type(error).__name__


def makes(
    case: Case, directory: str, others: Mapping[str, Any], bfloat16: bool
) -> dict[str, MakeWith]:
    """Factories of the optimizers of *case*, by column; exact first."""
    formats = {
        name: functools.partial(ours, name, directory, case.kind)
        for name in ("exact", "compact", "compact24")
    }
    if bfloat16:
        return {name: functools.partial(in_bfloat16, make) for name, make in formats.items()}
    found: dict[str, MakeWith] = {
        "exact": lambda options, params: case.kind(params, **options),
        "compact": formats["compact"],
        "always 8 bits": functools.partial(always_8_bits, directory, case.kind),
    }
    if case.kind is torch.optim.AdamW:
        for name, other in others.items():
            found[name] = lambda options, params, other=other: other(params, **options)
    return found


def row(case: Case, made: Mapping[str, MakeWith], names: Sequence[str]) -> list[str]:
    """A row of the table with the columns *names*."""
    losses = {name: measured(case, make) for name, make in made.items()}
    exact = losses.pop("exact")
    assert not isinstance(exact, str), exact
    cells = {name: multiple(found, exact) for name, found in losses.items()}
    mean = f"{statistics.fmean(exact):.4g}"
    return [case.name, str(case.seeds), mean, *(cells.get(name, "") for name in names)]


def multiple(found: list[float] | str, exact: list[float]) -> str:
    """The mean of the losses *found* divided by the mean of *exact*, of the same seeds; with the
    standard error of the mean difference if there are several.
    """
    if isinstance(found, str):
        return found
    if not math.isfinite(sum(found)):
        return str(sum(found))
    mean = statistics.fmean(exact)
    cell = f"{statistics.fmean(found) / mean:.3f}"
    if len(exact) == 1:
        return cell
    differences = [here - there for here, there in zip(found, exact, strict=True)]
    return f"{cell} ± {statistics.stdev(differences) / len(exact) ** 0.5 / mean:.3f}"


def main() -> None:
    """Measure all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", help="a directory on the drive")
    parser.add_argument("--packages", help="directory of the other packages")
    parser.add_argument("--output", type=Path, help="a Markdown file")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--seeds", type=int, help="seeds of each case")
    parser.add_argument("--bfloat16", action="store_true", help="weights; tries compact24, too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.packages:
        sys.path.append(arguments.packages)
    about = {**facts(Path(arguments.directory), "sweeps.formats.quality"), "commit": commit()}
    about["computing"] = f"torch {torch.__version__} on the CPU, one thread"
    others = {} if arguments.bfloat16 else peers()
    names = (
        ["compact", "compact24"] if arguments.bfloat16 else ["compact", "always 8 bits", *others]
    )
    lines = [["case", "seeds", "exact, loss", *names]]
    for case in cases():
        if arguments.only in case.name:
            case = case._replace(seeds=arguments.seeds or case.seeds)
            made = makes(case, arguments.directory, others, arguments.bfloat16)
            lines.append(row(case, made, names))
            print(*lines[-1], sep=" | ", flush=True)
    if arguments.output:
        compared = "in bfloat16" if arguments.bfloat16 else "and others' 8 bits"
        columns = (
            "*compact24* also has masters of 24 bits. Weights and gradients are bfloat16; with float32 weights compact24 equals compact."
            if arguments.bfloat16
            else "*always 8 bits* is without that."
        )
        text = document(
            f"# Losses of compact compared with exact {compared}",
            listed(about),
            "Final losses, means over that many seeds, as multiples of exact's. What stands after ± is the standard error of a mean over seeds. *compact* is "
            f"what a user has: with beta1 or a momentum above {widening._LARGEST_BETA}, an eps below {widening._LEAST_EPS:g}, or second moments of a block "
            f"that are more than 30 octaves apart, it keeps states in 16 bits. {columns}",
            table(lines[0], lines[1:]),
        )
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
