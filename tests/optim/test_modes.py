"""The modes of a thread, such as inference_mode, around a step, the making of the optimizer and the
use of states: the results are equal to the results of the plain optimizer.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from covering import covering
from reference import compared, differing, loss_of, model

from nvme_offload.errors import UnsupportedError
from nvme_offload.optim import NVMeOptimizer


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Functions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODES = {
    "inference_mode": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "enable_grad": torch.enable_grad,
    "functions": Functions,
}
OPTIONS = {
    "plain": {},
    "in backward": {"step_in_backward": True},
    "provisional": {"step_in_backward": "provisional"},
    "overlap": {"overlap_step": True},
    "accumulate": {"accumulate": "host"},
}


class Products(torch.optim.SGD):
    """Computes what modes change: a product of matrices, and tensors of the default dtype."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                    state["total"] = torch.zeros(3, device="cpu")
                state["average"].mul_(0.9).add_(parameter.grad)
                state["total"] += parameter.grad.mean()
                change = state["average"]
                if change.dim() == 2:
                    change = change @ (change.t() @ change) * 1e-3
                rate = torch.tensor(0.1, device="cpu")
                parameter.sub_(change * rate + state["total"].sum() * 1e-6)


WHENS = ("first", "later", "made", "states")
CLASSES = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "products": functools.partial(Products, lr=0.01),
}


def run(make, mode, when):
    """The parameters after four steps, with the *mode* in parts of the program."""

    def mode_if(wanted):
        return MODES[mode]() if wanted else contextlib.nullcontext()

    net = model()
    with mode_if(when == "made"):
        optimizer = make(list(net.parameters()))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        with mode_if(when == "first" or (when == "later" and step > 1)):
            optimizer.step()
        if when == "states" and step > 1:
            with mode_if(True):
                first = next(net.parameters())
                optimizer.state[first]["exp_avg"].mul_(0.5)
                optimizer.load_state_dict(optimizer.state_dict())
    result = [parameter.detach().clone() for parameter in net.parameters()]
    if isinstance(optimizer, NVMeOptimizer):
        optimizer.close()
    return result


@covering(mode=list(MODES), options=list(OPTIONS), when=WHENS)
def test_adamw(tmp_path, mode, when, options):
    plain = CLASSES["adamw"]
    try:
        expected = run(plain, mode, when)
    except (RuntimeError, NotImplementedError):  # torch cannot do it, or not for some steps
        expected = run(plain, "enable_grad", when)
    ours = functools.partial(
        NVMeOptimizer,
        optimizer_class=plain,
        paths=tmp_path,
        host_memory=600_000,
        **OPTIONS[options],
    )
    assert differing(run(ours, mode, when), expected) == []


@covering(
    options=["provisional", "overlap"],
    mode=["bfloat16", "autocast", "inference_mode"],
    when=["first", "later", "made"],
)
def test_an_optimizer_whose_results_depend_on_modes(tmp_path, mode, when, options):
    plain = CLASSES["products"]
    expected = run(plain, "enable_grad" if mode == "inference_mode" else mode, when)
    ours = functools.partial(
        NVMeOptimizer,
        optimizer_class=plain,
        paths=tmp_path,
        host_memory=4_000_000,
        **OPTIONS[options],
    )
    assert differing(run(ours, mode, when), expected) == []


@pytest.mark.parametrize("options", ["plain", "provisional", "overlap", "accumulate"])
def test_gradients_that_were_made_under_inference_mode(tmp_path, options):
    """Such as by ``parameter.grad = parameter.grad / 2``."""

    def program(make):
        net = model()
        optimizer = make(net.parameters())
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            with torch.inference_mode():
                for parameter in net.parameters():
                    parameter.grad = parameter.grad / 2
            optimizer.step()
        return list(net.parameters())

    assert compared(program, tmp_path, CLASSES["adamw"], **OPTIONS[options]) == []


def test_parameters_that_were_made_under_inference_mode_are_refused(tmp_path):
    with torch.inference_mode():
        net = model()
    with pytest.raises(UnsupportedError, match="make the model outside"):
        NVMeOptimizer(net.parameters(), paths=tmp_path)


def test_a_sparse_gradient_is_refused_by_name(tmp_path):
    for when in (False, True, "provisional"):
        net = torch.nn.EmbeddingBag(50, 8, sparse=True, mode="sum")
        with NVMeOptimizer(
            net.parameters(), torch.optim.SGD, lr=0.1, paths=tmp_path, step_in_backward=when
        ) as optimizer:
            net(torch.arange(10).view(2, 5)).square().sum().backward()
            with pytest.raises(UnsupportedError, match="a gradient is sparse"):
                optimizer.step()
            optimizer.zero_grad()
            net.weight.grad = torch.ones_like(net.weight)
            before = net.weight.detach().clone()
            optimizer.step()
            assert differing([net.weight], [before - 0.1]) == []
