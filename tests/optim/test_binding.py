"""`NVMeOptimizer` follows its parameters as `torch.optim` does: programs that move, cast, replace,
freeze and regroup them, before the first step and between steps, give the bits of the plain
optimizer.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from covering import covering
from reference import OPTIMIZERS, Reference, differing, parameters, set_gradients, train, unlike

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.optim import NVMeOptimizer

Make = Callable[..., torch.optim.Optimizer]

MODES: dict[str, dict[str, Any]] = {
    "after": {},
    "overlapped": {"overlap_step": True},
    "in backward": {"step_in_backward": True},
    "provisional": {"step_in_backward": "provisional"},
    "in both": {"step_in_backward": True, "overlap_step": True},
    "accumulated": {"accumulate": "host"},
}
QUICK = ("after", "in backward")
EACH_MODE = [
    pytest.param(mode, marks=[] if mode in QUICK else [pytest.mark.slow]) for mode in MODES
]
CAP = 180_000  # which does not hold the states of `net_of`
AFTER_STEPS = ("sgd-momentum", "adagrad", "adadelta", "rprop", "asgd")


def net_of(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 200),
        torch.nn.Tanh(),
        torch.nn.Linear(200, 100),
        torch.nn.Linear(100, 3),
    )


def step(net: torch.nn.Module, optimizer: Any, number: int) -> None:
    net(_batch(number, net)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


compared = functools.partial(reference.compared, host_memory=CAP)


def changed_between(place, mode, change, kind=torch.optim.AdamW, made=net_of):
    """Where ten steps of a net that *made* makes differ from the plain optimizer's; *change* gets the
    net, its optimizer and the number of the step that follows.
    """

    def program(make: Make) -> list[torch.Tensor]:
        net = made()
        optimizer = make(net.parameters())
        for number in range(10):
            change(net, optimizer, number)
            step(net, optimizer, number)
        return list(net.parameters())

    return compared(program, place, kind, **MODES[mode])


def resumed(
    net: torch.nn.Module, optimizer: Any, make: Make, again: torch.nn.Module
) -> tuple[torch.nn.Module, Any]:
    """*again* in place of *net*, with another optimizer that has the states of *optimizer*."""
    saved = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    again.load_state_dict(saved[0])
    made = make(again.parameters())
    made.load_state_dict(saved[1])
    return again, made


@pytest.mark.outside(
    program="a model that is cast to {dtype} after the optimizer was made, updates: {mode}",
    reference="`torch.optim.AdamW`",
    steps="20, resumed after 10",
    ranks=1,
)
@covering(mode=list(MODES), dtype=[torch.float64, torch.bfloat16], pairs=False)
def test_a_model_that_is_cast_after_the_optimizer_was_made(tmp_path, mode, dtype):
    """20 steps, with a checkpoint in the middle, which a model that is cast afterwards loads."""

    def program(make: Make) -> list[torch.Tensor]:
        net = net_of()
        optimizer = make(net.parameters())
        net.to(dtype)
        for number in range(10):
            step(net, optimizer, number)
        net, optimizer = resumed(net, optimizer, make, net_of(1).to(dtype))
        for number in range(10, 20):
            step(net, optimizer, number)
        return list(net.parameters())

    assert compared(program, tmp_path, masters=False, **MODES[mode]) == []


@pytest.mark.parametrize("mode", EACH_MODE)
def test_one_that_assigns_data_of_another_dtype_and_size(tmp_path, mode):
    def program(make: Make) -> list[torch.Tensor]:
        net = net_of()
        optimizer = make(net.parameters())
        for layer in net[2:]:
            layer.weight.data, layer.bias.data = (
                layer.weight.data.double(),
                layer.bias.data.double(),
            )
        net[3].weight.data = torch.cat(
            [net[3].weight.data, torch.ones(4, 100, dtype=torch.float64)]
        )
        net[3].bias.data = torch.cat([net[3].bias.data, torch.ones(4, dtype=torch.float64)])
        for number in range(8):
            hidden = net[1](net[0](torch.randn(8, 40, generator=_generator(number)))).double()
            net[3](net[2](hidden)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(net.parameters())

    assert compared(program, tmp_path, **MODES[mode]) == []


@covering(mode=["after", "overlapped", "in backward"], name=AFTER_STEPS)
def test_a_cast_between_steps_keeps_states_as_torch_does(tmp_path, name, mode):
    """These go on with states of the old dtype."""

    def change(net, _, number):
        if number in (3, 7):
            net.to(torch.float64 if number == 3 else torch.float32)

    assert changed_between(tmp_path, mode, change, OPTIMIZERS[name]) == []


@pytest.mark.parametrize("mode", ["after", "overlapped", "provisional", "accumulated"])
def test_a_cast_between_backward_and_step(tmp_path, mode):
    def change(net, optimizer, number):
        if number in (3, 7):
            net(_batch(number, net)).square().mean().backward()
            net.to(torch.float64 if number == 3 else torch.float32)
            optimizer.step()
            optimizer.zero_grad()

    assert changed_between(tmp_path, mode, change, OPTIMIZERS["sgd-momentum"]) == []


@covering(pairs=False, mode=list(MODES), state_format=["exact", "split", "compact", "compact24"])
def test_a_cast_between_steps_casts_states_where_torch_fails(tmp_path, state_format, mode):
    """It goes on from the states that it has, as a run that is resumed in the new dtype does."""
    ends = []
    for resumes in (False, True):
        net = net_of()
        options = {"paths": tmp_path, "state_format": state_format, "host_memory": 400_000}
        optimizer = NVMeOptimizer(net.parameters(), **options, **MODES[mode])
        for number in range(3):
            step(net, optimizer, number)
        if resumes:
            states = copy.deepcopy(optimizer.state_dict())
            optimizer.close()
            net.to(torch.bfloat16)
            optimizer = NVMeOptimizer(net.parameters(), **options, **MODES[mode])
            optimizer.load_state_dict(states)
        else:
            net.to(torch.bfloat16)
        for number in range(3, 8):
            step(net, optimizer, number)
        optimizer.state_dict()
        optimizer.close()
        ends.append(list(net.parameters()))
    assert differing(*ends) == []


def test_masters_follow_a_cast_to_another_16_bit_dtype_and_back_to_32(tmp_path):
    net = net_of().to(torch.bfloat16)
    with NVMeOptimizer(net.parameters(), paths=tmp_path, lr=1e-4) as optimizer:
        for number in range(3):
            step(net, optimizer, number)
        net.to(torch.float32)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.param_groups[0]["lr"] = 0.0
        step(net, optimizer, 3)
        assert differing(list(net.parameters()), before) == []
        assert all("master" not in state for state in optimizer.state.values())
        assert {int(state["step"]) for state in optimizer.state.values()} == {4}


def test_states_show_what_they_are_after_a_cast(tmp_path):
    """A state dictionary and a placeholder that the program kept still belong to the parameter."""
    net = net_of()
    with NVMeOptimizer(net.parameters(), paths=tmp_path) as optimizer:
        step(net, optimizer, 0)
        parameter = net[0].weight
        kept = optimizer.state[parameter]
        average = kept["exp_avg"].clone()
        net.to(torch.float64)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        assert kept["exp_avg"].dtype == torch.float64
        assert torch.equal(kept["exp_avg"].clone(), average.double())
        kept["exp_avg"].zero_()
        assert not optimizer.state[parameter]["exp_avg"].clone().any()


@pytest.mark.outside(
    program="one block of a model after another, as BAdam trains them, updates: {mode}",
    reference="`torch.optim.AdamW`",
    steps="20, resumed after 11",
    ranks=1,
)
@pytest.mark.parametrize("mode", EACH_MODE)
def test_blocks_of_a_model_that_are_trained_in_turn(tmp_path, mode):
    """As by BAdam: new fp32 parameters for the trained block, in separate groups, and no states.
    20 steps, with a checkpoint that another optimizer loads.
    """

    def program(make: Make) -> list[torch.Tensor]:
        net = net_of()
        optimizer = make(net.parameters())
        blocks = [net[0], net[2], net[3]]
        copies: dict[Any, torch.nn.Parameter] = {}
        for number in range(20):
            if number % 3 == 0:
                block = blocks[number // 3 % 3]
                net.requires_grad_(False)
                block.requires_grad_(True)
                optimizer.state = defaultdict(dict)
                options = {
                    key: value
                    for key, value in optimizer.param_groups[0].items()
                    if key != "params"
                }
                copies = {
                    one: torch.nn.Parameter(one.detach().float().clone())
                    for one in block.parameters()
                }
                optimizer.param_groups = [
                    {**options, "params": [copies[block.weight]], "weight_decay": 0.1},
                    {**options, "params": [copies[block.bias]], "weight_decay": 0.0},
                ]
            batch = torch.randn(8, 40, generator=_generator(number))
            net(batch).square().mean().backward()
            for one, other in copies.items():
                other.grad, one.grad = one.grad, None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for one, other in copies.items():
                    one.copy_(other)
            if number == 10:
                saved = copy.deepcopy(optimizer.state_dict())
                groups = optimizer.param_groups
                optimizer = make([{**group, "params": [*group["params"]]} for group in groups])
                optimizer.load_state_dict(saved)
        return list(net.parameters())

    assert compared(program, tmp_path, **MODES[mode]) == []


@covering(
    pairs=False,
    mode=list(MODES),
    name=["adamw", "adam-amsgrad", "sgd-momentum", "adafactor"],
)
def test_parameters_that_leave_and_come_back_have_their_states_again(tmp_path, name, mode):
    def change(net, optimizer, number):
        net.zero_grad()
        everything = list(net.parameters())
        chosen = everything[:3] if number % 7 in (2, 3) else everything[2:]
        if number % 7 > 4:
            chosen = everything[::-1]
        optimizer.param_groups[0]["params"] = list(chosen)

    assert changed_between(tmp_path, mode, change, OPTIMIZERS[name]) == []


@pytest.mark.parametrize("mode", EACH_MODE)
def test_states_that_a_program_moves_to_the_parameter_in_place_of_another(tmp_path, mode):
    def change(net, optimizer, number):
        for layer in {3: (net[0], net[3]), 7: (net[2],)}.get(number, ()):
            old, new = layer.weight, torch.nn.Parameter(layer.weight.detach().clone())
            layer.weight = new
            for group in optimizer.param_groups:
                group["params"] = [new if one is old else one for one in group["params"]]
            optimizer.state[new] = optimizer.state.pop(old)

    assert changed_between(tmp_path, mode, change) == []


@pytest.mark.parametrize("mode", EACH_MODE)
def test_parameters_that_are_replaced_begin_anew_as_in_torch(tmp_path, mode):
    def change(net, optimizer, number):
        net.zero_grad()
        if number in (4, 7):
            values = {key: value.clone() for key, value in net.state_dict().items()}
            net.load_state_dict(values, assign=True)
        if number == 7:
            optimizer.param_groups[0]["params"] = list(net.parameters())

    assert changed_between(tmp_path, mode, change) == []


@covering(pairs=False, mode=list(MODES), name=["adamw", "lion"])
def test_layers_that_are_unfrozen_one_after_the_other(tmp_path, name, mode):
    def frozen():
        net = net_of().requires_grad_(False)
        net[3].requires_grad_(True)
        return net

    def change(net, _, number):
        if number in (2, 4):
            net[2 if number == 2 else 0].requires_grad_(True)
        if number in (6, 8):
            net[3].requires_grad_(number == 8)

    assert changed_between(tmp_path, mode, change, OPTIMIZERS[name], frozen) == []


@pytest.mark.parametrize("mode", EACH_MODE)
def test_parameters_that_change_groups(tmp_path, mode):
    def change(net, optimizer, number):
        everything = list(net.parameters())
        if number == 0:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))], "lr": 0.1})
        first, second = optimizer.param_groups
        if number == 3:
            second["params"] = [*everything[4:], *second["params"]]
            first["params"] = everything[:4]
        if number == 5:
            optimizer.param_groups = [second, first]
        if number == 8:
            second["params"].insert(0, first["params"].pop())

    assert changed_between(tmp_path, mode, change) == []


@pytest.mark.parametrize("mode", EACH_MODE)
def test_adapters_that_are_attached_and_merged(tmp_path, mode):
    """As LoRA: the weights are frozen for some steps, and then changed by the trained layers."""

    def program(make: Make) -> list[torch.Tensor]:
        net = net_of()
        optimizer = make(net.parameters())
        layer, adapter = net[0], None
        for number in range(10):
            if number == 3:
                net.requires_grad_(False)
                torch.manual_seed(5)
                adapter = [
                    torch.nn.Parameter(torch.randn(200, 4) / 10),
                    torch.nn.Parameter(torch.zeros(4, 40)),
                ]
                optimizer.add_param_group({"params": adapter, "weight_decay": 0.0})
            if number == 7 and adapter is not None:
                with torch.no_grad():
                    layer.weight += adapter[0] @ adapter[1]
                optimizer.param_groups.pop()
                net.requires_grad_(True)
                adapter = None
            batch = torch.randn(8, 40, generator=_generator(number))
            weight = layer.weight if adapter is None else layer.weight + adapter[0] @ adapter[1]
            hidden = torch.nn.functional.linear(batch, weight, layer.bias)
            net[3](net[2](hidden.tanh())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(net.parameters())

    assert compared(program, tmp_path, **MODES[mode]) == []


@pytest.mark.parametrize("mode", EACH_MODE)
def test_a_model_from_meta_whose_parameters_keep_their_objects(tmp_path, mode):
    """Ten steps, with a checkpoint that another optimizer loads."""

    def program(make: Make) -> list[torch.Tensor]:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with torch.device("meta"):
                net = net_of()
            optimizer = make(net.parameters())
            net.to_empty(device="cpu")
            torch.manual_seed(3)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.copy_(torch.randn(parameter.shape) / 8)
            for number in range(10):
                if number == 3:
                    net.to(torch.float64)
                    optimizer.state.clear()
                if number == 6:
                    net, optimizer = resumed(net, optimizer, make, net_of(1).double())
                step(net, optimizer, number)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
        return list(net.parameters())

    assert compared(program, tmp_path, **MODES[mode]) == []


def test_a_model_on_meta_that_is_replaced_is_reported(tmp_path):
    with torch.device("meta"):
        net = net_of()
    with NVMeOptimizer(net.parameters(), paths=tmp_path) as optimizer:
        assert optimizer.state_dict()["state"] == {}
        net.to_empty(device="cpu")
        net.apply(lambda one: one.reset_parameters() if hasattr(one, "reset_parameters") else None)
        with pytest.raises(
            UnsupportedError, match="all parameters of the optimizer are on the meta"
        ):
            step(net, optimizer, 0)
        net.zero_grad()
        optimizer.param_groups[0]["params"] = list(net.parameters())
        step(net, optimizer, 0)
        assert len(optimizer.state_dict()["state"]) == 6


def test_states_that_are_loaded_before_the_parameters_are_somewhere(tmp_path):
    trained = net_of()
    plain = torch.optim.AdamW(trained.parameters())
    step(trained, plain, 0)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.device("meta"):
            net = net_of()
        with NVMeOptimizer(net.parameters(), paths=tmp_path) as optimizer:
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
            net.to_empty(device="cpu")
            net.load_state_dict(trained.state_dict())
            for one, other in ((trained, plain), (net, optimizer)):
                step(one, other, 1)
            assert unlike(optimizer.state_dict()["state"], plain.state_dict()["state"]) == []
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert differing(list(net.parameters()), list(trained.parameters())) == []


@pytest.mark.parametrize("mode", EACH_MODE)
def test_a_parameter_of_another_size_is_refused_by_name_while_it_has_states(tmp_path, mode):
    net = net_of()
    with NVMeOptimizer(net.named_parameters(), paths=tmp_path, **MODES[mode]) as optimizer:
        step(net, optimizer, 0)
        kept = net[3].bias.data, net[3].weight.data
        net[3].bias.data, net[3].weight.data = torch.ones(5), torch.ones(5, 100)
        with pytest.raises(
            UsageError, match=r"parameter '3.weight' has become one of shape \[5, 100\]"
        ):
            optimizer.state_dict()
        with pytest.raises(UsageError, match=r"parameter '3.weight' has become one of shape"):
            step(net, optimizer, 1)
        for parameter in net[3].parameters():
            optimizer.state.pop(parameter)
        optimizer.step()  # with the gradients that there are
        net[3].bias.data, net[3].weight.data = kept
        gc.collect()  # the graph of the step that was refused, which expects the other size
        for parameter in net[3].parameters():
            optimizer.state.pop(parameter)
        optimizer.zero_grad()
        step(net, optimizer, 2)
        counts = [int(optimizer.state[parameter]["step"]) for parameter in net.parameters()]
    assert counts == [3, 3, 3, 3, 1, 1]


def test_what_cannot_be_bound_keeps_its_states_until_it_can(tmp_path):
    params, plain = parameters(), parameters()
    reference = torch.optim.AdamW(plain)
    with NVMeOptimizer(params, paths=tmp_path) as optimizer:
        for one, other in ((params, optimizer), (plain, reference)):
            train(one, other, steps=2)
        wrong = torch.nn.Parameter(torch.ones(3).to_sparse())
        optimizer.param_groups[0]["params"][2] = wrong
        set_gradients(params, 2)
        for use in (optimizer.step, lambda: optimizer.load_state_dict(reference.state_dict())):
            with pytest.raises(UnsupportedError, match="must be dense"):
                use()
        optimizer.param_groups[0]["params"][:] = params
        for one, other in ((params, optimizer), (plain, reference)):
            train(one, other, steps=2, first=2)
        assert unlike(optimizer.state_dict()["state"], reference.state_dict()["state"]) == []
    assert differing(params, plain) == []


@pytest.mark.parametrize("mode", QUICK)
def test_the_model_before_sharding_is_garbage_once_it_is_replaced(tmp_path, mode):
    """On ranks, nothing but the groups holds plain parameters before the first step."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net, sharded = net_of(), net_of()
        before = weakref.ref(net[0].weight)
        with NVMeOptimizer(net.parameters(), paths=tmp_path, **MODES[mode]) as optimizer:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.param_groups[0]["params"] = list(sharded.parameters())
            del net
            gc.collect()
            assert before() is None
            step(sharded, optimizer, 0)
            step(sharded, optimizer, 1)
        plain = net_of()
        reference = torch.optim.AdamW(plain.parameters())
        for number in range(2):
            step(plain, reference, number)
    finally:
        torch.distributed.destroy_process_group()
    assert differing(list(sharded.parameters()), list(plain.parameters())) == []


@pytest.mark.parametrize("mode", EACH_MODE)
def test_new_buckets_between_forward_and_backward_leave_the_graph_as_it_is(tmp_path, mode):
    """Of Adagrad, whose states are made, and packed with the masters, before its first step."""
    plain, ours = net_of().bfloat16(), net_of().bfloat16()
    reference = Reference(list(plain.parameters()), OPTIMIZERS["adagrad"])
    optimizer = None
    for number in range(4):
        losses = [net(_batch(number, net)).square().mean() for net in (plain, ours)]
        if optimizer is None:
            optimizer = NVMeOptimizer(
                ours.parameters(),
                OPTIMIZERS["adagrad"],
                paths=tmp_path,
                host_memory=CAP,
                **MODES[mode],
            )
        if number == 2:  # the biases leave
            reference.pairs = reference.pairs[::2]
            for one in (reference.optimizer, optimizer):
                one.param_groups[0]["params"] = one.param_groups[0]["params"][::2]
        for loss in losses:
            loss.backward()
        reference.step()
        optimizer.step()
        plain.zero_grad()
        ours.zero_grad()
    optimizer.close()
    assert differing(list(ours.parameters()), list(plain.parameters())) == []


def test_a_parameter_in_two_groups_is_refused(tmp_path):
    params = parameters()
    with NVMeOptimizer(params, paths=tmp_path) as optimizer:
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": params[:1]})
        set_gradients(params, 0)
        with pytest.raises(UsageError, match="more than once"):
            optimizer.step()
        optimizer.param_groups.pop()
        optimizer.step()


@pytest.mark.parametrize("mode", EACH_MODE)
def test_nothing_is_left_of_a_binding(tmp_path, mode):
    """Replaced parameters are garbage once they have no states, and their drive space is freed."""
    net = net_of()
    optimizer = NVMeOptimizer(net.parameters(), paths=tmp_path, host_memory=CAP, **MODES[mode])
    rooms = []
    for number in range(12):
        step(net, optimizer, number)
        optimizer.state.clear()
        net.load_state_dict(
            {key: value.clone() for key, value in net.state_dict().items()}, assign=True
        )
        optimizer.param_groups[0]["params"] = list(net.parameters())
        step(net, optimizer, number)
        rooms.append(len(optimizer._steps.tier.swapper.names()))
    assert rooms == rooms[:1] * 12
    optimizer.close()


def _batch(number: int, net: torch.nn.Module) -> torch.Tensor:
    return torch.randn(8, 40, generator=_generator(number)).to(next(net.parameters()).dtype)


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)
