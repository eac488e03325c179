"""Graphs as training makes them: several alive, nested, retained, checkpointed, compiled,
abandoned, and in several threads.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from activation_models import Attention, Feed, gradients, made, same
from offloading import Make, left
from processes import finished
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvme_offload import UsageError, save_on_nvme


def loss_of(model: nn.Module, x: torch.Tensor, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return model(x).float().square().mean()


def trained(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 2, 0]])
def test_several_graphs_at_once(order: list[int], make: Make) -> None:
    model, x = made("layers")
    offload = make()
    expected = []
    for context in (contextlib.nullcontext(), offload):
        for _ in range(2):
            losses = []
            for seed in range(3):
                with context:
                    losses.append(loss_of(model, x, seed))
            for number in order:
                losses[number].backward()
            del losses
        expected.append(trained(model))
    assert same(*expected)
    assert left(offload) == (0, 0, [])
    assert offload.stats().bytes_read > offload.stats().saved_bytes // 2


def test_the_innermost_of_nested_contexts_has_what_is_saved_in_it(make: Make) -> None:
    first, x = made("layers")
    second, _ = made("layers")
    outer, inner = make(), make()

    def step(
        around: contextlib.AbstractContextManager[object],
        within: contextlib.AbstractContextManager[object],
    ) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with around:
            y = first(x)
            with within, within:  # a context is reentrant
                y = second(y)
            with around:
                loss = y.float().square().mean()
        loss.backward()
        return [*trained(first), *trained(second)]

    expected = step(contextlib.nullcontext(), contextlib.nullcontext())
    alone = []
    for one in (outer, inner):
        for _ in range(2):
            assert same(
                step(
                    *(
                        (one, contextlib.nullcontext())
                        if one is outer
                        else (contextlib.nullcontext(), one)
                    )
                ),
                expected,
            )
        alone.append(one.stats().saved_bytes)
    for _ in range(2):
        assert same(step(outer, inner), expected)
    assert inner.stats().saved_bytes == 2 * alone[1]
    around_both = alone[0] - x.nbytes  # which outlived the first step, and stayed in the others
    assert outer.stats().saved_bytes - alone[0] == around_both - alone[1]


def test_a_graph_that_is_retained_can_be_gone_through_again(make: Make) -> None:
    model, x = made("transformer")
    model.eval()
    expected = gradients(model, x)
    offload = make(host_memory=200_000)
    with offload:
        loss = loss_of(model, x, 1)
    for again in (True, True, False):
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=again)
        assert same(
            [parameter.grad for parameter in model.parameters()],
            expected[: len(list(model.parameters()))],
        )
        assert (offload.stats().alive_bytes > 0) == again
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_gradients(make: Make) -> None:
    model, x = made("layers")
    model.eval()
    x.requires_grad_(True)

    def penalty(context: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        with context:
            loss = model(x).tanh().sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            slope.square().sum().backward()
        x.grad = None
        return trained(model)

    offload = make()
    expected = penalty(contextlib.nullcontext())
    assert same(penalty(offload), expected)
    gc.collect()
    assert left(offload) == (0, 0, [])


@pytest.mark.parametrize("inside", [True, False])
def test_reentrant_checkpoints_save_their_inputs(inside: bool, make: Make) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(Attention(), Feed()) for _ in range(4))
    x = torch.randn(4, 64, 64, requires_grad=True)

    def step(context: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with context:
            y = x * 1.0
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=True)
            loss = y.square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return trained(blocks)

    expected = step(contextlib.nullcontext())
    offload = make(host_memory=600_000)
    for _ in range(2):
        before = offload.stats().saved_bytes
        assert same(step(offload), expected)
        saved = offload.stats().saved_bytes - before
        if not inside:
            assert saved == 5 * x.nbytes  # the input of each block, and of the square


# dynamo looks at it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "where", ["around", "within", pytest.param("first compiled within", marks=pytest.mark.slow)]
)
def test_compiled_blocks(where: str, make: Make) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Sequential(Attention(), Feed()).eval() for _ in range(3)))
    x = torch.randn(4, 64, 64)
    expected = gradients(model, x)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    compiled: Callable[[torch.Tensor], torch.Tensor] = model
    offload = make(host_memory=600_000)
    if where == "within":
        model = nn.Sequential(*(nn.Sequential(Attention(), Feed()).eval() for _ in range(3)))
        torch.manual_seed(0)
        expected = gradients(model, x)

        def whole(x: torch.Tensor) -> torch.Tensor:
            with offload:
                return model(x)

        with pytest.raises(torch._dynamo.exc.Unsupported, match="save_on_nvme"):
            torch.compile(whole, backend="aot_eager", fullgraph=True)(x)
        compiled = torch.compile(whole, backend="aot_eager")
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            compiled(x).square().mean().backward()
            assert same(
                [parameter.grad for parameter in model.parameters()],
                expected[: len(list(model.parameters()))],
            )
    else:
        if where == "around":
            assert same(gradients(model, x), expected)
        for _ in range(2):
            assert same(gradients(model, x, offload), expected)
    assert min(offload.stats().bytes_written, offload.stats().bytes_read) > 1_000_000
    torch._dynamo.reset()


def test_an_exception_in_the_middle_leaves_nothing(make: Make) -> None:
    model, x = made("layers")
    expected = gradients(model, x)
    offload = make()

    def forward() -> None:
        with offload:
            y = model(x)
            assert offload.stats().alive_bytes > 0
            raise ValueError(y.shape)

    with pytest.raises(ValueError, match="64"):
        forward()
    gc.collect()
    assert left(offload) == (0, 0, [])
    assert same(gradients(model, x, offload), expected)


def test_a_graph_without_a_backward_pass_leaves_nothing(make: Make) -> None:
    model, x = made("layers")
    offload = make()
    for _ in range(3):
        with offload:
            loss = loss_of(model, x, 1)
        assert offload.stats().bytes_written > 0
    del loss
    assert left(offload) == (0, 0, [])


def test_evaluation_saves_nothing(make: Make) -> None:
    model, x = made("layers")
    offload = make()
    with offload, torch.no_grad():
        model(x)
    assert offload.stats().saved_bytes == 0


def test_in_several_threads(make: Make) -> None:
    cases = [made(name) for name in ("layers", "convolutions", "recurrent")]
    expected = [gradients(model.eval(), x) for model, x in cases]
    offload = make(host_memory=4_000_000)
    found: dict[int, list[torch.Tensor]] = {}

    def work(number: int) -> None:
        torch.set_num_threads(1)  # MKL has one for each core in a new thread, and other bits then
        model, x = cases[number]
        for _ in range(3):
            with offload:
                loss = model(x).float().square().mean()
            model.zero_grad(set_to_none=True)
            loss.backward()
            del loss
        found[number] = [parameter.grad for parameter in model.parameters()]

    threads = [threading.Thread(target=work, args=[number]) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (model, _) in enumerate(cases):
        assert same(found[number], expected[number][: len(list(model.parameters()))])


def test_a_graph_may_outlive_its_context_and_a_closed_context_is_named(tmp_path: Path) -> None:
    model, x = made("layers")
    model.eval()
    expected = gradients(model, x)
    offload = save_on_nvme(tmp_path, 1 << 10, "100KB")
    losses = []
    for _ in range(2):
        with offload:
            losses.append(loss_of(model, x, 1))
    cache = offload._cache
    del offload  # only the graphs have it now
    model.zero_grad(set_to_none=True)
    losses.pop().backward()
    assert same([parameter.grad for parameter in model.parameters()], expected)
    cache.close()
    cache.close()
    with pytest.raises(UsageError, match="closed"):
        losses.pop().backward()


def test_memory_and_files_go_with_the_last_who_needs_them(tmp_path: Path) -> None:
    model, x = made("layers")
    offload = save_on_nvme(tmp_path, 1 << 10, "100KB")
    with offload:
        loss = loss_of(model, x, 1)
    tier = offload._cache._tier
    closed = tier.close
    del offload, tier
    assert closed.alive
    del loss
    assert not closed.alive


IN_A_CHILD = """
import multiprocessing, sys, torch
sys.path += sys.argv[1:3]
torch.set_num_threads(1)
from activation_models import gradients, made, same
from test_graphs import loss_of, trained
from nvme_offload import UsageError, save_on_nvme

def in_a_child():
    assert same(gradients(*made("layers")), expected)
    for refused in (offload.__enter__, loss.backward):
        try:
            refused()
        except UsageError as error:
            assert "save_on_nvme belongs to the process" in str(error)
        else:
            raise AssertionError("not refused")

model, x = made("layers")
expected = gradients(model, x)
model.zero_grad(set_to_none=True)
offload = save_on_nvme(sys.argv[3], 1 << 10, 96 << 10)
with offload:
    loss = loss_of(model, x, 1)
    child = multiprocessing.get_context("fork").Process(target=in_a_child)
    child.start()
    child.join()
assert child.exitcode == 0
loss.backward()
assert same(trained(model), expected)
assert offload.stats().saved_bytes > 0
"""


def test_a_forked_child_computes_in_its_own_memory(tmp_path: Path) -> None:
    # a process whose autograd has no threads yet, so that it can fork
    here, tests = Path(__file__).parents[:2]
    command = [sys.executable, "-c", IN_A_CHILD, str(here), str(tests), str(tmp_path)]
    ended = finished(command)
    assert ended.returncode == 0, ended.stderr


def test_a_context_that_a_keyboard_interrupt_has_left_entered_can_be_closed(tmp_path: Path) -> None:
    model, x = made("layers")
    model.eval()
    expected = gradients(model, x)
    model.zero_grad(set_to_none=True)
    with save_on_nvme(tmp_path, 1 << 10, "100KB") as offload:
        offload.close()
        loss_of(model, x, 1).backward()
    assert same([parameter.grad for parameter in model.parameters()], expected)


def test_a_closed_context_is_not_entered(tmp_path: Path) -> None:
    offload = save_on_nvme(tmp_path)
    offload.close()
    with pytest.raises(UsageError, match="save_on_nvme is closed: make another"), offload:
        pass
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        pass  # no hook of it is left behind
    assert repr(offload).endswith(": closed>")
