"""States of other shapes than the parameter, in lists, dictionaries and objects: they travel, are
counted, and come back as they were.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
from collections import deque

import pytest
import torch
from covering import covering
from reference import (
    KINDS,
    OPTIMIZERS,
    Reference,
    differing,
    parameters,
    taken_by_many_steps,
    tight,
    train,
    unlike,
)

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optimizer_states.tree import tensors

SHAPES = [(40, 30), (7,), (300, 100), (64, 64), (6, 4, 3, 3)]


class Averages:
    """What some optimizers keep their statistics in."""

    def __init__(self, parameter):
        self.by_rows = [torch.zeros(size, dtype=torch.float64) for size in parameter.shape]
        self.count = 0


class Odd(torch.optim.Optimizer):
    """Keeps momenta by their decay, as AggMo does; the last gradients, as AdaShift does; matrices
    by sides, as SOAP does; and an object.
    """

    def __init__(self, params, lr=1e-2, late=2):
        super().__init__(params, {"lr": lr, "late": late})

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["momenta"] = {decay: torch.zeros_like(parameter) for decay in (0.0, 0.9)}
                    state["last"] = deque([gradient.clone()], maxlen=3)
                    state["sides"] = [torch.zeros(size, size) for size in parameter.shape]
                    state["averages"] = Averages(parameter)
                    state["pair"] = [torch.ones_like(parameter), torch.zeros_like(parameter)]
                state["step"] += 1
                if state["step"] > group["late"]:
                    state["late"] = (state.get("late", (torch.zeros(3, 2),))[0] + 1,)
                state["last"].append(gradient.clone())
                state["pair"].reverse()
                state["pair"][0].lerp_(gradient, 0.5)
                update = state["pair"][1] + sum(state["last"])
                for decay, momentum in state["momenta"].items():
                    update += momentum.mul_(decay).add_(gradient)
                for index, size in enumerate(parameter.shape):
                    rows = gradient.transpose(0, index).reshape(size, -1)
                    state["sides"][index] = state["sides"][index] * 0.9 + rows @ rows.T
                    state["averages"].by_rows[index] += rows.double().mean(1)
                    update += (
                        (state["sides"][index].trace() + state["averages"].by_rows[index].sum())
                        .tanh()
                        .to(parameter.dtype)
                    )
                state["averages"].count += 1
                parameter.sub_(update, alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_the_plain_ones(tmp_path, dtype):
    plain, ours = parameters(dtype, shapes=SHAPES), parameters(dtype, shapes=SHAPES)
    reference = Reference(plain, Odd)
    with NVMeOptimizer(ours, Odd, paths=tmp_path, host_memory=3_000_000) as optimizer:
        for first in (0, 3, 6):
            train(plain, reference, first=first)
            train(ours, optimizer, first=first)
            assert differing(ours, plain) == []
            for parameter, (_, master) in zip(ours, reference.pairs, strict=True):
                expected, found = (
                    tensors(reference.optimizer.state[master]),
                    tensors(optimizer.state[parameter]),
                )
                assert expected.keys() == found.keys() - {"master"}
                for key, value in expected.items():
                    assert torch.equal(found[key].clone(), value)
                    assert (found[key].dtype, found[key].stride()) == (value.dtype, value.stride())
                assert optimizer.state[parameter]["averages"].count == first + 3


def test_no_more_than_numbers_stays_in_memory(tmp_path):
    params = parameters(shapes=[*SHAPES, (100, 300), (200, 80)])
    with NVMeOptimizer(params, Odd, paths=tmp_path, host_memory=2_600_000) as optimizer:
        train(params, optimizer, steps=4)
        states = [
            fragment.states
            for bucket in optimizer._steps.binding.buckets
            for fragment in bucket.fragments
        ]
        assert sum(value.nbytes for state in states for value in tensors(state).values()) == 0
        assert sum(map(len, map(tensors, states))) > 12 * len(params)
        whole = sum(
            value.nbytes
            for state in optimizer.state_dict()["state"].values()
            for value in tensors(state).values()
        )
        assert (
            whole
            <= sum(bucket.nbytes for bucket in optimizer._steps.binding.buckets)
            <= whole * 1.05 + 4096 * len(optimizer._steps.binding.buckets)
        )
        assert optimizer._steps.tier._pool.nbytes <= 2_600_000
        assert optimizer.stats().bytes_read > 0


@pytest.mark.parametrize("through", ["memory", "file"])
def test_checkpoints(tmp_path, through):
    plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = Odd(plain)
    train(plain, reference, steps=7)
    with NVMeOptimizer(ours, Odd, paths=tmp_path, host_memory=3_000_000) as optimizer:
        train(ours, optimizer, steps=4)
        state = optimizer.state_dict()
        if through == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=False)
        kept = copy.deepcopy(state["state"])
        there = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
        train(ours, optimizer, first=4)
    with NVMeOptimizer(there, Odd, paths=tmp_path, host_memory=4_000_000) as optimizer:
        optimizer.load_state_dict(state)
        again = optimizer.state_dict()["state"]
        for index in kept:
            assert unlike(tensors(again[index]), tensors(kept[index])) == []
        train(there, optimizer, first=4)
    assert differing(there, plain) == differing(ours, plain) == []


def test_changes_take_effect(tmp_path):
    plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = Odd(plain)
    with NVMeOptimizer(ours, Odd, paths=tmp_path, host_memory=3_000_000) as optimizer:
        for params, one in ((plain, reference), (ours, optimizer)):
            train(params, one)
            state = one.state[params[0]]
            state["momenta"][0.9].mul_(0.5)
            state["sides"][1] = torch.full((30, 30), 0.25)
            state["averages"].by_rows[0].add_(1)
            one.state[params[2]]["last"].clear()
            one.state[params[3]].clear()
            train(params, one, first=3)
    assert differing(ours, plain) == []


def test_one_whose_elements_have_lists_is_cut(tmp_path):
    class Aggregated(torch.optim.Optimizer):
        """AggMo. Source: arXiv:1804.00325."""

        def __init__(self, params, lr=1e-2):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            """One step."""
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                for decay in state.setdefault(
                    "buffers", {decay: torch.zeros_like(parameter) for decay in (0.0, 0.9, 0.99)}
                ):
                    parameter.sub_(
                        state["buffers"][decay].mul_(decay).add_(parameter.grad), alpha=1e-2
                    )

    plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = Aggregated(plain)
    train(plain, reference)
    with tight(ours, tmp_path, Aggregated) as optimizer:
        train(ours, optimizer)
        assert max(len(weight.fragments) for weight in optimizer._steps.binding.weights) > 1
        state = copy.deepcopy(optimizer.state_dict())
        assert unlike(state["state"], reference.state_dict()["state"]) == []
        optimizer.load_state_dict(state)
        train(ours, optimizer, first=3)
    train(plain, reference, first=3)
    assert differing(ours, plain) == []


class Growing(torch.optim.Optimizer):
    """Keeps the gradients of the first half until the second step ends, and then of all."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
            if "kept" in state:
                kept = state["kept"]
                parameter[: len(kept)].sub_(kept, alpha=1e-3)
            state["steps"] = steps = state.get("steps", 0) + 1
            state["kept"] = parameter.grad[: -(-len(parameter) // (1 + (steps < 3)))].clone()


def test_a_state_that_grows_to_the_shape_of_its_parameter_is_loaded_before_and_after(tmp_path):
    for steps in (2, 3):
        plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
        train(plain, Growing(plain), steps=5)
        with NVMeOptimizer(ours, Growing, paths=tmp_path) as optimizer:
            train(ours, optimizer, steps=steps)
            state = optimizer.state_dict()
        with NVMeOptimizer(ours, Growing, paths=tmp_path) as optimizer:
            optimizer.load_state_dict(state)
            train(ours, optimizer, first=steps, steps=5 - steps)
        assert differing(ours, plain) == []


class Unforeseen(Odd):
    """Keeps a state that no trial sees, for large parameters only."""

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel() > 20_000:
                self.state[parameter].setdefault("more", torch.zeros(10, parameter.numel()))


def test_a_cap_that_shows_to_be_too_little_is_reported_with_what_would_do(tmp_path):
    reason = "which shows as it makes them, and host_memory has no room for them"
    with (
        tight(parameters(shapes=SHAPES), tmp_path, Unforeseen) as optimizer,
        pytest.raises(UsageError, match=reason) as reported,
    ):
        train(optimizer.param_groups[0]["params"], optimizer, steps=4)
    enough = int(re.search(r"at least (\d+)", str(reported.value))[1])
    params = parameters(shapes=SHAPES)
    with NVMeOptimizer(params, Unforeseen, paths=tmp_path, host_memory=enough) as optimizer:
        train(params, optimizer, steps=4)


@pytest.mark.slow
def test_many_steps_take_no_more_than_the_budget(tmp_path):
    taken, states = taken_by_many_steps(
        tmp_path, shapes=[(512, 512)] * 16, optimizer="test_odd_states.Odd", host_memory="60MB"
    )
    assert states > 140e6
    assert taken < 60e6 * 1.2


# Rows and columns of many sizes, which a bucket has many of; sizes of one; and large matrices.
COMPOSED = {
    "matrices": [(7, 3), (4, 4), (3, 2, 5)] * 30,
    "ones": [(1, 1)] * 100,
    "kernels": [(8, 4, 1, 1), (3,), (5, 4, 3, 2, 3)] * 10,
    "tall": [(300, 2), (5, 5), ()] * 10,
}


@covering(
    kind=[torch.optim.Adafactor, Odd],
    shapes=list(COMPOSED),
    options=[
        {"state_format": "exact", "accumulate": None},
        {"state_format": "split", "accumulate": "host"},
    ],
)
def test_the_least_memory_named_suffices(tmp_path, kind, shapes, options):
    plain, ours = (parameters(torch.bfloat16, shapes=COMPOSED[shapes]) for _ in range(2))
    with NVMeOptimizer(plain, kind, paths=tmp_path, **options) as roomy:
        train(plain, roomy)
    with tight(ours, tmp_path, kind, **options) as optimizer:
        train(ours, optimizer)
        assert differing(ours, plain) == []


@covering(accumulate=[None, "host"], state_format=["exact", "split", "compact", "compact24"])
def test_the_least_memory_named_suffices_any_optimizer(tmp_path, state_format, accumulate):
    trained = 0
    for name in KINDS:
        params = parameters(torch.bfloat16, shapes=[(7, 3), (7,), (), (40, 30)])
        with (
            contextlib.suppress(UnsupportedError),  # not every format takes every optimizer
            tight(
                params, tmp_path, OPTIMIZERS[name], state_format=state_format, accumulate=accumulate
            ) as optimizer,
        ):
            train(params, optimizer)
            trained += 1
    assert trained >= 4
