"""`NVMeOptimizer` where a `torch.optim.Optimizer` is expected: schedulers, scalers, hooks, groups,
closures; and refusals.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from covering import covering
from reference import (
    OPTIMIZERS,
    Lion,
    Reference,
    differing,
    loss_of,
    model,
    parameters,
    set_gradients,
    smallest,
    train,
    unlike,
)
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nvme_offload import NVMeOptimizer as exported
from nvme_offload.errors import NoSpaceError, UnsupportedError, UsageError
from nvme_offload.optim import NVMeOptimizer

# Of rates, momenta and betas, with a number, with a loss, and of other schedulers.
SCHEDULERS = {
    "lambda": lambda one, _: lr_scheduler.LambdaLR(one, lambda epoch: 0.5**epoch),
    "cyclic": lambda one, momentum: lr_scheduler.CyclicLR(
        one, 1e-4, 1e-2, step_size_up=2, **momentum
    ),
    "one-cycle": lambda one, momentum: lr_scheduler.OneCycleLR(
        one, 1e-2, total_steps=10, **momentum
    ),
    "plateau": lambda one, _: lr_scheduler.ReduceLROnPlateau(one, patience=0),
    "sequential": lambda one, _: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one), lr_scheduler.ExponentialLR(one, 0.5)], [2]
    ),
    "chained": lambda one, _: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(one), lr_scheduler.ExponentialLR(one, 0.5)]
    ),
}


@covering(
    pairs=False, name=list(SCHEDULERS), optimizer_class=[torch.optim.AdamW, torch.optim.Adagrad]
)
def test_schedulers(tmp_path, name, optimizer_class):
    """Adagrad has states before its first step, and a scheduler sets the rate of that step."""
    plain, ours = parameters(shapes=[(30, 20), (5,)]), parameters(shapes=[(30, 20), (5,)])
    momentum = {"cycle_momentum": False} if optimizer_class is torch.optim.Adagrad else {}
    rates = []
    with NVMeOptimizer(ours, optimizer_class, paths=tmp_path) as optimizer:
        for params, one in ((plain, optimizer_class(plain)), (ours, optimizer)):
            scheduler = SCHEDULERS[name](one, momentum)
            for step in range(5):
                set_gradients(params, step)
                one.step()
                scheduler.step(*([1.0] if name == "plateau" else []))
                rates.append(one.param_groups[0]["lr"])
    assert rates[:5] == rates[5:]
    assert len(set(rates)) > 1
    assert differing(ours, plain) == []


SCALED = [
    *({}, {"overlap_step": True}, {"accumulate": "host"}, {"step_in_backward": "provisional"}),
    {"step_in_backward": "provisional", "overlap_step": True},
]


def test_a_rate_that_is_a_tensor_stays_the_users(tmp_path):
    rate = torch.tensor(0.01)
    plain, ours = parameters(), parameters()
    reference = torch.optim.AdamW(plain, lr=torch.tensor(0.01))
    with NVMeOptimizer(ours, lr=rate, paths=tmp_path) as optimizer:
        train(plain, reference)
        train(ours, optimizer)
        rate.fill_(0.1)
        reference.param_groups[0]["lr"].fill_(0.1)
        train(plain, reference, first=3)
        train(ours, optimizer, first=3)
        assert optimizer.param_groups[0]["lr"] is rate
    assert differing(ours, plain) == []


@pytest.mark.parametrize("mode", SCALED, ids=str)
def test_a_scaler_skips_steps_and_then_goes_on(tmp_path, mode):
    """As does one whose provisional updates are undone, since its step is skipped."""
    provisional = "step_in_backward" in mode
    # a scale changes gradients after backward(), so that no later update is provisional
    scale, infinite = (1.0, (6,)) if provisional else (1024.0, (0, 3, 6))
    kinds, made = set(), []

    def run(net, optimizer):
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale, growth_interval=20 if provisional else 2
        )
        for step in range(8):
            factor = torch.inf if step in infinite else 1
            scaler.scale(loss_of(net, step) * factor).backward()
            if step == 4 and not provisional:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            kinds.update(type(one.grad).__name__ for one in net.parameters())
            scaler.step(optimizer)
            scaler.update()
            kinds.update(type(one).__name__ for one in net.parameters())
            if step and optimizer is not reference:
                made.append(optimizer.last_stats.updated_in_backward)
            net.zero_grad()  # without a call of the optimizer
            yield scaler.get_scale()

    plain, ours = model(), model()
    reference = torch.optim.AdamW(plain.parameters())
    expected = list(run(plain, reference))
    with NVMeOptimizer(ours.parameters(), paths=tmp_path, host_memory=200_000, **mode) as optimizer:
        scales = run(ours, optimizer)
        assert next(scales) == expected[0] == (scale if provisional else scale / 2)
        assert bool(optimizer.state) == provisional
        assert list(scales) == expected[1:]
        assert optimizer.stats().step == 8 - len(infinite)
    assert any(made) == provisional
    assert ("AwaitedParameter" in kinds) == ("overlap_step" in mode)
    assert ("HostGradient" in kinds) == ("accumulate" in mode)
    assert differing(list(ours.parameters()), list(plain.parameters())) == []


def test_closures_hooks_and_what_step_returns(tmp_path):
    params = parameters(shapes=[(3, 3)])
    called = []
    with NVMeOptimizer(params, torch.optim.SGD, lr=0.1, paths=tmp_path) as optimizer:
        optimizer.register_step_pre_hook(
            lambda one, args, kwargs: called.append(("before", one is optimizer))
        )
        optimizer.register_step_post_hook(
            lambda one, args, kwargs: called.append(("after", one is optimizer))
        )
        everywhere = register_optimizer_step_pre_hook(
            lambda one, args, kwargs: called.append(("everywhere", one is optimizer))
        )

        def closure():
            optimizer.zero_grad()
            loss = (params[0] ** 2).sum()
            loss.backward()
            return loss

        try:
            first, second = optimizer.step(closure), optimizer.step(closure)
        finally:
            everywhere.remove()
    assert 0 < second.item() < first.item()
    assert called == [("everywhere", True), ("before", True), ("after", True)] * 2


def test_it_is_an_optimizer(tmp_path):
    with NVMeOptimizer(
        [{"params": parameters(), "lr": 0.5}], torch.optim.SGD, momentum=0.9, paths=tmp_path
    ) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.defaults == torch.optim.SGD(parameters(), momentum=0.9).defaults
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert optimizer.param_groups[0]["momentum"] == 0.9
        assert "Parameter Group 0" in repr(optimizer)
        set_gradients(optimizer.param_groups[0]["params"], 0)
        optimizer.zero_grad(set_to_none=False)
        assert float(optimizer.param_groups[0]["params"][0].grad.abs().max()) == 0
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["params"][0].grad is None
        with pytest.raises(UsageError, match="no step yet"):
            optimizer.stats()
    assert exported is NVMeOptimizer


def test_named_parameters_iterators_and_single_tensors_in_groups(tmp_path):
    model = torch.nn.Linear(30, 40)
    with NVMeOptimizer(model.named_parameters(), paths=tmp_path) as optimizer:
        assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
        train(list(model.parameters()), optimizer, steps=1)
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    with NVMeOptimizer(
        ({"params": parameter} for parameter in model.parameters()), paths=tmp_path
    ) as optimizer:
        train(list(model.parameters()), optimizer, steps=1)
        assert len(optimizer.state) == 2


def test_small_states_are_in_memory_and_others_have_stand_ins(tmp_path):
    params = parameters(torch.bfloat16)
    with NVMeOptimizer(params, paths=tmp_path) as optimizer:
        train(params, optimizer)
        assert all(float(optimizer.state[parameter]["step"]) == 3 for parameter in params)
        for parameter in params:
            for key in ("exp_avg", "exp_avg_sq", "master"):
                value = (
                    optimizer.state[parameter][key]
                    if parameter.dim() or key == "master"
                    else torch.zeros(())
                )
                assert (value.shape, value.dtype, value.device) == (
                    parameter.shape,
                    torch.float32,
                    parameter.device,
                )
                assert (
                    not parameter.dim()
                    or repr(value)
                    == f"<state {key!r} of shape {list(parameter.shape)}, on a drive>"
                )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_may_be_moved_and_copied(tmp_path, dtype):
    plain, ours = parameters(dtype), parameters(dtype)
    train(plain, Reference(plain, torch.optim.AdamW), steps=6)
    with smallest(lambda cap: NVMeOptimizer(ours, paths=tmp_path, host_memory=cap)) as optimizer:
        train(ours, optimizer)
        for parameter in ours:  # as trainers do that move optimizers from device to device
            optimizer.state[parameter] = {
                key: value.to("cpu", torch.float64).to(value.dtype)
                for key, value in optimizer.state[parameter].items()
            }
        train(ours, optimizer, steps=1, first=3)
        optimizer.state = copy.deepcopy(
            optimizer.state, {id(parameter): parameter for parameter in ours}
        )
        train(ours, optimizer, steps=2, first=4)
    assert differing(ours, plain) == []


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "lion", "adafactor", "adagrad"])
@pytest.mark.parametrize("which", [slice(None), slice(2)])
def test_state_may_be_reset(tmp_path, name, which):
    shapes = [(40, 30), (7,), (), (30, 20)]
    plain, ours = parameters(shapes=shapes), parameters(shapes=shapes)
    reference = OPTIMIZERS[name](plain)
    train(plain, reference)
    fresh = OPTIMIZERS[name](plain)
    for parameter in plain[which]:
        reference.state[parameter] = fresh.state[parameter] if name == "adagrad" else {}
    train(plain, reference, first=3)
    with smallest(
        lambda cap: NVMeOptimizer(ours, OPTIMIZERS[name], paths=tmp_path, host_memory=cap)
    ) as optimizer:
        train(ours, optimizer)
        for parameter in ours[which]:
            del optimizer.state[parameter]
        train(ours, optimizer, first=3)
    assert differing(ours, plain) == []


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    params = parameters()
    with (
        NVMeOptimizer(params, paths=tmp_path) as optimizer,
        NVMeOptimizer(params, paths=tmp_path) as other,
    ):
        train(params, optimizer)
        other.state = optimizer.state
        set_gradients(params, 3)
        with pytest.raises(UsageError, match="another optimizer has on its drive"):
            other.step()


def test_add_param_group(tmp_path):
    plain, ours = parameters(torch.bfloat16), parameters(torch.bfloat16)
    reference = Reference(
        [{"params": plain[:2]}, {"params": plain[2:], "lr": 0.1}], torch.optim.AdamW
    )
    with NVMeOptimizer(ours[:2], paths=tmp_path, host_memory=420_000) as optimizer:
        sparse = torch.nn.Parameter(torch.ones(3).to_sparse())
        with pytest.raises(UnsupportedError):  # and its options are forgotten
            optimizer.add_param_group({"params": sparse, "lr": 0.9, "weight_decay": 0.5})
        optimizer.add_param_group({"params": (one for one in ours[2:]), "lr": 0.1})
        train(plain, reference)
        train(ours, optimizer)
        assert optimizer.stats().bytes_read > 0
        before = len(optimizer.param_groups)
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": ours[0]})
        assert len(optimizer.param_groups) == before
        train(plain, reference, first=3)
        train(ours, optimizer, first=3)
    assert differing(ours, plain) == []


def test_a_group_may_be_added_by_named_parameters(tmp_path):
    net, other = torch.nn.Linear(30, 40), torch.nn.Linear(40, 2)
    with NVMeOptimizer(net.named_parameters(), paths=tmp_path) as optimizer:
        optimizer.add_param_group({"params": other.named_parameters()})
        assert optimizer.param_groups[1]["param_names"] == ["weight", "bias"]
        for wrong in ({"params": {net.weight}}, [net.weight]):
            with pytest.raises(TypeError, match=r"ordered collections|must be a dict"):
                optimizer.add_param_group(wrong)
        assert len(optimizer.param_groups) == 2


def test_a_group_that_is_added_within_a_step_leaves_the_options_of_others(tmp_path):
    """Lion counts its steps in the group: after a backward() that has updated its parameters."""
    counts = []
    with NVMeOptimizer(
        parameters(), OPTIMIZERS["lion"], paths=tmp_path, step_in_backward=True
    ) as optimizer:
        params = optimizer.param_groups[0]["params"]
        for step in range(3):
            sum(one.square().sum() for one in params).backward()
            if step == 1:
                optimizer.add_param_group({"params": parameters(shapes=[(3, 3)])})
            optimizer.step()
            counts.append(optimizer.param_groups[0]["count"])
    assert counts == [1, 2, 3]


def test_groups_without_parameters_and_with_frozen_ones_only(tmp_path):
    frozen = torch.nn.Parameter(torch.ones(1000), requires_grad=False)
    for group in ({"params": []}, {"params": [frozen]}):  # a rank may have only that
        with NVMeOptimizer([group], paths=tmp_path) as optimizer:
            optimizer.step()
            state = optimizer.state_dict()
            assert state["state"] == {}
            optimizer.load_state_dict(state)
            added = parameters()
            optimizer.add_param_group({"params": added})
            train(added, optimizer)
    plain = parameters()
    train(plain, torch.optim.AdamW(plain))
    assert differing(added, plain) == []
    assert float(frozen.sum()) == 1000


@pytest.mark.parametrize("mode", [{}, {"step_in_backward": True}, {"overlap_step": True}], ids=str)
def test_groups_without_gradients_count_their_steps(tmp_path, mode):
    """Lion divides its decay by the count of the group."""

    def run(params, optimizer):
        one, other = (params[index : index + 2] for index in (0, 2))
        for step in range(6):
            optimizer.zero_grad()
            for parameter in [[], one, other, one, [*one, *other], other][step]:
                (parameter * (step + 1)).sin().sum().backward()
            optimizer.step()
            yield [group["count"] for group in optimizer.param_groups]

    found = []
    for kind in (Lion, functools.partial(NVMeOptimizer, optimizer_class=Lion, **mode)):
        params = parameters(shapes=[(30, 20), (5,), (40, 10), (7,)])
        groups = [{"params": params[:2]}, {"params": params[2:]}, {"params": []}]
        place = {} if kind is Lion else {"paths": tmp_path}
        optimizer = kind(groups, lr=0.01, weight_decay=0.5, **place)
        found.append((list(run(params, optimizer)), params))
        if kind is not Lion:
            optimizer.close()
    (plain, expected), (counts, ours) = found
    assert counts == plain == [[step] * 3 for step in range(1, 7)]
    assert differing(ours, expected) == []


def test_quantized_parameters_are_left_alone(tmp_path):
    frozen = torch.nn.Parameter(torch.arange(100, dtype=torch.uint8), requires_grad=False)
    plain, ours = parameters(), parameters()
    train([*plain], torch.optim.AdamW([frozen, *plain]))
    with NVMeOptimizer([frozen, *ours], paths=tmp_path) as optimizer:
        train(ours, optimizer, steps=2)
        optimizer.load_state_dict(optimizer.state_dict())
        train(ours, optimizer, steps=1, first=2)
    assert differing(ours, plain) == []
    assert torch.equal(frozen, torch.arange(100, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_a_load_adds_no_options_to_groups(tmp_path, name):
    """Options that the class does not have would be in all later checkpoints."""
    shapes = [(7,), (4, 5)]
    plain, ours = parameters(shapes=shapes), parameters(shapes=shapes)
    reference = OPTIMIZERS[name](plain)
    with NVMeOptimizer(ours, OPTIMIZERS[name], paths=tmp_path) as optimizer:
        for params, one in ((plain, reference), (ours, optimizer)):
            train(params, one)
            one.load_state_dict(one.state_dict())
        found, expected = optimizer.state_dict(), reference.state_dict()
    assert unlike(found["param_groups"], expected["param_groups"]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_load_converts_states_as_torch_does(tmp_path, name, dtype):
    """States of a model in another dtype. Adafactor's states have other shapes than their parameters."""
    shapes = [(7,), (4, 5), (3, 4, 5)]
    before = parameters(dtype, shapes=shapes)
    train(before, saved := OPTIMIZERS[name](before))
    plain, ours = parameters(shapes=shapes), parameters(shapes=shapes)
    reference = OPTIMIZERS[name](plain)
    with NVMeOptimizer(ours, OPTIMIZERS[name], paths=tmp_path) as optimizer:
        for params, one in ((plain, reference), (ours, optimizer)):
            one.load_state_dict(copy.deepcopy(saved.state_dict()))
            train(params, one, first=3)
        assert unlike(optimizer.state_dict()["state"], reference.state_dict()["state"]) == []
    assert differing(ours, plain) == []


class TogetherOptimizer(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.stack(
            [parameter.grad.norm() for group in self.param_groups for parameter in group["params"]]
        ).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / norm, alpha=group["lr"])


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda at: NVMeOptimizer([], paths=at), ValueError, "empty parameter list"),
        (lambda at: NVMeOptimizer(torch.ones(3), paths=at), TypeError, "iterable of Tensors"),
        (lambda at: NVMeOptimizer([3], paths=at), TypeError, "can only optimize Tensors"),
        (lambda at: NVMeOptimizer(parameters(), lr=-1.0, paths=at), ValueError, "Invalid learning"),
        (lambda at: NVMeOptimizer(parameters(), rate=1.0, paths=at), TypeError, "rate"),
        (
            lambda at: NVMeOptimizer(torch.nn.LazyLinear(4).parameters(), paths=at),
            UsageError,
            "call the model once before its optimizer is made",
        ),
        (lambda at: NVMeOptimizer(parameters(), paths=[]), UsageError, "at least one path"),
        (lambda at: NVMeOptimizer(parameters(), paths=""), UsageError, "a path is empty"),
        (
            lambda at: NVMeOptimizer(parameters(), paths=at, host_memory="much"),
            UsageError,
            'host_memory must be "auto", bytes',
        ),
        (
            lambda at: NVMeOptimizer(parameters(), paths=at, host_memory=1000),
            UsageError,
            "host_memory of 1000 bytes cannot hold",
        ),
        (
            lambda at: NVMeOptimizer(parameters(), paths=at, state_format="tiny"),
            UsageError,
            "'exact', 'split', 'compact'",
        ),
        (
            lambda at: NVMeOptimizer(parameters(torch.float16), paths=at, state_format="split"),
            UnsupportedError,
            "bfloat16",
        ),
        (
            lambda at: NVMeOptimizer(parameters(), Lion, paths=at, state_format="compact"),
            UnsupportedError,
            "does not know the state 'average' of Lion",
        ),
        (
            lambda at: NVMeOptimizer(parameters(), paths=at, capturable=True),
            UnsupportedError,
            "capturable=True",
        ),
        (
            lambda at: NVMeOptimizer(parameters(), paths=at, differentiable=True),
            UnsupportedError,
            "differentiable=True",
        ),
        (
            lambda at: NVMeOptimizer(parameters(), torch.optim.LBFGS, paths=at),
            UnsupportedError,
            "LBFGS cannot be used",
        ),
        (
            lambda at: NVMeOptimizer(parameters(), torch.optim.SparseAdam, paths=at),
            UnsupportedError,
            "SparseAdam cannot be used",
        ),
        (
            lambda at: NVMeOptimizer(
                [*parameters(), *parameters(torch.float64)], TogetherOptimizer, lr=0.0, paths=at
            ),
            UnsupportedError,
            "updates all parameters together",
        ),
        (
            lambda at: NVMeOptimizer([torch.nn.Parameter(torch.ones(3).to_sparse())], paths=at),
            UnsupportedError,
            "must be dense",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, make, error, said):
    with pytest.raises(error, match=said):
        make(tmp_path)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_twice_is_refused(tmp_path):
    with pytest.raises(UsageError, match="more than once"):
        NVMeOptimizer([*parameters()[:1]] * 2, paths=tmp_path)


def test_a_drive_without_room_is_refused(mounted):
    params = parameters(shapes=[(300, 1000)] * 10)
    with pytest.raises(NoSpaceError, match=r"training needs .*, or allow more host_memory"):
        NVMeOptimizer(params, paths=mounted("ext4-full"), host_memory="16MB")
    with NVMeOptimizer(params, paths=mounted("ext4-full")) as optimizer:  # all fit in memory
        set_gradients(params, 0)
        optimizer.step()
        assert optimizer.stats().bytes_written == 0


def test_options_that_come_to_be_wrong_are_refused_when_they_do(tmp_path):
    params = parameters()
    with NVMeOptimizer(params, paths=tmp_path) as optimizer:
        optimizer.param_groups[0]["capturable"] = True
        set_gradients(params, 0)
        with pytest.raises(UnsupportedError, match="capturable"):
            optimizer.step()


@pytest.mark.parametrize("state_format", ["exact", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_are_saved_after_all_was_moved_to_another_device(tmp_path, dtype, state_format):
    """Lightning's `save_checkpoint` after `fit`: it has moved states and model to the CPU by then."""
    params = parameters(dtype)
    with NVMeOptimizer(params, paths=tmp_path, state_format=state_format) as optimizer:
        train(params, optimizer, steps=3)
        expected = copy.deepcopy(optimizer.state_dict()["state"])
        for bucket in optimizer._steps.binding.buckets:
            bucket.home = bucket.device = torch.device("cuda", 0)  # as if they had been there
        for weight in optimizer._steps.binding.weights:
            weight.form = weight.form._replace(device=torch.device("cuda", 0))
        for state in optimizer.state.values():
            for key, value in state.items():
                if key != "step":
                    state[key] = value.to("cpu", copy=True)
        for parameter in params:
            parameter.data = parameter.data.clone()
        assert unlike(optimizer.state_dict()["state"], expected) == []
        train(params, optimizer, steps=1, first=3)  # on the CPU from now on
    moved, plain = params, parameters(dtype)
    with NVMeOptimizer(plain, paths=tmp_path, state_format=state_format) as optimizer:
        train(plain, optimizer, steps=4)
    assert differing(moved, plain) == []


def test_it_is_not_copied(tmp_path):
    with NVMeOptimizer(parameters(), paths=tmp_path) as optimizer:
        with pytest.raises(UsageError, match="cannot be copied"):
            copy.deepcopy(optimizer)
        with pytest.raises(UsageError, match="cannot be pickled"):
            pickle.dumps(optimizer)
        with pytest.raises(UsageError, match="cannot be pickled"):
            torch.save(optimizer, io.BytesIO())


def test_after_close_nothing_goes(tmp_path):
    params = parameters()
    optimizer = NVMeOptimizer(params, paths=tmp_path)
    optimizer.close()
    optimizer.close()
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(UsageError, match="closed"):
            use()


@pytest.mark.parametrize("in_backward", [False, True])
def test_garbage_gives_its_memory_back(tmp_path, in_backward):
    params = parameters()
    optimizer = NVMeOptimizer(params, paths=tmp_path, step_in_backward=in_backward)
    train(params, optimizer, steps=1)
    pool = weakref.ref(optimizer._steps.tier._pool)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    del optimizer, scheduler
    gc.collect()
    assert pool() is None
    sum(parameter.sum() for parameter in params).backward()  # its hooks have no optimizer to call
    assert list(tmp_path.iterdir()) == []


def test_several_drives(tmp_path):
    plain, ours = parameters(), parameters()
    train(plain, torch.optim.AdamW(plain))
    places = [tmp_path / "one", str(tmp_path / "two")]
    for place in places:
        Path(place).mkdir()
    with smallest(lambda cap: NVMeOptimizer(ours, paths=places, host_memory=cap)) as optimizer:
        train(ours, optimizer)
        assert all(optimizer._steps.tier.store.bytes_on(str(place)) > 0 for place in places)
    assert differing(ours, plain) == []
