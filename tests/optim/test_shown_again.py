"""`optimizer.state` after a load or a write whose states look like those before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import differing, parameters, set_gradients, train

from nvme_offload.errors import UsageError
from nvme_offload.io.pool import PinnedPool
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.store.store import TensorStore
from nvme_offload.swap.swapper import TensorSwapper


class Counts(torch.optim.Optimizer):
    """Keeps nothing but a number for each parameter, which its steps depend on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"] / state["step"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, Counts])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_states_that_are_loaded_into_the_same_optimizer_stay(tmp_path, kind, dtype):
    gone_on, loaded = parameters(dtype), parameters(dtype)
    for params in (gone_on, loaded):
        with NVMeOptimizer(params, kind, paths=tmp_path, lr=0.01) as optimizer:
            train(params, optimizer)
            if params is loaded:
                before = optimizer.state_dict()
                optimizer.load_state_dict(before)
                assert optimizer.state_dict()["state"].keys() == before["state"].keys()
            train(params, optimizer, steps=40, first=3)
    assert differing(gone_on, loaded) == []


def test_a_master_that_is_written_to_is_used(tmp_path):
    [parameter] = params = parameters(torch.bfloat16, shapes=[(40, 30)])
    with NVMeOptimizer(params, torch.optim.SGD, paths=tmp_path, lr=0.5) as optimizer:
        train(params, optimizer)
        # what the bfloat16 weight cannot hold
        master = parameter.detach().float() + 2.0**-12
        optimizer.state[parameter]["master"].copy_(master)
        set_gradients(params, 3)
        gradient = parameter.grad.float()
        optimizer.step()
        assert torch.equal(optimizer.state[parameter]["master"], master - 0.5 * gradient)


class BySize(Counts):
    """Chooses the keys of a state by the size of the parameter, as some Muon do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                key = "first" if parameter.shape[0] < 1000 else "second"
                state = self.state[parameter]
                state[key] = state.get(key, torch.zeros_like(parameter)) + parameter.grad
                parameter.sub_(state[key], alpha=group["lr"])


def test_keys_that_depend_on_the_size_are_loaded(tmp_path):
    shapes = [(2000, 3), (20, 3)]
    gone_on, saved, resumed = (parameters(shapes=shapes) for _ in range(3))
    with NVMeOptimizer(gone_on, BySize, paths=tmp_path) as optimizer:
        train(gone_on, optimizer, steps=5)
    with NVMeOptimizer(saved, BySize, paths=tmp_path) as optimizer:
        train(saved, optimizer)
        states = optimizer.state_dict()
        for ours, theirs in zip(resumed, saved, strict=True):
            ours.data.copy_(theirs)
        with NVMeOptimizer(resumed, BySize, paths=tmp_path) as other:
            other.load_state_dict(states)
            train(resumed, other, steps=2, first=3)
    assert differing(gone_on, resumed) == []


def test_a_wrong_argument_leaves_store_and_swapper_usable(tmp_path):
    values = torch.arange(4096, dtype=torch.uint8)
    with TensorStore(tmp_path) as store:
        store.put("a", values).wait()
        assert [] not in store
        for wrong in (lambda: store.get("a", values, after=[None]), lambda: store.delete([])):
            with pytest.raises(UsageError):
                wrong()
        back = torch.zeros_like(values)
        store.get("a", back).wait()
        assert torch.equal(back, values)
        store.put("b", torch.zeros(64 << 20, dtype=torch.uint8))
        store.reset()
        assert (store.names(), store.used_bytes) == ([], 0)
        with TensorSwapper(store, PinnedPool(1 << 20)) as swapper:
            swapper.swap_out("a", values)
            with pytest.raises(TypeError):
                swapper.prefetch(None)
            swapper.swap_in("a")
            with pytest.raises(TypeError):
                swapper.release("a", changed=True, nbytes=1.5)
            swapper.release("a", changed=False)
