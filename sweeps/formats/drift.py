"""`python -m sweeps.formats.drift`: how far 8-bit moments are from exact ones that saw the same
gradients, as a transformer trains.
"""

from __future__ import annotations

import click
import torch

from nvme_offload.optimizer_states import state_format
from nvme_offload.optimizer_states.eight_bit import BLOCK, decode, encode

from ..report import listed, table
from .__main__ import device_facts, shape
from .text import batches, cut, read_text
from .trainer import PackedAdamW, Recipe
from .transformer import Shape, Transformer

EPS = 1e-8
_HEAD = (
    "steps",
    "second moment over exact: mean",
    "scatter",
    "step over exact: mean",
    "error of the step, rms",
    "largest step",
    "exact's",
)


class Moments:
    """Adam's two moments of *numel* weights. in_codes: kept in 8 bits between steps."""

    def __init__(self, numel: int, device: str, betas: tuple[float, float], in_codes: bool) -> None:
        self.first, self.second = (torch.zeros(numel, device=device) for _ in range(2))
        self._codes = torch.empty(numel, dtype=torch.uint8, device=device)
        self._exponents = torch.empty(-(-numel // BLOCK), dtype=torch.uint8, device=device)
        self._betas = betas
        self._in_codes = in_codes
        self._steps = 0

    def step(self, gradient: torch.Tensor) -> torch.Tensor:
        """Adam's step for the *gradient*, over the learning rate."""
        beta1, beta2 = self._betas
        self._steps += 1
        self.first.lerp_(gradient, 1 - beta1)
        self.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = (self.first / (1 - beta1**self._steps)) / (
            (self.second / (1 - beta2**self._steps)).sqrt() + EPS
        )
        if self._in_codes:
            for index, moment in enumerate((self.first, self.second)):
                encode(
                    moment,
                    self._codes,
                    self._exponents,
                    signed=index == 0,
                    seed=(self._steps, index),
                )
                decode(self._codes, self._exponents, moment, signed=index == 0)
        return step


@click.command()
@shape(layers=3, width=96, heads=4, context=64, batch=16, steps=2000)
def main(
    layers: int, width: int, heads: int, context: int, batch: int, steps: int, device: str
) -> None:
    """Print a table in Markdown: by steps done, what rounding did to the second moments and to the
    steps that they make.
    """
    text, _, what = read_text(4_000_000)
    text = text.to(device)
    recipe = Recipe(Shape(layers, width, heads, context), steps, batch, warm_up=min(100, steps))
    torch.manual_seed(0)
    model = Transformer(recipe.shape).to(device, torch.bfloat16)
    weights = list(model.parameters())
    optimizer = PackedAdamW(
        weights, state_format("exact"), 0, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    numel = sum(weight.numel() for weight in weights)
    exact, coded = (Moments(numel, device, recipe.betas, in_codes) for in_codes in (False, True))
    click.echo(listed(device_facts(device, "sweeps.formats.drift")))
    click.echo(f"- {numel / 1e6:.2f} million parameters, {recipe}; {what}\n")
    click.echo(table(_HEAD, []))
    for number, starts in enumerate(batches(text, steps, batch, context, 0), start=1):
        model(*cut(text, starts, context)).backward()
        torch.nn.utils.clip_grad_norm_(weights, recipe.clip)
        gradient = torch.cat(
            [weight.grad.float().flatten() for weight in weights if weight.grad is not None]
        )
        right, found = exact.step(gradient), coded.step(gradient)
        if number & (number - 1) == 0 or number == steps:
            seen = exact.second > 0
            # held up where it is less than a block can show
            ratio = (coded.second / exact.second)[seen].clamp(max=10)
            error = ((found - right).square().mean() / right.square().mean()).sqrt()
            along = (found * right).sum() / right.square().sum()
            largest = found.abs().max(), right.abs().max()
            figures = (ratio.mean(), ratio.std(), along, error, *largest)
            click.echo(f"| {number} | {' | '.join(f'{value:.3f}' for value in figures)} |")
        optimizer.step(recipe.rate(number - 1))
        for weight in weights:
            weight.grad = None


if __name__ == "__main__":
    main()
