"""`step_in_backward="provisional"`: updates during backward() that `step` undoes where their
gradients were changed since. The same bits as updates after it, whatever happens in between.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
import sys

import numpy as np
import pytest
import torch
from covering import covering
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from reference import KINDS, OPTIMIZERS, Lion, batch, differing, loss_of, model, parameters, unlike

from nvme_offload import _aio
from nvme_offload.errors import NoSpaceError, UsageError
from nvme_offload.optim import NVMeOptimizer, provisional
from nvme_offload.optimizer_states.fingerprint import CHUNK, fingerprint
from nvme_offload.swap.access_order import AccessOrder

SMALL = 200_000  # of host memory: a few buckets of `model` are on the drive
STEPS = 10


def both(
    path, dtype=torch.float32, optimizer=torch.optim.AdamW, host_memory=None, alike=False, **options
):
    """Two models, and their optimizers: with updates after backward(), and provisional ones. All
    states of the first are in memory, unless the two are *alike*.
    """
    made = []
    for in_backward in (False, "provisional"):
        net = model(dtype)
        kwargs = {"host_memory": host_memory or SMALL, **options}
        if in_backward:
            kwargs["step_in_backward"] = in_backward
        elif not alike:
            kwargs["host_memory"] = "64MB"
        made.append(
            (
                net,
                NVMeOptimizer(
                    net.parameters(),
                    optimizer,
                    **{"lr": 0.01, "paths": path, **kwargs},
                ),
            )
        )
    return made


def like(net, number):
    """A batch of the dtype of *net*."""
    return batch(number, next(net.parameters()).dtype)


def clip(net, limit):
    torch.nn.utils.clip_grad_norm_(net.parameters(), limit)


def sometimes(net, step):
    if step % 5 in (2, 3):
        clip(net, 1e-3)


CLIPPING = {
    "never": lambda net, step: clip(net, 1e9),
    "always": lambda net, step: clip(net, 1e-3),
    "sometimes": sometimes,
    "every other": lambda net, step: clip(net, 1e-3 if step % 2 else 1e9),
    "by value": lambda net, step: torch.nn.utils.clip_grad_value_(net.parameters(), 1e-4),
}


@contextlib.contextmanager
def closing(pairs):
    with contextlib.ExitStack() as stack:
        for _, optimizer in pairs:
            stack.callback(optimizer.close)
        yield pairs


def step_of(net, optimizer, step, change=None):
    """A step, whose gradients *change* may change."""
    optimizer.zero_grad()
    loss_of(net, step).backward()
    if change is not None:
        change(net, step)
    optimizer.step()


def assert_same(pairs):
    (plain, after), (ours, provisional) = pairs
    assert differing(list(ours.parameters()), list(plain.parameters())) == []
    assert unlike(provisional.state_dict()["state"], after.state_dict()["state"]) == []
    assert (
        unlike(provisional.state_dict()["param_groups"], after.state_dict()["param_groups"]) == []
    )


@covering(
    clipping=list(CLIPPING),
    state_format=["exact", "split", "compact", "compact24"],
    dtype=[torch.float32, torch.bfloat16],
)
def test_the_same_bits(tmp_path, dtype, state_format, clipping):
    counts = []
    host_memory = 120_000 if (dtype, state_format[:7]) == (torch.float32, "compact") else SMALL
    with closing(
        both(tmp_path, dtype, state_format=state_format, host_memory=host_memory)
    ) as pairs:
        for step in range(STEPS):
            for net, optimizer in pairs:
                step_of(net, optimizer, step, CLIPPING[clipping])
            assert differing(*(list(net.parameters()) for net, _ in pairs)) == []
            stats = pairs[1][1].stats()
            counts.append((stats.updated_in_backward, stats.rolled_back))
            assert stats.rolled_back <= stats.updated_in_backward <= stats.buckets
        assert_same(pairs)
    # the first step makes the states, and compact checks the states in steps 2, 4 and 8
    made = [count for count, _ in counts]
    undone = [count for _, count in counts]
    assert made[0] == 0
    if clipping in ("always", "by value"):
        assert made == undone == [0] * STEPS
    elif clipping == "never":
        assert undone == [0] * STEPS
        assert all(made[step] > 0 for step in (2, 4, 5, 6, 8, 9))
    elif clipping == "sometimes":
        assert undone[2] == made[2] > 0  # the undo was unexpected
        assert made[3] == 0  # as the last one
        assert made[6] > 0 == undone[6]


@pytest.mark.parametrize("name", KINDS[1:])
def test_other_optimizers(tmp_path, name):
    with closing(
        both(tmp_path, optimizer=OPTIMIZERS[name], lr=0.002, host_memory=300_000)
    ) as pairs:
        made = 0
        for step in range(6):
            for net, optimizer in pairs:
                step_of(net, optimizer, step, sometimes)
            made += pairs[1][1].stats().updated_in_backward
        assert_same(pairs)
    # states smaller than the memory stay there
    assert (made > 0) == (pairs[1][1].last_stats.bytes_read > 0)


class InGradients(torch.optim.SGD):
    """Computes in the gradients themselves, as Muon does."""

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault(
                        "average", torch.zeros_like(parameter)
                    )
                    average.lerp_(parameter.grad, 0.1)
                    parameter.sub_(parameter.grad.lerp_(average, 0.5), alpha=group["lr"])


def test_an_optimizer_that_computes_in_gradients(tmp_path):
    with closing(both(tmp_path, optimizer=InGradients, host_memory=100_000)) as pairs:
        made = undone = 0
        for step in range(8):
            for net, optimizer in pairs:
                step_of(net, optimizer, step, sometimes)
            made += pairs[1][1].stats().updated_in_backward
            undone += pairs[1][1].stats().rolled_back
        assert made > undone > 0
        assert_same(pairs)


class Fading(torch.optim.SGD):
    """Counts the steps of a parameter in an attribute, which no state dict has."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = {}

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.steps[id(parameter)] = self.steps.get(id(parameter), 0) + 1
                    average = self.state[parameter].setdefault(
                        "average", torch.zeros_like(parameter)
                    )
                    parameter.sub_(
                        average.lerp_(parameter.grad, 0.1),
                        alpha=group["lr"] / self.steps[id(parameter)],
                    )


def test_an_optimizer_that_counts_elsewhere_steps_afterwards(tmp_path):
    with closing(both(tmp_path, optimizer=Fading, host_memory=100_000)) as pairs:
        for step in range(6):
            for net, optimizer in pairs:
                step_of(net, optimizer, step, sometimes)
        assert pairs[1][1].stats().updated_in_backward == 0
        assert_same(pairs)


class Masked(InGradients):
    """Draws a random number for each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(torch.bernoulli(torch.tensor(0.5)))
        super().step()


def test_an_optimizer_that_draws_random_numbers_steps_afterwards(tmp_path):
    found = []
    for net, optimizer in both(tmp_path, optimizer=Masked, host_memory=170_000):
        torch.manual_seed(0)
        for step in range(6):
            step_of(net, optimizer, step)
        assert optimizer.stats().updated_in_backward == 0
        optimizer.close()
        found.append(list(net.parameters()))
    assert differing(*found) == []


def test_an_optimizer_that_changes_its_groups(tmp_path):
    with closing(both(tmp_path, optimizer=Lion, host_memory=100_000, weight_decay=0.5)) as pairs:
        made = undone = 0
        for step in range(8):
            for net, optimizer in pairs:
                optimizer.zero_grad()
                loss_of(net, step).backward()
                sometimes(net, step)
                if step == 6:  # without an update, which Lion counts nevertheless
                    net.zero_grad()
                optimizer.step()
            assert [optimizer.param_groups[0]["count"] for _, optimizer in pairs] == [step + 1] * 2
            made += pairs[1][1].stats().updated_in_backward
            undone += pairs[1][1].stats().rolled_back
        assert made > undone > 0
        assert_same(pairs)


def test_an_optimizer_that_is_dropped_before_step_leaves_no_hook(tmp_path):
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    gc.collect()
    before = len(hooks)
    made = both(tmp_path)
    net, optimizer = made[1]
    for step in range(3):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        loss_of(net, step).backward()
    assert len(hooks) == before + 1
    del made, net, optimizer
    gc.collect()
    assert len(hooks) == before


def test_moves_no_more_bytes_than_updates_afterwards(tmp_path):
    """In steps like the one before. An undone step moves its bytes again."""
    with closing(both(tmp_path, alike=True)) as pairs:
        moved = []
        for step in range(36):
            for net, optimizer in pairs:
                optimizer.zero_grad()
                loss_of(net, step).backward()
                clip(net, 1e-3 if step == 35 else 1e9)
                optimizer.step()
            moved.append(
                [
                    (optimizer.stats().bytes_read, optimizer.stats().bytes_written)
                    for _, optimizer in pairs
                ]
            )
        # a transfer in flight at the end of a step counts in the next one: up to half a step's
        # bytes at either end, so that a difference shows only over many steps
        after, provisional = (sum(sum(sides[which]) for sides in moved[5:35]) for which in (0, 1))
        assert provisional <= 1.06 * after
        assert sum(moved[35][1]) > sum(moved[35][0]) > 0


def chain():
    """Of 24 matrices, most of whose states are on the drive with 300 kB of host memory."""
    torch.manual_seed(0)
    matrices = (torch.nn.Linear(64, 64, bias=False) for _ in range(24))
    return torch.nn.Sequential(*matrices).to(torch.bfloat16)


def step_of_chain(net, optimizer, number, norm):
    optimizer.zero_grad()
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
    net(inputs.to(torch.bfloat16)).float().square().mean().backward()
    clip(net, norm)
    optimizer.step()
    return optimizer.stats()


@covering(overlap=[False, True], state_format=["exact", "compact"])
def test_the_order_of_use_is_learned_once(tmp_path, monkeypatch, state_format, overlap):
    """Also where a step is not provisional: the format looks at the states in steps 4, 8 and 16, and
    a norm is clipped in step 12. A new order costs reads that are not used, and may move residents.
    """
    adopted = []
    step = AccessOrder.step

    def counted(order):
        adopted.append(step(order))
        return adopted[-1]

    monkeypatch.setattr(AccessOrder, "step", counted)
    net = chain()
    with NVMeOptimizer(
        net.parameters(),
        paths=tmp_path,
        host_memory=300_000,
        state_format=state_format,
        step_in_backward="provisional",
        overlap_step=overlap,
    ) as optimizer:
        counts, moved = [], []
        for number in range(20):
            stats = step_of_chain(net, optimizer, number, 1e-9 if number == 11 else 1e9)
            counts.append(stats.updated_in_backward)
            moved.append(stats.bytes_read + stats.bytes_written)
    settled = counts[5:7]
    assert 0 < settled[0] == settled[1] < optimizer.stats().buckets
    assert counts[14] == settled[0]
    assert len(adopted) == 20
    assert not any(adopted[5:])
    assert sum(moved[16:]) <= 1.1 * sum(moved[5:9])


def test_what_changes_one_gradient_undoes_one_update(tmp_path):
    pairs = both(tmp_path)
    with closing(pairs):
        for step in range(6):
            for net, optimizer in pairs:
                optimizer.zero_grad()
                loss_of(net, step).backward()
            if step == 5:
                net, optimizer = pairs[1]
                fragment = next(iter(optimizer._steps.provisional._made)).fragments[0]
                number = next(
                    number
                    for number, parameter in enumerate(net.parameters())
                    if parameter is fragment.weight.parameter
                )
                for net, _ in pairs:
                    gradient = [*net.parameters()][number].grad
                    gradient.data.view(-1)[fragment.start] *= 1.5  # without a change of its version
            for _, optimizer in pairs:
                optimizer.step()
        stats = pairs[1][1].stats()
        assert 0 < stats.rolled_back < stats.updated_in_backward  # its own buckets, and no others
        assert_same(pairs)


def test_accumulation_under_no_sync(tmp_path):
    pairs = both(tmp_path)
    with closing(pairs):
        for step in range(8):
            for net, optimizer in pairs:
                optimizer.zero_grad()
                with optimizer.no_sync():
                    loss_of(net, 2 * step).backward()
                loss_of(net, 2 * step + 1).backward()
                clip(net, 1e-2 if step % 3 == 2 else 1e9)
                optimizer.step()
        assert pairs[1][1].stats().updated_in_backward > 0
        assert_same(pairs)


def begun(path, steps=3, **options):
    """A model and its optimizer after some *steps*, with the updates of the next."""
    [_, pair] = both(path, **options)
    net, optimizer = pair
    for step in range(steps):
        step_of(net, optimizer, step)
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    loss_of(net, steps).backward()
    assert differing(list(net.parameters()), before) != []  # it is updated
    return net, optimizer, before


def test_accumulation_without_it_is_an_error_that_nothing_comes_of(tmp_path):
    net, optimizer, before = begun(tmp_path)
    weights = list(net.parameters())
    with pytest.raises(UsageError, match=r"second backward\(\) before step\(\)"):
        (weights[2] * 1.0).sum().backward()
    optimizer.zero_grad()
    assert differing(weights, before) == []
    optimizer.close()


def test_a_layer_of_two_checkpointed_regions(tmp_path):
    """Each region with use_reentrant=True runs its own backward(), after which the other one would
    compute with an updated layer.
    """
    pairs = []
    for kwargs in ({}, {"step_in_backward": "provisional"}):
        net = chain()
        options = {"lr": 1e-3, "paths": tmp_path, "host_memory": SMALL}
        pairs.append((net, NVMeOptimizer(net.parameters(), **options, **kwargs)))

    def backward(net, number, reentrant):
        hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
        hidden = hidden.bfloat16().requires_grad_()
        for layer in (*net, net[0]):
            hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=reentrant)
        hidden.float().square().mean().backward()

    with closing(pairs):
        for step in range(4):
            for net, optimizer in pairs:
                optimizer.zero_grad()
                backward(net, step, reentrant=False)
                optimizer.step()
        net, optimizer = pairs[1]
        assert optimizer.stats().updated_in_backward > 0
        assert_same(pairs)
        optimizer.zero_grad()
        with pytest.raises(UsageError, match="use_reentrant=False"):
            backward(net, 4, reentrant=True)
        optimizer.zero_grad()
        assert_same(pairs)


LOOKS = {
    "zero_grad": lambda net, optimizer: optimizer.zero_grad(),
    "a state": lambda net, optimizer: optimizer.state[net[0].weight]["exp_avg"].clone(),
    "a state dict": lambda net, optimizer: optimizer.state_dict(),
    "a forward pass": lambda net, optimizer: net(like(net, 50)),
    "of one layer": lambda net, optimizer: net[2](torch.ones(200)),
    "without gradients": lambda net, optimizer: torch.no_grad()(net)(like(net, 50)),
    "closing": lambda net, optimizer: optimizer.close(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_until_the_step_there_was_none(tmp_path, look):
    net, optimizer, before = begun(tmp_path)
    LOOKS[look](net, optimizer)
    assert differing(list(net.parameters()), before) == []
    optimizer.close()


@pytest.mark.parametrize("look", [name for name in LOOKS if name != "closing"])
def test_whatever_was_undone_comes_in_the_step(tmp_path, look):
    pairs = both(tmp_path)
    with closing(pairs):
        for step in range(6):
            for net, optimizer in pairs:
                optimizer.zero_grad()
                loss_of(net, step).backward()
                if step in (2, 4):
                    LOOKS[look](net, optimizer)
                    if look == "zero_grad":
                        loss_of(net, step).backward()
                optimizer.step()
        assert_same(pairs)


def test_a_forward_pass_that_backward_makes_undoes_nothing(tmp_path):
    class Checkpointed(torch.nn.Module):
        def __init__(self, net, reentrant):
            super().__init__()
            self.net, self.reentrant = net, reentrant

        def forward(self, x):
            for layer in self.net:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
            return x

    for reentrant in (False, True):
        pairs = both(tmp_path)
        with closing(pairs):
            for step in range(5):
                for net, optimizer in pairs:
                    optimizer.zero_grad()
                    inputs = batch(step).requires_grad_()
                    Checkpointed(net, reentrant)(inputs).square().mean().backward()
                    optimizer.step()
            stats = pairs[1][1].stats()
            assert stats.updated_in_backward > 0 == stats.rolled_back
            assert_same(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", [lambda parameter: parameter, lambda parameter: parameter.data])
def test_a_parameter_that_is_changed_between_is_an_error(tmp_path, dtype, of):
    net, optimizer, before = begun(tmp_path, dtype=dtype)
    with torch.no_grad():
        of(net[2].weight).mul_(0.5)
    with pytest.raises(UsageError, match="a parameter was changed between"):
        optimizer.step()
    optimizer.zero_grad()
    assert set(differing(list(net.parameters()), before)) <= {2}
    optimizer.close()


def test_the_forward_pass_has_a_share_of_the_updates(tmp_path):
    """And no value is moved more often for it. The bits equal updates after backward()."""
    found = {}
    for overlap in (None, False, True):
        net = chain()
        provisional = {"step_in_backward": "provisional", "overlap_step": overlap}
        with NVMeOptimizer(
            net.parameters(),
            paths=tmp_path,
            host_memory=300_000,
            state_format="compact",
            **({} if overlap is None else provisional),
        ) as optimizer:
            counts, moved = [], []
            for number in range(20):
                stats = step_of_chain(net, optimizer, number, 1e-9 if number == 9 else 1e9)
                counts.append(stats.updated_in_backward)
                moved.append(stats.bytes_read + stats.bytes_written)
            found[overlap] = counts[16:], sum(moved[14:]), [p.clone() for p in net.parameters()]
    without, with_share = (sum(found[overlap][0]) for overlap in (False, True))
    assert with_share == pytest.approx(0.7 * without, rel=0.1)
    assert found[True][1] <= 1.1 * found[False][1]
    for overlap in (False, True):
        assert differing(found[overlap][2], found[None][2]) == []


# A drive that fails, or is full.


def test_a_drive_without_room_for_two_versions_is_refused(mounted):
    params = parameters(shapes=[(100, 100)] * 110)  # 8.8 MB of states; the drive has 13
    options = {"paths": mounted("ext4-full"), "host_memory": "2MB"}
    with pytest.raises(NoSpaceError, match="training needs"):
        NVMeOptimizer(params, step_in_backward="provisional", **options)
    NVMeOptimizer(params, step_in_backward=True, **options).close()


def test_the_space_of_a_second_version_is_released(tmp_path):
    [_, (net, optimizer)] = both(tmp_path)
    store = optimizer._steps.tier.store
    for step in range(6):
        step_of(net, optimizer, step)
        store.drain()
        kept = sum(-(-bucket.nbytes // 4096) * 4096 for bucket in optimizer._steps.binding.buckets)
        assert store.used_bytes <= kept
    optimizer.close()


AFTER_LOADING = {
    "states": lambda net, optimizer, states: optimizer.load_state_dict(states),
    "states first": lambda net, optimizer, states: None,
    "zero_grad": lambda net, optimizer, states: optimizer.zero_grad(),
    "forward": lambda net, optimizer, states: [loss_of(net, 3), optimizer.zero_grad()],
    "a state dict": lambda net, optimizer, states: [optimizer.state_dict(), optimizer.zero_grad()],
    "close": lambda net, optimizer, states: optimizer.close(),
}


@covering(
    dtype=[torch.float32, torch.bfloat16], then=list(AFTER_LOADING), by=["load_state_dict", "data"]
)
def test_a_model_that_is_loaded_after_backward_stays_loaded(tmp_path, dtype, then, by):
    """As after a loss that is not a number, without a step."""
    pairs = both(tmp_path, dtype)
    with closing(pairs):
        kept = []
        for step in range(6):
            for net, optimizer in pairs:
                if step == 4:
                    kept.append(
                        (copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict()))
                    )
                step_of(net, optimizer, step)
        for (net, optimizer), (weights, states) in zip(pairs, kept, strict=True):
            optimizer.zero_grad()
            loss_of(net, 6).backward()
            if then == "states first":
                optimizer.load_state_dict(states)
            if by == "data":
                for name, parameter in net.named_parameters():
                    parameter.data.copy_(weights[name])
            else:
                net.load_state_dict(weights)
            AFTER_LOADING[then](net, optimizer, states)
            assert differing(list(net.state_dict().values()), list(weights.values())) == []
        if then != "close":
            for step in range(7, 10):
                for pair in pairs:
                    step_of(*pair, step)
            assert optimizer.stats().updated_in_backward > 0
            assert_same(pairs)


PASSES = {
    "accumulated": lambda net, optimizer: loss_of(net, 7).backward(),
    "none": lambda net, optimizer: None,
}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("between", PASSES)
def test_a_step_that_the_model_drops_is_forgotten(tmp_path, to_none, between):
    """By `zero_grad` of the model, without a call of the optimizer."""
    pairs = both(tmp_path)
    with closing(pairs):
        for step in range(6):
            for pair in pairs:
                step_of(*pair, step)
        for net, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(net, 6).backward()
            net.zero_grad(set_to_none=to_none)
            with optimizer.no_sync():
                PASSES[between](net, optimizer)
            loss_of(net, 8).backward()
            optimizer.step()
        assert optimizer.stats().updated_in_backward > 0
        assert_same(pairs)


class Scaled(torch.optim.SGD):
    """Scales each step of a parameter by `factor` of its state."""

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    buffer = state.setdefault("buffer", torch.zeros_like(parameter))
                    buffer.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(buffer, alpha=group["lr"] * self.factor(state))


class Late(Scaled):
    """With a small state that is created later than the other states."""

    @staticmethod
    def factor(state):
        """One, and from the fifth step on more each time."""
        state["count"] = state.get("count", 0) + 1
        if state["count"] >= 5:
            state["late"] = state.get("late", 1.0) * 1.5
        return state.get("late", 1.0)


class Drawing(Scaled):
    """Draws from a generator that is not torch's."""

    draw = staticmethod(random.random)

    def factor(self, _):
        """A number at random."""
        return self.draw()


def test_a_small_state_that_an_undone_update_made_is_gone(tmp_path):
    pairs = both(tmp_path, optimizer=Late, lr=1e-3, host_memory=100_000)
    undone = 0
    with closing(pairs):
        for step in range(8):
            for pair in pairs:
                step_of(*pair, step, lambda net, step: clip(net, 1e-3 if step == 4 else 1e9))
            undone += pairs[1][1].stats().rolled_back
        assert undone > 0
        assert_same(pairs)


def test_a_small_state_that_the_program_keeps_is_the_same_tensor_after_an_undo(tmp_path):
    pairs, kept = both(tmp_path), {}
    with closing(pairs):
        for step in range(8):
            for net, optimizer in pairs:
                if step == 6:
                    for count in kept[id(net)]:
                        count.zero_()
                step_of(
                    net, optimizer, step, lambda net, step: clip(net, 1e-3 if step == 4 else 1e9)
                )
            if step == 3:
                kept = {
                    id(net): [optimizer.state[one]["step"] for one in net.parameters()]
                    for net, optimizer in pairs
                }
        assert_same(pairs)


@pytest.mark.parametrize("draw", [random.random, np.random.random], ids=["python", "numpy"])
def test_numbers_of_other_generators_are_drawn_in_the_same_order(tmp_path, monkeypatch, draw):
    monkeypatch.setattr(Drawing, "draw", staticmethod(draw))
    weights = []
    for in_backward in (False, "provisional"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24)))
        with NVMeOptimizer(
            net.parameters(),
            Drawing,
            lr=1e-2,
            paths=tmp_path,
            host_memory=300_000,
            step_in_backward=in_backward,
        ) as optimizer:
            random.seed(0)
            np.random.seed(0)
            for step in range(6):
                optimizer.zero_grad()
                net(
                    torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
                ).square().mean().backward()
                optimizer.step()
            assert (
                optimizer.stats().resident_bytes < sum(one.numel() for one in net.parameters()) * 4
            )
        weights.append(list(net.parameters()))
    assert differing(*weights) == []


FIRST_CALLS = {
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "a state": lambda optimizer: optimizer.state,
    "step": lambda optimizer: optimizer.step(),
}


@covering(cut=[1, 3], first=list(FIRST_CALLS))
def test_an_undo_that_is_cut_short_is_not_taken_for_whole(tmp_path, monkeypatch, first, cut):
    """By Ctrl-C; until states are loaded, whatever is called first."""
    pairs = both(tmp_path)
    with closing(pairs):
        for step in range(5):
            for pair in pairs:
                step_of(*pair, step)
        _, (net, optimizer) = pairs
        weights = copy.deepcopy(net.state_dict())
        states = copy.deepcopy(optimizer.state_dict())
        calls, restore = itertools.count(1), provisional._restore

        def interrupted(before, others):
            if next(calls) == cut:
                raise KeyboardInterrupt
            restore(before, others)

        monkeypatch.setattr(provisional, "_restore", interrupted)
        loss_of(net, 5).backward()
        clip(net, 1e-3)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        with contextlib.suppress(UsageError):
            FIRST_CALLS[first](optimizer)
        assert optimizer._steps.health.broken
        for refused in (optimizer.step, optimizer.state_dict):
            with pytest.raises(UsageError, match="load both from a checkpoint"):
                refused()
        net.load_state_dict(weights)
        optimizer.load_state_dict(states)
        for step in range(6, 12):
            for pair in pairs:
                step_of(*pair, step, sometimes)
        assert optimizer.stats().updated_in_backward > 0
        assert_same(pairs)


# Costs.


@pytest.mark.parametrize("expected", [False, True], ids=["undone", "left to the step"])
def test_the_cost_of_a_step_grows_with_the_buckets_and_no_faster(tmp_path, expected):
    """Lines of the package, in steps whose gradients are changed, which was *expected* or not."""
    counts = []
    for layers in (12, 24, 48):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(layers)))
        optimizer = NVMeOptimizer(
            [{"params": layer.parameters()} for layer in net],
            lr=1e-3,
            host_memory=100_000,
            paths=tmp_path,
            step_in_backward="provisional",
        )
        lines, of_steps = 0, []

        def trace(frame, kind, _):
            nonlocal lines
            lines += kind == "line"
            return trace if "nvme_offload" in frame.f_code.co_filename else None

        for step in range(11):
            counted = step in (4, 7, 10)  # a step that is undone has the next one left to `step`
            lines = 0
            if counted:
                sys.settrace(trace)
            optimizer.zero_grad()
            net(torch.ones(4, 32)).square().mean().backward()
            if counted or expected:
                torch._foreach_mul_([parameter.grad for parameter in net.parameters()], 0.5)
            optimizer.step()
            sys.settrace(None)
            if counted:
                of_steps.append(lines)
                assert optimizer.stats().rolled_back >= (0 if expected else layers // 3)
        optimizer.close()
        counts.append(min(of_steps))  # waits for the drive take lines, too
    assert counts[2] - counts[1] <= 2.3 * (counts[1] - counts[0]), counts


@pytest.fixture(params=["XXH3", "sums"])
def by(request, monkeypatch):
    """As on the CPU, and as on a GPU or in a build without checksums."""
    if request.param == "sums":
        monkeypatch.setattr(_aio, "fingerprint", lambda *_: None)
    elif _aio.fingerprint(0, 0) is None:
        pytest.skip("this build has no checksums")


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.float16,
        torch.float8_e4m3fn,
        torch.complex64,
    ],
    ids=str,
)
def test_a_fingerprint_tells_any_bit(dtype):
    values = torch.randn(3, 77).to(dtype)[:, 1:]
    before = fingerprint(values)
    assert torch.equal(fingerprint(values.clone()), before)
    for place in range(0, values.numel() * values.element_size() * 8, 31):
        other = values.clone()
        other.view(-1).view(torch.uint8)[place // 8] ^= 1 << place % 8
        assert not torch.equal(fingerprint(other), before), place


@pytest.mark.usefixtures("by")
def test_a_fingerprint_tells_signs_and_places():
    values = torch.randn(CHUNK + 1000)
    found = [
        fingerprint(values),
        fingerprint(-values),
        fingerprint(values.roll(1)),
        fingerprint(torch.zeros(CHUNK)),
        fingerprint(torch.full((CHUNK,), -0.0)),
    ]
    assert len({tuple(one.tolist()) for one in found}) == len(found)
    long = torch.zeros(2 * CHUNK + 5)
    long[7] = 1
    moved = long.roll(CHUNK)  # to the same place of the next chunk
    assert not torch.equal(fingerprint(long), fingerprint(moved))
    assert torch.equal(fingerprint(torch.empty(0)), fingerprint(torch.empty(0)))
    assert fingerprint(torch.zeros(5, 4).t()).shape == (2,)


def test_random_numbers_are_the_users(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    fingerprint(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_left(tmp_path):
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    _, optimizer, _ = begun(tmp_path)
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks + 1
    optimizer.close()
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    del optimizer
    gc.collect()
    assert list(tmp_path.iterdir()) == []


ACTIONS = {
    "clip": lambda net, optimizer: clip(net, 1e-3),
    "clip, not": lambda net, optimizer: clip(net, 1e9),
    "one": lambda net, optimizer: net[2].weight.grad.data.mul_(2.0),
    "bias": lambda net, optimizer: net[0].bias.grad.add_(0.5),
    "none": lambda net, optimizer: setattr(net[4].weight, "grad", None),
    "another": lambda net, optimizer: setattr(
        net[4].weight, "grad", torch.ones_like(net[4].weight)
    ),
    "forward": lambda net, optimizer: net(like(net, 70)),
    "state": lambda net, optimizer: optimizer.state[net[2].weight]["exp_avg_sq"].clone(),
    "change a state": lambda net, optimizer: optimizer.state[net[2].weight]["exp_avg"].mul_(0.5),
    "saved": lambda net, optimizer: optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    ),
    "rate": lambda net, optimizer: optimizer.param_groups[0].update(lr=0.003),
}
PROGRAMS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(sorted(ACTIONS)), max_size=3),
        st.sampled_from(["step", "step", "step", "step", "zero_grad", "change"]),
    ),
    min_size=3,
    max_size=10,
)


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    program=PROGRAMS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    state_format=st.sampled_from(["exact", "split", "compact"]),
    host_memory=st.sampled_from([160_000, SMALL, 400_000]),
    overlap=st.booleans(),
)
def test_any_program(tmp_path, program, dtype, state_format, host_memory, overlap):
    pairs = both(
        tmp_path, dtype, host_memory=host_memory, state_format=state_format, overlap_step=overlap
    )
    with closing(pairs):
        made = undone = 0
        for number, (actions, end) in enumerate([([], "step"), *program]):
            for net, optimizer in pairs:
                optimizer.zero_grad()
                loss_of(net, number).backward()
                for name in actions:
                    if "state" not in name or number:
                        ACTIONS[name](net, optimizer)
                if end != "zero_grad":
                    optimizer.step()
                if end == "change":
                    with torch.no_grad():
                        net[0].weight.mul_(0.5)
            if end != "zero_grad":
                made += pairs[1][1].stats().updated_in_backward
                undone += pairs[1][1].stats().rolled_back
        event(f"provisional: {made > 0}, undone: {undone > 0}")
        for _, optimizer in pairs:
            optimizer.zero_grad()
        assert_same(pairs)
