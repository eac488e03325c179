"""What the forward and backward pass compute, what they save for each other, and from how many
tokens a step on the drive is hidden. Pure.

Operations of a transformer with P parameters, L layers of width w and sequences of s tokens, for
each token: forward 2 P + 2 L s w (causal attention), backward twice that, and with activation
checkpointing the forward once more. Source: Korthikanti et al., 2022; docs/plain-pytorch.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from .model import Model
from .traffic import WEIGHT_BYTES

# Where what a forward pass saves for its backward lies: all of it on the GPU; only the inputs of
# layers, whose rest is computed again; all of it on the drive by save_on_nvme; those inputs on it.
Activations = Literal["keep", "checkpoint", "drive", "checkpoint-drive"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)

# Bytes of a token and unit of width that a layer saves: in all, with what is there only while its
# gradients are made (Korthikanti et al., 2022), and of that what save_on_nvme takes (measured:
# 31.8, reports/activations-h200.md).
LAYER_BYTES = 34
SAVED_BYTES = 32
LOGITS_BYTES = 6  # of a token and word: in 16 bits, and in fp32 for the loss
# Of the inputs of checkpointed layers that go to the drive, the share that is on the GPU all the
# same: copies trail the forward pass (measured: 0.7 to 0.8 of the memory, reports/activations-*.md).
_TRAILING_SHARE = 0.5


class Work(NamedTuple):
    """What a rank computes in a step.

    Attributes
    ----------
    sequence : int
        Tokens of a sequence; 0 where not known, and neither compute nor activations are predicted.
    micro_batch : int
        Sequences of a forward pass.
    accumulation : int
        Forward and backward passes of a step.
    activations : {"keep", "checkpoint", "drive", "checkpoint-drive"}
        Where activations lie.
    offloaded_share : float
        Of the layers, those whose activations go to the drive with "drive".
    activation_host_bytes : int
        "host_memory" of `save_on_nvme`.
    """

    sequence: int = 0
    micro_batch: int = 1
    accumulation: int = 1
    activations: Activations = "checkpoint"
    offloaded_share: float = 1.0
    activation_host_bytes: int = 2_000_000_000

    @property
    def tokens(self) -> int:
        """Of a rank in one forward pass."""
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
    """Bytes of GPU memory beside weights, gradients and states; 0 where the shape is not known.

    With an attention that keeps no matrix of scores. What one layer holds while its gradients are
    made is counted in every case, and the logits.
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
    """Bytes that `save_on_nvme` takes of one forward pass."""
    if not (work.offloads and model.hidden and model.layers):
        return 0.0
    each = WEIGHT_BYTES if work.recomputes else SAVED_BYTES * work.offloaded_share
    return each * work.tokens * model.hidden * model.layers


def free_tokens(
    moved_bytes: float, flops: float, bytes_per_second: float, operations_a_token: float
) -> float:
    """Tokens from which a step's transfers are hidden under compute.

    The drive needs ``b P / B`` seconds for a step that moves b bytes a parameter, both ways
    together, and compute that the transfers run under takes ``k P t / F`` for t tokens; equal times
    give ``t* = b F / (k B)``, whatever the number P of parameters. k is 4 where the window is the
    backward pass (``step_in_backward``), 2 for the next forward, 6 for both together, and 6 for the
    backward pass with activation checkpointing, which computes the forward again, 8 with the forward
    pass beside that.

    Parameters
    ----------
    moved_bytes : float
        ``b P``: bytes of a step to and from the drive, of all ranks that share it.
    flops : float
        F: operations a second that a rank reaches.
    bytes_per_second : float
        B: of the drive with reads and writes at once.
    operations_a_token : float
        ``k P``: operations of a token in the window, of one rank.

    Returns
    -------
    float
        Tokens of a rank in the window.
    """
    return moved_bytes / bytes_per_second * flops / operations_a_token
