"""Methods, attributes and properties of the optimizer class, reached through `NVMeOptimizer`."""

from __future__ import annotations

import pytest
import torch
from reference import Reference, differing, parameters, smallest, train, unlike

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.optim import NVMeOptimizer


class ScheduleFree(torch.optim.Optimizer):
    """Trains at one point, and evaluates at another that `eval` goes to and `train` comes back
    from. Source: arXiv:2405.15682.
    """

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})
        self.verbose = False

    @property
    def supports_flat_params(self):
        """As some trainers ask."""
        return True

    def _go(self, weight, mode):
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight(group["beta"]))
                group["train_mode"] = mode

    @torch.no_grad()
    def eval(self):
        """Go to the average."""
        self._go(lambda beta: 1 - 1 / beta, False)

    @torch.no_grad()
    def train(self):
        """Come back."""
        self._go(lambda beta: 1 - beta, True)

    def itself(self):
        """As some return themselves, to be called in a chain."""
        return self

    def norm(self):
        """Another one for each bucket."""
        return float(
            sum(parameter.norm() for group in self.param_groups for parameter in group["params"])
        )

    def forget(self, key):
        """Raises for missing states."""
        for state in self.state.values():
            del state[key]

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            if not group["train_mode"]:
                raise Exception("not in train mode")
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.clone()
                parameter.lerp_(state["z"], 1 / group["k"]).sub_(
                    parameter.grad, alpha=group["lr"] * (1 - group["beta"])
                )
                state["z"].sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_methods_work_on_all_parameters(tmp_path, dtype):
    plain, ours = parameters(dtype), parameters(dtype)
    reference = Reference(plain, ScheduleFree)

    def follow(method):
        method()
        with torch.no_grad():
            for parameter, master in reference.pairs:
                if master is not parameter:
                    parameter.copy_(master)

    with smallest(
        lambda cap: NVMeOptimizer(ours, ScheduleFree, paths=tmp_path, host_memory=cap)
    ) as optimizer:
        assert len(optimizer._steps.binding.buckets) > 1
        for round_ in range(2):
            follow(reference.optimizer.train)
            optimizer.train()
            assert optimizer.param_groups[0]["train_mode"]
            train(plain, reference, first=3 * round_)
            train(ours, optimizer, first=3 * round_)
            follow(reference.optimizer.eval)
            assert differing(ours, plain) != []
            assert optimizer.eval() is None
            assert differing(ours, plain) == []
        states = optimizer.state_dict()["state"]
        assert (
            unlike(
                {index: state["z"] for index, state in states.items()},
                {i: s["z"] for i, s in reference.optimizer.state_dict()["state"].items()},
            )
            == []
        )


def test_attributes_and_properties(tmp_path):
    params = parameters()
    with smallest(
        lambda cap: NVMeOptimizer(params, ScheduleFree, paths=tmp_path, host_memory=cap)
    ) as optimizer:
        assert optimizer.supports_flat_params
        optimizer.verbose = True  # before there are inner optimizers
        optimizer.train()
        assert optimizer.verbose
        assert all(bucket.inner.verbose for bucket in optimizer._steps.binding.buckets)
        optimizer.verbose = 3
        assert [bucket.inner.verbose for bucket in optimizer._steps.binding.buckets] == [3] * len(
            optimizer._steps.binding.buckets
        )
        for missing in ("nothing_like_it", "_private"):
            with pytest.raises(
                AttributeError, match="and neither has the optimizer that it was given"
            ):
                getattr(optimizer, missing)
        assert optimizer.itself() is optimizer
        with pytest.raises(
            UsageError, match=r"norm\(\) of ScheduleFree has another value for each bucket"
        ):
            optimizer.norm()


def test_a_method_that_fails_at_once_has_changed_nothing(tmp_path):
    plain, ours = parameters(), parameters()
    reference = ScheduleFree(plain)
    with NVMeOptimizer(ours, ScheduleFree, paths=tmp_path) as optimizer:
        for params, one in ((plain, reference), (ours, optimizer)):
            one.train()
            train(params, one)
            with pytest.raises(KeyError):
                one.forget("nothing")
            train(params, one, first=3)
    assert differing(ours, plain) == []


def test_a_step_out_of_train_mode_is_as_in_memory(tmp_path):
    params = parameters()
    with (
        NVMeOptimizer(params, ScheduleFree, paths=tmp_path) as optimizer,
        pytest.raises(Exception, match="not in train mode"),
    ):
        train(params, optimizer, steps=1)


class Shared(torch.optim.SGD):
    """Counts in a state that is of no parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        self.state["total"] = self.state.get("total", 0) + 1


def test_a_state_of_no_parameter_is_refused(tmp_path):
    with pytest.raises(
        UnsupportedError,
        match="Shared cannot be used with NVMeOptimizer: its state has 'total', which belongs to no parameter",
    ):
        NVMeOptimizer(parameters(), Shared, lr=0.1, paths=tmp_path)


class Wrapper(torch.optim.Optimizer):
    """Steps with another optimizer, whose states are separate: as Lookahead does."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
        self.optimizer = torch.optim.AdamW(
            [parameter for group in self.param_groups for parameter in group["params"]], lr=lr
        )

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        self.optimizer.step()


class Sums(torch.optim.SGD):
    """Keeps its sums in a separate list."""

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        parameters = self.param_groups[0]["params"]
        self.sums = getattr(self, "sums", [torch.zeros_like(parameter) for parameter in parameters])
        for total, parameter in zip(self.sums, parameters, strict=True):
            if parameter.grad is not None:
                parameter.sub_(total.add_(parameter.grad), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("kind", "what"),
    [(Wrapper, "another optimizer, AdamW, as 'optimizer'"), (Sums, "tensors as 'sums'")],
)
def test_what_keeps_states_elsewhere_is_refused(kind, what, tmp_path):
    with pytest.raises(
        UnsupportedError,
        match=f"{kind.__name__} cannot be used with NVMeOptimizer: it keeps {what}, outside of its state",
    ):
        NVMeOptimizer(parameters(), kind, lr=1e-3, paths=tmp_path)
