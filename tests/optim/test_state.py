"""`optimizer.state`: reading, writing, replacing, removing and restoring an entry behaves as in
memory, or is refused immediately.
"""

from __future__ import annotations

import copy
import functools
import io
import sys
from pathlib import Path

import pytest
import torch
from processes import finished
from reference import Reference, differing, parameters, tight, train, unlike

from nvme_offload.errors import UsageError

SHAPES = [(40, 30), (7,), (300, 100), (64, 64)]  # one of which is cut


def zero(state):
    state["exp_avg"].zero_()


def prune(state):
    state["exp_avg"].mul_(state["exp_avg_sq"] > state["exp_avg_sq"].mean())


def through_a_view(state):
    state["exp_avg"].view(-1)[:5].fill_(0.5)
    state["exp_avg_sq"].t()[0] = 2.0 if state["exp_avg_sq"].dim() > 1 else 1.0


def replace(state):
    state["exp_avg"] = torch.full_like(state["exp_avg"], 0.25)
    state["step"] = torch.tensor(1.0)


def update(state):
    state.update(exp_avg=state["exp_avg"] * 2)


def swap(state):
    state["exp_avg"], state["exp_avg_sq"] = (
        state["exp_avg_sq"].clone(),
        state["exp_avg"].clone().abs(),
    )


def count_anew(state):
    state["step"].fill_(1)


def foreach(state):
    torch._foreach_mul_([state["exp_avg"], state["exp_avg_sq"]], 0.5)


def clear(state):
    state.clear()


def set_data(state):
    state["exp_avg"].data = torch.full_like(state["exp_avg"], 0.25)


def through_a_copy(state):
    copy.copy(state["exp_avg"]).fill_(0.25)


CHANGES = [
    *(zero, prune, through_a_view, replace, update, swap, count_anew, foreach, clear),
    *(set_data, through_a_copy),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_a_state_takes_effect(tmp_path, change):
    plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain)
    with tight(ours, tmp_path) as optimizer:
        for params, one in ((plain, reference), (ours, optimizer)):
            train(params, one)
            for parameter in params[:3]:
                change(one.state[parameter])
            train(params, one, first=3)
    assert differing(ours, plain) == []


@pytest.mark.parametrize("mode", [{}, {"step_in_backward": "provisional"}], ids=str)
def test_a_change_of_one_state_leaves_the_dtypes_of_others(tmp_path, mode):
    """NAdam keeps mu_product in fp32 with 16-bit parameters, of which load_state_dict makes 16
    bits.
    """
    plain, ours = (parameters(torch.bfloat16, shapes=SHAPES) for _ in range(2))
    reference = torch.optim.NAdam(plain, lr=0.01)
    with tight(ours, tmp_path, torch.optim.NAdam, lr=0.01, masters=False, **mode) as optimizer:
        for params, one in ((plain, reference), (ours, optimizer)):
            train(params, one, 2)
            for parameter in params:
                one.state[parameter]["exp_avg"].mul_(0.5)
            train(params, one, 2, first=2)
        assert unlike(optimizer.state_dict()["state"], reference.state_dict()["state"]) == []
    assert differing(ours, plain) == []


def test_momentum_may_be_reset_by_pop(tmp_path):
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = make(plain)
    with tight(ours, tmp_path, make) as optimizer:
        for params, one in ((plain, reference), (ours, optimizer)):
            train(params, one)
            for parameter in params[1:3]:
                assert one.state[parameter].pop("momentum_buffer").shape == parameter.shape
            one.state.pop(params[0])
            train(params, one, first=3)
            one.state.clear()
            train(params, one, first=6)
    assert differing(ours, plain) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_read_is_what_is_there(tmp_path, dtype):
    plain, ours = parameters(dtype, shapes=SHAPES), parameters(dtype, shapes=SHAPES)
    reference = Reference(plain, torch.optim.AdamW)
    train(plain, reference)
    with tight(ours, tmp_path) as optimizer:
        train(ours, optimizer)
        for parameter, (_, master) in zip(ours, reference.pairs, strict=True):
            state, expected = optimizer.state[parameter], reference.optimizer.state[master]
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[key].clone(), expected[key])
                assert torch.equal(state[key], expected[key])
                assert float(state[key].norm()) == float(expected[key].norm())
                assert state[key].flatten()[3].item() == expected[key].flatten()[3].item()
                assert [part.sum().item() for part in state[key].chunk(2)] == [
                    part.sum().item() for part in expected[key].chunk(2)
                ]
                saved = io.BytesIO()
                torch.save(state[key], saved)
                saved.seek(0)
                assert torch.equal(torch.load(saved), expected[key])
            if dtype == torch.bfloat16:
                assert torch.equal(state["master"], master)
        assert optimizer.state[ours[0]]["exp_avg"] is optimizer.state[ours[0]]["exp_avg"]


def test_a_clone_is_a_snapshot_and_a_move_is_not(tmp_path):
    params = parameters(shapes=SHAPES)
    with tight(params, tmp_path) as optimizer:
        train(params, optimizer)
        state = optimizer.state[params[2]]
        snapshot, moved = state["exp_avg"].clone(), copy.deepcopy(state["exp_avg"])
        before = snapshot.clone()
        assert torch.equal(moved, before)
        with pytest.raises(
            UsageError, match="would change a copy of a state that is still on the drive"
        ):
            moved.zero_()
        train(params, optimizer, steps=1, first=3)
        assert torch.equal(snapshot, before)
        assert not torch.equal(state["exp_avg"], before)
        with pytest.raises(
            UsageError,
            match="was moved before an update, and its values have changed since",
        ):
            moved.sum()
        with pytest.raises(UsageError, match="cannot be put into state: put in a clone"):
            state["exp_avg"] = moved
        state["exp_avg"] = snapshot
        train(params[:2], optimizer, steps=0)
        assert torch.equal(optimizer.state_dict()["state"][2]["exp_avg"], before)


OTHER_VALUES = {
    "rounded": lambda one: one.bfloat16().to(one.dtype),
    "turned": lambda one: one.t(),
    "moved, rounded and turned": lambda one: one.cpu().half().t().to(one.dtype),
    "the same": lambda one: one.double().detach().to(one.dtype),
}


@pytest.mark.parametrize("way", OTHER_VALUES)
@pytest.mark.parametrize("how", ["item", "whole"])
def test_a_rounding_or_a_view_of_a_state_replaces_it(tmp_path, way, how):
    ours, plain = (parameters(shapes=SHAPES) for _ in range(2))
    in_memory = torch.optim.AdamW(plain, lr=1e-2)
    with tight(ours, tmp_path, lr=1e-2) as optimizer:
        for params, one in ((ours, optimizer), (plain, in_memory)):
            train(params, one)
            state = one.state[params[3]]
            value = OTHER_VALUES[way](state["exp_avg"])
            if how == "item":
                state["exp_avg"] = value
            else:
                one.state[params[3]] = {**state, "exp_avg": value}
            train(params, one, first=3)
        assert differing(ours, plain) == []
        assert unlike(optimizer.state_dict()["state"], in_memory.state_dict()["state"]) == []


MEMORY = {
    "data of another shape": lambda one: setattr(one, "data", torch.zeros(3)),
    "share_memory_": lambda one: one.share_memory_(),
    "DLPack": torch.from_dlpack,
    "address": lambda one: one.data_ptr(),
    "storage": lambda one: one.untyped_storage(),
    "array": lambda one: one.numpy(),
    "resize_": lambda one: one.resize_(3),
    "t_": lambda one: one.t_(),
    "set_": lambda one: one.set_(torch.zeros(3)),
}


@pytest.mark.parametrize("use", MEMORY)
def test_what_uses_the_memory_of_a_state_is_refused(tmp_path, use):
    """Some of these would end the process, others be lost without a word."""
    plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    train(plain, torch.optim.AdamW(plain))
    with tight(ours, tmp_path) as optimizer:
        train(ours, optimizer, steps=2)
        with pytest.raises(UsageError, match=r"cannot be done to the state 'exp_avg'.*clone\(\)"):
            MEMORY[use](optimizer.state[ours[0]]["exp_avg"])
        train(ours, optimizer, steps=1, first=2)
    assert differing(ours, plain) == []


@pytest.mark.parametrize("mode", [{}, {"overlap_step": True}, {"step_in_backward": "provisional"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_may_exchange_their_states(tmp_path, dtype, mode):
    shapes = [(300, 100), (7,), (40, 30), (300, 100)]  # two of which are cut
    plain, ours = parameters(dtype, shapes=shapes), parameters(dtype, shapes=shapes)
    reference = Reference(plain, torch.optim.AdamW, lr=0.1)
    first, *_, last = (master for _, master in reference.pairs)
    with tight(ours, tmp_path, lr=0.1, **mode) as optimizer:
        for number in (0, 3, 6):
            train(plain, reference, first=number)
            train(ours, optimizer, first=number)
            for state, one, other in (
                (reference.optimizer.state, first, last),
                (optimizer.state, ours[0], ours[3]),
            ):
                state[one], state[other] = state[other], state[one]
                state[one]["exp_avg"].mul_(0.5)  # which is not the other's any more
        train(plain, reference, first=9)
        train(ours, optimizer, first=9)
        optimizer.synchronize()
        assert differing(ours, plain) == []
        state = optimizer.state
        with pytest.raises(UsageError, match="another parameter or another optimizer"):
            state[ours[0]]["exp_avg"] = state[ours[3]]["exp_avg"]


def test_a_state_cannot_be_swapped(tmp_path):
    params = parameters(shapes=SHAPES)
    with tight(params, tmp_path) as optimizer:
        train(params, optimizer)
        state = optimizer.state[params[0]]
        with pytest.raises(RuntimeError, match="Cannot swap"):
            torch.utils.swap_tensors(state["exp_avg"], torch.ones_like(params[0]))
        with pytest.raises(RuntimeError, match="Cannot swap"):
            torch.utils.swap_tensors(state["exp_avg"], state["exp_avg_sq"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["state", "gradient"])
def test_every_use_has_the_same_effect_or_is_refused(tmp_path, kind):
    """All methods of a tensor, in a process that may end by a signal."""
    ran = finished([sys.executable, Path(__file__).parent / "uses_of_tensors.py", tmp_path, kind])
    found = [line.strip() for line in ran.stdout.replace("\r", "\n").splitlines()]
    assert ran.returncode == 0, (found[-1], ran.stderr)
    assert found[-1] == "done"
    assert [line for line in found if " instead of " in line] == []


def test_what_cannot_be_put_in_is_refused_there_and_then(tmp_path):
    params = parameters(shapes=SHAPES)
    with tight(params, tmp_path) as optimizer:
        train(params, optimizer)
        state = optimizer.state[params[0]]
        for put in (
            lambda: state.__setitem__("exp_avg", torch.zeros(3)),
            lambda: state.update(exp_avg=torch.zeros(3)),
            lambda: state.__ior__({"exp_avg": 3}),
        ):
            with pytest.raises(UsageError, match="the loaded 'exp_avg' has the shape"):
                put()
        train(params, optimizer, steps=1, first=3)
    with pytest.raises(UsageError, match="closed"):
        state["exp_avg"].sum()


@pytest.mark.parametrize("state_format", ["split", "compact", "compact24"])
def test_writing_to_packed_states(tmp_path, state_format):
    params = parameters(torch.bfloat16, shapes=SHAPES)
    with tight(params, tmp_path, state_format=state_format) as optimizer:
        train(params, optimizer)
        for parameter in params:
            optimizer.state[parameter]["exp_avg"].zero_()
            assert float(optimizer.state[parameter]["exp_avg"].abs().max()) == 0
            assert float(optimizer.state[parameter]["exp_avg_sq"].max()) > 0
        train(params, optimizer, first=3)
