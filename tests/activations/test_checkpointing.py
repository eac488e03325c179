"""`torch.utils.checkpoint` in the context: the tensors it keeps for backward go to the drive, by
whatever way the block has it, and the gradients are the same bits.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_models import same
from offloading import Make
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nvme_offload import save_on_nvme
from nvme_offload.activations import checkpointing

Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]

ROWS, WIDTH, BLOCKS = 64, 32, 4
TENSOR_BYTES = ROWS * WIDTH * 4
Pair = collections.namedtuple("Pair", ["scale", "shift"])


@dataclasses.dataclass
class Inputs:
    hidden: torch.Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None = None,
        pair: Any = None,
        tables: dict[str, list[torch.Tensor]] | None = None,
        found: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        x = hidden if mask is None else hidden * mask
        if pair is not None:
            x = x * pair[0] + pair[1]
        if tables is not None:
            x = x + tables["one"][0]
        result = hidden + self.down(nn.functional.gelu(self.up(x)))
        if found is not None:
            found.append(result)
        return result


run = functools.partial(checkpoint, use_reentrant=False)

# How a block is called, and how many tensors of TENSOR_BYTES each call keeps for its backward.
WAYS: dict[str, tuple[Call, int]] = {
    "position": (lambda block, x: run(block, x), 1),
    "keyword": (lambda block, x: run(block, hidden=x), 1),
    "both": (lambda block, x: run(block, x, mask=x.sigmoid()), 2),
    "method": (lambda block, x: run(block.forward, hidden=x), 1),
    "partial": (lambda block, x: run(functools.partial(block, hidden=x)), 1),
    "partial of a partial": (
        lambda block, x: run(
            functools.partial(functools.partial(block, mask=x.cos()), pair=(x.sin(), x.tanh())), x
        ),
        4,
    ),
    "keyword tuple": (lambda block, x: run(block, x, pair=(x.cos(), x.sin())), 3),
    "positional tuple": (lambda block, x: run(block, x, None, (x.cos(), x.sin())), 3),
    "named tuple": (lambda block, x: run(block, x, pair=Pair(x.cos(), x.sin())), 3),
    "list in a dict": (lambda block, x: run(block, x, tables={"one": [x.cos()]}), 2),
    "list that grows": (lambda block, x: run(block, hidden=x, found=[x.cos()]), 2),
    "no early stop": (lambda block, x: run(block, hidden=x, early_stop=False), 1),
}


def blocks_and_input() -> tuple[nn.ModuleList, torch.Tensor]:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(BLOCKS)), torch.randn(
        ROWS, WIDTH, requires_grad=True
    )


def kept_bytes() -> dict[int, int]:
    """The bytes of each storage of a tensor that Python has, by address."""
    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if type(one) is torch.Tensor]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def gradients_of(
    call: Call, context: save_on_nvme | None = None, *, inside: bool = False
) -> tuple[list[torch.Tensor], int]:
    """Gradients of a step, and the bytes of tensors that stay in memory between its passes."""
    blocks, x = blocks_and_input()
    y = x * 1
    before = kept_bytes()
    with context or contextlib.nullcontext():
        for block in blocks:
            y = call(block, y)
        loss = y.square().mean()
        del y
        kept = sum(
            nbytes
            for address, nbytes in kept_bytes().items()
            if address not in before and nbytes in (TENSOR_BYTES, 2 * TENSOR_BYTES)
        )
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [parameter.grad for parameter in blocks.parameters()] + [x.grad], kept  # type: ignore[misc]


@pytest.mark.parametrize("way", WAYS)
def test_inputs_go_to_the_drive(way: str, make: Make) -> None:
    call, each = WAYS[way]
    expected, without = gradients_of(call)
    assert without >= BLOCKS * each * TENSOR_BYTES
    offload = make(host_memory=8 * TENSOR_BYTES)
    for inside in (False, True):
        before = offload.stats().saved_bytes
        found, kept = gradients_of(call, offload, inside=inside)
        assert same(found, expected)
        # inputs of the blocks, and the input of `square`
        assert offload.stats().saved_bytes - before == (BLOCKS * each + 1) * TENSOR_BYTES or inside
        assert kept < TENSOR_BYTES


def test_inputs_of_a_composable_checkpoint_go_to_the_drive(make: Make) -> None:
    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_module(block)(hidden=x)

    expected, _ = gradients_of(call)
    offload = make(host_memory=8 * TENSOR_BYTES)
    found, kept = gradients_of(call, offload)
    assert same(found, expected)
    assert offload.stats().saved_bytes == (BLOCKS + 1) * TENSOR_BYTES
    assert kept < TENSOR_BYTES


def test_an_input_that_the_caller_changes_later_is_recomputed_with_as_changed(make: Make) -> None:
    """As without the context: torch keeps the tensor itself, and does not look at its version."""

    def step(context: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        blocks, x = blocks_and_input()
        mask = torch.ones(ROWS, WIDTH)
        with context:
            loss = run(blocks[0], x, mask=mask).square().mean()
        mask.mul_(0.5)
        loss.backward()
        return [x.grad]  # type: ignore[list-item]

    assert same(step(make()), step(contextlib.nullcontext()))


def test_a_weight_that_changes_after_a_function_has_saved_it_itself_is_refused(make: Make) -> None:
    """Without the context, the checkpoint would recompute with the new weight."""
    offload, (blocks, x) = make(), blocks_and_input()

    def function(x: torch.Tensor) -> torch.Tensor:
        with offload:
            return blocks[0](x)

    loss = checkpoint(function, x, use_reentrant=False).sum()
    with torch.no_grad():
        blocks[0].down.weight.mul_(2)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace .*enter it around the checkpoint"
    ):
        loss.backward()


def test_a_retained_graph_is_recomputed_twice(make: Make) -> None:
    def step(context: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        blocks, x = blocks_and_input()
        with context:
            loss = run(blocks[1], hidden=run(blocks[0], hidden=x * 2)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad]  # type: ignore[list-item]

    assert same(step(make()), step(contextlib.nullcontext()))


def in_a_closure(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return run(lambda: block(x))


def in_an_object(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return run(lambda given: block(given.hidden), Inputs(x))


def in_a_default(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return run(lambda x=x: block(x))


def in_an_inner_checkpoint(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return run(lambda x: run(block, hidden=x * 2), x)


@pytest.mark.parametrize("call", [in_a_closure, in_an_object, in_a_default, in_an_inner_checkpoint])
def test_what_stays_in_memory_is_logged_once(
    call: Call, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = gradients_of(call)
    offload = make()
    with caplog.at_level(logging.WARNING, "nvme_offload.activations"):
        for _ in range(2):
            assert same(gradients_of(call, offload)[0], expected)
    reported = [
        record.getMessage() for record in caplog.records if "closure" in record.getMessage()
    ]
    assert len(reported) == 1
    assert reported[0].startswith("8 KiB or more that a checkpoint keeps")


def selective(kept: Any, **settings: Any) -> Call:
    contexts = functools.partial(create_selective_checkpoint_contexts, kept, **settings)
    return lambda block, x: run(block, hidden=x, context_fn=contexts)


def every_result(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
VIEWS = [torch.ops.aten.t.default, torch.ops.aten.view.default, torch.ops.aten.gelu.default]


@pytest.mark.parametrize(
    "kept", [PRODUCTS, VIEWS, every_result], ids=["products", "views", "every result"]
)
def test_what_a_policy_keeps_goes_to_the_drive(kept: Any, make: Make) -> None:
    expected, without = gradients_of(selective(kept))
    assert without >= 3 * BLOCKS * TENSOR_BYTES
    offload = make(host_memory=8 * TENSOR_BYTES)
    for inside in (False, True):
        found, in_memory = gradients_of(selective(kept), offload, inside=inside)
        assert same(found, expected)
        assert in_memory < TENSOR_BYTES
    assert offload.stats().bytes_read > 3 * BLOCKS * TENSOR_BYTES


@pytest.mark.parametrize("allowed", [False, True])
def test_what_a_policy_keeps_and_the_block_changes(
    allowed: bool, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def changes(block: Any, x: torch.Tensor) -> torch.Tensor:
        product = block.up(x)
        with torch.no_grad():
            product.detach().clamp_(-0.1, 0.1)
        return block.down(product.sin())

    contexts = functools.partial(
        create_selective_checkpoint_contexts, PRODUCTS[:1], allow_cache_entry_mutation=allowed
    )

    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return run(changes, block, x, context_fn=contexts)

    offload = make()
    if allowed:
        assert same(gradients_of(call, offload)[0], gradients_of(call)[0])
        assert "allow_cache_entry_mutation stay in memory" in caplog.text
    else:
        for context in (None, offload):
            with pytest.raises(RuntimeError, match=r"mutated|modified"):
                gradients_of(call, context)


def test_a_part_of_a_buffer_whose_rest_changes(tmp_path):
    def train(context: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block, x = Block(), torch.randn(ROWS, WIDTH)
        buffer = torch.rand(2 * ROWS, WIDTH)
        with context:
            result = run(block, x, mask=buffer[:ROWS])
            buffer[ROWS:].fill_(0.5)
        result.square().mean().backward()
        return [parameter.grad for parameter in block.parameters()]

    assert same(train(save_on_nvme(tmp_path, host_memory="1MiB")), train(contextlib.nullcontext()))


# torch's decompositions, which it loads now, use it
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_derivatives(tmp_path):
    torch.manual_seed(0)
    block, x, mask, tangent = Block(), *(torch.rand(ROWS, WIDTH) for _ in range(3))
    forward_ad = torch.autograd.forward_ad
    found = []
    for context in (save_on_nvme(tmp_path, host_memory="1MiB"), contextlib.nullcontext()):
        with context, forward_ad.dual_level():
            result = run(block, x, mask=forward_ad.make_dual(mask, tangent))
            found.append(forward_ad.unpack_dual(result).tangent)
    assert torch.equal(*found)


def test_checkpoints_of_an_unknown_torch_are_reported(monkeypatch, caplog):
    monkeypatch.setattr(checkpointing, "_GENERATORS", ("renamed",))
    checkpointing._warn_unknown.cache_clear()
    checkpointing.install()
    assert [one.getMessage().split(":")[0] for one in caplog.records] == [
        f"torch {torch.__version__} runs checkpoints in an unknown way"
    ]
