"""Operations and saved activations of the forward and backward pass: the formulas of
docs/planning.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from .model import Model
from .traffic import WEIGHT_BYTES

Activations = Literal["keep", "checkpoint", "drive", "checkpoint-drive"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)

# Bytes that a layer saves for each token and unit of width: in total, with temporaries of the backward
# pass (Korthikanti et al., 2022), and the part that save_on_nvme offloads (measured: 31.8,
# reports/activations-h200.md).
LAYER_BYTES = 34
SAVED_BYTES = 32
LOGITS_BYTES = 6  # for each token and word: in 16 bits, and in fp32 for the loss
# The share of offloaded inputs of checkpointed layers that is on the GPU, because copies trail the
# forward pass (measured: 0.7 to 0.8 of the memory, reports/activations-*.md).
_TRAILING_SHARE = 0.5


class Work(NamedTuple):
    """The work of a rank in a step. *sequence*: tokens; 0 if unknown. *micro_batch*: sequences of a
    forward pass. *accumulation*: passes of a step. *offloaded_share*: of the layers with
    activations on the "drive". *activation_host_bytes*: "host_memory" of `save_on_nvme`.
    """

    sequence: int = 0
    micro_batch: int = 1
    accumulation: int = 1
    activations: Activations = "checkpoint"
    offloaded_share: float = 1.0
    activation_host_bytes: int = 2_000_000_000

    @property
    def tokens(self) -> int:
        """Tokens of a rank in one forward pass."""
        return self.sequence * self.micro_batch

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes the forward again."""
        return self.activations in ("checkpoint", "checkpoint-drive")

    @property
    def offloads(self) -> bool:
        """Whether `save_on_nvme` is in use."""
        return self.activations in ("drive", "checkpoint-drive")


class Operations(NamedTuple):
    """Floating-point operations of a rank in one forward pass, and in its backward pass."""

    forward: float
    backward: float


def operations(model: Model, work: Work) -> Operations:
    """Operations of one micro-batch; attention only where the model's shape is known."""
    attention = 2 * work.sequence * (model.hidden or 0) * (model.layers or 0)
    forward = float(work.tokens * (2 * model.active + attention))
    frozen = 2.0 * work.tokens * max(model.active - model.trained, 0)
    return Operations(forward, (3 if work.recomputes else 2) * forward - frozen)


def activation_bytes(model: Model, work: Work) -> int:
    """Bytes of GPU memory for activations, without a matrix of scores; 0 if the shape is unknown.
    The logits, and the temporaries of one layer's backward pass, do not exist at the same time.
    """
    if not (work.tokens and model.hidden and model.layers):
        return 0
    whole = LAYER_BYTES * model.layers  # a token, in units of the width
    kept = {
        "keep": whole,
        "checkpoint": WEIGHT_BYTES * model.layers,
        "drive": whole * (1 - work.offloaded_share),
        "checkpoint-drive": _TRAILING_SHARE * WEIGHT_BYTES * model.layers,
    }[work.activations]
    at_loss = model.hidden * kept + LOGITS_BYTES * (model.vocabulary or 0)
    in_a_layer = model.hidden * min(kept + LAYER_BYTES, whole)
    return int(work.tokens * max(at_loss, in_a_layer))


def saved_bytes(model: Model, work: Work) -> float:
    """Bytes that `save_on_nvme` offloads in one forward pass."""
    if not (work.offloads and model.hidden and model.layers):
        return 0.0
    each = WEIGHT_BYTES if work.recomputes else SAVED_BYTES * work.offloaded_share
    return each * work.tokens * model.hidden * model.layers
