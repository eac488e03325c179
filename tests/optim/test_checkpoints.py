"""`state_dict` and `load_state_dict`: to and from the plain optimizer, resumed bit for bit, without
the states in memory.
"""

from __future__ import annotations

import copy
import functools
import mmap
import resource
import signal

import pytest
import torch
from covering import covering
from reference import (
    KINDS,
    OPTIMIZERS,
    SHAPES,
    Reference,
    copied,
    differing,
    parameters,
    set_gradients,
    tight,
    train,
    unlike,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from nvme_offload.errors import UsageError
from nvme_offload.optim import NVMeOptimizer


@pytest.mark.parametrize("name", [name for name in KINDS if name != "sgd"])
def test_there_and_back_between_this_and_the_plain_optimizer(tmp_path, name):
    # Adafactor divides by the number of elements
    shapes = [shape for shape in SHAPES if 0 not in shape or name != "adafactor"]
    plain, ours = parameters(shapes=shapes), parameters(shapes=shapes)
    reference = OPTIMIZERS[name](plain)
    train(plain, reference)
    with tight(ours, tmp_path, OPTIMIZERS[name]) as optimizer:
        train(ours, optimizer)
        to_plain, to_ours = copied(ours), copied(plain)
        plain_again, state = OPTIMIZERS[name](to_plain), optimizer.state_dict()
        plain_again.load_state_dict(state)
        with tight(to_ours, tmp_path, OPTIMIZERS[name]) as ours_again:
            ours_again.load_state_dict(reference.state_dict())
            assert unlike(ours_again.state_dict()["state"], state["state"]) == []
            for params, one in ((plain, reference), (to_plain, plain_again), (to_ours, ours_again)):
                train(params, one, first=3)
    assert differing(to_plain, plain) == []
    assert differing(to_ours, plain) == []


@covering(
    kept=[
        *((name, "exact") for name in ("adamw", "sgd", "sgd-momentum", "lion", "adafactor")),
        ("adamw", "split"),
        ("adamw", "compact"),
    ],
    flat=[False, True],
    dtype=[torch.float32, torch.bfloat16],
)
def test_torchs_functions_for_distributed_state(tmp_path, kept, flat, dtype):
    name, state_format = kept

    def loss(net, step):
        inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(step)).to(dtype)
        return net(inputs).float().square().mean()

    def run(net, optimizer, first):
        for step in range(first, first + 3):
            loss(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2)
        ).to(dtype)

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    undisturbed, saved, resumed = model(), model(), model()
    reference = Reference(list(undisturbed.parameters()), OPTIMIZERS[name])
    for step in range(6):
        undisturbed.zero_grad()
        loss(undisturbed, step).backward()
        reference.step()
    make = functools.partial(
        NVMeOptimizer, optimizer_class=OPTIMIZERS[name], paths=tmp_path, state_format=state_format
    )
    with make(saved.parameters()) as optimizer:
        run(saved, optimizer, 0)
        state = get_optimizer_state_dict(saved, optimizer, options=options)
        resumed.load_state_dict(saved.state_dict())
        with make(resumed.parameters()) as again:
            set_optimizer_state_dict(resumed, again, state, options=options)
            run(saved, optimizer, 3)
            run(resumed, again, 3)
    assert differing(list(resumed.parameters()), list(saved.parameters())) == []
    if state_format != "compact":
        assert differing(list(saved.parameters()), list(undisturbed.parameters())) == []


def test_the_model_may_be_loaded_after_the_optimizer(tmp_path):
    whole, first = parameters(torch.bfloat16), parameters(torch.bfloat16)
    train(whole, Reference(whole, torch.optim.AdamW), steps=6)
    with tight(first, tmp_path) as optimizer:
        train(first, optimizer)
        state = optimizer.state_dict()
        second = parameters(torch.bfloat16)
        with tight(second, tmp_path) as again:
            again.load_state_dict(state)
            # which are for the user to load
            assert differing(second, parameters(torch.bfloat16)) == []
            with torch.no_grad():
                for parameter, value in zip(second, first, strict=True):
                    parameter.copy_(value)
            train(second, again, first=3)
    assert differing(second, whole) == []


def test_from_a_plain_optimizer_over_16_bits_masters_are_made_from_the_parameters(tmp_path):
    plain = parameters(torch.bfloat16)
    reference = torch.optim.AdamW(plain)
    train(plain, reference)
    ours = copied(plain)
    with tight(ours, tmp_path) as optimizer:
        optimizer.load_state_dict(reference.state_dict())
        state = optimizer.state_dict()["state"]
        for index, parameter in enumerate(plain):
            assert differing([state[index]["master"]], [parameter.detach().float()]) == []
            assert (
                differing(
                    [state[index]["exp_avg"].float()],
                    [reference.state_dict()["state"][index]["exp_avg"].float()],
                )
                == []
            )
        train(ours, optimizer, first=3)
    with_plain = copied(ours)
    # "master" is nothing to it
    torch.optim.AdamW(with_plain).load_state_dict({**reference.state_dict(), "state": state})
    train(with_plain, torch.optim.AdamW(with_plain))


@pytest.mark.parametrize(
    ("before", "after"),
    [("exact", "split"), ("split", "exact"), ("split", "compact"), ("compact", "exact")],
)
def test_from_one_format_to_another(tmp_path, before, after):
    params = parameters(torch.bfloat16)
    with NVMeOptimizer(params, paths=tmp_path, state_format=before) as optimizer:
        train(params, optimizer)
        state = optimizer.state_dict()
    with NVMeOptimizer(params, paths=tmp_path, state_format=after) as optimizer:
        optimizer.load_state_dict(state)
        loaded = optimizer.state_dict()["state"]
        assert (
            unlike(
                [kept["master"] for kept in loaded.values()],
                [kept["master"] for kept in state["state"].values()],
            )
            == []
        )
        if after != "compact":
            assert unlike(loaded, state["state"]) == []
        train(params, optimizer, first=3)


def test_a_state_dict_is_mapped_from_a_file_that_goes_with_it(tmp_path):
    params = parameters(shapes=[(1000, 1000)])
    with NVMeOptimizer(params, paths=tmp_path, host_memory="1MB") as optimizer:
        train(params, optimizer)
        state = optimizer.state_dict()
        expected = torch.optim.AdamW(again := parameters(shapes=[(1000, 1000)]))
        train(again, expected)
        with open("/proc/self/maps") as maps:  # noqa: PTH123
            assert sum(str(tmp_path) in line and "(deleted)" in line for line in maps) >= 1
        # its own, not the file's
        assert state["state"][0]["exp_avg"].untyped_storage().nbytes() == 4_000_000
        train(params, optimizer, first=3)
    # whatever became of the optimizer
    assert unlike(state["state"], expected.state_dict()["state"]) == []
    assert list(tmp_path.iterdir()) == []
    del state
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        assert not any(str(tmp_path) in line for line in maps)


def test_hooks_of_checkpoints(tmp_path):
    params = parameters()
    called = []
    with tight(params, tmp_path) as optimizer:
        train(params, optimizer)
        optimizer.register_state_dict_pre_hook(lambda one: called.append("saving"))
        optimizer.register_state_dict_post_hook(
            lambda one, state: {**state, "note": len(state["state"].get(2, ()))}
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda one, state: {
                **state,
                "state": {k: v for k, v in state["state"].items() if k != 2},
            }
        )
        optimizer.register_load_state_dict_post_hook(
            lambda one: called.append(sorted(one.state_dict()["state"]))
        )
        state = optimizer.state_dict()
        assert state["note"] == 3
        optimizer.load_state_dict(state)
        assert called == ["saving", "saving", [0, 1, 3, 4, 5, 6, 7]]
        assert 2 in state["state"]


def test_parameters_without_state_have_none_after_loading(tmp_path):
    plain, ours = parameters(), parameters()
    reference = torch.optim.AdamW(plain)
    with tight(ours, tmp_path) as optimizer:
        train(plain[:2], reference)
        train(ours, optimizer)
        with torch.no_grad():
            for one, other in zip(ours, plain, strict=True):
                one.copy_(other)
        optimizer.load_state_dict(reference.state_dict())
        assert sorted(optimizer.state_dict()["state"]) == [0, 1]
        train(plain, reference, first=3)
        train(ours, optimizer, first=3)
    assert differing(ours, plain) == []


def test_what_is_not_of_these_parameters_is_refused_and_changes_nothing(tmp_path):
    plain, ours = parameters(), parameters()
    reference = torch.optim.AdamW(plain)
    with tight(ours, tmp_path) as optimizer:
        train(plain, reference)
        train(ours, optimizer)
        good = copy.deepcopy(reference.state_dict())
        wrong_shape, too_few, too_many = (copy.deepcopy(good) for _ in range(3))
        wrong_shape["state"][2]["exp_avg"] = torch.zeros(3)
        too_few["param_groups"][0]["params"].pop()
        too_many["param_groups"] *= 2
        for wrong, error, said in (
            (
                wrong_shape,
                UsageError,
                r"'exp_avg' has the shape \[3\] where the parameter has \[300, 100\]",
            ),
            (too_few, ValueError, "doesn't match the size"),
            (too_many, ValueError, "different number of parameter groups"),
            ({**good, "state": {0: 5}}, UsageError, "must be a dictionary, not int"),
        ):
            with pytest.raises(error, match=said):
                optimizer.load_state_dict(wrong)
        train(plain, reference, first=3)
        train(ours, optimizer, first=3)
    assert differing(ours, plain) == []


def test_options_come_with_the_state_dict(tmp_path):
    params = parameters()
    with tight(params, tmp_path) as optimizer:
        optimizer.param_groups[0]["lr"] = 0.7
        train(params, optimizer)
        state = optimizer.state_dict()
    del state["param_groups"][0]["decoupled_weight_decay"]  # as in a state dict of an earlier torch
    with tight(params, tmp_path) as optimizer:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.7
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
        assert scheduler.optimizer.param_groups is optimizer.param_groups
        train(params, optimizer)


def test_steps_that_were_saved_as_numbers(tmp_path):
    plain, ours = parameters(), parameters()
    reference = torch.optim.AdamW(plain)
    train(plain, reference)
    old = copy.deepcopy(reference.state_dict())
    for state in old["state"].values():
        state["step"] = float(state["step"])  # as torch did before 1.12
    ours = copied(plain)
    with tight(ours, tmp_path) as optimizer:
        optimizer.load_state_dict(old)
        train(ours, optimizer, first=3)
    train(plain, reference, first=3)
    assert differing(ours, plain) == []


def test_states_put_into_state_are_taken_up(tmp_path):
    plain = parameters()
    reference = torch.optim.AdamW(plain)
    train(plain, reference)
    ours = copied(plain)
    with tight(ours, tmp_path) as optimizer:
        for one, other in zip(ours, plain, strict=True):
            optimizer.state[one] = copy.deepcopy(reference.state[other])
        train(ours, optimizer, first=3)
        train(plain, reference, first=3)
        assert unlike(optimizer.state_dict()["state"], reference.state_dict()["state"]) == []
        # of one of a bucket
        optimizer.state[ours[1]] = {
            "step": torch.tensor(9.0),
            "exp_avg": torch.ones(7),
            "exp_avg_sq": torch.ones(7),
        }
        reference.state[plain[1]] = copy.deepcopy(optimizer.state[ours[1]])
        assert unlike(optimizer.state_dict()["state"], reference.state_dict()["state"]) == []
        train(ours, optimizer, first=6)
        train(plain, reference, first=6)
    assert differing(ours, plain) == []


def test_room_for_a_state_dict_that_is_not_there(tmp_path):
    params = parameters()
    with tight(params, tmp_path) as optimizer:
        train(params, optimizer)
        optimizer._steps.tier.swapper.flush()  # so that nothing else is written
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (mmap.PAGESIZE, before[1]))
            with pytest.raises(OSError, match="File too large"):
                optimizer.state_dict()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert len(optimizer.state_dict()["state"]) == 8  # as good as new


@pytest.mark.parametrize("name", ["adamw", "adam-amsgrad", "sgd-momentum", "adafactor", "nadam"])
@pytest.mark.parametrize("masters", [True, False])
def test_states_that_lack_a_key_are_refused_and_nothing_changes(tmp_path, name, masters):
    """Another package's optimizer may use other names for the keys."""
    dtype = torch.bfloat16 if masters else torch.float32
    shapes = [(40, 30), (7,), (64, 64)]
    plain, ours = parameters(dtype, shapes=shapes), parameters(dtype, shapes=shapes)
    reference = Reference(plain, OPTIMIZERS[name])
    with NVMeOptimizer(ours, OPTIMIZERS[name], paths=tmp_path) as optimizer:
        train(plain, reference)
        train(ours, optimizer)
        saved = optimizer.state_dict()
        for index in (0, 1):
            for key in saved["state"][index]:
                if key == "master":
                    continue
                edited = {**saved, "state": copy.deepcopy(saved["state"])}
                edited["state"][index]["another"] = edited["state"][index].pop(key)
                if edited["state"][index].keys() - {"master", "another"} or masters:
                    edited["param_groups"] = [{**saved["param_groups"][0], "lr": 0.5}]
                    with pytest.raises(UsageError, match=f"lacks '{key}'.*and has.*'another'"):
                        optimizer.load_state_dict(edited)
        train(plain, reference, first=3)
        train(ours, optimizer, first=3)
        state = optimizer.state[ours[0]]
        kept = {key: value.clone() for key, value in state.items()}
        for key in kept.keys() - {"master"}:
            if len(kept.keys() - {"master"}) > 1:
                del state[key]
                set_gradients(ours, 6)
                with pytest.raises(UsageError, match=f"lacks '{key}'"):
                    optimizer.step()
                state[key] = kept[key]
        train(plain, reference, first=6)
        train(ours, optimizer, first=6)
    assert differing(ours, plain) == []


@pytest.mark.parametrize("saved_with", [False, True])
def test_the_loaded_options_say_which_keys_are_needed(tmp_path, saved_with):
    """The options of a group are loaded with the states, and the training goes on with both."""
    first, plain, ours = parameters(), parameters(), parameters()
    source = torch.optim.Adam(first, amsgrad=saved_with)
    train(first, source)
    reference = torch.optim.Adam(plain, amsgrad=not saved_with)
    reference.load_state_dict(copy.deepcopy(source.state_dict()))
    train(plain, reference)
    with NVMeOptimizer(ours, torch.optim.Adam, amsgrad=not saved_with, paths=tmp_path) as optimizer:
        optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
        train(ours, optimizer)
    assert differing(ours, plain) == []
