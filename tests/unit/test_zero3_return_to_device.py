"""What Lightning moves to the CPU after a run is moved back before the next one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.deepspeed


class Accelerator:
    def current_device_name(self) -> str:
        return "cuda:1"


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, str]]]:
    """A function from a module and the status of each of its parameters, by name, to the addresses
    of the tensors that are moved, and where to.
    """
    param_swapper = pytest.importorskip("nvme_offload.zero3.param_swapper")
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    def by(module: torch.nn.Module, **status: str) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []

        def to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
            found.append((tensor.data_ptr(), str(device)))
            return tensor

        for name, one in status.items():
            module.get_parameter(name).ds_status = ZeroParamStatus[one]
        monkeypatch.setattr(param_swapper, "get_accelerator", Accelerator)
        monkeypatch.setattr(torch.Tensor, "to", to)
        param_swapper.return_to_device(module)
        return found

    return by


def test_whole_parameters_and_buffers_are_put_on_the_device(
    moved: Callable[..., list[tuple[int, str]]],
) -> None:
    module = torch.nn.BatchNorm1d(4)
    # not the bias: its partition is elsewhere, and is gathered where it belongs
    assert moved(module, weight="AVAILABLE", bias="NOT_AVAILABLE") == [
        (tensor.data_ptr(), "cuda:1") for tensor in (module.weight, *module.buffers())
    ]


@pytest.mark.parametrize("status", [{}, {"weight": "NOT_AVAILABLE", "bias": "NOT_AVAILABLE"}])
def test_a_module_that_was_not_used_before_is_left_as_it_is(
    moved: Callable[..., list[tuple[int, str]]], status: dict[str, str]
) -> None:
    assert moved(torch.nn.BatchNorm1d(4), **status) == []
