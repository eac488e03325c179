"""compact: the bits do not depend on how much memory there is, and states that 8 bits are too few
for have 16.
"""

from __future__ import annotations

import copy
import functools
import logging

import pytest
import torch
from covering import covering
from reference import differing, parameters, smallest, train, unlike

from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optimizer_states.formats import state_format
from nvme_offload.optimizer_states.widening import far_blocks, round_near

SHAPES = [(40, 30), (7,), (300, 100), (64, 64), (1000,), (33, 31)]


def compact(params, tmp_path, host_memory, state_format="compact", **kwargs):
    return NVMeOptimizer(
        params,
        torch.optim.AdamW,
        paths=tmp_path,
        host_memory=host_memory,
        state_format=state_format,
        **kwargs,
    )


@covering(
    kept=[
        ("compact", torch.float32),
        ("compact", torch.bfloat16),
        ("compact24", torch.bfloat16),
    ],
    betas=[(0.9, 0.999), (0.99, 0.999)],
)
def test_the_bits_are_the_same_with_any_budget_also_of_a_resumed_run(tmp_path, kept, betas):
    state_format, dtype = kept
    make = functools.partial(compact, state_format=state_format, betas=betas, weight_decay=0.1)
    whole = parameters(dtype, shapes=SHAPES)
    with make(whole, tmp_path, "64MiB") as optimizer:
        buckets = {len(optimizer._steps.binding.buckets)}
        train(whole, optimizer, steps=4)
        half, state = (
            [torch.nn.Parameter(parameter.detach().clone()) for parameter in whole],
            copy.deepcopy(optimizer.state_dict()),
        )
        train(whole, optimizer, steps=4, first=4)
        expected = copy.deepcopy(optimizer.state_dict()["state"])
    for cap in (None, 200_000, 3_000_000):
        for resumed in (False, True):
            params = (
                [torch.nn.Parameter(parameter.detach().clone()) for parameter in half]
                if resumed
                else parameters(dtype, shapes=SHAPES)
            )
            of = functools.partial(make, params, tmp_path)
            with smallest(of) if cap is None else of(cap) as optimizer:
                buckets.add(len(optimizer._steps.binding.buckets))
                if resumed:
                    optimizer.load_state_dict(state)
                train(params, optimizer, steps=4 if resumed else 8, first=4 if resumed else 0)
                assert unlike(optimizer.state_dict()["state"], expected) == []
            assert differing(params, whole) == []
    assert len(buckets) > 2


def test_masters_have_24_bits_and_follow_those_of_32(tmp_path):
    shorter, whole = parameters(torch.bfloat16), parameters(torch.bfloat16)
    with (
        compact(shorter, tmp_path, "64MiB", "compact24") as ours,
        compact(whole, tmp_path, "64MiB") as reference,
    ):
        train(shorter, ours, steps=20)
        train(whole, reference, steps=20)
        kept = ours.state_dict()["state"]
        masters = reference.state_dict()["state"]
        assert any((one["master"].view(torch.int32) & 0xFF != 0).any() for one in masters.values())
        for index in kept:
            assert (kept[index]["master"].view(torch.int32) & 0xFF == 0).all()
            # a step moves a weight by up to the rate of 1e-3, and rounds it to 2**-16 of itself
            assert torch.allclose(kept[index]["master"], masters[index]["master"], atol=4e-3)
        assert sum(bucket.nbytes for bucket in ours._steps.binding.buckets) < 0.8 * sum(
            bucket.nbytes for bucket in reference._steps.binding.buckets
        )


@pytest.mark.parametrize(
    ("optimizer_class", "said"),
    [
        (functools.partial(torch.optim.AdamW, betas=(0.98, 0.999)), "beta1 is 0.98"),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.99), "momentum is 0.99"),
        (functools.partial(torch.optim.AdamW, eps=1e-15), "eps is 1e-15"),
        (torch.optim.AdamW, ""),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.95), ""),
    ],
)
def test_states_are_widened_with_a_line(tmp_path, caplog, optimizer_class, said):
    caplog.set_level(logging.INFO, logger="nvme_offload")
    params = parameters(shapes=[(300, 100)])
    with NVMeOptimizer(
        params, optimizer_class, paths=tmp_path, state_format="compact"
    ) as optimizer:
        train(params, optimizer)
        assert ("keeps the states of" in caplog.text) == bool(said)
        assert said in caplog.text
        kept = sum(bucket.nbytes for bucket in optimizer._steps.binding.buckets) / sum(
            parameter.numel() for parameter in params
        )
        states = len([key for key in optimizer.state[params[0]] if key != "step"])
        assert states * (2 if said else 1) <= kept < states * (2 if said else 1) * 1.01


def test_options_that_come_to_need_it_widen_them(tmp_path):
    """As with schedulers that cycle momenta; the states are kept."""
    params = parameters(shapes=SHAPES)
    with smallest(lambda cap: compact(params, tmp_path, cap)) as optimizer:
        train(params, optimizer)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.param_groups[0]["betas"] = (0.99, 0.999)
        optimizer.param_groups[0]["lr"] = 0.0
        train(params, optimizer, steps=1, first=3)
        after = optimizer.state_dict()["state"]
        for index in before:
            gradient = params[index].grad
            expected = before[index]["exp_avg"] * 0.99 + gradient * 0.01
            assert torch.allclose(after[index]["exp_avg"], expected, rtol=2**-7, atol=0)


def apart(params, step, *, of=(0, 2)):
    """Gradients over eight decades in each block of the parameters *of* these indices; in others,
    all of one size.
    """
    generator = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(params):
        scale = (
            torch.logspace(0, -8, 256)
            .repeat(-(-parameter.numel() // 256))[: parameter.numel()]
            .view(parameter.shape)
            if index in of
            else 1.0
        )
        parameter.grad = (
            (torch.randn(parameter.shape, generator=generator) * 0.1 + parameter.detach().float())
            .mul_(scale)
            .to(parameter.dtype)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_that_are_far_apart_are_widened_before_they_are_rounded(tmp_path, caplog, dtype):
    caplog.set_level(logging.INFO, logger="nvme_offload")
    exact, ours = parameters(dtype, shapes=SHAPES), parameters(dtype, shapes=SHAPES)
    with (
        NVMeOptimizer(exact, torch.optim.AdamW, paths=tmp_path, lr=0.05, weight_decay=0.0) as plain,
        compact(ours, tmp_path, "64MiB", lr=0.05, weight_decay=0.0) as optimizer,
    ):
        for step in range(60):
            for params, one in ((exact, plain), (ours, optimizer)):
                apart(params, step)
                one.step()
        assert (
            caplog.text.count(
                "second moments of one block are more than 30 octaves apart, for which 8 are too few"
            )
            == 1
        )
        moments = [
            plain.state_dict()["state"][0]["exp_avg_sq"],
            optimizer.state_dict()["state"][0]["exp_avg_sq"],
        ]
    assert torch.allclose(moments[1], moments[0], rtol=0.3, atol=0)
    # towards zero, in which most are within a few steps
    for one, other in zip(exact, ours, strict=True):
        assert (
            float(other.detach().float().square().mean())
            < 1.1 * float(one.detach().float().square().mean()) + 1e-3
        )


@pytest.mark.parametrize(
    "wide",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in [(0,), (5,)]), (2,), (0, 5)],
    ids=str,
)
def test_the_bits_of_those_are_the_same_with_any_budget_too(tmp_path, wide):
    def go(params, optimizer, first, last):
        for step in range(first, last):
            apart(params, step, of=wide)
            for index in wide if step < 3 else ():  # so that the look at the fourth step finds them
                params[index].grad = None
            optimizer.step()

    whole = parameters(shapes=SHAPES)
    with compact(whole, tmp_path, "64MiB") as optimizer:
        buckets = {len(optimizer._steps.binding.buckets)}
        go(whole, optimizer, 0, 6)
        half, state = (
            [torch.nn.Parameter(parameter.detach().clone()) for parameter in whole],
            copy.deepcopy(optimizer.state_dict()),
        )
        assert state["nvme_offload"]["wide"]
        go(whole, optimizer, 6, 9)
        expected = copy.deepcopy(optimizer.state_dict()["state"])
    for cap in (None, 200_000, 3_000_000):
        for resumed in (False, True):
            params = (
                [torch.nn.Parameter(parameter.detach().clone()) for parameter in half]
                if resumed
                else parameters(shapes=SHAPES)
            )
            of = functools.partial(compact, params, tmp_path)
            with smallest(of) if cap is None else of(cap) as optimizer:
                buckets.add(len(optimizer._steps.binding.buckets))
                if resumed:
                    optimizer.load_state_dict(state)
                go(params, optimizer, 6 if resumed else 0, 9)
                assert unlike(optimizer.state_dict()["state"], expected) == []
            assert differing(params, whole) == []
    assert len(buckets) > 2


def test_a_plain_state_that_is_far_apart_is_widened_as_it_is_loaded(tmp_path):
    params = parameters(shapes=SHAPES)
    plain = torch.optim.AdamW(params)
    for step in range(3):
        apart(params, step)
        plain.step()
    expected = plain.state_dict()["state"]
    loaded = []
    for cap in (None, "64MiB"):
        of = functools.partial(compact, params, tmp_path)
        with smallest(of) if cap is None else of(cap) as optimizer:
            optimizer.load_state_dict(plain.state_dict())
            loaded.append(copy.deepcopy(optimizer.state_dict()))
            assert loaded[-1]["nvme_offload"]["wide"]
            found, given = (
                one[2]["exp_avg_sq"].view(-1) for one in (loaded[-1]["state"], expected)
            )
            whole = len(given) // 256 * 256  # the remainder is not far apart
            assert torch.allclose(found[:whole], given[:whole], rtol=2**-7, atol=0)
            assert torch.allclose(found[whole:], given[whole:], rtol=2**-3, atol=0)
    assert unlike(loaded[0]["state"], loaded[1]["state"]) == []


def test_which_blocks_are_far(tmp_path):
    layout = state_format("compact").layout(
        1000, {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}, torch.float32
    )
    first, second = torch.ones(1000), torch.ones(1000)
    first[256:290], second[256:290] = 2.0**-16, 2.0**-32
    states = {"exp_avg": first, "exp_avg_sq": second}
    assert far_blocks(layout, states, 1e-8).tolist() == [False, True, False, False]
    assert far_blocks(layout, states, 1e-3) is None  # which hides them
    second[256:290] = 2.0**-29
    assert far_blocks(layout, states, 1e-8) is None  # has a code
    second[256:290], first[256:290] = 2.0**-32, 2.0**-23
    assert far_blocks(layout, states, 1e-8) is None  # hardly move
    first[256:290], second[256:290] = 1e-10, 1e-20
    assert far_blocks(layout, states, 1e-8) is None  # noise below eps
    assert far_blocks(layout, states, 1e-10).tolist() == [False, True, False, False]
    first[256:290], second[256:290] = 2.0**-16, 2.0**-32
    first[256:280], second[256:280] = 1.0, 1.0
    assert far_blocks(layout, states, 1e-8) is None  # ten in a block
    second[998:], first[998:] = 0.0, 0.0
    assert far_blocks(layout, states, 1e-8) is None  # no gradients at all


def test_what_is_far_and_what_is_not_of_many_elements():
    count = (1 << 18) + 1000  # more than are looked at together
    compact = state_format("compact")
    layout = compact.layout(
        count, {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}, torch.float32
    )
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0))
    last = slice(count // 256 * 256 - 256, count // 256 * 256)
    drawn[last][:64] *= 1e-6
    states = {"exp_avg": drawn.clone(), "exp_avg_sq": drawn.square()}
    far = far_blocks(layout, states, 1e-15)
    assert far.nonzero().flatten().tolist() == [last.start // 256]
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    compact.pack(
        layout, buffer, [drawn], None, {key: value.clone() for key, value in states.items()}, 7
    )
    expected = compact.unpack(layout, buffer, [drawn])[1]
    for key, value in states.items():
        expected[key][last] = value[last]
    round_near(layout, states, far, 7, None)
    assert [key for key in states if not torch.equal(states[key], expected[key])] == []


def test_a_fault_stays_one_and_rounding_is_unbiased():
    from nvme_offload.optimizer_states.eight_bit import round_to_16

    values = torch.full((100_000,), 1 + 2**-10)
    values[:3] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    values[3] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
    values[4] = 0
    codes = torch.empty(100_000, dtype=torch.bfloat16)
    round_to_16(values, codes, seed=(3, 0))
    assert torch.equal(codes[:5].isfinite(), torch.tensor([False, False, False, False, True]))
    assert codes[4] == 0
    assert abs(float(codes[5:].double().mean()) - (1 + 2**-10)) < 2**-7 * 0.125 * 0.02 * 2
    again = torch.empty_like(codes)
    round_to_16(codes.float(), again, seed=(4, 0))
    assert torch.equal(again[4:], codes[4:])
