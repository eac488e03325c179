"""One training: a transformer of bfloat16 weights whose optimizer states lie packed in a state
format between steps, as they do on a drive.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvme_offload.optimizer_states import Layout, StateFormat, state_format

from .text import batches, cut, read_text
from .transformer import Shape, Transformer

BUNDLE_ELEMENTS = 1 << 22
VALIDATION_BATCHES = 40


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train. beta2 is AdamW's default: the slower the second moment, the harder for few
    bits.
    """

    shape: Shape
    steps: int
    batch: int
    learning_rate: float = 1e-3
    warm_up: int = 100
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """The learning rate of *step*: up from nothing, then half a cosine down to a tenth."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training gave. losses: of every step; validation: at the end; both in nats a byte."""

    format: str
    seed: int
    parameters: int
    state_bytes: int
    losses: list[float]
    validation: float


@dataclasses.dataclass
class _Bundle:
    weights: list[torch.nn.Parameter]
    # what AdamW steps; their values are unpacked for each step and packed after it
    masters: list[torch.nn.Parameter]
    layout: Layout
    buffer: torch.Tensor


class PackedAdamW:
    """AdamW over bfloat16 *weights* whose fp32 masters and moments are unpacked before each step of
    a bundle and packed after it.
    """

    def __init__(
        self,
        weights: Sequence[torch.nn.Parameter],
        format: StateFormat,
        seed: int,
        bundle_elements: int = BUNDLE_ELEMENTS,
        **settings: object,
    ) -> None:
        self._format = format
        self._seed = seed
        self._steps = 0
        self._bundles = []
        for members in _bundles(weights, bundle_elements):
            numel = sum(weight.numel() for weight in members)
            layout = format.layout(
                numel,
                {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
                torch.bfloat16,
                "AdamW",
            )
            buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=members[0].device)
            whole = torch.cat([weight.detach().reshape(-1).float() for weight in members])
            zeros = torch.zeros_like(whole)
            format.pack(layout, buffer, members, whole, {"exp_avg": zeros, "exp_avg_sq": zeros})
            masters = [
                torch.nn.Parameter(torch.empty_like(weight, dtype=torch.float32))
                for weight in members
            ]
            self._bundles.append(_Bundle(members, masters, layout, buffer))
        self._adam = torch.optim.AdamW(
            [master for bundle in self._bundles for master in bundle.masters], **settings
        )
        for bundle in self._bundles:
            for master in bundle.masters:
                self._adam.state[master]["step"] = torch.zeros(())

    @property
    def state_bytes(self) -> int:
        """Bytes that a drive would hold."""
        return sum(bundle.layout.nbytes for bundle in self._bundles)

    def step(self, learning_rate: float) -> None:
        """Step every weight by its gradient."""
        self._adam.param_groups[0]["lr"] = learning_rate
        for number, bundle in enumerate(self._bundles):
            master, states = self._format.unpack(bundle.layout, bundle.buffer, bundle.weights)
            flat = {"": master, **states}
            sizes = [weight.numel() for weight in bundle.weights]
            parts = {key: tensor.split(sizes) for key, tensor in flat.items() if tensor is not None}
            for index, (weight, shell) in enumerate(
                zip(bundle.weights, bundle.masters, strict=True)
            ):
                shell.data = parts[""][index].view_as(weight)
                shell.grad = None if weight.grad is None else weight.grad.float()
                self._adam.state[shell].update(
                    {key: parts[key][index].view_as(weight) for key in states}
                )
            self._adam.step()
            for shell in bundle.masters:
                shell.grad = None  # other bundles' steps leave these alone
            self._format.pack(
                bundle.layout,
                bundle.buffer,
                bundle.weights,
                master,
                states,
                seed=hash_of(self._seed, self._steps, number),
            )
        self._steps += 1

    def unpacked(self) -> list[tuple[torch.Tensor | None, dict[str, torch.Tensor]]]:
        """Masters and states of every bundle, as they would be read from the drive."""
        return [
            self._format.unpack(bundle.layout, bundle.buffer, bundle.weights)
            for bundle in self._bundles
        ]


def hash_of(seed: int, step: int, bundle: int) -> int:
    """A number for every bundle of every step of a run."""
    return (seed << 48) + (step << 16) + bundle


def train(
    text: torch.Tensor, held_out: torch.Tensor, recipe: Recipe, format: str, seed: int
) -> Trained:
    """Train a new transformer. Its weights and the order of the text are *seed*'s, whatever the
    *format*.
    """
    torch.manual_seed(seed)
    model = Transformer(recipe.shape).to(text.device, torch.bfloat16)
    weights = list(model.parameters())
    optimizer = PackedAdamW(
        weights, state_format(format), seed, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    losses = []
    for step, starts in enumerate(
        batches(text, recipe.steps, recipe.batch, recipe.shape.context, seed)
    ):
        loss = model(*cut(text, starts, recipe.shape.context))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, recipe.clip)
        optimizer.step(recipe.rate(step))
        for weight in weights:
            weight.grad = None
        losses.append(loss.detach())
    with torch.no_grad():
        held = [
            model(*cut(held_out, starts, recipe.shape.context))
            for starts in batches(
                held_out, VALIDATION_BATCHES, recipe.batch, recipe.shape.context, 0
            )
        ]
    parameters = sum(weight.numel() for weight in weights)
    rounded = [round(loss, 5) for loss in torch.stack(losses).tolist()]
    return Trained(
        format, seed, parameters, optimizer.state_bytes, rounded, torch.stack(held).mean().item()
    )


class Job(NamedTuple):
    """A training. *number*: its index, which selects the GPU if there are several."""

    number: int
    device: str
    text_bytes: int
    recipe: Recipe
    format: str
    seed: int


def run_job(job: Job) -> Trained:
    """Run *job*, in any process."""
    device = (
        f"cuda:{job.number % torch.cuda.device_count()}" if job.device == "cuda" else job.device
    )
    text, held_out, _ = read_text(job.text_bytes)
    return train(text.to(device), held_out.to(device), job.recipe, job.format, job.seed)


def _bundles(
    weights: Sequence[torch.nn.Parameter], elements: int
) -> list[list[torch.nn.Parameter]]:
    """The *weights*, in order, in runs of at least *elements*, but for the last."""
    bundles: list[list[torch.nn.Parameter]] = [[]]
    for weight in weights:
        if sum(member.numel() for member in bundles[-1]) >= elements:
            bundles.append([])
        bundles[-1].append(weight)
    return bundles
