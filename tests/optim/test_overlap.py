"""`overlap_step`: the updates of a step run under the next forward pass, with the same bits, and
no reader sees a weight or a state from before them.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref

import late
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from reference import (
    Lion,
    batch,
    differing,
    loss_of,
    model,
    parameters,
    set_gradients,
    step_of,
    unlike,
)

from nvme_offload import Offload, save_on_nvme
from nvme_offload.errors import IOFailure, UnsupportedError, UsageError
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optim.awaited import AwaitedParameter, AwaitedTensor
from nvme_offload.update.queue import Job, UpdateQueue, queues, wait_for

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")

STEPS = 5


def waiting(net):
    return [type(parameter) is AwaitedParameter for parameter in net.parameters()]


def begun(path, steps=2, **options):
    """A model and its optimizer after some *steps*, a bucket for each layer, with gradients."""
    net = model()
    optimizer = NVMeOptimizer(
        [{"params": layer.parameters()} for layer in (net[0], net[2], net[4])],
        lr=0.01,
        paths=path,
        overlap_step=True,
        **options,
    )
    for step in range(steps):
        step_of(net, optimizer, step)
    optimizer.zero_grad()
    loss_of(net, steps).backward()
    return net, optimizer


def in_memory(steps):
    """What AdamW makes of the model."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(steps):
        step_of(net, optimizer, step)
    return net


@pytest.fixture
def only_when_awaited():
    with late.only_when_awaited():
        yield


_gates = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A test leaves no thread at a gate, where a fork and the end of the process would wait for it,
    and no optimizer to the garbage collector, whose time is not ours.
    """
    yield
    for gate in _gates:
        gate.opened.set()
    _gates.clear()
    gc.collect()
    for thread in threads():
        thread.join(PATIENCE)


class Gate:
    """Holds the update of the last bucket; sets an event when a caller waits for one."""

    def __init__(self, optimizer, monkeypatch):
        self.opened, self.awaited = threading.Event(), threading.Event()
        _gates.append(self)
        opening, waits = optimizer._steps.updater.open, UpdateQueue._wait

        def open_bucket(bucket):
            if bucket is optimizer._steps.binding.buckets[-1]:
                self.opened.wait()
            return opening(bucket)

        def wait(queue, is_done):
            if not is_done():
                self.awaited.set()
            waits(queue, is_done)

        monkeypatch.setattr(optimizer._steps.updater, "open", open_bucket)
        monkeypatch.setattr(UpdateQueue, "_wait", wait)


# The bits.


@pytest.mark.parametrize("state_format", ["split", "compact"])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.usefixtures("only_when_awaited")
def test_the_same_bits_as_without(tmp_path, state_format, in_backward):
    """With accumulation, a scheduler, clipping of some steps, and an evaluation."""
    results = []
    for overlap in (False, True):
        net, seen = model(torch.bfloat16), []
        with NVMeOptimizer(
            net.parameters(),
            lr=0.01,
            paths=tmp_path,
            host_memory=200_000,
            state_format=state_format,
            step_in_backward=in_backward,
            overlap_step=overlap,
        ) as optimizer:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for step in range(STEPS):
                with optimizer.no_sync():
                    loss_of(net, 100 + step).backward()
                loss_of(net, step).backward()
                if step % 2 and not in_backward:
                    seen.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01))
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                assert any(waiting(net)) == (overlap and step > 0)
                if step == 2:
                    with torch.no_grad():
                        seen.append(net(batch(200, torch.bfloat16)))
        results.append([*net.parameters(), *seen])
    assert differing(*results) == []


@pytest.mark.usefixtures("only_when_awaited")
@pytest.mark.parametrize("in_backward", [False, True])
def test_with_what_a_forward_pass_saves_on_the_drive_too(tmp_path, in_backward):
    def run(net, optimizer, offload):
        for step in range(STEPS):
            optimizer.zero_grad()
            with offload:
                loss = loss_of(net, step)
            loss.backward()
            optimizer.step()
        return list(net.parameters())

    plain, ours = model(), model()
    expected = run(plain, torch.optim.AdamW(plain.parameters()), contextlib.nullcontext())
    offload = save_on_nvme(tmp_path, min_bytes=64, host_memory=12_288)
    with NVMeOptimizer(
        ours.parameters(),
        paths=tmp_path,
        host_memory=200_000,
        overlap_step=True,
        step_in_backward=in_backward,
    ) as optimizer:
        assert differing(run(ours, optimizer, offload), expected) == []
    assert offload.stats().bytes_read > 0
    offload.close()


@pytest.mark.usefixtures("only_when_awaited")
def test_groups_with_parameters_that_are_frozen_unused_shared_and_plain(tmp_path):
    def run(make):
        net = model()
        net[0].bias.requires_grad_(False)
        unused, plain = torch.nn.Parameter(torch.ones(7)), torch.ones(3, requires_grad=True)
        groups = [
            {"params": [net[0].weight, net[0].bias, unused], "lr": 0.1},
            {"params": [*net[2].parameters(), *net[4].parameters(), plain], "weight_decay": 0.5},
        ]
        optimizer = make(groups)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            hidden = net[1](net[0](batch(step)))
            (net[2:](hidden) * plain + net[2:](hidden * 2)).square().mean().backward()
            optimizer.step()
            if step == 2:
                net[0].bias.requires_grad_(True)
        return [*net.parameters(), unused, plain]

    def ours(groups):
        return NVMeOptimizer(groups, paths=tmp_path, host_memory=200_000, overlap_step=True)

    assert differing(run(ours), run(torch.optim.AdamW)) == []


def test_transformers_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2, use_cache=False
    )
    tokens = torch.randint(0, 64, (24, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]

    def run(make, **options):
        torch.manual_seed(0)
        net = transformers.GPT2LMHeadModel(config)
        optimizer = make(net.parameters(), lr=1e-2, **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            max_grad_norm=0.1,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        queued = []

        class Looking(transformers.TrainerCallback):
            def on_step_end(self, *_, **__):
                queued.append(any(waiting(net)))

        trainer = transformers.Trainer(
            net,
            arguments,
            train_dataset=rows,
            eval_dataset=rows[:4],
            optimizers=(optimizer, scheduler),
            callbacks=[Looking()],
        )
        trainer.train()
        reported = [
            (entry.get("loss"), entry.get("grad_norm"), entry.get("eval_loss"))
            for entry in trainer.state.log_history
        ]
        return net, reported, optimizer, queued

    plain, expected, *_ = run(torch.optim.AdamW)
    ours, reported, optimizer, queued = run(
        NVMeOptimizer, paths=tmp_path, host_memory=100_000, overlap_step=True
    )
    assert queued == [False, *[True] * 5]  # the first makes the states
    assert optimizer.stats().step == 6
    optimizer.close()
    assert reported == expected
    assert differing(list(ours.parameters()), list(plain.parameters())) == []


@pytest.mark.filterwarnings("ignore")  # of Lightning's own
def test_lightning_whose_steps_have_closures(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, make):
            super().__init__()
            self.net = model()
            self.make = make

        def training_step(self, rows, _):
            return self.net(rows).square().mean()

        def configure_optimizers(self):
            return self.make(self.net.parameters(), lr=0.01)

    rows = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))

    def run(make):
        module = Module(make)
        lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            gradient_clip_val=0.1,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
        ).fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        return list(module.net.parameters())

    ours = run(functools.partial(NVMeOptimizer, paths=tmp_path, overlap_step=True))
    assert differing(ours, run(torch.optim.AdamW)) == []


# What runs under what.


def test_the_forward_pass_runs_while_the_drive_works(tmp_path, monkeypatch):
    net, optimizer = begun(tmp_path, host_memory=200_000)
    expected = in_memory(3)
    gate = Gate(optimizer, monkeypatch)
    optimizer.step()
    optimizer.zero_grad()
    hidden = net[:4](batch(3))  # while the update of the last layer is held
    assert not gate.opened.is_set()
    assert waiting(net) == [False] * 4 + [True] * 2
    assert torch.equal(hidden, expected[:4](batch(3)))
    gate.awaited.clear()
    results = []
    last = threading.Thread(target=lambda: results.append(net[4](hidden).detach()))
    last.start()
    gate.awaited.wait()
    assert results == []
    gate.opened.set()
    last.join()
    assert torch.equal(results[0], expected(batch(3)).detach())
    assert optimizer.stats().update_wait_seconds > 0
    assert "the program waited" in str(optimizer.stats())
    optimizer.close()


def test_updates_begin_under_the_backward_pass_too(tmp_path, monkeypatch):
    net, optimizer = begun(tmp_path, steps=1, step_in_backward=True)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    before = net[4].weight.detach().clone()
    gate = Gate(optimizer, monkeypatch)
    loss_of(net, 2).backward()  # the last layer is the first to be queued
    assert waiting(net) == [True] * 6
    optimizer.step()
    assert not gate.opened.is_set()
    gate.opened.set()
    optimizer.synchronize()
    assert differing([net[4].weight], [before]) == [0]
    assert differing(list(net.parameters()), list(in_memory(3).parameters())) == []
    optimizer.close()


def test_zero_grad_and_what_is_asked_of_a_gradient_do_not_wait(tmp_path, monkeypatch):
    net, optimizer = begun(tmp_path)
    gate = Gate(optimizer, monkeypatch)
    optimizer.step()
    assert [parameter.grad.shape for parameter in net.parameters()] == [
        parameter.shape for parameter in net.parameters()
    ]
    assert all(type(parameter.grad) is AwaitedTensor for parameter in net[4].parameters())
    assert net[4].weight.requires_grad
    assert net[4].weight.is_leaf
    assert (net[4].weight.dtype, net[4].weight.device.type) == (torch.float32, "cpu")
    assert {net[4].weight} <= set(net.parameters())
    optimizer.zero_grad()
    net.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not gate.awaited.is_set()
    gate.opened.set()
    optimizer.close()
    assert differing(list(net.parameters()), list(in_memory(3).parameters())) == []


def test_last_stats_does_not_wait(tmp_path, monkeypatch):
    optimizer = begun(tmp_path)[1]
    optimizer.synchronize()
    before = optimizer.last_stats
    assert before.step == 2
    gate = Gate(optimizer, monkeypatch)
    optimizer.step()
    assert optimizer.last_stats.step == 2
    assert not gate.awaited.is_set()
    gate.opened.set()
    assert optimizer.stats() == optimizer.last_stats
    assert optimizer.last_stats.step == 3
    optimizer.close()


# No reader sees a value from before the updates.


def pair_of(path):
    """A model in memory and one with pending updates, after the same steps, and their optimizers;
    gradients are still there.
    """
    plain, ours = model(), model()
    optimizers = (
        torch.optim.AdamW(plain.parameters(), lr=0.01),
        NVMeOptimizer(
            ours.parameters(), lr=0.01, paths=path, host_memory=200_000, overlap_step=True
        ),
    )
    for net, optimizer in zip((plain, ours), optimizers, strict=True):
        step_of(net, optimizer, 0)
        step_of(net, optimizer, 1)
    return (plain, optimizers[0]), (ours, optimizers[1])


class Apart(torch.nn.Module):
    """Passes its own parameter to code that does not check its class."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, _):
        return torch.as_tensor(self.weight).detach().clone()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, weight):
        return weight * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


def cubed(weight):
    return (weight**3).sum()


LOOKS = {
    "detach": lambda net, _: net[0].weight.detach().clone(),
    "data": lambda net, _: net[2].weight.data.clone(),
    "as_subclass": lambda net, _: net[0].weight.as_subclass(torch.Tensor).detach().clone(),
    "tolist": lambda net, _: torch.tensor(net[4].weight.tolist()),
    "numpy": lambda net, _: torch.from_numpy(net[4].weight.detach().numpy().copy()),
    "item": lambda net, _: torch.tensor(net[4].bias[0].item()),
    "norm": lambda net, _: net[2].weight.norm().detach(),
    "repr": lambda net, _: torch.tensor(list(repr(net[4].weight).encode())),
    "data_ptr": lambda net, _: net[0].weight.untyped_storage().clone() and net[0].weight.clone(),
    "state_dict": lambda net, _: torch.cat([v.view(-1) for v in net.state_dict().values()]),
    "deepcopy": lambda net, _: torch.nn.utils.parameters_to_vector(
        copy.deepcopy(net).parameters()
    ).detach(),
    "deepcopy of one": lambda net, _: copy.deepcopy(net[0].weight).detach(),
    "copy": lambda net, _: copy.copy(net[0].bias).detach().clone(),
    "pickle": lambda net, _: pickle.loads(pickle.dumps(net[2].bias)).detach(),
    "save": lambda net, _: saved_and_loaded(net),
    "vector": lambda net, _: torch.nn.utils.parameters_to_vector(net.parameters()).detach(),
    "foreach": lambda net, _: torch.stack(torch._foreach_norm(list(net.parameters()))).detach(),
    "forward": lambda net, _: net(batch(77)).detach(),
    "no_grad": lambda net, _: torch.no_grad()(net)(batch(77)),
    "inference": lambda net, _: torch.inference_mode()(net)(batch(77)).clone(),
    "functional": lambda net, _: torch.func.functional_call(
        net, dict(net.named_parameters()), batch(77)
    ).detach(),
    "gradient of functional": lambda net, _: torch.cat(
        [
            one.reshape(-1)
            for one in torch.func.grad(
                lambda weights: torch.func.functional_call(net, weights, batch(77)).square().sum()
            )(dict(net.named_parameters())).values()
        ]
    ).detach(),
    "gradients of rows": lambda net, _: torch.func.vmap(torch.func.grad(cubed))(
        net[4].weight
    ).detach(),
    "gradient": lambda net, _: torch.func.grad(cubed)(net[4].weight).detach(),
    "vjp": lambda net, _: torch.func.vjp(cubed, net[4].weight)[0].detach(),
    "jvp": lambda net, _: torch.func.jvp(cubed, (net[4].bias,), (torch.ones(3),))[1].detach(),
    "jacrev": lambda net, _: torch.func.jacrev(cubed)(net[4].weight).detach(),
    "hessian": lambda net, _: torch.func.hessian(cubed)(net[4].bias).detach(),
    "functionalize": lambda net, _: torch.func.functionalize(cubed)(net[4].weight).detach(),
    "vmap": lambda net, _: torch.func.vmap(lambda row: row * 2)(net[4].weight).detach(),
    "function": lambda net, _: Scaled.apply(net[4].weight).detach(),
    "ops": lambda net, _: torch.ops.aten.mul.Tensor(net[4].weight, 2).detach(),
    "module": lambda net, _: Apart(net[0].weight)(None),
    "TorchScript": lambda net, _: torch.jit.trace(net, batch(0), check_trace=False)(
        batch(77)
    ).detach(),
    "a state": lambda net, optimizer: optimizer.state[net[0].weight]["exp_avg"].clone(),
    "a number": lambda net, optimizer: optimizer.state[net[4].bias]["step"].clone(),
    "states": lambda net, optimizer: torch.cat(
        [state["exp_avg_sq"].reshape(-1) for state in optimizer.state_dict()["state"].values()]
    ),
}


COLLECTIVES = {
    "all_gather": lambda mine, out: torch.distributed.all_gather([out], mine),
    "all_reduce": lambda mine, out: out.copy_(torch.distributed.all_reduce(mine) or mine),
    "reduce_scatter": lambda mine, out: torch.distributed.reduce_scatter(out, [mine]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.filterwarnings("ignore:You are using a Backend")
@pytest.mark.usefixtures("only_when_awaited")
def test_collectives_wait(tmp_path, name):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        seen = []
        for net, optimizer in pair_of(tmp_path):
            seen.append(torch.zeros_like(net[0].weight.data))
            step_of(net, optimizer, 2)
            with torch.no_grad():
                COLLECTIVES[name](net[0].weight, seen[-1])
        optimizer.close()
    finally:
        torch.distributed.destroy_process_group()
    assert differing(seen[1:], seen[:1]) == []


@pytest.mark.usefixtures("only_when_awaited")
def test_a_swap_of_a_parameter_waits_for_its_update(tmp_path):
    (plain, reference), (ours, optimizer) = pair_of(tmp_path)
    for net, one in ((plain, reference), (ours, optimizer)):
        step_of(net, one, 2)
        updated = torch.nn.Parameter(torch.ones(3))
        torch.utils.swap_tensors(net[4].bias, updated)
        assert not torch.equal(updated, torch.ones(3))
        assert torch.equal(net[4].bias, torch.ones(3))
        step_of(net, one, 3)
    assert differing(list(ours.parameters()), list(plain.parameters())) == []
    optimizer.close()


@pytest.mark.parametrize("swap", [False, True])
def test_a_model_is_converted_while_updates_and_gradients_are_there(tmp_path, swap):
    """Also where torch swaps tensors, which it refuses where there are weak references to them."""
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        with late.only_when_awaited():
            net, optimizer = begun(tmp_path, steps=3)
            optimizer.step()
            assert all(waiting(net))
            net.to(torch.float32, memory_format=torch.preserve_format).cpu()
            optimizer.close()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert differing(list(net.parameters()), list(in_memory(4).parameters())) == []


def test_a_gradient_that_was_kept_waits_and_is_a_tensor_again(tmp_path):
    with late.only_when_awaited():
        net, optimizer = begun(tmp_path)
        kept = net[4].weight.grad
        before = kept.clone()
        optimizer.step()
        optimizer.zero_grad()
        net(batch(0))
        assert type(kept) is AwaitedTensor  # its parameter has been waited for, and it was not used
        assert differing([kept * 1], [before]) == []
        assert type(kept) is torch.Tensor
        optimizer.close()


def saved_and_loaded(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)[0].weight.detach()


def no_grad(function):
    return lambda *args: torch.no_grad()(function)(*args)


CHANGES = {
    "mul_": no_grad(lambda net, _: net[0].weight.mul_(0.5)),
    "data": lambda net, _: net[2].weight.data.add_(0.25),
    "new data": lambda net, _: setattr(net[4].bias, "data", torch.full((3,), 0.125)),
    "set_": no_grad(lambda net, _: net[4].bias.set_(torch.full((3,), 0.125))),
    "out": no_grad(lambda net, _: torch.add(net[4].bias, 1, out=net[4].bias)),
    "setitem": no_grad(lambda net, _: net[4].weight.__setitem__(0, 0.5)),
    "foreach": no_grad(lambda net, _: torch._foreach_mul_(list(net.parameters()), 0.75)),
    "init": lambda net, _: torch.nn.init.constant_(net[0].bias, 0.5),
    "load": lambda net, _: net.load_state_dict(
        {key: value * 0.5 for key, value in net.state_dict().items()}
    ),
    "vector": lambda net, _: torch.nn.utils.vector_to_parameters(
        torch.linspace(-1, 1, 40 * 200 + 200 + 200 * 100 + 100 + 303), net.parameters()
    ),
    "a state": lambda net, optimizer: optimizer.state[net[0].weight]["exp_avg"].mul_(2.0),
    "another state": lambda net, optimizer: optimizer.state[net[0].bias].update(
        exp_avg=torch.ones(200)
    ),
    "a gradient": lambda net, _: net[0].weight.grad.mul_(100),
    "memory of a gradient": lambda net, _: net[4].bias.grad.set_(torch.full((3,), 0.125)),
    "gradients": lambda net, optimizer: optimizer.zero_grad(set_to_none=False),
    "clipping": lambda net, _: torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
    "accumulation": lambda net, _: loss_of(net, 88).backward(),
    "a rate": lambda net, optimizer: optimizer.param_groups[0].update(lr=0.5),
}


RESETS = {
    "assignment": lambda optimizer: setattr(optimizer, "state", collections.defaultdict(dict)),
    "__setstate__": lambda optimizer: optimizer.__setstate__(
        {"state": collections.defaultdict(dict), "param_groups": optimizer.param_groups}
    ),
}


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.usefixtures("only_when_awaited")
def test_states_that_are_replaced_are_not_put_back_by_updates(tmp_path, reset):
    pairs = pair_of(tmp_path)
    for net, optimizer in pairs:
        RESETS[reset](optimizer)
        step_of(net, optimizer, 2)
        step_of(net, optimizer, 3)
    (plain, reference), (ours, optimizer) = pairs
    assert differing(list(ours.parameters()), list(plain.parameters())) == []
    assert unlike(optimizer.state_dict()["state"], reference.state_dict()["state"]) == []
    optimizer.close()


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.usefixtures("only_when_awaited")
def test_every_read_sees_the_new_value(tmp_path, name):
    plain, ours = pair_of(tmp_path)
    seen = [LOOKS[name](*one) for one in (plain, ours)]
    assert differing([seen[1]], [seen[0]]) == []
    assert type(seen[1]) is torch.Tensor
    ours[1].close()


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("only_when_awaited")
def test_every_write_changes_the_new_value(tmp_path, name):
    pairs = pair_of(tmp_path)
    for net, optimizer in pairs:
        CHANGES[name](net, optimizer)
        step_of(net, optimizer, 2)
    (plain, _), (ours, optimizer) = pairs
    assert differing(list(ours.parameters()), list(plain.parameters())) == []
    optimizer.close()


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(
        st.sampled_from(
            [
                *(("look", name) for name in LOOKS if name != "TorchScript"),
                *(("change", name) for name in CHANGES),
                ("step", ""),
                ("step", ""),
            ]
        ),
        max_size=12,
    )
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.usefixtures("only_when_awaited")
def test_any_program(tmp_path, program):
    pairs = pair_of(tmp_path)
    try:
        for number, (kind, name) in enumerate(program, 2):
            if kind == "look":
                seen = [LOOKS[name](*one) for one in pairs]
                assert differing([seen[1]], [seen[0]]) == [], name
                continue
            for net, optimizer in pairs:
                if kind == "step":
                    step_of(net, optimizer, number)
                elif net[0].weight.grad is not None or "gradient" not in name:
                    CHANGES[name](net, optimizer)
        (plain, reference), (ours, optimizer) = pairs
        assert differing(list(ours.parameters()), list(plain.parameters())) == []
        assert unlike(optimizer.state_dict()["state"], reference.state_dict()["state"]) == []
    finally:
        pairs[1][1].close()


@pytest.mark.usefixtures("only_when_awaited")
def test_a_layer_of_torch_with_a_fast_path_takes_it(tmp_path):
    def run(make):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        optimizer = make(layer.parameters(), lr=0.01)
        inputs = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            layer.train()(inputs).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                seen.append(layer.eval()(inputs))
        return seen

    ours = functools.partial(NVMeOptimizer, paths=tmp_path, overlap_step=True)
    assert differing(run(ours), run(torch.optim.AdamW)) == []


@pytest.mark.usefixtures("only_when_awaited")
def test_a_graph_of_before_the_step_is_refused_as_in_memory(tmp_path):
    for net, optimizer in pair_of(tmp_path):
        optimizer.zero_grad()
        loss = loss_of(net, 2)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    optimizer.close()


@pytest.mark.usefixtures("only_when_awaited")
def test_placeholders_of_before_the_step(tmp_path):
    (plain, reference), (ours, optimizer) = pair_of(tmp_path)
    kept = optimizer.state[ours[0].weight]["exp_avg"]
    moved = kept.double()
    for net, one in ((plain, reference), (ours, optimizer)):
        step_of(net, one, 2)
    with pytest.raises(UsageError, match="was moved before an update"):
        moved.clone()
    step_of(ours, optimizer, 3)
    step_of(plain, reference, 3)
    assert torch.equal(kept.double().clone(), reference.state[plain[0].weight]["exp_avg"].double())
    optimizer.close()


def test_type_of_a_parameter_makes_a_parameter(tmp_path, monkeypatch):
    net, optimizer = begun(tmp_path)
    gate = Gate(optimizer, monkeypatch)
    optimizer.step()
    assert isinstance(net[4].weight, torch.nn.Parameter)
    assert type(type(net[4].weight)(torch.ones(2), requires_grad=False)) is torch.nn.Parameter
    assert type(type(net[4].weight.grad)(2)) is torch.Tensor
    assert len(list(net.parameters())) == 6
    gate.opened.set()
    optimizer.close()
    assert {type(parameter) for parameter in net.parameters()} == {torch.nn.Parameter}
    assert all(not vars(parameter) for parameter in net.parameters())


# Errors.


class Failing:
    """Has updates of the last bucket fail so many times."""

    def __init__(self, optimizer, monkeypatch, times):
        self.times = times
        opening = optimizer._steps.updater.open

        def open_bucket(bucket):
            if bucket is optimizer._steps.binding.buckets[-1] and self.times:
                self.times -= 1
                raise IOFailure(
                    5, "gone", operation="read", path="drive", offset=0, nbytes=0, done=0
                )
            return opening(bucket)

        monkeypatch.setattr(optimizer._steps.updater, "open", open_bucket)


@pytest.mark.parametrize(
    "use",
    [
        lambda net, optimizer: net(batch(3)),
        lambda net, optimizer: optimizer.step(),
        lambda net, optimizer: optimizer.synchronize(),
        lambda net, optimizer: optimizer.state_dict(),
        lambda net, optimizer: optimizer.stats(),
        lambda net, optimizer: net.state_dict(),
        lambda net, optimizer: net[4].weight.grad.zero_(),
        lambda net, optimizer: copy.deepcopy(net),
    ],
)
def test_the_first_wait_raises_the_error_and_the_next_continues(tmp_path, monkeypatch, use):
    net, optimizer = begun(tmp_path)
    Failing(optimizer, monkeypatch, 2)
    optimizer.step()
    for _ in range(2):
        with pytest.raises(IOFailure, match="gone") as reported:
            use(net, optimizer)
        if sys.version_info >= (3, 11):
            assert reported.value.__notes__ == ["in the updates of step 3 of NVMeOptimizer"]
    use(net, optimizer)
    assert optimizer.stats().step == 3
    assert differing(list(net.parameters()), list(in_memory(3).parameters())) == []
    optimizer.close()


def test_a_step_after_an_error_makes_its_own_where_there_are_other_gradients(tmp_path, monkeypatch):
    net, optimizer = begun(tmp_path)
    Failing(optimizer, monkeypatch, 1)
    optimizer.step()
    with pytest.raises(IOFailure):
        optimizer.synchronize()
    optimizer.step()  # the same gradients: the rest of the third step
    assert optimizer.stats().step == 3
    Failing(optimizer, monkeypatch, 1)
    step_of(net, optimizer, 3)
    set_gradients(net.parameters(), 4)
    with pytest.raises(IOFailure):
        optimizer.step()
    optimizer.step()  # the rest of the fourth step, and the fifth
    assert optimizer.stats().step == 5
    optimizer.close()
    reference = torch.optim.AdamW((again := model()).parameters(), lr=0.01)
    for step in range(4):
        again.zero_grad()
        loss_of(again, step).backward()
        reference.step()
    set_gradients(again.parameters(), 4)
    reference.step()
    assert differing(list(net.parameters()), list(again.parameters())) == []


def test_loading_states_drops_updates_that_cannot_be_made(tmp_path, monkeypatch, caplog):
    net, optimizer = begun(tmp_path)
    saved, kept = optimizer.state_dict(), copy.deepcopy(net.state_dict())
    failing = Failing(optimizer, monkeypatch, 1 << 30)
    optimizer.step()
    optimizer.load_state_dict(saved)
    failing.times = 0
    assert "updates are given up, since states are loaded" in caplog.text
    net.load_state_dict(kept)
    optimizer.step()
    optimizer.close()
    assert differing(list(net.parameters()), list(in_memory(3).parameters())) == []


def test_closing_tells_what_went_wrong_and_closes(tmp_path, monkeypatch):
    net, optimizer = begun(tmp_path)
    Failing(optimizer, monkeypatch, 1 << 30)
    optimizer.step()
    with pytest.raises(IOFailure, match="gone"):
        optimizer.close()
    optimizer.close()
    assert not any(waiting(net))
    assert os.listdir(tmp_path) == []  # noqa: PTH208


# What cannot be queued.


def test_an_optimizer_that_changes_its_groups_steps_at_once(tmp_path, caplog):
    plain, ours = model(), model()
    reference = Lion(plain.parameters(), weight_decay=0.5)
    with NVMeOptimizer(
        ours.parameters(), Lion, weight_decay=0.5, paths=tmp_path, overlap_step=True
    ) as optimizer:
        for step in range(4):
            step_of(plain, reference, step)
            step_of(ours, optimizer, step)
            assert optimizer.param_groups[0]["count"] == step + 1
            assert not any(waiting(ours))
    assert differing(list(ours.parameters()), list(plain.parameters())) == []
    assert caplog.text.count("overlap_step is left out: Lion changes count of its groups") == 1


def test_an_optimizer_that_changes_its_groups_later_is_found_out(tmp_path, caplog):
    class Later(torch.optim.SGD):
        """Halves its rate after the second step."""

        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    if state["step"] == 3:
                        group["lr"] = 0.05

    plain, ours = model(), model()
    reference = Later(plain.parameters(), lr=0.1)
    with NVMeOptimizer(ours.parameters(), Later, lr=0.1, paths=tmp_path, overlap_step=True) as one:
        for step in range(5):
            step_of(plain, reference, step)
            step_of(ours, one, step)
        assert one.param_groups[0]["lr"] == 0.05
    assert differing(list(ours.parameters()), list(plain.parameters())) == []
    assert "overlap_step is left out: Later changes lr" in caplog.text


def test_parameters_of_another_class_are_refused(tmp_path):
    class Own(torch.nn.Parameter):
        pass

    with pytest.raises(UnsupportedError, match=r"overlap_step=True takes.* not Own"):
        NVMeOptimizer([Own(torch.ones(3))], paths=tmp_path, overlap_step=True)
    optimizer = NVMeOptimizer(
        [torch.nn.Parameter(torch.ones(3))], paths=tmp_path, overlap_step=True
    )
    with pytest.raises(UnsupportedError, match="not Own"):
        optimizer.add_param_group({"params": [Own(torch.ones(3))]})
    optimizer.close()


@pytest.fixture
def compiler():
    """What the test compiles is gone with it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns
@pytest.mark.usefixtures("compiler", "only_when_awaited")
@pytest.mark.parametrize("when", ["before", "in between"])
@pytest.mark.parametrize("how", ["model", "in place", "function"])
def test_what_is_compiled_waits_first_and_then_steps_are_made_at_once(tmp_path, caplog, how, when):
    plain, ours = model(), model()
    reference = torch.optim.AdamW(plain.parameters())

    def compiled(net):
        if how == "in place":
            net.compile(backend="eager")
            return net
        if how == "model":
            return torch.compile(net, backend="eager")
        return torch.compile(lambda rows: net(rows), backend="eager")

    forward = compiled(ours) if when == "before" else ours
    with NVMeOptimizer(ours.parameters(), paths=tmp_path, overlap_step=True) as optimizer:
        for step in range(5):
            step_of(plain, reference, step)
            optimizer.zero_grad()
            if step == 2 and when == "in between":
                assert all(waiting(ours))
                forward = compiled(ours)
            loss = forward(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            assert any(waiting(ours)) == (when == "in between" and step == 1) or how == "in place"
    assert differing(list(ours.parameters()), list(plain.parameters())) == []
    assert torch._dynamo.utils.counters["frames"]["total"] < 5
    assert caplog.text.count("overlap_step is left out: torch.compile is used") == 1
    assert torch.compiler.is_compiling() is False


# Threads and processes.


def threads():
    return [thread for thread in threading.enumerate() if "nvme_offload" in thread.name]


def test_the_thread_ends_with_the_optimizer(tmp_path):
    _, optimizer = begun(tmp_path)
    optimizer.step()
    [thread] = threads()
    optimizer.close()
    assert not thread.is_alive()


def test_a_dropped_optimizer_makes_its_pending_updates(tmp_path, monkeypatch):
    net, optimizer = begun(tmp_path)
    gate = Gate(optimizer, monkeypatch)
    optimizer.step()
    [thread], gone = threads(), weakref.ref(optimizer)
    del optimizer
    gc.collect()
    gate.opened.set()
    assert differing(list(net.parameters()), list(in_memory(3).parameters())) == []
    monkeypatch.undo()
    del gate
    _gates.clear()
    thread.join()
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("only_when_awaited")
def test_a_dropped_optimizer_with_pending_updates_makes_room_for_another(tmp_path):
    net = model()
    with Offload(tmp_path, 1_000_000) as offload:
        for steps in (2, 1):
            optimizer = offload.optimizer(
                net.parameters(), lr=0.01, host_memory=600_000, overlap_step=True
            )
            for step in range(steps):
                step_of(net, optimizer, step)
            assert any(waiting(net)) == (steps > 1)
            del optimizer
    expected = in_memory(2)
    step_of(expected, torch.optim.AdamW(expected.parameters(), lr=0.01), 0)
    assert differing(list(net.parameters()), list(expected.parameters())) == []


def test_a_del_may_close_it_in_the_midst_of_a_use(tmp_path):
    net, optimizer = begun(tmp_path)

    def use():
        with optimizer._steps.overlap.lock:  # the collector may run while this thread has it
            optimizer.step()
            optimizer.close()

    using = threading.Thread(target=use, daemon=True)
    using.start()
    using.join(PATIENCE)
    assert not using.is_alive()
    assert threads() == []
    assert differing(list(net.parameters()), list(in_memory(3).parameters())) == []


def test_the_collector_waits_for_no_lock_in_whichever_thread_it_runs(tmp_path):
    """A thread may hold the lock for as long as it likes: Ctrl-C can end it between two lines."""
    _, optimizer = begun(tmp_path)
    optimizer.step()
    optimizer.synchronize()
    queue = optimizer._steps.overlap
    queue.itself, lock, gone = queue, queue.lock, weakref.ref(queue)
    optimizer.close()
    with lock:
        del optimizer, queue
        collecting = threading.Thread(target=gc.collect, daemon=True)
        collecting.start()
        collecting.join(PATIENCE)
        assert not collecting.is_alive()
        assert gone() is None


def test_one_that_has_failed_is_garbage_with_its_model(tmp_path, monkeypatch):
    """And leaves no hook of modules."""
    net, optimizer = begun(tmp_path)
    Failing(optimizer, monkeypatch, 1 << 30)
    optimizer.step()
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    assert len(hooks) == 1
    with pytest.raises(IOFailure):
        net(batch(0))
    [thread] = threads()
    gone = weakref.ref(net[4].weight)
    monkeypatch.undo()
    del net, optimizer
    gc.collect()
    assert gone() is None
    thread.join()
    gc.collect()
    assert len(hooks) == 0


def test_a_wait_can_be_interrupted(tmp_path, monkeypatch):
    net, optimizer = begun(tmp_path)
    gate = Gate(optimizer, monkeypatch)

    def interrupt():
        gate.awaited.wait()
        os.kill(os.getpid(), signal.SIGINT)

    optimizer.step()
    hidden = net[:4](batch(3))
    gate.awaited.clear()
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        net[4](hidden)
    other.join()
    gate.opened.set()
    optimizer.close()
    assert differing(list(net.parameters()), list(in_memory(3).parameters())) == []


def test_a_wait_looks_up_without_being_woken():
    """As for a signal that came just before it."""
    condition, true = threading.Condition(), []
    timer = threading.Timer(0.05, true.append, [True])
    timer.start()
    with condition:
        wait_for(condition, lambda: bool(true))
    timer.join()


class Rows(torch.utils.data.Dataset):
    def __init__(self, net):
        self.net = net

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            return self.net(batch(index))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_data_loader_that_forks_has_the_new_weights(tmp_path):
    net, optimizer = begun(tmp_path)
    optimizer.step()
    loader = torch.utils.data.DataLoader(
        Rows(net), batch_size=4, num_workers=1, multiprocessing_context="fork", timeout=PATIENCE
    )
    [rows] = list(loader)
    # row by row, as the loader's process computes them: one batch may round otherwise
    expected = Rows(in_memory(3))
    assert torch.equal(rows, torch.stack([expected[row] for row in range(4)]))
    optimizer.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_does_not_wait_for_what_never_comes(tmp_path, monkeypatch):
    net, optimizer = begun(tmp_path)
    Failing(optimizer, monkeypatch, 1)
    optimizer.step()
    with pytest.raises(IOFailure):
        optimizer.synchronize()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                net[4].weight.sum()
            except UsageError as error:
                status = 0 if "forked" in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    optimizer.close()
    assert differing(list(net.parameters()), list(in_memory(3).parameters())) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_lacks_the_thread_of_updates_and_its_locks(tmp_path, monkeypatch):
    """The thread that made an update takes the lock once more, and a fork may come meanwhile."""
    net, optimizer = begun(tmp_path)
    optimizer.step()
    held, end, quiesce = threading.Event(), threading.Event(), UpdateQueue.quiesce

    def hold(lock):
        with lock:
            held.set()
            end.wait()

    def taken_afterwards(queue):
        quiesce(queue)
        threading.Thread(target=hold, args=[queue.lock]).start()
        held.wait()

    expected = list(in_memory(3).parameters())
    monkeypatch.setattr(UpdateQueue, "quiesce", taken_afterwards)
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)  # which ends the child
        status = 1
        with contextlib.suppress(BaseException):
            assert differing(list(net.parameters()), expected) == []
            with pytest.raises(UsageError, match="was forked from: make one here"):
                optimizer.state_dict()
            status = 0
        os._exit(status)
    monkeypatch.undo()
    status = os.waitpid(child, 0)[1]
    end.set()
    optimizer.close()
    assert os.waitstatus_to_exitcode(status) == 0


def test_queues_are_listed_while_a_thread_makes_one():
    """Every update lists them, and an optimizer may be made meanwhile."""
    made = [UpdateQueue()]

    def in_between(*_):
        made.append(UpdateQueue())
        return in_between

    sys.settrace(in_between)  # for each line
    try:
        found = queues()
    finally:
        sys.settrace(None)
    assert len(made) > 1
    assert made[0] in found


def test_a_thread_that_dies_gives_the_lock_back():
    """An exception between the last line of a `with` and its end leaves the lock held."""

    class Dying(UpdateQueue):
        def _ended(self, job, error):
            self.lock.acquire()
            raise KeyboardInterrupt

    queue = Dying()
    queue.put(Job(lambda: None))
    for thread in threads():
        thread.join()
    assert queue.lock.acquire(blocking=False)
    queue.lock.release()
    with pytest.raises(KeyboardInterrupt):
        queue.wait()


def test_threads_of_the_program_wait_too(tmp_path, monkeypatch):
    net, optimizer = begun(tmp_path)
    gate = Gate(optimizer, monkeypatch)
    optimizer.step()
    seen = [None] * 4

    def look(index):
        seen[index] = net[4].weight.detach().clone()

    several = [threading.Thread(target=look, args=(index,)) for index in range(4)]
    for thread in several:
        thread.start()
    gate.awaited.wait()
    gate.opened.set()
    for thread in several:
        thread.join()
    expected = in_memory(3)[4].weight
    assert differing(seen, [expected] * 4) == []
    optimizer.close()


# All else that is asked of it.


@pytest.mark.usefixtures("only_when_awaited")
def test_what_is_asked_of_the_optimizer_waits(tmp_path):
    net, optimizer = begun(tmp_path)
    optimizer.step()
    assert optimizer.stats().step == 3
    step_of(net, optimizer, 3)
    extra = parameters(shapes=[(5, 5)])
    optimizer.add_param_group({"params": extra, "lr": 0.5})
    assert not any(waiting(net))
    assert optimizer.state_dict()["nvme_offload"]["steps"] == 4
    step_of(net, optimizer, 4)
    optimizer.load_state_dict(optimizer.state_dict())
    step_of(net, optimizer, 5)
    step_of(net, optimizer, 6)
    assert all(waiting(net))
    optimizer.close()
    assert not any(waiting(net))
    expected = in_memory(7)
    assert differing(list(net.parameters()), list(expected.parameters())) == []


def test_without_it_synchronize_does_nothing(tmp_path):
    with NVMeOptimizer(parameters(), paths=tmp_path) as optimizer:
        optimizer.synchronize()
        assert threads() == []


KEPT = {
    "clear": lambda states, one: states.clear(),
    "delete": lambda states, one: states.__delitem__(one),
    "replace": lambda states, one: states.__setitem__(one, {}),
    "clear one": lambda states, one: states[one].clear(),
    "replace a tensor": lambda states, one: states[one].update(exp_avg=torch.full_like(one, 0.25)),
    "write to a tensor": lambda states, one: states[one]["exp_avg"].fill_(0.25),
    "pop": lambda states, one: states.pop(one),
    "union": lambda states, one: states.__ior__({one: {}}),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.usefixtures("only_when_awaited")
def test_a_dictionary_of_states_that_was_kept_waits(tmp_path, name):
    """The program keeps `optimizer.state`, and the state of a parameter, over steps."""
    pairs = pair_of(tmp_path)
    kept = [({**optimizer.state}, optimizer.state) for _, optimizer in pairs]
    for (net, optimizer), (of_each, states) in zip(pairs, kept, strict=True):
        step_of(net, optimizer, 2)
        KEPT[name](of_each if "one" in name or "tensor" in name else states, net[0].weight)
        step_of(net, optimizer, 3)
    (plain, reference), (ours, optimizer) = pairs
    assert differing(list(ours.parameters()), list(plain.parameters())) == []
    assert unlike(optimizer.state_dict()["state"], reference.state_dict()["state"]) == []
    optimizer.close()


FAILED = "nvme_offload: unawaited update failed: ValueError: no reason"
if sys.version_info >= (3, 11):
    FAILED += "; in step 3"  # the note


@pytest.mark.parametrize(
    ("end", "status", "line"),
    [
        ("", 1, FAILED),
        ("sys.exit(4)", 4, FAILED),
        ("try: queue.wait()\nexcept ValueError: pass", 0, ""),
    ],
    ids=["the end", "a status", "a caller has received it"],
)
def test_an_update_that_fails_as_the_program_ends_is_a_line_and_a_status(end, status, line):
    script = """
import sys
from nvme_offload.update.queue import Job, UpdateQueue

def update():
    raise ValueError("no reason")

queue = UpdateQueue()
queue.put(Job(update, note="in step 3"))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script + end], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ran.returncode, ran.stderr.strip()) == (status, line)
