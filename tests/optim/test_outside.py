"""Optimizers that treat their groups as other packages' do, and some of those themselves: the same
bits as in memory, or refused by name.

reports/optimizers-of-others-cpu.md has the results of all classes of those packages.
"""

from __future__ import annotations

import functools

import pytest
import torch
from reference import differing, parameters, set_gradients, smallest, train

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.optim import NVMeOptimizer

SHAPES = [(40, 30), (300, 100), (64, 64), (1500,), (7,)]


class Kinds(torch.optim.Optimizer):
    """Has defaults for each kind of group, sets them itself, and refuses groups with any other key,
    as Muon with an auxiliary Adam does.
    """

    def __init__(self, params):
        for group in params:
            group.setdefault("lr", 0.02 if group["matrices"] else 1e-3)
            group.setdefault("decay", 0.1 if group["matrices"] else 0.0)
            assert set(group) == {"params", "lr", "decay", "matrices"}
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = (
                    self.state[parameter]
                    .setdefault("momentum", torch.zeros_like(parameter))
                    .lerp_(parameter.grad, 0.1)
                )
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.sub_(
                    momentum / momentum.norm() if group["matrices"] else momentum, alpha=group["lr"]
                )


class Strict(torch.optim.SGD):
    """Takes a list of Parameters and nothing else, as Muon does, skips those that are frozen, as
    Adam-mini does, and keeps its rate in a tensor.
    """

    def __init__(self, params, lr=0.1):
        assert isinstance(params, list)
        assert all(isinstance(parameter, torch.nn.Parameter) for parameter in params)
        super().__init__(params, lr=lr)

    def add_param_group(self, param_group):
        """With a tensor for the rate, as torchao's have, which lower bits and compiled
        steps need.
        """
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = torch.tensor(
            float(self.param_groups[-1].get("lr", self.defaults["lr"]))
        )

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        [group] = self.param_groups
        if not torch.is_tensor(group["lr"]):
            raise TypeError("the rate is no tensor any more")
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is not None:
                parameter.sub_(
                    self.state[parameter]
                    .setdefault("sum", torch.zeros_like(parameter))
                    .add_(parameter.grad)
                    * group["lr"]
                )


class Regrouped(torch.optim.SGD):
    """Makes a group of each parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(
            [
                {"params": [parameter]}
                for entry in params
                for parameter in (entry["params"] if isinstance(entry, dict) else [entry])
            ],
            lr=lr,
        )


class Wrapper(torch.optim.Optimizer):
    """Wraps another without being an optimizer itself."""

    def __init__(self, params):
        self.inner = torch.optim.SGD(params)


def kinds(params):
    return [
        {"params": params[:2], "matrices": True},
        {"params": params[2:3], "matrices": True, "lr": 0.5},
        {"params": params[3:], "matrices": False},
    ]


class Quantized(torch.Tensor):
    """A tensor subclass, as torchao's optimizers keep for parameters of 4096 elements
    and more.
    """


class Packed(torch.optim.SGD):
    """Keeps a tensor of this subclass."""

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel() % 4096 == 0:
                self.state[parameter]["packed"] = torch.zeros_like(parameter).as_subclass(Quantized)
            parameter.sub_(parameter.grad, alpha=1e-3)


def scheduled(params, optimizer):
    """The rates in the end of some training with a scheduler, which adds to groups what it
    needs.
    """
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(4):
        train(params, optimizer, steps=1, first=step)
        scheduler.step()
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_defaults_of_a_kind_of_group(tmp_path):
    plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    rates = scheduled(plain, Kinds(kinds(plain)))
    with smallest(
        lambda cap: NVMeOptimizer(kinds(ours), Kinds, paths=tmp_path, host_memory=cap)
    ) as optimizer:
        assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.5, 1e-3]
        assert scheduled(ours, optimizer) == rates
        assert len(optimizer._steps.binding.buckets) > 2
    assert differing(ours, plain) == []


def test_a_list_of_parameters_that_are_not_frozen_and_a_rate_in_a_tensor(tmp_path):
    plain, ours = parameters(shapes=SHAPES[:4]), parameters(shapes=SHAPES[:4])
    rates = scheduled(plain, Strict(plain))
    with smallest(
        lambda cap: NVMeOptimizer(ours, Strict, paths=tmp_path, host_memory=cap)
    ) as optimizer:
        assert scheduled(ours, optimizer) == rates
        assert len(optimizer._steps.binding.buckets) > 1
    assert differing(ours, plain) == []


def test_a_group_that_is_added_is_as_the_class_has_it(tmp_path):
    class Tensors(Strict):
        def __init__(self, params, lr=0.1):
            torch.optim.SGD.__init__(self, params, lr=lr)

    plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    with NVMeOptimizer(ours[:2], Tensors, paths=tmp_path) as optimizer:
        optimizer.add_param_group({"params": ours[2:], "lr": 0.5})
        assert [torch.is_tensor(group["lr"]) for group in optimizer.param_groups] == [True, True]
        train(ours, optimizer)
    for params, rate in ((plain[:2], 0.1), (plain[2:], 0.5)):
        one = Strict(params, lr=rate)
        for step in range(3):
            set_gradients(plain, step)
            one.step()
    assert differing(ours, plain) == []


def test_what_cannot_be_used_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"must be a class, such as .*, not 'AdamW'"):
        NVMeOptimizer(parameters(shapes=SHAPES), "AdamW", paths=tmp_path)
    with pytest.raises(
        UnsupportedError,
        match="Regrouped cannot be used with NVMeOptimizer: it turns one parameter group into 4",
    ):
        NVMeOptimizer(parameters(shapes=SHAPES), Regrouped, paths=tmp_path)
    with pytest.raises(
        UnsupportedError, match="Wrapper cannot be used with NVMeOptimizer: it has no param_groups"
    ):
        NVMeOptimizer(parameters(shapes=SHAPES), Wrapper, paths=tmp_path)
    with pytest.raises(
        UnsupportedError,
        match="Packed cannot be used with NVMeOptimizer: its state 'packed' is of Quantized, which is no plain tensor",
    ):
        NVMeOptimizer(parameters(shapes=SHAPES), Packed, paths=tmp_path)


# By the extent of their norms: single elements, parameters, the model; with modes, and without.
PACKAGED = {
    "lion_pytorch.Lion": {"lr": 1e-3},
    "schedulefree.AdamWScheduleFree": {"warmup_steps": 3},
    "schedulefree.SGDScheduleFree": {},
    "schedulefree.RAdamScheduleFree": {},
    "prodigyopt.Prodigy": {"safeguard_warmup": True},
    "dadaptation.DAdaptAdam": {},
}


@pytest.mark.parametrize("name", PACKAGED)
def test_those_of_other_packages(tmp_path, name):
    package, _, kind = name.rpartition(".")
    make = functools.partial(getattr(pytest.importorskip(package), kind), **PACKAGED[name])
    plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    switch(reference := make(plain), "train")
    train(plain, reference, steps=12)
    switch(reference, "eval")
    with smallest(
        lambda cap: NVMeOptimizer(ours, make, paths=tmp_path, host_memory=cap)
    ) as optimizer:
        switch(optimizer, "train")
        train(ours, optimizer, steps=12)
        switch(optimizer, "eval")
    assert differing(ours, plain) == []


def switch(optimizer, mode):
    """Call `train` or `eval`, where the class has it."""
    method = getattr(optimizer, mode, None)
    if method is not None:
        method()
