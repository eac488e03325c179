"""`accumulate="host"`: the bits of accumulation in `.grad`, in host memory; every read of a
gradient sees it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref

import pytest
import torch
from covering import covering
from late_copies import LateCopies
from reference import (
    KINDS,
    OPTIMIZERS,
    SHAPES,
    Reference,
    compared,
    differing,
    loss_of,
    model,
    parameters,
    smallest,
    step_of,
    unlike,
)

from nvme_offload.activations import save_on_nvme
from nvme_offload.errors import UsageError
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optim.accumulation import GradientSums
from nvme_offload.optim.host_gradient import HostGradient
from nvme_offload.optim.update import Updater
from nvme_offload.update import gradients
from nvme_offload.update.gradients import GradientValues


def backward(params, number):
    """What comes to `.grad` in a micro-batch, through autograd: zeros of both signs, too."""
    generator = torch.Generator().manual_seed(number)
    total = torch.zeros(())
    for parameter in params:
        values = torch.randn(parameter.shape, generator=generator)
        values = torch.where(values.abs() < 0.2, torch.copysign(torch.zeros(()), values), values)
        total = total + (parameter * values.to(parameter.device, parameter.dtype)).float().sum()
    total.backward()


def train(params, optimizer, *, micro_batches=3, steps=3, first=0, middle=None, **options):
    """Some steps, each over some micro-batches; *middle* is called before each step."""
    for step in range(first, first + steps):
        for micro_batch in range(micro_batches):
            backward(params, 100 * step + micro_batch)
        if middle is not None:
            middle(params, optimizer)
        optimizer.step()
        for parameter in params:
            if options.get("set_to_none", True):
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


@covering(
    name=KINDS,
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    micro_batches=[1, 2, 4],
)
def test_any_optimizer_with_any_budget(tmp_path, name, dtype, micro_batches):
    shapes = [shape for shape in SHAPES if 0 not in shape or name != "adafactor"]
    plain, roomy, tight = (parameters(dtype, shapes=shapes) for _ in range(3))
    train(plain, Reference(plain, OPTIMIZERS[name]), micro_batches=micro_batches)
    make = functools.partial(
        NVMeOptimizer, optimizer_class=OPTIMIZERS[name], paths=tmp_path, accumulate="host"
    )
    with make(roomy) as optimizer:
        train(roomy, optimizer, micro_batches=micro_batches)
    with smallest(lambda cap: make(tight, host_memory=cap)) as optimizer:
        train(tight, optimizer, micro_batches=micro_batches)
    assert differing(roomy, plain) == []
    assert differing(tight, plain) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"masters": False}),
        *({"state_format": name} for name in ("split", "compact", "compact24")),
    ],
    ids=str,
)
def test_what_fits_without_fits_with(tmp_path, dtype, options):
    """With the least host memory that the states need, gradients go to the drive."""
    plain, ours = parameters(dtype), parameters(dtype)
    caps = []

    def without(cap):
        caps.append(cap)
        return NVMeOptimizer(plain, paths=tmp_path, host_memory=cap, **options)

    with smallest(without) as optimizer:
        train(plain, optimizer)
    with NVMeOptimizer(
        ours, paths=tmp_path, host_memory=caps[-1], accumulate="host", **options
    ) as optimizer:
        train(ours, optimizer)
        assert optimizer.stats().bytes_read > 0
        assert optimizer._steps.tier._pool.nbytes <= caps[-1]
    assert differing(ours, plain) == []


def test_no_gradient_is_where_the_parameters_are(tmp_path, monkeypatch):
    """At most one of the gradients that backward() makes, and in an update one bucket's."""
    net = model()
    made = []
    most = [0]
    outside = []
    updated = Updater.step

    def note(parameter):
        if type(parameter.grad) is torch.Tensor:
            made.append(weakref.ref(parameter.grad))

    def seen(parameter):
        assert isinstance(parameter.grad, HostGradient)
        most[0] = max(most[0], sum(one() is not None for one in made))

    def step(self, bucket, *args):
        outside.append(
            sum(
                fragment.summed.numel()
                for other in optimizer._steps.binding.buckets
                for fragment in other.fragments
                if fragment.summed is not None
            )
        )
        assert outside[-1] == sum(fragment.numel for fragment in bucket.fragments)
        return updated(self, bucket, *args)

    monkeypatch.setattr(Updater, "step", step)
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    with NVMeOptimizer(
        net.parameters(), paths=tmp_path, host_memory=200_000, accumulate="host"
    ) as optimizer:
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(seen)
        for step_number in range(2):
            for micro_batch in range(3):
                loss_of(net, micro_batch).backward()
                assert [one() for one in made if one() is not None] == []
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.stats().step == step_number + 1
    assert len(made) == 2 * 6
    assert most[0] <= 1
    assert len(outside) == 2 * len(optimizer._steps.binding.buckets) > 8


def test_operations_do_not_grow_with_the_number_of_parameters(tmp_path):
    calls = []
    for count in (20, 200):
        params = [torch.nn.Parameter(torch.ones(40)) for _ in range(count)]
        with NVMeOptimizer(params, paths=tmp_path, accumulate="host") as optimizer:
            schedule = optimizer._steps.tier.swapper._schedule
            train(params, optimizer, steps=1)
            before = schedule.blocks.operations, schedule._count
            train(params, optimizer, steps=1)
            calls.append((schedule.blocks.operations - before[0], schedule._count - before[1]))
    # as few for ten times as many, which are in one bucket
    assert calls[1][1] <= calls[0][1] + 10
    assert calls[1][0] <= calls[0][0] + 50


def clip(params, optimizer):
    torch.nn.utils.clip_grad_norm_(params, 0.1)


def clip_in_a_list(params, optimizer):
    norm = torch.nn.utils.get_total_norm([one.grad for one in params if one.grad is not None], 3.0)
    torch.nn.utils.clip_grads_with_norm_(params, 0.5, norm)


def clip_twice(params, optimizer):
    clip(params, optimizer)
    clip_in_a_list(params, optimizer)


def clip_and_add(params, optimizer):
    clip(params, optimizer)
    backward(params, 7)


def average(params, optimizer):
    for parameter in params:
        parameter.grad /= 3


def averages(params, optimizer):
    torch._foreach_mul_([parameter.grad for parameter in params], 1 / 3)


def change(params, optimizer):
    for parameter in params:
        parameter.grad.clamp_(-0.5, 0.5)
        parameter.grad.add_(torch.ones_like(parameter), alpha=2)


def replace(params, optimizer):
    params[0].grad = torch.full_like(params[0], 0.3)
    params[2].grad = params[2].grad * 2
    params[6].grad = None


def replace_and_add(params, optimizer):
    replace(params, optimizer)
    backward(params, 7)


def set_data(params, optimizer):
    replacement = torch.full_like(params[0], 0.3)
    params[0].grad.data = replacement
    replacement.mul_(2)  # which both have
    params[2].grad.data = params[2].grad * 2
    params[4].grad.data.zero_()
    copy.copy(params[6].grad).mul_(0.5)


def set_data_and_add(params, optimizer):
    set_data(params, optimizer)
    backward(params, 7)


def look(params, optimizer):
    assert all(torch.isfinite(parameter.grad).all() for parameter in params)
    assert "gradient of shape" in repr(params[0].grad) or type(params[0].grad) is torch.Tensor
    assert copy.deepcopy(params[0].grad).shape == params[0].shape


def with_a_graph(params, optimizer):
    for parameter in params[:2]:
        parameter.grad = None
    (params[0].sum() ** 2 + params[1].sum() ** 3).backward(create_graph=True)


MIDDLES = [
    clip,
    clip_in_a_list,
    clip_twice,
    clip_and_add,
    average,
    averages,
    change,
    replace,
    replace_and_add,
    set_data,
    set_data_and_add,
    look,
]


@covering(dtype=[torch.float32, torch.bfloat16], middle=MIDDLES)
def test_every_read_of_a_gradient_sees_it(tmp_path, middle, dtype):
    plain, ours = parameters(dtype), parameters(dtype)
    train(plain, Reference(plain, torch.optim.AdamW, lr=0.1), middle=middle)
    with NVMeOptimizer(
        ours, lr=0.1, paths=tmp_path, host_memory=200_000, accumulate="host"
    ) as optimizer:
        train(ours, optimizer, middle=middle)
    assert differing(ours, plain) == []


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_with_a_graph_stays_where_it_is(tmp_path):
    plain, ours = parameters(), parameters()
    train(plain, torch.optim.AdamW(plain), middle=with_a_graph)
    with NVMeOptimizer(ours, paths=tmp_path, accumulate="host") as optimizer:
        train(ours, optimizer, middle=with_a_graph)
    assert differing(ours, plain) == []


@pytest.mark.parametrize("accumulate", [None, "host"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_optimizer(tmp_path, norm_type, accumulate):
    shapes = [shape for shape in SHAPES if 0 not in shape]  # which have no greatest element
    plain, ours = parameters(shapes=shapes), parameters(shapes=shapes)
    backward(plain, 1)
    norm = torch.nn.utils.clip_grad_norm_(plain, 0.1, norm_type)
    torch.optim.AdamW(plain).step()
    with NVMeOptimizer(ours, paths=tmp_path, accumulate=accumulate) as optimizer:
        backward(ours, 1)
        assert torch.equal(optimizer.clip_grad_norm_(0.1, norm_type), norm)
        optimizer.step()
    assert differing(ours, plain) == []


def test_clipping_over_several_dtypes(tmp_path):
    """The scale is in fp32 then, also for 16-bit parameters and for scalars."""
    results = []
    for ours in (False, True):
        params = [*parameters(torch.bfloat16), *parameters(), *parameters(torch.float16)]
        optimizer = (
            NVMeOptimizer(params, paths=tmp_path, host_memory=300_000, accumulate="host")
            if ours
            else Reference(params, torch.optim.AdamW)
        )
        train(params, optimizer, middle=clip)
        train(params, optimizer, middle=clip_and_add, first=3)
        results.append(params)
        if ours:
            optimizer.close()
    assert differing(*results) == []


@covering(set_to_none=[True, False], by=["model", "optimizer"], foreach=[True, False])
def test_zero_grad(tmp_path, by, set_to_none, foreach):
    """Gradients that are none, and gradients of zeros, to which -0 is added; with steps in between
    that have no backward.
    """

    def program(make):
        net = torch.nn.ParameterList(parameters())
        params = list(net)
        optimizer = make(params, foreach=foreach)
        for step in range(6):
            if step not in (0, 3):
                for micro_batch in range(2):
                    backward(params[step % 3 :], 10 * step + micro_batch)
            if step == 4:
                clip(params, optimizer)
            if step != 5:
                optimizer.step()
            (net if by == "model" else optimizer).zero_grad(set_to_none=set_to_none)
        backward(params, 99)
        optimizer.step()
        return params

    kind = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    assert compared(program, tmp_path, kind, host_memory=200_000, accumulate="host") == []


@covering(
    move=[torch.double, torch.bfloat16, torch.channels_last],
    when=["before step", "after step", "after zero_grad"],
    by=["model", "optimizer"],
    set_to_none=[True, False],
    momentum=[0.9, 0.0],
)
def test_a_model_that_is_moved_anywhere_in_a_step(tmp_path, move, when, by, set_to_none, momentum):
    def program(make):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(72, 5)
        )
        optimizer = make(net.parameters())
        for step in range(3):
            for micro_batch in range(2):
                generator = torch.Generator().manual_seed(2 * step + micro_batch)
                images = torch.randn(2, 3, 5, 5, generator=generator)
                net(images.to(net[0].weight.dtype)).square().mean().backward()
            for moment in ("before step", "after step", "after zero_grad"):
                if moment == "after step":
                    optimizer.step()
                if moment == "after zero_grad":
                    (net if by == "model" else optimizer).zero_grad(set_to_none=set_to_none)
                if moment == when and step == 1:
                    net.to(move) if isinstance(move, torch.dtype) else net.to(memory_format=move)
        return list(net.parameters())

    kind = functools.partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    assert compared(program, tmp_path, kind, accumulate="host", masters=False) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_leaves_with_its_gradient_and_returns(tmp_path, dtype):
    plain, ours = (parameters(dtype, shapes=[(30, 20), (7,), ()]) for _ in range(2))
    reference = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
    options = {"lr": 0.1, "momentum": 0.9, "masters": False, "accumulate": "host"}
    with NVMeOptimizer(ours, torch.optim.SGD, paths=tmp_path, **options) as optimizer:
        for params, one in ((plain, reference), (ours, optimizer)):
            backward(params, 0)
            one.step()
            away = one.param_groups[0]["params"].pop(0)
            one.zero_grad()
            backward(params[1:], 1)
            one.step()
            one.param_groups[0]["params"].append(away)
            one.zero_grad(set_to_none=False)
            for number in (2, 3):
                backward(params, number)
            one.step()
    assert differing(ours, plain) == []


def test_a_group_that_is_added(tmp_path):
    def program(make):
        params = parameters()
        optimizer = make(params[:3])
        backward(params[:3], 0)
        optimizer.add_param_group({"params": params[3:], "lr": 0.1})
        backward(params, 1)
        backward(params, 2)
        if isinstance(optimizer, NVMeOptimizer):
            assert all(isinstance(parameter.grad, HostGradient) for parameter in params)
        optimizer.step()
        return params

    assert compared(program, tmp_path, accumulate="host") == []


def test_strides_of_gradients(tmp_path):
    """A parameter in channels_last, and gradients with other strides than their parameter's."""

    def program(make):
        torch.manual_seed(0)
        net = torch.nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        odd = torch.nn.Parameter(torch.randn(40, 30).t())
        optimizer = make([*net.parameters(), odd])
        for _ in range(3):
            for _ in range(2):
                (net(torch.randn(2, 8, 9, 9)).square().mean() + (odd @ odd.t()).sum()).backward()
            strides = [parameter.grad.stride() for parameter in [*net.parameters(), odd]]
            norm = torch.nn.utils.clip_grad_norm_([*net.parameters(), odd], 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [*net.parameters(), odd, norm, torch.tensor(sum(strides, ()))]

    assert compared(program, tmp_path, accumulate="host") == []


def test_closures(tmp_path):
    def program(make):
        net = model()
        optimizer = make(net.parameters())

        def closure(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(net, 0)
            loss.backward()
            loss_of(net, 1).backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(3)]
        return [*net.parameters(), *losses]

    assert compared(program, tmp_path, accumulate="host") == []


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context, batch):
        return batch.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("injected")


@pytest.mark.parametrize("given_up", [False, True])
def test_a_backward_that_fails_in_the_middle(tmp_path, given_up):
    """Gradients added before the failure stay added, as in memory."""

    def program(make):
        net = model()
        optimizer = make(net.parameters())
        loss_of(net, 0).backward()
        with pytest.raises(RuntimeError, match="injected"):
            net[2:](Failing.apply(net[:2](torch.ones(8, 40)))).square().mean().backward()
        if given_up:
            step_of(net, optimizer, 1)
        return list(net.parameters())

    assert compared(program, tmp_path, accumulate="host") == []


def test_gradients_are_used_up_by_a_step(tmp_path):
    net = model()
    with NVMeOptimizer(net.parameters(), paths=tmp_path, accumulate="host") as optimizer:
        optimizer.step()  # without any gradient
        loss_of(net, 0).backward()
        optimizer.step()
        for use in (
            optimizer.step,
            loss_of(net, 1).backward,
            functools.partial(clip, list(net.parameters()), optimizer),
        ):
            before = [parameter.detach().clone() for parameter in net.parameters()]
            with pytest.raises(UsageError, match=r"was used up by step\(\): call zero_grad\(\)"):
                use()
            assert differing(list(net.parameters()), before) == []
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in net.parameters())
        optimizer.step()
        loss_of(net, 1).backward()
        optimizer.step()
        gone = optimizer.param_groups[0]["params"].pop()
        optimizer.zero_grad()
        with pytest.raises(UsageError, match="left the optimizer, set"):
            loss_of(net, 2).backward()
        gone.grad = None
        step_of(net, optimizer, 2)


def test_what_takes_all_gradients_at_once_is_refused(tmp_path):
    net = model()
    with NVMeOptimizer(net.parameters(), paths=tmp_path, accumulate="host") as optimizer:
        loss_of(net, 0).backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        for use in (
            lambda: torch.cat([gradients[1], gradients[3]]),
            lambda: torch._foreach_abs(gradients),
            lambda: gradients[0].view(-1),
        ):
            with pytest.raises(UsageError, match=r"clone\(\) them one by one"):
                use()
        gradients[0].clone().view(-1)
        optimizer.step()


MEMORY = {
    "share_memory": lambda net: net.share_memory(),
    "DLPack": lambda net: torch.from_dlpack(net[0].weight.grad),
    "address": lambda net: net[0].weight.grad.data_ptr(),
    "storage": lambda net: net[0].weight.grad.untyped_storage(),
    "array": lambda net: net[0].weight.grad.numpy(),
    "t_": lambda net: net[0].weight.grad.t_(),
    "set_": lambda net: net[0].weight.grad.set_(torch.zeros(3)),
    "data of a copy": lambda net: setattr(
        net[0].weight.grad.detach(), "data", torch.zeros(200, 40)
    ),
}


@pytest.mark.parametrize("use", MEMORY)
def test_what_uses_the_memory_of_a_gradient_is_refused(tmp_path, use):
    plain, ours = model(), model()
    reference = torch.optim.AdamW(plain.parameters())
    with NVMeOptimizer(ours.parameters(), paths=tmp_path, accumulate="host") as optimizer:
        for net, one in ((plain, reference), (ours, optimizer)):
            loss_of(net, 0).backward()
            if net is ours:
                with pytest.raises(UsageError, match=r'accumulate="host" has in host memory'):
                    MEMORY[use](net)
            one.step()
    assert differing(list(ours.parameters()), list(plain.parameters())) == []


def test_a_gradient_whose_data_was_replaced_is_gone(tmp_path):
    net = model()
    with NVMeOptimizer(net.parameters(), paths=tmp_path, accumulate="host") as optimizer:
        loss_of(net, 0).backward()
        kept = net[0].weight.grad
        kept.data = torch.ones(200, 40)
        with pytest.raises(UsageError, match=r"was replaced by an assignment to its \.data"):
            kept.norm()
        optimizer.step()


@pytest.mark.parametrize("host_memory", ["auto", 200_000])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_that_is_assigned_to_another_parameter_is_used_there(
    tmp_path, host_memory, micro_batches
):
    def exchange(params, _):
        params[0].grad, params[1].grad = params[1].grad, params[0].grad
        params[2].grad = params[0].grad

    shapes = [(120, 50)] * 3 + [(31,)]
    plain, ours = parameters(torch.float32, shapes=shapes), parameters(torch.float32, shapes=shapes)
    train(
        plain,
        torch.optim.AdamW(plain, lr=0.01),
        micro_batches=micro_batches,
        middle=exchange,
    )
    with NVMeOptimizer(
        ours, paths=tmp_path, lr=0.01, accumulate="host", host_memory=host_memory
    ) as optimizer:
        train(ours, optimizer, micro_batches=micro_batches, middle=exchange)
    assert differing(ours, plain) == []


def test_what_is_refused(tmp_path):
    for options, message in (
        ({"accumulate": "cpu"}, "must be None or \"host\", not 'cpu'"),
        ({"accumulate": True}, "must be None"),
        ({"accumulate": "host", "step_in_backward": True}, "needs step_in_backward=False"),
        ({"accumulate": "host", "overlap_step": True}, "overlap_step=False"),
    ):
        with pytest.raises(UsageError, match=message):
            NVMeOptimizer(model().parameters(), paths=tmp_path, **options)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.filterwarnings("ignore:FSDP:UserWarning", "ignore::FutureWarning")
def test_fully_sharded_data_parallel_is_refused_when_it_is_made(tmp_path, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net = FullyShardedDataParallel(
            model(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        with pytest.raises(
            UsageError, match="does not take parameters of FullyShardedDataParallel"
        ):
            NVMeOptimizer(net.parameters(), paths=tmp_path, accumulate="host")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("host_memory", ["auto", 200_000])
def test_state_between_micro_batches(tmp_path, host_memory):
    """A state dict has no gradients; saving, reading and loading states leave them as they are."""
    states = []

    def program(make):
        net = model()
        optimizer = make(net.parameters())
        saved = []
        for step in range(4):
            for micro_batch in range(3):
                loss_of(net, 10 * step + micro_batch).backward()
                if step:
                    saved.append(copy.deepcopy(optimizer.state_dict()["state"]))
                    assert optimizer.state[net[0].weight]["exp_avg"].clone().shape == (200, 40)
                    if step == 2:
                        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
            optimizer.zero_grad()
        states.append(saved[-1])
        return list(net.parameters())

    assert compared(program, tmp_path, host_memory=host_memory, accumulate="host") == []
    assert unlike(*states) == []


def test_closing_frees_all(tmp_path):
    net = model()
    with NVMeOptimizer(
        net.parameters(), paths=tmp_path, host_memory=200_000, accumulate="host"
    ) as optimizer:
        loss_of(net, 0).backward()
        tier = weakref.ref(optimizer._steps.tier)
    assert all(parameter.grad is None for parameter in net.parameters())
    loss_of(net, 1).backward()  # as ever
    assert all(type(parameter.grad) is torch.Tensor for parameter in net.parameters())
    del optimizer
    gc.collect()
    assert tier() is None


def test_what_was_kept_of_gradients(tmp_path):
    """A reference to the placeholder in `.grad` has no values."""
    net = model()
    with NVMeOptimizer(net.parameters(), paths=tmp_path, accumulate="host") as optimizer:
        loss_of(net, 0).backward()
        kept, copied = net[0].weight.grad.detach(), net[0].weight.grad.clone()
        assert torch.equal(kept, copied)
        net[0].weight.grad = None
        loss_of(net, 1).backward()
        with pytest.raises(UsageError, match="was replaced by another"):
            kept.norm()
        kept = net[0].weight.grad
        assert not torch.equal(kept, copied)
        optimizer.zero_grad()
        with pytest.raises(UsageError, match=r"was given up by zero_grad\(\)"):
            kept.norm()
        loss_of(net, 0).backward()
        assert torch.equal(net[0].weight.grad, copied)


def test_an_optimizer_that_is_gone(tmp_path):
    net = model()
    optimizer = NVMeOptimizer(net.parameters(), paths=tmp_path, accumulate="host")
    loss_of(net, 0).backward()
    tier = weakref.ref(optimizer._steps.tier)
    del optimizer
    gc.collect()
    assert tier() is None
    with pytest.raises(UsageError, match="went with its NVMeOptimizer"):
        loss_of(net, 1).backward()
    net.zero_grad()
    loss_of(net, 1).backward()


def test_zero_grad_releases_memory(tmp_path):
    net = model()
    with NVMeOptimizer(net.parameters(), paths=tmp_path, accumulate="host") as optimizer:
        for step in range(3):
            loss_of(net, step).backward()
            names = optimizer._steps.tier.swapper.names()
            assert sum(name.endswith("/gradients") for name in names) == 1
            if step:
                optimizer.step()
            else:
                optimizer.zero_grad()
            names = optimizer._steps.tier.swapper.names()
            assert not any(name.endswith("/gradients") for name in names)
            assert not optimizer._steps.tier.swapper.in_use()
            optimizer.zero_grad()


def test_gradients_that_are_looked_at_are_not_written_again(tmp_path):
    params = [torch.nn.Parameter(torch.ones(300, 100)) for _ in range(40)]
    with smallest(
        lambda cap: NVMeOptimizer(params, paths=tmp_path, host_memory=cap, accumulate="host")
    ) as optimizer:
        backward(params, 0)
        counters = []
        for _ in range(4):
            for parameter in params:
                parameter.grad.clone()
            optimizer._steps.drain()
            counters.append(optimizer._steps.tier.swapper.stats())
    assert counters[3].bytes_read > counters[1].bytes_read  # they do not all fit
    assert counters[3].bytes_written == counters[1].bytes_written


def test_a_sum_that_is_not_whole_is_reported(tmp_path, monkeypatch):
    params = [torch.nn.Parameter(torch.ones(300, 100))]
    with NVMeOptimizer(params, paths=tmp_path, host_memory=200_000, accumulate="host") as optimizer:
        backward(params, 0)
        monkeypatch.setattr(
            optimizer._steps.tier.swapper,
            "swap_in",
            lambda name: (_ for _ in ()).throw(OSError("the drive")),
        )
        with pytest.raises(OSError, match="the drive"):
            backward(params, 1)
        monkeypatch.undo()
        for use in (optimizer.step, functools.partial(backward, params, 1)):
            with pytest.raises(UsageError, match=r"is not whole.*call zero_grad\(\)"):
                use()
        optimizer.zero_grad()
        backward(params, 2)
        optimizer.step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns
@pytest.mark.parametrize("autograd_too", [False, True])
def test_compiled(tmp_path, autograd_too):
    def program(make):
        net = model()
        run = torch.compile(net, backend="aot_eager")
        optimizer = make(net.parameters())
        for step in range(2):
            for micro_batch in range(3):
                with (
                    torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
                    if autograd_too
                    else contextlib.nullcontext()
                ):
                    loss_of(run, 10 * step + micro_batch).backward()
            if isinstance(optimizer, NVMeOptimizer):
                assert all(isinstance(one.grad, HostGradient) for one in net.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return list(net.parameters())

    assert compared(program, tmp_path, accumulate="host") == []


class InParts(torch.nn.Module):
    """As docs/plain-pytorch.md has it."""

    def __init__(self, block, rows):
        super().__init__()
        self.block, self.rows = block, rows

    def forward(self, batch):
        parts = batch.split(self.rows)
        return torch.cat(
            [
                torch.utils.checkpoint.checkpoint(self.block, part, use_reentrant=False)
                for part in parts
            ]
        )


def test_one_block_at_a_time(tmp_path, monkeypatch):
    """Each gradient is moved once, however many parts a batch has; one block's stay in memory."""
    moved = []
    monkeypatch.setattr(GradientSums, "add", lambda *_: pytest.fail("moved twice"))
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            *(
                InParts(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), 8)
                for _ in range(4)
            )
        )
        optimizer = (
            NVMeOptimizer(net.parameters(), paths=tmp_path, accumulate="host")
            if ours
            else torch.optim.AdamW(net.parameters())
        )
        offload = save_on_nvme(tmp_path, min_bytes=1024, host_memory="1MB")
        for parameter in net.parameters() if ours else ():
            parameter.register_post_accumulate_grad_hook(lambda one: moved.append(type(one.grad)))
        for step in range(3):
            inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
            with offload if ours else contextlib.nullcontext():
                loss = net(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(list(net.parameters()))
        if ours:
            assert offload.stats().saved_bytes > 0
            optimizer.close()
        offload.close()
    assert moved == [HostGradient] * 3 * 8
    assert differing(*results) == []


@covering(
    host_memory=["auto", 300_000, 200_000],
    middle=[None, clip, clip_and_add, change, replace_and_add],
)
def test_copies_that_are_late(tmp_path, monkeypatch, middle, host_memory):
    """As copies of a GPU: no memory is released, read or written while a copy of it is in flight."""
    plain, ours = parameters(torch.bfloat16), parameters(torch.bfloat16)
    train(plain, Reference(plain, torch.optim.AdamW, lr=0.1), middle=middle)
    later = LateCopies()
    monkeypatch.setattr(GradientValues, "_copies_between", lambda *_: later)
    monkeypatch.setattr(gradients, "_IN_FLIGHT", 5)
    with NVMeOptimizer(
        ours, lr=0.1, paths=tmp_path, host_memory=host_memory, accumulate="host"
    ) as optimizer:
        train(ours, optimizer, middle=middle)
        optimizer.zero_grad()
        assert not optimizer._steps.tier.swapper.in_use()
    assert len(later.events) > 70
    assert all(event.query() for event in later.events)
    assert differing(ours, plain) == []
