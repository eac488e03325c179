"""Operations and saved activations of the forward and backward pass, and the number of tokens from
which a step's drive time is hidden.

Operations of a transformer with P parameters, L layers of width w and sequences of s tokens, for
each token: forward 2 P + 2 L s w (causal attention), backward twice that, and with activation
checkpointing the forward once more. Source: Korthikanti et al., 2022; docs/plain-pytorch.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from .model import Model
from .traffic import WEIGHT_BYTES

# Saved activations: all on the GPU; only the inputs of layers, the rest recomputed; all on the drive by
# save_on_nvme; only the inputs of layers, and on the drive.
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
    """The work of a rank in a step.

    sequence: tokens of a sequence; 0 if unknown, and then neither compute nor activations are predicted.
    micro_batch: sequences of a forward pass. accumulation: forward and backward passes of a step.
    activations: their place. offloaded_share: share of the layers whose activations go to the drive with
    "drive". activation_host_bytes: "host_memory" of `save_on_nvme`.
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
    return Operations(forward, (3 if work.recomputes else 2) * forward)


def activation_bytes(model: Model, work: Work) -> int:
    """Bytes of GPU memory for activations; 0 if the shape is unknown.

    The attention keeps no matrix of scores. The logits and the temporaries of one layer's backward
    pass are included.
    """
    if not (work.tokens and model.hidden and model.layers):
        return 0
    layers = {
        "keep": LAYER_BYTES * model.layers,
        "checkpoint": WEIGHT_BYTES * model.layers + LAYER_BYTES,
        "drive": LAYER_BYTES * (model.layers * (1 - work.offloaded_share) + 1),
        "checkpoint-drive": _TRAILING_SHARE * WEIGHT_BYTES * model.layers + LAYER_BYTES,
    }[work.activations]
    layers = min(layers, LAYER_BYTES * model.layers)
    return int(work.tokens * (model.hidden * layers + LOGITS_BYTES * (model.vocabulary or 0)))


def saved_bytes(model: Model, work: Work) -> float:
    """Bytes that `save_on_nvme` offloads in one forward pass."""
    if not (work.offloads and model.hidden and model.layers):
        return 0.0
    each = WEIGHT_BYTES if work.recomputes else SAVED_BYTES * work.offloaded_share
    return each * work.tokens * model.hidden * model.layers


def free_tokens(
    moved_bytes: float, flops: float, bytes_per_second: float, operations_a_token: float
) -> float:
    """Tokens of a rank from which a step's transfers are hidden behind compute.

    The drive takes ``b P / B`` seconds for a step that transfers b bytes a parameter in both directions;
    concurrent compute takes ``k P t / F`` for t tokens. Equal times give ``t* = b F / (k B)`` for any number
    P of parameters. k is 4 for the backward pass (``step_in_backward``), 2 for the next forward pass, 6
    for both; with activation checkpointing, which repeats the forward pass, 6 and 8.

    moved_bytes: ``b P``, of all ranks that share the drive. flops: F, of a rank. bytes_per_second: B, of
    concurrent reads and writes. operations_a_token: ``k P``, of one rank.
    """
    return moved_bytes / bytes_per_second * flops / operations_a_token
