"""What an optimizer counts advances once per step, whatever the number of sub-groups."""

from __future__ import annotations

import pytest
from launch import Case, differences, run, train

torch = pytest.importorskip("torch")

from models import Counting, Estimating  # noqa: E402  # where there is torch

from nvme_offload.zero3.once_per_step import (  # noqa: E402
    OncePerStep,
    computed_from_values,
    update_scale,
)


def made(kind=Counting):
    """An optimizer of two groups with two parameters each, and the parameters."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(4)]
    return kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.3}]), params


def step_one_by_one(optimizer, params):
    """Update *params* as ZeRO-3 does: the group of each has that one alone, the others have none."""
    step = OncePerStep(optimizer)
    for number, param in enumerate(params):
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [param] if index == number // 2 else []
        with step.sub_group(number // 2):
            optimizer.step()
    step.end()
    return step.conflict


def options(optimizer):
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def test_sub_groups_of_two_groups_are_updated_as_by_one_call():
    (whole, wanted), (cut, params) = made(), made()
    held = [cut.param_groups[0]["seen"], cut.param_groups[1]["seen"]]
    for _ in range(3):
        for param in (*wanted, *params):
            param.grad = param.detach().clone()
        whole.step()
        assert step_one_by_one(cut, params) == ""
        assert all(map(torch.equal, params, wanted))
    assert str(options(cut)) == str(options(whole))
    assert cut.steps == whole.steps == 3
    # the same objects, which others may hold
    assert [group["seen"] for group in cut.param_groups] == held
    assert cut.param_groups[0]["seen"] is held[0]


@pytest.mark.parametrize("how", ["replaced", "hook"])
def test_what_is_counted_around_a_step_of_torch_counts_once(how):
    optimizer, params = made(torch.optim.SGD)
    for param in params:
        param.grad = param.detach().clone()

    def count(*_):
        group = optimizer.param_groups[0]
        group["count"] = group.get("count", 0) + 1

    if how == "hook":
        optimizer.register_step_post_hook(count)
    else:
        step = optimizer.step
        optimizer.step = lambda: (step(), count())
    assert step_one_by_one(optimizer, params) == ""
    assert optimizer.param_groups[0]["count"] == 1


def test_a_step_that_is_undone_counts_nothing():
    (optimizer, _), (other, _) = made(), made()
    step = OncePerStep(optimizer)
    with step.sub_group(0):
        optimizer.step()
    step.undo()
    assert str(options(optimizer)) == str(options(other))
    assert optimizer.steps == 0


def test_what_depends_on_the_values_is_found():
    optimizer, params = made(Estimating)
    for param in params:
        param.grad = param.detach().clone()
    assert step_one_by_one(optimizer, params) == "d"
    assert computed_from_values(made(Estimating)[0]) == "d"
    assert computed_from_values(made()[0]) == ""
    assert computed_from_values(made(torch.optim.AdamW)[0]) == ""


def test_the_trial_runs_on_the_cpu_whatever_the_default_device():
    optimizer = made(Estimating)[0]
    with torch.device("meta"):
        assert computed_from_values(optimizer) == "d"


@pytest.mark.parametrize("found_inf", [False, True])
def test_a_scale_is_updated_as_torch_does(found_inf):
    scalers = [torch.amp.GradScaler("cpu", growth_interval=2) for _ in range(2)]
    for _ in range(4):
        param = torch.ones(1, requires_grad=True)
        scalers[0].scale(param * (torch.inf if found_inf else 1.0)).backward()
        scalers[0].step(torch.optim.SGD([param]))
        scalers[0].update()
        update_scale(scalers[1], found_inf)
        assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.parametrize(("parameters", "states"), [("none", "nvme"), ("nvme", "cpu")])
def test_an_optimizer_that_needs_all_parameters_at_once_is_refused(tmp_path, parameters, states):
    case = Case(optimizer="estimating", parameters=parameters, states=states)
    cases = [case.but(groups=2), case.but(sub_group_size=500), case]
    *refused, mine = train(cases, tmp_path)
    for result in refused:
        assert result["error"] == "UnsupportedError"
        assert "Estimating computes 'd' from all parameters" in result["message"]
        assert "sub_group_size" in result["message"]
    (reference,) = train([case], tmp_path, ours=False)
    assert differences(mine, reference) == []


def test_hooks_that_are_called_for_each_sub_group_are_warned_of(tmp_path):
    case = Case(sub_group_size=500, loop="hook")
    (rank,) = run([case], tmp_path)
    assert "error" not in rank.results[0]
    assert rank.complaints.count("hooks of the step of AdamW are called") == 1


class Remembering(Counting):
    """Has a tensor with a NaN, and a list of tensors that each step replaces."""

    def __init__(self, params):
        super().__init__(params)
        self.unset = torch.full((3,), torch.nan)
        self.latest = [torch.zeros(3), torch.zeros(3)]

    def step(self, closure=None):
        """One step."""
        super().step(closure)
        self.latest[0] = self.latest[0] + 1


def test_tensors_in_lists_and_nans_are_kept():
    optimizer, params = made(Remembering)
    assert computed_from_values(optimizer) == ""
    for steps in range(1, 4):
        for param in params:
            param.grad = param.detach().clone()
        assert step_one_by_one(optimizer, params) == ""
        assert torch.equal(optimizer.latest[0], torch.full((3,), float(steps)))
