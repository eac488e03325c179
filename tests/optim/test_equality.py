"""`NVMeOptimizer` with "exact" states: the bits that the same class gives in memory."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from covering import covering
from reference import (
    OPTIMIZERS,
    SHAPES,
    Reference,
    differing,
    parameters,
    set_gradients,
    smallest,
    taken_by_many_steps,
    tight,
    train,
    unlike,
)

from nvme_offload.errors import UnsupportedError
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.units import format_gb

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@covering(dtype=DTYPES, name=list(OPTIMIZERS))
def test_any_optimizer_with_any_budget(tmp_path, name, dtype):
    # which divides by the number of elements
    shapes = [shape for shape in SHAPES if 0 not in shape or name != "adafactor"]
    plain, roomy, ours = (parameters(dtype, shapes=shapes) for _ in range(3))
    reference = Reference(plain, OPTIMIZERS[name])
    train(plain, reference)
    with NVMeOptimizer(roomy, OPTIMIZERS[name], paths=tmp_path) as optimizer:
        train(roomy, optimizer)
        assert differing(roomy, plain) == []
        # everything fits
        assert (optimizer.stats().bytes_read, optimizer.stats().bytes_written) == (0, 0)
        states = optimizer.state_dict()["state"]
    with smallest(
        lambda cap: NVMeOptimizer(ours, OPTIMIZERS[name], paths=tmp_path, host_memory=cap)
    ) as optimizer:
        train(ours, optimizer)
        assert differing(ours, plain) == []
        expected = reference.optimizer.state_dict()["state"]
        if dtype != torch.float32:
            expected = {
                index: {**expected.get(index, {}), "master": master}
                for index, (_, master) in enumerate(reference.pairs)
            }
        assert unlike(states, expected) == []
        assert unlike(optimizer.state_dict()["state"], expected) == []


def test_the_smallest_budget_streams(tmp_path):
    params = parameters(torch.bfloat16)
    with smallest(lambda cap: NVMeOptimizer(params, paths=tmp_path, host_memory=cap)) as optimizer:
        train(params, optimizer)
        stats = optimizer.stats()
        elements = sum(parameter.numel() for parameter in params)
        assert stats.step == 3
        assert 12 * elements * 0.8 < stats.bytes_read < 12 * elements * 1.3
        assert 12 * elements * 0.8 < stats.bytes_written < 12 * elements * 1.3
        assert stats.peak_bytes < 12 * elements / 3
        assert f"read {format_gb(stats.bytes_read)} and wrote" in str(stats)


@covering(
    name=["adamw", "adamw-fused", "adamw-loop", "sgd-momentum", "adagrad", "adafactor", "lion"],
    dtype=[torch.bfloat16, torch.float16],
)
def test_without_masters_it_is_the_plain_optimizer(tmp_path, name, dtype):
    shapes = [shape for shape in SHAPES if 0 not in shape]
    plain, ours, resumed = (parameters(dtype, shapes=shapes) for _ in range(3))
    reference = OPTIMIZERS[name](plain)
    train(plain, reference)
    with smallest(
        lambda cap: NVMeOptimizer(
            ours, OPTIMIZERS[name], paths=tmp_path, host_memory=cap, masters=False
        )
    ) as optimizer:
        train(ours, optimizer)
        assert differing(ours, plain) == []
        state = optimizer.state_dict()
        assert unlike(state["state"], reference.state_dict()["state"]) == []
        if name == "adamw":
            elements = sum(parameter.numel() for parameter in ours)
            assert 4 * elements * 0.8 < optimizer.stats().bytes_read < 4 * elements * 1.3
    with torch.no_grad():
        for parameter, value in zip(resumed, ours, strict=True):
            parameter.copy_(value)
    with NVMeOptimizer(resumed, OPTIMIZERS[name], paths=tmp_path, masters=False) as optimizer:
        optimizer.load_state_dict(state)
        train(plain, reference, first=3)
        train(resumed, optimizer, first=3)
    assert differing(resumed, plain) == []


def test_adafactors_eps_of_two_dtypes(tmp_path):
    """torch's takes the dtype of the group's first parameter."""
    kind = torch.optim.Adafactor
    plain, ours = (
        [*parameters(shapes=[(5, 7)]), *parameters(torch.bfloat16)[:3]] for _ in range(2)
    )
    with pytest.raises(UnsupportedError, match=r"torch\.bfloat16 and torch\.float32: pass eps"):
        NVMeOptimizer(ours, kind, paths=tmp_path, masters=False)
    NVMeOptimizer(ours, kind, paths=tmp_path).close()  # all updates are in float32
    for options in ({"eps": (1e-5, 1e-3)}, {}):
        both = [
            params if options else [{"params": params[:1]}, {"params": params[1:]}]
            for params in (plain, ours)
        ]
        train(plain, kind(both[0], **options))
        with NVMeOptimizer(both[1], kind, paths=tmp_path, masters=False, **options) as optimizer:
            train(ours, optimizer)
        assert differing(ours, plain) == []


def test_without_masters_8_bits_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="keeps float32 states; AdamW has"):
        NVMeOptimizer(
            parameters(torch.bfloat16), paths=tmp_path, masters=False, state_format="compact"
        )


def test_frozen_parameters_take_no_room(tmp_path):
    params = parameters(torch.bfloat16)
    for parameter in params[2:]:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in params]
    with NVMeOptimizer(params, paths=tmp_path, host_memory=200_000) as optimizer:
        train(params[:2], optimizer)
        assert sorted(optimizer.state_dict()["state"]) == [0, 1]
        assert (
            optimizer.stats().peak_bytes
            <= 12 * sum(parameter.numel() for parameter in params[:2]) + 4096
        )
        assert differing(params[2:], before[2:]) == []
        assert differing(params[:1], before[:1]) == [0]
        params[2].requires_grad_(True)  # thawed
        train(params[:3], optimizer, first=3)
        assert sorted(optimizer.state_dict()["state"]) == [0, 1, 2]


FUSED = {
    "adamw": functools.partial(torch.optim.AdamW, fused=True),
    "adam": functools.partial(torch.optim.Adam, fused=True, amsgrad=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, fused=True),
    "adamw-loop": functools.partial(torch.optim.AdamW, foreach=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_states_have_the_memory_format_of_the_weight(tmp_path, name, dtype):
    """Fused kernels go by the order of memory, in the weights and in the states."""

    def images():
        shapes = ((16, 3, 5, 5), (7,), (8, 16, 3, 3))
        made = [
            torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            for shape in shapes
        ]
        return [
            torch.nn.Parameter(one.to(memory_format=torch.channels_last) if one.dim() == 4 else one)
            for one in made
        ]

    def train_images(params, optimizer, first):
        for step in range(first, first + 3):
            generator = torch.Generator().manual_seed(step)
            for parameter in params:  # with the strides that autograd gives them
                parameter.grad = torch.empty_like(parameter).copy_(
                    torch.randn(parameter.shape, generator=generator)
                )
            optimizer.step()

    plain, ours = images(), images()
    reference = Reference(plain, FUSED[name])
    train_images(plain, reference, 0)
    with NVMeOptimizer(ours, FUSED[name], paths=tmp_path) as optimizer:
        train_images(ours, optimizer, 0)
        assert differing(ours, plain) == []
        state = optimizer.state_dict()
        for index, expected in reference.optimizer.state_dict()["state"].items():
            for key, value in expected.items():
                found = state["state"][index][key]
                assert (found.stride(), differing([found], [value])) == (value.stride(), []), key
        train_images(plain, reference, 3)
        resumed = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
        if dtype == torch.float32:
            again = FUSED[name](resumed)
            again.load_state_dict(state)
            train_images(resumed, again, 3)
            assert differing(resumed, plain) == []
        train_images(ours, optimizer, 3)
    assert differing(ours, plain) == []


def test_gradients_that_are_views(tmp_path):
    plain, ours = (
        parameters(torch.float32, shapes=[(64, 32), (50, 1000)]),
        parameters(torch.float32, shapes=[(64, 32), (50, 1000)]),
    )
    reference = torch.optim.AdamW(plain)
    with smallest(lambda cap: NVMeOptimizer(ours, paths=tmp_path, host_memory=cap)) as optimizer:
        for params, one in ((plain, reference), (ours, optimizer)):
            for parameter in params:
                parameter.grad = torch.linspace(-1, 1, parameter.shape[1]).expand(parameter.shape)
            one.step()
    assert differing(ours, plain) == []


def test_what_an_optimizer_begins_to_keep_later_on(tmp_path):
    plain, ours = parameters(torch.bfloat16), parameters(torch.bfloat16)
    reference = Reference(plain, torch.optim.SGD, lr=0.1)
    with NVMeOptimizer(
        ours, torch.optim.SGD, lr=0.1, paths=tmp_path, host_memory="1MB"
    ) as optimizer:
        for step, momentum in enumerate((0.0, 0.0, 0.9, 0.9)):
            reference.optimizer.param_groups[0]["momentum"] = optimizer.param_groups[0][
                "momentum"
            ] = momentum
            train(plain, reference, steps=1, first=step)
            train(ours, optimizer, steps=1, first=step)
        assert (
            unlike(
                reference.optimizer.state_dict()["state"][2]["momentum_buffer"],
                optimizer.state_dict()["state"][2]["momentum_buffer"],
            )
            == []
        )
    assert differing(ours, plain) == []


CHANGES = {
    "in place": lambda parameter: parameter.clamp_(-0.5, 0.5),
    "data": lambda parameter: parameter.data.clamp_(-0.5, 0.5),
    "data that stays": lambda parameter: setattr(parameter, "data", parameter.data.mul_(0.5)),
    "an older view": lambda parameter: parameter.kept.mul_(0.5),
}


@covering(
    change=list(CHANGES),
    name=["adamw", "adamw-loop", "sgd-momentum", "lion", "adafactor"],
    dtype=[torch.bfloat16, torch.float16],
    mode=[{}, {"step_in_backward": "provisional"}, {"overlap_step": True}],
    between=["nothing", "a state", "a load"],
)
def test_weights_that_the_program_changes_between_steps(
    tmp_path, change, name, dtype, mode, between
):
    shapes = [shape for shape in SHAPES if 0 not in shape]  # by which Adafactor divides
    plain, ours = parameters(dtype, shapes=shapes), parameters(dtype, shapes=shapes)
    reference = Reference(plain, OPTIMIZERS[name])
    with tight(ours, tmp_path, OPTIMIZERS[name], **mode) as optimizer:
        for params in (plain, ours):
            for parameter in params:
                parameter.kept = parameter.data
        for step in range(4):
            train(plain, reference, steps=1, first=step)
            train(ours, optimizer, steps=1, first=step)
            optimizer.synchronize()  # an older view does not wait
            with torch.no_grad():
                for params in (plain, ours):
                    for parameter in params:
                        CHANGES[change](parameter)
                # where they are other weights now, the masters are what the weights are
                for parameter, master in reference.pairs:
                    master.copy_(
                        torch.where(
                            master.to(parameter.dtype) == parameter, master, parameter.float()
                        )
                    )
            if between == "a state":  # of one of the parameters of a bucket
                state = optimizer.state[ours[0]]
                key = next(key for key, value in state.items() if torch.is_tensor(value))
                state[key] = state[key].clone()
        if between == "a load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(plain, reference, steps=1, first=9)
        train(ours, optimizer, steps=1, first=9)
    assert differing(ours, plain) == []


def test_autograd_knows_of_updates_in_place(tmp_path):
    params = parameters(shapes=[(4, 4)])
    with NVMeOptimizer(params, paths=tmp_path) as optimizer:
        loss = (params[0] * params[0]).sum()
        set_gradients(params, 0)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_budget_is_held_to(tmp_path):
    params = parameters(torch.bfloat16, shapes=[(1000, 100)] * 10)
    with NVMeOptimizer(params, paths=tmp_path, host_memory="2MB") as optimizer:
        train(params, optimizer)
        assert optimizer._steps.tier._pool.nbytes <= 2_000_000 * 7 / 8 + 4096
        assert optimizer.stats().peak_bytes <= 2_000_000 * 7 / 8 + 4096
        assert optimizer.stats().bytes_read >= 12_000_000 - 2_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "element_bytes"),
    [
        # which allocates memory to compute, and the C library keeps that
        ({"foreach": False, "fused": False}, 12),
        ({"fused": True, "state_format": "split"}, 10),
        ({"fused": True, "state_format": "compact"}, 4),
        ({"fused": True, "state_format": "compact24"}, 3),
    ],
    ids=str,
)
def test_many_steps_take_no_more_than_the_budget(tmp_path, options, element_bytes):
    """With state dicts and saves."""
    taken, states = taken_by_many_steps(
        tmp_path,
        shapes=[(1024, 1024)] * 12,
        dtype="bfloat16",
        optimizer="torch.optim.AdamW",
        host_memory="30MB",
        options=options,
    )
    assert states > element_bytes * 12e6
    assert taken < 30e6 * 1.2
