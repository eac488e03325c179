from __future__ import annotations

import itertools
import math

import pytest
import torch

from nvme_offload.errors import InvariantError, UnsupportedError, UsageError
from nvme_offload.optimizer_states import by_torch
from nvme_offload.optimizer_states.eight_bit import decode, encode, round_to_24
from nvme_offload.optimizer_states.formats import FORMATS, state_format
from nvme_offload.optimizer_states.rounding import BLOCK
from nvme_offload.planning import traffic
from sweeps.formats import Recipe, train

pytestmark = pytest.mark.processor

ADAM = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
STEPS, ELEMENTS, BETAS = 300, 1 << 14, (0.9, 0.999)
# The Cauchy-Schwarz bound of |exp_avg| / sqrt(exp_avg_sq). Gradients that grow by beta2 / beta1 per
# step approach it.
BOUND = (1 - BETAS[0]) / math.sqrt((1 - BETAS[1]) * (1 - BETAS[0] ** 2 / BETAS[1]))
each_format = pytest.mark.parametrize("name", FORMATS)


def aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def noise(step: int) -> torch.Tensor:
    return normal(ELEMENTS, seed=step)


def bucket(numel: int, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A master and Adam's moments, of magnitudes over many decades."""
    scale = torch.exp(3 * normal(numel, seed=seed + 1))
    return normal(numel, seed=seed), {
        "exp_avg": normal(numel, seed=seed + 2) * scale,
        "exp_avg_sq": scale**2,
    }


def packed(name: str, numel: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
    """A bucket of three weights of *numel* in all, packed; format, layout, buffer, weights, master
    and states.
    """
    format = state_format(name)
    layout = format.layout(numel, ADAM, dtype)
    buffer = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)
    sizes = [numel // 2, 0, numel - numel // 2]
    working = [torch.ones(size, dtype=dtype) for size in sizes]
    master, states = bucket(numel, seed)
    format.pack(layout, buffer, working, master if dtype.itemsize == 2 else None, states, seed=seed)
    return format, layout, buffer, working, master, states


class PackedAdamW:
    """AdamW over bfloat16 *weights*, whose masters and moments are packed between steps."""

    def __init__(self, weights, name: str, **settings: object) -> None:
        self.weights, self.format = weights, state_format(name)
        whole = torch.cat([weight.detach().flatten().float() for weight in weights])
        self.layout = self.format.layout(whole.numel(), ADAM, torch.bfloat16, "AdamW")
        self.buffer = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        self.format.pack(
            self.layout, self.buffer, weights, whole, {key: torch.zeros_like(whole) for key in ADAM}
        )
        self.master = torch.nn.Parameter(whole)
        self.adam = torch.optim.AdamW([self.master], **settings)
        self.adam.state[self.master]["step"] = torch.zeros(())
        self.steps = 0

    def unpacked(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The master and the states, as they are on a drive."""
        return self.format.unpack(self.layout, self.buffer, self.weights)

    def step(self) -> None:
        """Step by the weights' gradients."""
        self.master.data, states = self.unpacked()
        self.master.grad = torch.cat([weight.grad.flatten().float() for weight in self.weights])
        self.adam.state[self.master].update(states)
        self.adam.step()
        master = self.master.detach()
        self.format.pack(self.layout, self.buffer, self.weights, master, states, seed=self.steps)
        self.steps += 1


# Layout


@pytest.mark.parametrize(
    ("name", "dtype", "slots"),
    [
        ("exact", torch.bfloat16, [4, 4, 4]),
        ("exact", torch.float16, [4, 4, 4]),
        ("exact", torch.float32, [4, 4]),
        ("split", torch.bfloat16, [2, 4, 4]),
        ("split", torch.float32, [4, 4]),
        ("compact", torch.bfloat16, [2, 1, 1 / 256, 1, 1 / 256]),
        ("compact", torch.float32, [1, 1 / 256, 1, 1 / 256]),
        ("compact24", torch.bfloat16, [1, 1, 1 / 256, 1, 1 / 256]),
        ("compact24", torch.float32, [1, 1 / 256, 1, 1 / 256]),
    ],
)
def test_the_bytes_are_those_that_are_promised(name, dtype, slots):
    numel = 1 << 20
    assert state_format(name).layout(numel, ADAM, dtype).nbytes == sum(slots) * numel


@each_format
@pytest.mark.parametrize("numel", [0, 1, 63, 255, 256, 257, 100_003])
def test_slots_are_aligned_and_share_no_byte(name, numel):
    layout = state_format(name).layout(numel, ADAM, torch.bfloat16)
    slots = [
        layout.master,
        *itertools.chain.from_iterable(
            (state.values, state.exponents) for state in layout.states.values()
        ),
    ]
    end = 0
    for slot in filter(None, slots):
        assert slot.offset == end
        end += aligned(slot.nbytes)
    assert layout.nbytes == end


# Without loss


@pytest.mark.parametrize("name", ["exact", "split"])
@pytest.mark.parametrize("numel", [0, 1, 257, 200_001])
def test_what_is_lossless_comes_back_bit_for_bit(name, numel):
    format, layout, buffer, working, master, states = packed(name, numel)
    back, states_back = format.unpack(layout, buffer, working)
    assert torch.equal(back, master)
    assert states_back.keys() == states.keys()
    for key, state in states.items():
        assert torch.equal(states_back[key], state)


@each_format
def test_working_weights_are_the_masters_rounded(name):
    format, layout, buffer, working, _, _ = packed(name, 10_001)
    kept, _ = format.unpack(layout, buffer, working)
    # ties, which only masters of 24 bits often are, go away from zero
    tied = (kept.view(torch.int32) & 0xFFFF == 0x8000) & (name == "compact24")
    assert tied.sum() < 10_001 / 100
    assert torch.equal(torch.cat(working)[~tied], kept.bfloat16()[~tied])
    assert (torch.cat(working)[tied].float().abs() > kept[tied].abs()).all()


def rounded_to_24(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """By the extension, which gives the bits of torch's operations."""
    ours, reference = values.clone(), values.clone()
    round_to_24(ours, seed=(seed,))
    by_torch.round_to_24(reference, seed=(seed,))
    assert torch.equal(ours.view(torch.int32), reference.view(torch.int32))
    return ours


@pytest.mark.parametrize("numel", [0, 1, 255, 257, 200_001])
def test_masters_of_24_bits_come_back_as_they_were_rounded(numel):
    format, layout, buffer, working, _, _ = packed("compact24", numel, seed=3)
    expected, _ = bucket(numel, 3)
    round_to_24(expected, seed=(3, -1))
    back, _ = format.unpack(layout, buffer, working)
    assert torch.equal(back, expected)
    again = torch.empty_like(buffer)
    format.pack(layout, again, working, back.clone(), format.unpack(layout, buffer, working)[1], 9)
    kept, _ = format.unpack(layout, again, working)
    assert torch.equal(kept, back)  # a rounded value is not rounded again


def test_rounding_to_24_bits_moves_by_less_than_a_step_and_is_unbiased():
    values = normal(10_000)
    found = torch.stack([rounded_to_24(values, seed) for seed in range(64)])
    step = 2.0 ** (values.abs().log2().floor() - 15)
    assert (found.view(torch.int32) & 0xFF == 0).all()
    assert ((found - values).abs() < step).all()
    up = (found.double() - values.double()) / step.double()
    # of a share of a step the standard deviation is at most a half
    assert abs(up.mean().item()) < 5 * 0.5 / (64 * 10_000) ** 0.5
    assert up.mean(dim=0).abs().max() < 5.5 * 0.5 / 64**0.5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0x7F800000, 0x7F800000),
        (0xFF800000, 0xFF800000),
        (0x7F800001, 0x7FC00000),
        (0x00000000, 0x00000000),
        (0x80000000, 0x80000000),
        (0x3F800000, 0x3F800000),
    ],
)
def test_faults_and_zeros_stay_what_they_are_in_24_bits(given, expected):
    pattern = torch.full((BLOCK,), given, dtype=torch.int64).to(torch.int32)
    found = rounded_to_24(pattern.view(torch.float32)).view(torch.int32).to(torch.int64)
    assert (found & 0xFFFFFFFF).unique().tolist() == [expected]


def test_exact_rounds_ties_as_torch_does_and_the_others_away_from_zero():
    tied = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    found = {}
    for name in FORMATS:
        format = state_format(name)
        layout = format.layout(2, {}, torch.bfloat16)
        weight = torch.empty(2, dtype=torch.bfloat16)
        format.pack(layout, torch.empty(layout.nbytes, dtype=torch.uint8), [weight], tied, {})
        found[name] = weight.tolist()
    assert found == {
        "exact": tied.bfloat16().tolist(),
        "split": [1 + 2**-7, 1 + 2**-6],
        "compact": [1 + 2**-7, 1 + 2**-6],
        "compact24": [1 + 2**-7, 1 + 2**-6],
    }


def test_exact_gives_views_so_that_a_step_changes_the_buffer():
    format, layout, buffer, working, master, states = packed("exact", 1000)
    back, states_back = format.unpack(layout, buffer, working)
    back.add_(1)
    states_back["exp_avg"].mul_(2)
    format.pack(layout, buffer, working, back, states_back)
    again, states_again = format.unpack(layout, buffer, working)
    assert torch.equal(again, master + 1)
    assert torch.equal(states_again["exp_avg"], states["exp_avg"] * 2)
    assert torch.equal(torch.cat(working), (master + 1).bfloat16())
    assert all(
        tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        for tensor in (back, *states_back.values())
    )


def test_exact_keeps_states_of_any_type():
    states = {
        "a": torch.arange(77, dtype=torch.int64),
        "b": normal(77).bfloat16(),
        "c": normal(77).double(),
        "d": normal(77) > 0,
    }
    format = state_format("exact")
    layout = format.layout(77, {key: state.dtype for key, state in states.items()}, torch.float32)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    format.pack(layout, buffer, [torch.empty(77)], None, states)
    _, back = format.unpack(layout, buffer, [])
    assert all(
        torch.equal(back[key], state) and back[key].dtype == state.dtype
        for key, state in states.items()
    )


@each_format
def test_fp32_weights_are_their_own_masters(name):
    format, layout, buffer, working, _, _ = packed(name, 1000, dtype=torch.float32)
    before = [weight.clone() for weight in working]
    master, states = format.unpack(layout, buffer, working)
    assert master is None
    format.pack(layout, buffer, working, None, states)
    assert all(torch.equal(weight, old) for weight, old in zip(working, before, strict=True))


@pytest.mark.parametrize("name", ["split", "compact", "compact24"])
def test_a_buffer_of_zeros_is_a_fresh_start(name):
    format = state_format(name)
    layout = format.layout(1000, ADAM, torch.bfloat16)
    weight = normal(1000).bfloat16()
    master, states = format.unpack(layout, torch.zeros(layout.nbytes, dtype=torch.uint8), [weight])
    assert torch.equal(master, weight.float())
    assert [state.abs().sum().item() for state in states.values()] == [0, 0]


@pytest.mark.parametrize("name", ["split", "compact", "compact24"])
def test_a_weight_that_was_changed_outside_has_a_master_that_rounds_to_it_or_its_neighbour(name):
    format, layout, buffer, working, _, _ = packed(name, 1000)
    for weight in working:
        weight.copy_(weight * 3)
    master, _ = format.unpack(layout, buffer, working)
    now = torch.cat(working).float()
    assert ((master - now).abs() <= now.abs() * 2**-8).all()


# Eight bits


def rounded(values: torch.Tensor, *, signed: bool, seed: int = 0) -> torch.Tensor:
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    exponents = torch.empty(-(-values.numel() // BLOCK), dtype=torch.uint8)
    encode(values, codes, exponents, signed=signed, seed=(seed,))
    back = torch.empty_like(values)
    decode(codes, exponents, back, signed=signed)
    return back


def codebook(*, signed: bool) -> torch.Tensor:
    """What the codes stand for where a block's largest value is in the octave of 1, from 0 up."""
    codes = torch.arange(128 if signed else 248, dtype=torch.uint8)
    values = torch.empty(codes.numel())
    decode(codes, torch.tensor([127], dtype=torch.uint8), values, signed=signed)
    return values


@pytest.mark.parametrize("signed", [True, False])
def test_codes_rise_evenly_then_by_an_eighth_of_the_octave(signed):
    values = codebook(signed=signed)
    assert values[0] == 0
    assert (values.diff() > 0).all()
    assert 1 <= values[-1] < 2
    normals = values[8:].view(-1, 8)
    assert torch.equal(normals, normals[:, :1] * (1 + torch.arange(8) / 8))
    assert normals.shape[0] == (15 if signed else 30)
    assert torch.equal(values[:8], values[1] * torch.arange(8))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 70_001])
def test_no_value_moves_by_more_than_a_step_or_changes_its_sign(signed, numel):
    states = bucket(numel)[1]
    values = states["exp_avg" if signed else "exp_avg_sq"]
    back = rounded(values, signed=signed)
    blocks = torch.nn.functional.pad(values, (0, -numel % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1).repeat_interleave(BLOCK)[:numel]
    least = largest * (2.0**-16 if signed else 2.0**-28)
    assert ((back - values).abs() <= torch.maximum(values.abs() / 8, least)).all()
    assert (back * values >= 0).all()


def test_a_second_moment_never_vanishes_and_zero_stays_zero():
    values = torch.logspace(-37, 8, 1000).repeat(3)
    values[::7] = 0
    back = rounded(values, signed=False)
    assert torch.equal(back == 0, values == 0)
    assert (back[values > 0] >= values[values > 0] * (1 - 1 / 8)).all()


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_rounded_is_not_rounded_again(signed):
    values = bucket(5000)[1]["exp_avg" if signed else "exp_avg_sq"]
    once = rounded(values, signed=signed, seed=1)
    assert torch.equal(rounded(once, signed=signed, seed=2), once)


@pytest.mark.parametrize("factor", [1.7, 2, 30])
def test_a_larger_value_in_the_block_does_not_move_the_others(factor):
    once = rounded(bucket(256)[1]["exp_avg_sq"], signed=False, seed=1)
    once = once.clamp(min=once.max() * 2**-15)
    once[17] = once.max() * factor
    again = rounded(once, signed=False, seed=2)
    others = torch.arange(256) != 17
    assert torch.equal(again[others], once[others])


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_is_unbiased_wherever_values_are(signed):
    # Between all neighbouring codes, in each of several shares of the way; the largest value sets
    # the scale.
    codes = codebook(signed=signed)
    codes = codes if signed else codes[8:]  # below that a second moment is held up
    share = torch.tensor([0.001, 0.1, 0.5, 0.9, 0.999])
    values = (codes[:-1, None] + codes.diff()[:, None] * share).flatten()
    step = codes.diff()[:, None].expand(-1, 5).flatten()
    values = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
    step = torch.nn.functional.pad(step, (0, values.numel() - step.numel()), value=1.0)
    values.view(-1, BLOCK)[:, -1] = codes[-1]
    trials = 4000
    mean = (
        sum(rounded(values, signed=signed, seed=seed).double() for seed in range(trials)) / trials
    )
    # A binomial's standard error is at most half a step over the root of the trials; six of them
    # for some thousand values.
    assert ((mean - values).abs() <= 6 * 0.5 * step / trials**0.5).all()
    assert ((mean - values) / step).mean().abs() <= 6 * 0.5 / (
        trials * values.numel()
    ) ** 0.5 + 1e-6


def test_a_moment_that_moves_by_a_thousandth_a_step_follows_where_the_nearest_code_would_stick():
    beta, steps = 0.999, 2000
    exact = torch.full((4096,), 1.0)
    stochastic, nearest, grid = exact.clone(), exact.clone(), codebook(signed=False)
    middle = (grid[1:] + grid[:-1]) / 2
    for step in range(steps):
        exact = exact * beta
        stochastic = rounded(stochastic * beta, signed=False, seed=step)
        nearest = grid[torch.bucketize(nearest * beta, middle)]
    assert torch.equal(nearest, torch.ones(4096))
    assert stochastic.double().mean().item() == pytest.approx(exact[0].item(), rel=0.02)


def test_no_pair_of_moments_makes_a_step_larger_than_the_bound_and_a_fifth():
    # As far apart as gradients can bring them, over 60 octaves side by side.
    generator = torch.Generator().manual_seed(0)
    second = torch.exp2(80 * torch.rand(1 << 18, generator=generator) - 60)
    first = BOUND * second.sqrt() * (2 * torch.rand(1 << 18, generator=generator) - 1)
    step = rounded(first, signed=True, seed=1) / rounded(second, signed=False, seed=2).sqrt()
    assert 0.99 * BOUND < step.abs().max() < 1.2 * BOUND


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("signed", [True, False])
def test_what_is_not_finite_stays_so_and_takes_its_block_along(bad, signed):
    values = normal(4 * BLOCK + 3).abs()
    values[BLOCK + 5] = bad
    back = rounded(values, signed=signed)
    broken = torch.zeros(values.numel(), dtype=torch.bool)
    broken[BLOCK : 2 * BLOCK] = True
    assert torch.equal(back.isnan(), broken)
    assert torch.equal(back[~broken], rounded(values.nan_to_num(0, 0, 0), signed=signed)[~broken])


def test_a_negative_second_moment_is_a_fault():
    values = normal(3 * BLOCK).abs()
    values[2 * BLOCK] = -1e-3
    assert rounded(values, signed=False).isnan().view(3, BLOCK).sum(dim=1).tolist() == [0, 0, BLOCK]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 1e-12, 1e30, 1.5e38])
def test_blocks_of_any_magnitude_keep_their_largest_value(signed, magnitude):
    values = torch.zeros(BLOCK)
    values[7] = magnitude
    back = rounded(values, signed=signed)
    assert back.count_nonzero() <= 1
    if magnitude >= 1e-30:
        assert back[7].item() == pytest.approx(values[7].item(), rel=1 / 8)
    else:
        assert 0 <= back[7].item() <= 2e-34


def test_a_run_repeats_by_its_seed_on_any_number_of_threads():
    states = bucket(300_001)[1]
    found = {}
    for number in (1, 2, 3):
        torch.set_num_threads(number)  # one_thread puts it back
        found[number] = {
            key: rounded(state, signed=key == "exp_avg", seed=7) for key, state in states.items()
        }
    for key, state in states.items():
        assert torch.equal(found[1][key], found[2][key])
        assert torch.equal(found[1][key], found[3][key])
        assert not torch.equal(found[1][key], rounded(state, signed=key == "exp_avg", seed=8))


def test_rounding_is_not_the_same_at_any_two_places():
    # 2**17 equal values in two rows of the table: were it used twice alike, the rows would agree;
    # half of all places do by chance.
    values = torch.full((1 << 17,), 1 + 1 / 16)
    up = (rounded(values, signed=True) > values).view(2, -1)
    assert (up[0] == up[1]).double().mean().item() == pytest.approx(0.5, abs=0.01)


def test_no_two_states_are_rounded_by_the_same_numbers():
    values = normal(10_000)
    format = state_format("compact")
    layout = format.layout(
        values.numel(), {"exp_avg": torch.float32, "momentum_buffer": torch.float32}, torch.float32
    )
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    format.pack(
        layout, buffer, [values], None, {"exp_avg": values, "momentum_buffer": values}, seed=1
    )
    first, second = format.unpack(layout, buffer, [values])[1].values()
    up = [state > values for state in (first, second)]
    # as of any two independent ones, where all shares of a step are alike
    assert (up[0] == up[1]).double().mean().item() == pytest.approx(2 / 3, abs=0.05)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_do_not_depend_on_how_the_processor_treats_denormals(signed):
    values = bucket(10_000)[1]["exp_avg" if signed else "exp_avg_sq"] * 1e-20
    expected = rounded(values, signed=signed)
    torch.set_flush_denormal(True)
    try:
        found = rounded(values, signed=signed)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, expected)


# Refusals


@pytest.mark.parametrize("name", ["split", "compact", "compact24"])
def test_fp16_weights_are_refused_with_what_to_do(name):
    with pytest.raises(UnsupportedError, match='bfloat16 or use state_format="exact"'):
        state_format(name).layout(10, ADAM, torch.float16)


@pytest.mark.parametrize(
    ("key", "optimizer"),
    [("grad_avg", "RMSprop"), ("ax", "ASGD"), ("prev", "Rprop"), ("exp_avg_diff", "Adan")],
)
def test_compact_refuses_an_unknown_state(key, optimizer):
    with pytest.raises(
        UnsupportedError, match=f'the state \'{key}\' of {optimizer}.*"split" or "exact"'
    ):
        state_format("compact").layout(10, {key: torch.float32}, torch.bfloat16, optimizer)


def test_compact_refuses_states_of_other_types():
    with pytest.raises(UnsupportedError, match=r"'exp_avg' in torch\.bfloat16"):
        state_format("compact").layout(10, {"exp_avg": torch.bfloat16}, torch.float32, "AdamW")


@pytest.mark.parametrize("name", ["fast", "", None, ["exact"]])
def test_a_format_that_does_not_exist_is_named_with_those_that_do(name):
    with pytest.raises(UsageError, match="'exact', 'split', 'compact'"):
        state_format(name)


def test_what_does_not_fit_the_layout_is_refused_and_changes_nothing():
    format, layout, buffer, working, master, states = packed("split", 1000)
    before = buffer.clone()

    def refused(buffer=buffer, working=working, master=master, states=states):
        with pytest.raises(InvariantError, match="tensors do not fit the layout"):
            format.pack(layout, buffer, working, master, states)

    refused(buffer=buffer[:-1])
    refused(buffer=buffer.view(torch.int8))
    refused(working=working[:1])
    refused(working=[normal(100, 10).bfloat16().T])
    refused(working=[normal(1000)])
    refused(master=None)
    refused(states={"exp_avg": states["exp_avg"]})
    refused(master=master[1:])
    refused(states={**states, "exp_avg_sq": states["exp_avg_sq"][2:]})
    refused(master=master.to("meta"))
    refused(working=[weight.to("meta") for weight in working])
    refused(states={**states, "exp_avg": states["exp_avg"].double()})
    with pytest.raises(InvariantError, match="tensors do not fit the layout"):
        format.unpack(layout, buffer, working, torch.empty(2000)[::2])
    assert torch.equal(buffer, before)


# Training


def magnitudes_side_by_side(step: int) -> torch.Tensor:
    """From 1e-12 to 1e4 in every block, constant for each weight."""
    return noise(step) * torch.logspace(-12, 4, 17).repeat(ELEMENTS // 17 + 1)[:ELEMENTS]


def rare(step: int) -> torch.Tensor:
    """Zero but for one weight in a hundred, another each step, as in an embedding of rare words."""
    chosen = torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(step + STEPS)) < 0.01
    return noise(step) * chosen


CASES = {
    "1e6": lambda step: noise(step) * 1e6,
    "1e-9": lambda step: noise(step) * 1e-9,
    "1e-12 to 1e4 side by side": magnitudes_side_by_side,
    "1e-9, then 1e6": lambda step: noise(step) * (1e-9 if step < STEPS // 2 else 1e6),
    "1e6, then 1e-9": lambda step: noise(step) * (1e6 if step < STEPS // 2 else 1e-9),
    "1, with 1e6 once": lambda step: noise(step) * (1e6 if step == STEPS // 2 else 1.0),
    "rising by a tenth a step": lambda step: torch.full((ELEMENTS,), 1e-9 * 1.11**step),
    "rare": rare,
}


@pytest.mark.parametrize("name", ["compact", "compact24"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_that_misbehave_do_not_make_a_step_out_of_bounds(name, case):
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.bfloat16))
    settings = {"lr": 1e-3, "betas": BETAS, "weight_decay": 0.0, "eps": 1e-16}
    optimizer = PackedAdamW([weight], name, **settings)
    before, largest = torch.zeros(ELEMENTS), 0.0
    for step in range(STEPS):
        weight.grad = CASES[case](step).bfloat16()
        optimizer.step()
        master, states = optimizer.unpacked()
        assert all(tensor.isfinite().all() for tensor in (master, *states.values()))
        largest = max(largest, float((master - before).abs().max()) / settings["lr"])
        before = master.clone()
    assert 0 < largest <= 1.2 * BOUND  # rounding adds a fifth at most


@pytest.mark.slow
def test_a_transformer_learns_with_compact_states_as_it_does_with_exact_ones(tmp_path):
    recipe = Recipe(3, 96, 4, context=64, batch=16, steps=40, learning_rate=3e-3, warm_up=10)
    exact, compact, shorter = (
        train(tmp_path, recipe, name, 0, 400_000) for name in ("exact", "compact", "compact24")
    )
    assert exact["losses"][0] == compact["losses"][0] > 5
    assert shorter["validation"] == pytest.approx(exact["validation"], abs=0.08)
    assert exact["validation"] < 3
    # "exact" and "split", which differ in ties alone, are as far apart
    assert compact["validation"] == pytest.approx(exact["validation"], abs=0.08)


def test_the_table_of_a_steps_bytes_is_that_of_the_formats():
    moments = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    kept = {
        name: format.element_bytes(moments, torch.bfloat16, "AdamW")
        for name, format in FORMATS.items()
    }
    assert kept == traffic.STATE_BYTES
