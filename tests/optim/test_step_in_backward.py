"""`step_in_backward`: the same bits as a step afterwards, less gradients, and no silence about what
contradicts it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import threading

import pytest
import torch
from reference import batch, breaking, compared, differing, loss_of, model, step_of
from torch.utils.checkpoint import checkpoint

import nvme_offload.store.store
from nvme_offload._aio import FaultKind
from nvme_offload.errors import IOFailure, UsageError
from nvme_offload.io.engine import Engine
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optim.placeholders import SpentGradient


def after_and_in_backward(program, tmp_path, settings=True, **options):
    """What differs between results of *program*, which receives a function that makes optimizers,
    with updates after backward() and in it.
    """
    results = []
    for in_backward in (False, settings):
        with contextlib.ExitStack() as stack:
            made = functools.partial(
                NVMeOptimizer, paths=tmp_path, step_in_backward=in_backward, **options
            )
            results.append(
                program(lambda params, **given: stack.enter_context(made(params, **given)))  # noqa: B023
            )
    return differing(*results)


@pytest.mark.parametrize("host_memory", ["auto", 200_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits(tmp_path, dtype, host_memory):
    def program(make):
        net = model(dtype)
        optimizer = make(net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            step_of(net, optimizer, step)
            scheduler.step()
        assert optimizer.stats().step == 4
        assert (optimizer.stats().bytes_read > 0) == (host_memory != "auto")
        return list(net.parameters())

    assert after_and_in_backward(program, tmp_path, host_memory=host_memory) == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_what_a_pass_leaves_out_has_the_zeros_of_zero_grad(tmp_path, to_none, overlap):
    """With which weight decay and moments move it; without a gradient nothing does."""

    def program(make):
        net = model()
        optimizer = make(net.parameters(), lr=0.01, weight_decay=0.1)
        for step in range(6):
            optimizer.zero_grad(set_to_none=to_none)
            hidden = net[:2](batch(step))
            (net[2:](hidden) if step % 3 else hidden).square().mean().backward()
            optimizer.step()
        return list(net.parameters())

    options = {"host_memory": 200_000, "step_in_backward": True, "overlap_step": overlap}
    assert compared(program, tmp_path, **options) == []


def test_gradients_are_gone_before_the_step(tmp_path):
    net = model()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with NVMeOptimizer(net.parameters(), paths=tmp_path, step_in_backward=True) as optimizer:
        loss_of(net, 0).backward()
        assert differing(list(net.parameters()), before) == list(range(6))
        assert {repr(parameter.grad).split(" ")[0] for parameter in net.parameters()} == {
            "<gradient"
        }
        after = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.step()
        assert differing(list(net.parameters()), after) == []
        assert all(parameter.grad is None for parameter in net.parameters())


def test_a_gradient_that_is_still_on_its_way_to_pinned_memory_is_waited_for(tmp_path, monkeypatch):
    """As FSDP2 with CPUOffloadPolicy provides it in torch 2.11."""
    arriving = []

    class Stream:
        def synchronize(self):
            for gradient, value in arriving:
                gradient.copy_(value)
            arriving.clear()

    def depart(parameter):
        arriving.append((parameter.grad, parameter.grad.clone()))
        parameter.grad.zero_()

    plain, ours = model(), model()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    loss_of(plain, 0).backward()
    reference.step()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    for parameter in ours.parameters():
        parameter.register_post_accumulate_grad_hook(depart)
    with NVMeOptimizer(
        ours.parameters(), lr=0.01, paths=tmp_path, step_in_backward=True
    ) as optimizer:
        loss_of(ours, 0).backward()
        optimizer.step()
    assert differing(list(ours.parameters()), list(plain.parameters())) == []


def test_what_backward_does_not_reach_is_for_the_step(tmp_path):
    net, unused = model(), torch.nn.Parameter(torch.ones(40))
    # one bucket, never complete
    with NVMeOptimizer(
        [*net.parameters(), unused], lr=0.1, paths=tmp_path, step_in_backward=True
    ) as optimizer:
        loss_of(net, 0).backward()
        assert all(type(parameter.grad) is torch.Tensor for parameter in net.parameters())
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.step()
        assert differing(list(net.parameters()), before) == list(range(6))
        assert float(unused.detach().sum()) == 40


def test_accumulation_under_no_sync(tmp_path):
    def program(make):
        net = model()
        optimizer = make(net.parameters(), lr=0.01)
        for step in range(3):
            with optimizer.no_sync():
                loss_of(net, 10 * step).backward()
                loss_of(net, 10 * step + 1).backward()
            loss_of(net, 10 * step + 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(net.parameters())

    assert after_and_in_backward(program, tmp_path) == []


def accumulate(net, optimizer):
    loss_of(net, 1).backward()


def clip(net, optimizer):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-6)


def scale(net, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)


def look(net, optimizer):
    sum(parameter.grad.sum() for parameter in net.parameters())


def duplicate(net, optimizer):
    copy.deepcopy(next(net.parameters()).grad)


def pickled(net, optimizer):
    pickle.dumps([parameter.grad for parameter in net.parameters()])


@pytest.mark.parametrize("contradict", [accumulate, clip, scale, look, duplicate, pickled])
def test_contradictions_are_errors_that_say_so(tmp_path, contradict):
    net = model()
    with NVMeOptimizer(net.parameters(), paths=tmp_path, step_in_backward=True) as optimizer:
        loss_of(net, 0).backward()
        with pytest.raises(UsageError, match=r"step_in_backward has used up.*no_sync"):
            contradict(net, optimizer)
        step_of(net, optimizer, 1)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_used_gradients_is_known(tmp_path, dtype, overlaps):
    """The Trainer asks for it where nothing is clipped, as any other program may by a large norm."""
    norms = []
    for in_backward in (False, True):
        net = model(dtype)
        with NVMeOptimizer(
            net.parameters(),
            paths=tmp_path,
            step_in_backward=in_backward,
            overlap_step=overlaps and in_backward,
            host_memory=300_000,
        ) as optimizer:
            for step in range(3):
                loss_of(net, step).backward()
                for limit in (float("inf"), 1e6):
                    norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), limit).item())
                norms += [parameter.grad.norm().item() for parameter in net.parameters()]
                optimizer.step()
                optimizer.zero_grad()
    assert norms[: len(norms) // 2] == norms[len(norms) // 2 :]
    assert min(norms) > 0


def test_a_drive_that_stays_broken_is_reported_by_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(
        nvme_offload.store.store,
        "Engine",
        functools.partial(Engine, _faults=[(8, 1 << 40, FaultKind.FAIL, 5)]),
    )
    net = model(torch.bfloat16)
    optimizer = NVMeOptimizer(
        net.parameters(), paths=tmp_path, host_memory=200_000, step_in_backward=True
    )

    def train():
        for step in range(3):
            step_of(net, optimizer, step)

    for _ in range(2):
        with pytest.raises(IOFailure):
            train()
    optimizer.close()


def test_an_error_in_the_midst_of_an_update_is_reported_by_the_step(tmp_path):
    Breaking = breaking()
    net = model()
    with NVMeOptimizer(
        net.parameters(), Breaking, paths=tmp_path, step_in_backward=True
    ) as optimizer:
        Breaking.broken = True
        loss_of(net, 0).backward()
        with pytest.raises(
            UsageError,
            match=r"failed in the midst of an update \(RuntimeError: out of something\).*load both from a checkpoint",
        ):
            optimizer.step()


@pytest.mark.parametrize("reentrant", [False, True])
def test_after_a_backward_that_failed_and_has_updated_some_a_checkpoint_is_loaded(
    tmp_path, reentrant
):
    """Also if all updates are made in the backward pass of a checkpoint, which has ended."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context, batch):
            return batch.clone()

        @staticmethod
        def backward(context, gradient):
            raise RuntimeError("injected")

    net = model()
    last = functools.partial(checkpoint, net[2:], use_reentrant=True) if reentrant else net[2:]
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with NVMeOptimizer(
        [{"params": layer.parameters()} for layer in (net[0], net[2], net[4])],
        paths=tmp_path,
        step_in_backward=True,
    ) as optimizer:
        saved = optimizer.state_dict()
        with pytest.raises(RuntimeError, match="injected"):
            last(Failing.apply(net[:2](torch.ones(8, 40)))).square().mean().backward()
        assert differing(list(net.parameters()), before) == [2, 3, 4, 5]
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(net, 1).backward()
            with pytest.raises(
                UsageError,
                match=r"backward\(\) failed after a part of its updates.*load both from a checkpoint",
            ):
                optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), before, strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(saved)
        plain = model()
        reference = torch.optim.AdamW(plain.parameters())
        for step in range(3):
            for one, its in ((net, optimizer), (plain, reference)):
                step_of(one, its, step)
    assert differing(list(net.parameters()), list(plain.parameters())) == []


@pytest.mark.parametrize("settings", [True, "provisional"])
def test_a_state_dict_in_another_thread_is_no_failed_backward(tmp_path, settings):
    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(context, batch):
            return batch.clone()

        @staticmethod
        def backward(context, gradient):
            thread = threading.Thread(target=lambda: taken.append(optimizer.state_dict()))
            thread.start()
            thread.join()
            return gradient

    net, taken = model(), []
    with NVMeOptimizer(
        [{"params": layer.parameters()} for layer in (net[0], net[2], net[4])],
        paths=tmp_path,
        step_in_backward=settings,
    ) as optimizer:
        for _ in range(2):
            net[2:](Asking.apply(net[:2](torch.ones(8, 40)))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(taken) == 2


def test_what_it_may_be(tmp_path):
    with pytest.raises(
        UsageError, match='must be False, True, "local" or "provisional", not \'yes\''
    ):
        NVMeOptimizer(model().parameters(), paths=tmp_path, step_in_backward="yes")
    for name, value in (("masters", "no"), ("masters", None), ("overlap_step", "false")):
        with pytest.raises(UsageError, match=f"{name} must be True or False, not {value!r}"):
            NVMeOptimizer(model().parameters(), paths=tmp_path, **{name: value})


def _halve_rate(net, optimizer):
    optimizer.param_groups[0]["lr"] /= 2


def _assign_gradient(net, optimizer):
    net[2].weight.grad = torch.ones_like(net[2].weight)


def _drop_gradient(net, optimizer):
    net[2].weight.grad = None


def _decay(net, optimizer):
    with torch.no_grad():
        net[2].weight.mul_(0.9)


def _restore(net, optimizer):
    net[2].weight.data = torch.ones_like(net[2].weight)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_halve_rate, "the option lr"),
        (_assign_gradient, "a gradient"),
        (_drop_gradient, "a gradient"),
        (_decay, "a parameter"),
        (_restore, "a parameter"),
    ],
)
def test_a_change_that_comes_after_its_update_is_refused(tmp_path, change, name, overlap):
    net = model()
    with NVMeOptimizer(
        net.parameters(),
        paths=tmp_path,
        host_memory=200_000,
        step_in_backward=True,
        overlap_step=overlap,
    ) as optimizer:
        for step in range(3):
            step_of(net, optimizer, step)
            change(net, optimizer)
        loss_of(net, 3).backward()
        change(net, optimizer)
        for _ in range(2):
            with pytest.raises(UsageError, match=f"{name} was changed between backward"):
                optimizer.step()
        optimizer.zero_grad()
        step_of(net, optimizer, 4)


def test_gradients_of_earlier_steps_may_be_gone(tmp_path):
    net = model()
    with NVMeOptimizer(net.parameters(), paths=tmp_path, step_in_backward=True) as optimizer:
        for frozen in (False, True, False):
            net[2].requires_grad_(not frozen)
            loss_of(net, 0).backward()
            optimizer.step()
            net.zero_grad()
        assert optimizer.stats().step == 3


@pytest.mark.parametrize("settings", [True, "provisional"])
def test_gradients_for_another_optimizer_are_dropped_under_no_sync(tmp_path, caplog, settings):
    """As those that a generator's loss has for the discriminator."""

    def program(make):
        torch.manual_seed(0)
        one, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        its, others = make(one.parameters(), lr=0.1), make(other.parameters(), lr=0.1)
        for _ in range(3):
            with others.no_sync():
                other(one(torch.ones(2, 8))).sum().backward()
            its.step()
            for optimizer in (its, others):
                optimizer.zero_grad()
            other(one(torch.ones(2, 8)).detach()).sum().backward()
            others.step()
            others.zero_grad()
        return [*one.parameters(), *other.parameters()]

    assert after_and_in_backward(program, tmp_path, settings) == []
    assert "given up" not in caplog.text


@pytest.mark.parametrize("settings", [True, "provisional"])
def test_two_optimizers_do_not_both_update_a_parameter(tmp_path, settings):
    refused = []

    def program(make):
        net = model()
        pair = [
            make(net.parameters(), optimizer_class=kind, lr=0.01)
            for kind in (torch.optim.Adam, torch.optim.SGD)
        ]
        for _ in range(2):
            try:
                loss_of(net, 0).backward()
            except UsageError as error:
                refused.append(str(error).split(" would")[0])
        net.zero_grad()
        for number in range(4):
            used, other = pair[:: 1 - 2 * (number % 2)]
            with other.no_sync():
                loss_of(net, number).backward()
            used.step()
            net.zero_grad()
        pair[0].close()
        step_of(net, pair[1], 4)
        return list(net.parameters())

    assert after_and_in_backward(program, tmp_path, settings, host_memory=200_000) == []
    assert refused == ["two optimizers with step_in_backward"] * 2


def test_zero_grad_by_the_model_or_by_the_optimizer_goes_on(tmp_path, caplog):
    net = model()
    with NVMeOptimizer(net.parameters(), paths=tmp_path, step_in_backward=True) as optimizer:
        for clear in (
            net.zero_grad,
            optimizer.zero_grad,
            lambda: optimizer.zero_grad(set_to_none=False),
        ):
            loss_of(net, 0).backward()
            optimizer.step()
            clear()
        loss_of(net, 0).backward()
        assert "is given up" not in caplog.text
        optimizer.zero_grad(set_to_none=False)  # without a step
        assert "is given up" in caplog.text
        loss_of(net, 0).backward()
        optimizer.step()
        assert optimizer.stats().step == 5
        net.zero_grad()
        loss_of(net, 0).backward()
        net.zero_grad()  # without a step
        with pytest.raises(UsageError, match=r"a second backward\(\) before step\(\)"):
            loss_of(net, 0).backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns
def test_compiled_autograd(tmp_path):
    results = []
    for in_backward in (False, True):
        net = model()
        with NVMeOptimizer(
            net.parameters(), paths=tmp_path, step_in_backward=in_backward
        ) as optimizer:
            for step in range(2):
                with (
                    torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
                    if in_backward
                    else contextlib.nullcontext()
                ):
                    loss_of(net, step).backward()
                assert not in_backward or all(
                    isinstance(parameter.grad, SpentGradient) for parameter in net.parameters()
                )
                optimizer.step()
                optimizer.zero_grad()
        results.append(list(net.parameters()))
    assert differing(*results) == []


def test_a_parameter_that_is_used_twice_is_updated_once(tmp_path):
    def program(make):
        torch.manual_seed(0)
        shared = torch.nn.Linear(30, 30)
        optimizer = make(shared.parameters(), lr=0.1)
        for step in range(2):
            shared(shared(torch.ones(2, 30) * step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(shared.parameters())

    assert after_and_in_backward(program, tmp_path) == []


def test_closures(tmp_path):
    net = model()
    with NVMeOptimizer(net.parameters(), paths=tmp_path, step_in_backward=True) as optimizer:

        def closure():
            loss = loss_of(net, 0)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > optimizer.step(closure).item()


@pytest.mark.parametrize("settings", [True, "provisional"])
def test_an_aborted_backward_pass_leaves_nothing_behind(tmp_path, settings):
    """Buckets complete in one backward pass do not count as complete in the next, in another order."""

    def program(make):
        torch.manual_seed(0)
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        net = torch.nn.ModuleList((first, second))
        optimizer = make(net.parameters(), lr=0.01)
        for _ in range(3):
            stop = first.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):  # as when memory runs out
                second(first(torch.ones(4))).sum().backward()
            stop.remove()
            net.zero_grad()
            first(second(torch.ones(4))).sum().backward()
            optimizer.step()
            net.zero_grad()
        return list(net.parameters())

    assert after_and_in_backward(program, tmp_path, settings) == []
