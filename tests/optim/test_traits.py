"""The traits of an optimizer: whether its parameters, and their elements, may be updated
separately.
"""

from __future__ import annotations

import contextlib
import functools
import logging

import pytest
import torch
from covering import covering
from reference import (
    OPTIMIZERS,
    Lion,
    Reference,
    differing,
    parameters,
    set_gradients,
    smallest,
    train,
)

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optimizer_states import traits as optimizer_traits
from nvme_offload.zero3.sub_groups import is_elementwise

SHAPES = [(40, 30), (300, 100), (1500,), (64, 64)]


class StableAdamW(torch.optim.Optimizer):
    """Divides its rate by the root mean square of the update where that is above one. Source:
    arXiv:2304.13013.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(
                        step=0,
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )
                state["step"] += 1
                gradient = parameter.grad
                state["exp_avg"].lerp_(gradient, (1 - first) / (1 - first ** state["step"]))
                state["exp_avg_sq"].lerp_(
                    gradient.square(), (1 - second) / (1 - second ** state["step"])
                )
                rms = (
                    (gradient.square() / state["exp_avg_sq"].clamp(min=group["eps"] ** 2))
                    .mean()
                    .sqrt()
                )
                rate = group["lr"] / max(1.0, float(rms))
                parameter.addcdiv_(
                    state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-rate
                )


class Projected(torch.optim.SGD):
    """Takes what lies along the weights out of gradients that are orthogonal to them, as AdamP and
    SGDP do. Source: arXiv:2006.08217.
    """

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                cosine = torch.nn.functional.cosine_similarity(
                    parameter.flatten(), gradient.flatten(), dim=0
                ).abs()
                if cosine < 1e-3:
                    gradient = gradient - parameter * (
                        (parameter * gradient).sum() / parameter.square().sum()
                    )
                parameter.sub_(gradient, alpha=group["lr"])


class Distance(torch.optim.Optimizer):
    """Finds its rate by the distance that all parameters have come, as Prodigy and D-Adaptation do.
    Source: arXiv:2306.06101.
    """

    def __init__(self, params, lr=1.0, d0=1e-6):
        super().__init__(params, {"lr": lr, "d": d0, "above": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        first = self.param_groups[0]
        above, below = first["above"], 0.0
        pairs = [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for group, parameter in pairs:
            state = self.state[parameter]
            if not state:
                state.update(p0=parameter.clone(), s=torch.zeros_like(parameter))
            above += (
                first["d"] * group["lr"] * float((parameter.grad * (state["p0"] - parameter)).sum())
            )
            state["s"].add_(parameter.grad, alpha=first["d"] * group["lr"])
            below += float(state["s"].abs().sum())
        distance = max(first["d"], above / below) if below else first["d"]
        for group in self.param_groups:
            group.update(d=distance, above=above)
        for group, parameter in pairs:
            parameter.sub_(parameter.grad, alpha=distance * group["lr"])


class Late(torch.optim.SGD):
    """Updates single elements for its first nine steps, and uses norms after them."""

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                scale = 1.0 if state["step"] < 10 else 1 / (1 + float(parameter.grad.norm()))
                parameter.sub_(parameter.grad, alpha=group["lr"] * scale)


class Noisy(torch.optim.SGD):
    """Adds noise."""

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad + torch.randn_like(parameter), alpha=group["lr"])


class ByRows(torch.optim.SGD):
    """Divides each row by its norm, and vectors by theirs."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(
                    parameter.grad / (parameter.grad.norm(dim=-1, keepdim=True) + 1e-6),
                    alpha=group["lr"],
                )


class ByKind(torch.optim.SGD):
    """Lets matrices decay, and vectors not."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9 if parameter.dim() > 1 else 1.0).sub_(
                    parameter.grad, alpha=group["lr"]
                )


LOOKING = {
    "stable": StableAdamW,
    "projected": functools.partial(Projected, lr=0.1),
    "distance": Distance,
    "late": functools.partial(Late, lr=0.1),
    "late-slowly": functools.partial(Late, lr=0.0),
    "lion": Lion,
    "noisy": functools.partial(Noisy, lr=0.1),
    "rows": functools.partial(ByRows, lr=0.1),
    "kinds": functools.partial(ByKind, lr=0.1),
}


def judged(make, dimensions=(1, 2)):
    found = optimizer_traits.examine(
        "it", lambda samples: make(list(samples)), dimensions, torch.float32, torch.device("cpu")
    )
    return found.separable, found.elementwise


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "lion"])
def test_what_is_known_is_so(monkeypatch, name):
    """The table of known classes, compared with a trial of each."""
    make = OPTIMIZERS[name]
    known = optimizer_traits.known(make([torch.zeros(2)]))
    assert known is not None
    monkeypatch.setattr(optimizer_traits, "_KNOWN", {})
    assert judged(make) == (True, known)


def test_what_torch_has_is_known():
    classes = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    # which are refused
    classes -= {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    assert {
        f"{kind.__module__}.{kind.__qualname__}" for kind in classes
    } <= optimizer_traits._KNOWN.keys()


def test_a_subclass_is_not_what_it_was_made_of():
    class Scaled(torch.optim.AdamW):
        pass

    assert optimizer_traits.known(Scaled([torch.zeros(2)])) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stable", (True, False)),
        ("projected", (True, False)),
        ("distance", (False, False)),
        ("late", (True, False)),
        ("late-slowly", (True, False)),
        ("lion", (True, True)),
        ("rows", (True, False)),
        ("kinds", (True, False)),
        ("noisy", (True, True)),  # as many numbers are drawn for parts as for all
    ],
)
def test_what_is_not_known_is_tried(name, expected):
    before = torch.get_rng_state()
    assert judged(LOOKING[name]) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_a_trial_seeds_no_gpu_that_has_no_part_in_it(tmp_path, monkeypatch):
    """Nothing would restore its generator, whose numbers are the program's."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    NVMeOptimizer(parameters(), Lion, paths=tmp_path).close()
    assert seeded == []


@covering(
    dtype=[torch.float32, torch.bfloat16],
    name=[name for name in LOOKING if name != "late-slowly"],
)
def test_the_bits_are_those_of_the_plain_one(tmp_path, name, dtype):
    plain, ours = parameters(dtype, shapes=SHAPES), parameters(dtype, shapes=SHAPES)
    torch.manual_seed(0)
    train(plain, Reference(plain, LOOKING[name]), steps=12)
    torch.manual_seed(0)
    with smallest(
        lambda cap: NVMeOptimizer(ours, LOOKING[name], paths=tmp_path, host_memory=cap)
    ) as optimizer:
        train(ours, optimizer, steps=12)
    assert differing(ours, plain) == []


def descend(params, optimizer, steps):
    """Towards zero, so that distances grow."""
    for _ in range(steps):
        for parameter in params:
            parameter.grad = parameter.detach().clone()
        optimizer.step()


def test_what_looks_at_all_parameters_has_all_its_groups_together(tmp_path, caplog):
    plain, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)

    def groups(params):
        return [
            {"params": params[:1], "lr": 0.5},
            {"params": params[1:3]},
            {"params": params[3:], "lr": 2.0},
        ]

    reference = Distance(groups(plain))
    descend(plain, reference, steps=6)
    caplog.set_level(logging.INFO, logger="nvme_offload")
    with NVMeOptimizer(groups(ours), Distance, paths=tmp_path) as optimizer:
        assert "Distance updates all parameters together (tried)" in caplog.text
        descend(ours, optimizer, steps=3)
        state = optimizer.state_dict()
        assert [group["d"] for group in optimizer.param_groups] == [
            optimizer.param_groups[0]["d"]
        ] * 3
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    with NVMeOptimizer(groups(copies), Distance, paths=tmp_path) as optimizer:
        optimizer.load_state_dict(state)
        descend(copies, optimizer, steps=3)
        assert optimizer.param_groups[1]["d"] == reference.param_groups[1]["d"] > 1e-6
    assert differing(copies, plain) == []


def test_what_looks_at_all_parameters_is_refused_where_it_cannot_be(tmp_path):
    params = parameters(shapes=SHAPES)
    with pytest.raises(
        UsageError,
        match="Distance updates all parameters together, so host_memory has to hold all of its states",
    ):
        NVMeOptimizer(params, Distance, paths=tmp_path, host_memory=200_000)
    with pytest.raises(
        UnsupportedError,
        match="Distance updates all parameters together: NVMeOptimizer takes it with parameters of one dtype",
    ):
        NVMeOptimizer([*params, *parameters(torch.float64)], Distance, paths=tmp_path)
    frozen = parameters(shapes=[(5, 5)])[0].requires_grad_(False)
    with NVMeOptimizer([*params, frozen], Distance, paths=tmp_path) as optimizer:
        set_gradients([*params, frozen], 0)
        with pytest.raises(UnsupportedError, match="some that are frozen have gradients"):
            optimizer.step()


def test_what_looks_at_all_parameters_has_those_that_come_later_too(tmp_path):
    """Another group, and a parameter that is unfrozen."""

    def run(make):
        params, more = parameters(shapes=SHAPES), parameters(shapes=[(5, 5), (70, 3)])
        more[0].requires_grad_(False)
        optimizer = make([*params, more[0]])
        descend(params, optimizer, steps=3)
        optimizer.add_param_group({"params": more[1:], "lr": 2.0})
        descend([*params, more[1]], optimizer, steps=3)
        more[0].requires_grad_(True)
        descend([*params, *more], optimizer, steps=3)
        return [*params, *more]

    plain = run(Distance)
    with contextlib.ExitStack() as stack:
        ours = run(
            lambda params: stack.enter_context(NVMeOptimizer(params, Distance, paths=tmp_path))
        )
    assert differing(ours, plain) == []


def test_what_the_user_declares_is_not_tried(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="nvme_offload")
    with NVMeOptimizer(
        parameters(), functools.partial(Noisy, lr=0.1), elementwise=True, paths=tmp_path
    ):
        assert "updates every element by itself (declared)" in caplog.text


def test_zero3_judges_as_well():
    flat = [torch.zeros(3000)]
    assert is_elementwise(torch.optim.AdamW(flat))
    assert is_elementwise(Lion(flat))
    assert not is_elementwise(torch.optim.Adafactor(flat))
    assert not is_elementwise(StableAdamW(flat))
    assert not is_elementwise(Distance(flat))
    assert not is_elementwise(Late(flat, lr=0.1))


class Chosen(torch.optim.SGD):
    """Looks at whole parameters where an argument, which is no option, or an option of a group says
    so.
    """

    def __init__(self, params, scales, *, whole=False):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group.setdefault("whole", False)
        self.scales = scales
        self.whole = whole

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    whole = self.whole or group["whole"]
                    parameter.sub_(
                        parameter.grad / (1 + float(parameter.grad.norm()))
                        if whole
                        else parameter.grad,
                        alpha=group["lr"] * self.scales[0],
                    )


class Holding(Chosen):
    """Keeps references to its parameters outside its groups, and updates through them."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, [1.0])
        self.mine = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter.sub_(
                    parameter.grad / (1 + float(parameter.grad.norm())),
                    alpha=self.param_groups[0]["lr"],
                )


def test_zero3_judges_with_the_users_own_arguments():
    flat = [torch.ones(3000), torch.ones(3000)]
    assert is_elementwise(Chosen(flat, [0.5]))
    assert not is_elementwise(Chosen(flat, [0.5], whole=True))
    assert not is_elementwise(
        Chosen([{"params": flat[:1]}, {"params": flat[1:], "whole": True}], [0.5])
    )
    assert not is_elementwise(Holding(flat))
    assert all(torch.equal(tensor, torch.ones(3000)) for tensor in flat)


@pytest.mark.parametrize("name", [name for name in LOOKING if name != "late-slowly"])
def test_both_doors_judge_alike(name):
    flat = [torch.zeros(3000), torch.zeros(3000)]
    assert is_elementwise(LOOKING[name](flat)) == judged(LOOKING[name], dimensions=[1])[1]
