"""Parameters whose strides change after the optimizer is made, as by ``model.to(memory_format=...)``."""

from __future__ import annotations

import torch
from covering import covering
from reference import Reference, differing, tight


class Convolutions(torch.nn.Sequential):
    """Two, the second of which is larger than a bucket."""

    def __init__(self, dtype):
        torch.manual_seed(0)
        super().__init__(torch.nn.Conv2d(16, 64, 3), torch.nn.Conv2d(64, 64, 3))
        self.to(dtype)

    def loss(self, step):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(2, 16, 8, 8, generator=generator).to(self[0].weight.dtype)
        return self(images).float().square().mean()


def without_memory_format(net):
    """Other strides, with gaps."""
    for parameter in net.parameters():
        parameter.data = torch.stack([parameter.data, parameter.data], dim=-1)[..., 0]


CONVERSIONS = {
    "channels_last": lambda net: net.to(memory_format=torch.channels_last),
    "contiguous": lambda net: net.to(memory_format=torch.contiguous_format),
    "transposed": lambda net: net[1].weight.data.transpose_(0, 1),
    "gaps": without_memory_format,
}


@covering(
    dtype=[torch.float32, torch.bfloat16],
    options=[
        {},
        {"step_in_backward": True},
        {"step_in_backward": "provisional"},
        {"overlap_step": True},
        {"accumulate": "host"},
    ],
    conversion=list(CONVERSIONS),
)
def test_a_model_whose_strides_change(tmp_path, conversion, options, dtype):
    plain, ours = Convolutions(dtype), Convolutions(dtype)
    if conversion == "contiguous":
        for net in (plain, ours):
            net.to(memory_format=torch.channels_last)
    reference = Reference(list(plain.parameters()), torch.optim.AdamW, lr=1e-2)
    with tight(list(ours.parameters()), tmp_path, lr=1e-2, **options) as optimizer:
        for step in range(6):
            for net, one in ((plain, reference), (ours, optimizer)):
                net.zero_grad()
                if net is ours:
                    optimizer.zero_grad()
                if step in (0, 2):
                    CONVERSIONS[conversion](net)
                net.loss(step).backward()
                one.step()
            if step == 3:
                weight, (_, master) = ours[1].weight, reference.pairs[2]
                average = optimizer.state[weight]["exp_avg"]
                assert torch.equal(average, reference.optimizer.state[master]["exp_avg"])
                for one in (average, reference.optimizer.state[master]["exp_avg"]):
                    one[3:5].fill_(0.125)
            if step == 4:
                optimizer.load_state_dict(optimizer.state_dict())
    assert (
        differing(
            [one.contiguous() for one in ours.parameters()],
            [one.contiguous() for one in plain.parameters()],
        )
        == []
    )
