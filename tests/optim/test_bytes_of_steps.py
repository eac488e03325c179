"""The bytes that steps move to and from the drive, by the size of host_memory."""

from __future__ import annotations

import torch
from covering import covering

from nvme_offload import NVMeOptimizer

STEPS = 5
# bytes a parameter in host memory: master and states, and the sum of gradients
STATES = {"exact": 12, "split": 10}
SUM = 2


def moved(path, host_memory, state_format, update):
    """Bytes read and written in each step."""
    accumulate = "host" if update == "accumulated" else None
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(40))).bfloat16()
    count = sum(parameter.numel() for parameter in net.parameters())
    whole = count * (STATES[state_format] + (SUM if accumulate else 0))
    found = []
    with NVMeOptimizer(
        net.parameters(),
        paths=path,
        host_memory=int(host_memory * whole),
        state_format=state_format,
        accumulate=accumulate,
        step_in_backward=update == "in backward",
    ) as optimizer:
        for _ in range(STEPS):
            for _ in range(2 if accumulate else 1):
                net(torch.randn(4, 128).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            stats = optimizer.stats()
            found.append(stats.bytes_read + stats.bytes_written)
    return found, whole


@covering(state_format=list(STATES), update=["after", "accumulated", "in backward"])
def test_from_half_of_the_states_to_twice_them(tmp_path, state_format, update):
    """What fits is never moved. The second step moves at most twice what later steps do, and less
    with more memory: a value that stays in memory is not moved to another place there.
    """
    before = None
    for share in (0.5, 1.0, 1.25, 2.0):
        found, whole = moved(tmp_path, share, state_format, update)
        assert share < 1.25 or found == [0] * STEPS, (share, found)
        # A few of the values, each about a fortieth of all: how many depends on when writes end. If
        # the second step moved everything, it would be twice the whole.
        room = whole // 4
        assert found[1] <= 2 * found[-1] + room, (share, found)
        assert before is None or found[-1] <= before + room, (share, found, before)
        before = found[-1]
