"""What Lightning moves to the CPU after a run is moved back before the next one."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.deepspeed
param_swapper = pytest.importorskip("nvme_offload.zero3.param_swapper")

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus  # noqa: E402


class Accelerator:
    def current_device_name(self) -> str:
        return "cuda:1"


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The address of a tensor, and the device that it is moved to."""
    found: list[tuple[int, str]] = []

    def to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        found.append((tensor.data_ptr(), str(device)))
        return tensor

    monkeypatch.setattr(param_swapper, "get_accelerator", Accelerator)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return found


def test_whole_parameters_and_buffers_are_put_on_the_device(moved: list[tuple[int, str]]) -> None:
    module = torch.nn.BatchNorm1d(4)
    module.weight.ds_status, module.bias.ds_status = (
        ZeroParamStatus.AVAILABLE,
        ZeroParamStatus.NOT_AVAILABLE,
    )
    # not the bias: its partition is elsewhere, and is gathered where it belongs
    param_swapper.return_to_device(module)
    assert moved == [
        (tensor.data_ptr(), "cuda:1")
        for tensor in (
            module.weight,
            module.running_mean,
            module.running_var,
            module.num_batches_tracked,
        )
    ]


@pytest.mark.parametrize("status", [None, ZeroParamStatus.NOT_AVAILABLE])
def test_a_module_that_was_not_used_before_is_left_as_it_is(
    moved: list[tuple[int, str]], status: ZeroParamStatus | None
) -> None:
    module = torch.nn.BatchNorm1d(4)
    for param in module.parameters():
        if status is not None:
            param.ds_status = status
    param_swapper.return_to_device(module)
    assert moved == []
