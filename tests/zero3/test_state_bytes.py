"""How much an optimizer keeps for each element is found out before it has made a step, since memory
is planned by it.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from nvme_offload.zero3.sub_groups import states_of  # noqa: E402  # wants DeepSpeed

PARAMETER = torch.nn.Parameter(torch.zeros(3))


class Peculiar(torch.optim.SGD):
    """Cannot be made from its defaults."""

    def __init__(self, params, factory):
        super().__init__(params, lr=factory())


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (torch.optim.AdamW([PARAMETER], lr=1e-3), 12),
        (torch.optim.AdamW([PARAMETER], lr=1e-3, amsgrad=True), 16),
        (torch.optim.Adam([PARAMETER], lr=1e-3), 12),
        (torch.optim.SGD([PARAMETER], lr=1e-3), 4),
        (torch.optim.SGD([PARAMETER], lr=1e-3, momentum=0.9), 8),
        (torch.optim.Adagrad([PARAMETER], lr=1e-3), 8),
        (torch.optim.RMSprop([PARAMETER], lr=1e-3, momentum=0.9, centered=True), 16),
        (Peculiar([PARAMETER], lambda: 1e-3), 12),
    ],
)
def test_bytes_for_each_element(optimizer, expected):
    states = states_of(optimizer, torch.float32)
    assert 4 + sum(dtype.itemsize for dtype in states.values()) == expected
