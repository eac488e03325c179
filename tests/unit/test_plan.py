"""The placement of each part, whether it fits, and the time of a step: compared with DeepSpeed's
estimates and the scheduler. `test_plan_reports.py` compares it with measured steps.
"""

from __future__ import annotations

import dataclasses
import itertools

import profiles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvme_offload.ds_config.edit import aio_section
from nvme_offload.hardware import gpu_models
from nvme_offload.hardware import machine as machines
from nvme_offload.hardware.machine import Gpu
from nvme_offload.hardware.profile import Profile, Setting, StripePath
from nvme_offload.optim import provisional as provisional_updates
from nvme_offload.optim.budget import beside_bytes, most_elements
from nvme_offload.optimizer_states.formats import FORMATS
from nvme_offload.optimizer_states.traits import Traits
from nvme_offload.planning import placement
from nvme_offload.planning.advice import Question, cheapest_change, faster, hiding, shown
from nvme_offload.planning.model import Model, of_count
from nvme_offload.planning.passes import (
    ACTIVATIONS,
    Work,
    activation_bytes,
    operations,
    saved_bytes,
)
from nvme_offload.planning.paste import ds_config, weights
from nvme_offload.planning.placement import (
    INFERENCE,
    STRATEGIES,
    World,
    beside_budget,
    fewest_bytes,
    needs,
    streamed,
    whole_bytes,
)
from nvme_offload.planning.plan import (
    Drive,
    Machine,
    Plan,
    drive_at,
    fastest,
    plans,
    this_machine,
)
from nvme_offload.planning.seconds import UTILISATION
from nvme_offload.planning.traffic import STATE_BYTES
from nvme_offload.sizes import FORWARD_SHARE, LARGEST_SUB_GROUP, overflow
from nvme_offload.swap.schedule import Schedule
from nvme_offload.zero3.settings import Settings

BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}
ON_CPU = {name: each._replace(update_device="cpu") for name, each in BY_NAME.items()}
WITH_GRADIENTS = {name: each._replace(gradients="gpu") for name, each in BY_NAME.items()}
SPEEDS = {"read": 3.0, "write": 2.5, "mixed": 2.8}
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 << 30, 55e9)


def passes_seconds(plan: Plan) -> float:
    """Seconds of forward and backward passes."""
    return sum(phase.seconds for phase in plan.phases if phase.name != "update")


def update_seconds(plan: Plan) -> float:
    """Seconds of the update after the passes."""
    return sum(phase.seconds for phase in plan.phases if phase.name == "update")


SEVEN = of_count("7B")
SEVENTY = of_count("70B")


def machine(**changes: object) -> Machine:
    drives = (Drive("/local_nvme", 1 << 40, SPEEDS, "a"),)
    return dataclasses.replace(Machine(H100, 128 << 30, 100e9, drives), **changes)  # type: ignore[arg-type]


def asked_of(machine: Machine, work: Work = Work()) -> Question:  # noqa: B008
    return Question(SEVEN, machine, World(), work)


def by_name(found: list[Plan]) -> dict[str, Plan]:
    return {plan.strategy.name: plan for plan in found}


# Compared with DeepSpeed.


@pytest.mark.deepspeed
def test_bytes_are_those_of_deepspeeds_estimates():
    stages = pytest.importorskip("deepspeed.runtime.zero", reason="deepspeed is not installed")
    three = stages.stage3.estimate_zero3_model_states_mem_needs
    two = stages.stage_1_and_2.estimate_zero2_model_states_mem_needs
    sizes = (7_000_000_000, 1_610_612_737), (131_072_000,)
    for total, largest, gpus, nodes, init in itertools.product(
        *sizes, (1, 2, 8), (1, 4), (True, False)
    ):
        answer = {
            "zero2": two(total, gpus, nodes, False),
            "zero2-cpu": two(total, gpus, nodes, True),
            "zero3": three(total, largest, gpus, nodes, False, False, init),
            "zero3-cpu-optimizer": three(total, largest, gpus, nodes, True, False, init),
            "zero3-cpu": three(total, largest, gpus, nodes, True, True, init),
        }
        for name, (host_bytes_of_node, gpu_bytes, *_) in answer.items():
            found = needs(BY_NAME[name], Model(total, largest, largest), World(gpus, nodes, init))
            assert found.gpu_bytes == gpu_bytes
            assert found.host_bytes == host_bytes_of_node // gpus
            assert found.drive_bytes == 0


def test_bytes_of_what_deepspeed_does_not_estimate():
    model, world = Model(8_000_000_000, 100_000_000, 100_000_000), World(ranks=4, nodes=2)
    each = 1_000_000_000
    assert needs(BY_NAME["zero1"], model, world).gpu_bytes == 4 * 8 * each + 16 * each
    ours = needs(ON_CPU["nvme-optimizer"], model, world)
    assert ours == (400_000_000 + 2 * each, 400_000_000, 14 * each)
    assert needs(ON_CPU["nvme-both"], model, world) == (400_000_000, 400_000_000, 16 * each)
    # three sub-groups, and the gradient of one in 16 and in 32 bits
    staged = (3 * 12 + 2 + 4) * LARGEST_SUB_GROUP
    on_gpu = needs(BY_NAME["nvme-optimizer"], model, world)
    assert on_gpu == (ours.gpu_bytes + staged, *ours[1:])
    holding = needs(WITH_GRADIENTS["nvme-optimizer"], model, world)
    assert holding == (on_gpu.gpu_bytes + 2 * each, *ours[1:])
    assert needs(BY_NAME["deepspeed-nvme-both"], model, world).drive_bytes == 18 * each
    assert (
        needs(BY_NAME["nvme-both"], model, dataclasses.replace(world, zero_init=False)).host_bytes
        == 4 * 8 * each
    )


# Compared with the scheduler.


class Steps:
    """A `Schedule` under a cyclic training, every transfer of which ends immediately. *on_gpu*: with
    gradients and scratch memory on the GPU.
    """

    def __init__(self, parameters: int, layers: int, budget: int, both: bool, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        size, most = parameters // layers, max(parameters // layers, min(1 << 26, budget // 228))
        together = max(most // size, 1)
        self.layers, self.both, self.size = layers, both, size
        self.groups = [min(together, layers - first) * size for first in range(0, layers, together)]
        self.together = together
        self.schedule = Schedule(budget)
        self.read = self.written = 0
        if not on_gpu:
            self.schedule.create("scratch", max(self.groups) * 4, lowest=True)
            self._drain()
            self.schedule.take("scratch")

    def step(self) -> tuple[int, int]:
        """The bytes read in the passes, and the bytes moved in total."""
        self.read = self.written = 0
        if self.both:
            for layer in [*range(self.layers), *reversed(range(self.layers))]:
                self._use(f"p{layer}", 2 * self.size, changed=False)
        in_passes = self.read
        for index in reversed(range(0 if self.on_gpu else len(self.groups))):
            self._use(f"g{index}", 2 * self.groups[index], changed=True, create=True)
        for index, numel in enumerate(self.groups):
            if not self.on_gpu:
                self._use(f"g{index}", 2 * numel, changed=False)
                self.schedule.discard(f"g{index}")
                self._drain()
            self._use(f"s{index}", 12 * numel, changed=True)
            for layer in (
                range(index * self.together, index * self.together + numel // self.size)
                if self.both
                else ()
            ):
                self._use(f"p{layer}", 2 * self.size, changed=True, create=True)
        self.schedule.step()
        self._drain()
        return in_passes, self.read + self.written

    def _use(self, name: str, nbytes: int, changed: bool, create: bool = False) -> None:
        if create or name not in self.schedule:
            self.schedule.create(name, nbytes)
        else:
            self.schedule.need(name)
        self._drain()
        self.schedule.take(name)
        self._drain()
        self.schedule.release(name, changed, None)
        self._drain()

    def _drain(self) -> None:
        while transfers := self.schedule.plan():
            for transfer in transfers:
                if transfer.writes:
                    self.written += transfer.nbytes
                else:
                    self.read += transfer.nbytes
                self.schedule.finished(transfer, True)


@pytest.mark.parametrize("name", ["nvme-optimizer", "nvme-both"])
@pytest.mark.parametrize(
    ("parameters", "layers"), [(1_610_000_000, 24), (1_610_000_000, 64), (7_000_000_000, 32)]
)
@pytest.mark.parametrize("share", [0.06, 0.1, 0.3, 0.7])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_is_streamed_is_what_the_scheduler_streams(name, parameters, layers, share, on_gpu):
    both = name == "nvme-both"
    budget = int(share * parameters * (16 if both else 14))
    steps = Steps(parameters, layers, budget, both, on_gpu)
    # In the first all is new, in the second the order is learned, in the third who stays moves to
    # where it belongs.
    *_, (in_passes, moved) = (steps.step() for _ in range(4))
    model = Model(parameters, parameters // layers, parameters // layers)
    strategy = (WITH_GRADIENTS if on_gpu else ON_CPU)[name]
    planned = streamed(strategy, model, World(), budget)
    assert planned.total == pytest.approx(moved, rel=0.2)
    assert planned.passes_read == pytest.approx(in_passes, abs=0.1 * moved)


@pytest.mark.parametrize("name", ["nvme-optimizer", "nvme-both"])
def test_what_fits_the_budget_is_not_streamed(name):
    whole = whole_bytes(BY_NAME[name], SEVEN, World())
    assert streamed(BY_NAME[name], SEVEN, World(), whole).total == 0
    assert streamed(BY_NAME[name], SEVEN, World(), whole - 1).total > 0


H200 = Gpu("NVIDIA H200", 143_771 << 20, 54.8e9)
# More of any resource is never slower, and a model that fits continues to fit.

SIZES = st.integers(20_000_000, 200_000_000_000)
MEMORY = st.integers(1 << 30, 1 << 41)


@settings(max_examples=40)
@given(
    SIZES,
    st.sampled_from([1, 2, 8]),
    MEMORY,
    MEMORY,
    MEMORY,
    st.floats(0.1, 30),
    st.sampled_from(["host", "gpu", "free", "drive", "copies"]),
    st.floats(1, 20),
)
def test_a_better_machine_is_never_slower(count, ranks, host, gpu, free, speed, what, times):
    speeds = {"read": speed, "write": 0.9 * speed, "mixed": speed}
    worse = Machine(Gpu("NVIDIA L4", gpu, 25e9), host, 50e9, (Drive("/d", free, speeds),))
    free_more = (Drive("/d", int(free * times), speeds),)
    faster_drive = (Drive("/d", free, {phase: value * times for phase, value in speeds.items()}),)
    better = {
        "host": {"host_bytes": int(host * times)},
        "gpu": {"gpu": Gpu("NVIDIA L4", int(gpu * times), 25e9)},
        "free": {"drives": free_more},
        "drive": {"drives": faster_drive},
        "copies": {"host_bytes_per_second": 50e9 * times},
    }
    after_all = dataclasses.replace(worse, **better[what])
    found = (plans(of_count(count), each, World(ranks)) for each in (worse, after_all))
    pairs = list(zip(*found, strict=True))
    for before, after in pairs:
        assert after.fits or not before.fits
        if before.fits:
            assert before.seconds is not None
            assert after.seconds is not None
            # More states with old versions: the old weights take GPU memory from weights that stream.
            one = before.strategy
            if not (what == "host" and one.provisional and one.streams):
                assert after.seconds <= before.seconds * (1 + 1e-3)
    before, after = (fastest([pair[index] for pair in pairs]) for index in (0, 1))
    if before is not None:
        assert after is not None
        assert after.seconds is not None
        assert after.concession <= before.concession
        # the simplest of those that are as fast
        if after.concession == before.concession:
            assert after.seconds <= (before.seconds or 0) * 1.1 * (1 + 1e-3)


@given(
    SIZES,
    st.sampled_from(["nvme-optimizer", "nvme-both"]),
    st.sampled_from([BY_NAME, ON_CPU, WITH_GRADIENTS]),
    st.integers(1, 16),
    MEMORY,
    MEMORY,
)
def test_a_larger_budget_never_streams_more(count, name, strategies, ranks, one, other):
    small, large = sorted((one, other))
    model, world, strategy = of_count(count), World(ranks), strategies[name]
    fewer, more = (streamed(strategy, model, world, each).total for each in (large, small))
    assert fewer <= more
    assert more <= (28 if name == "nvme-optimizer" else 34) * count / ranks + 1


@given(SIZES, st.integers(1, 64), st.integers(1, 8), st.booleans())
def test_more_ranks_never_need_more_each(count, ranks, nodes, zero_init):
    for strategy in STRATEGIES:
        few = needs(strategy, of_count(count), World(ranks, nodes, zero_init))
        many = needs(strategy, of_count(count), World(2 * ranks, nodes, zero_init))
        if strategy.door != "plain" or ranks > 1:  # FSDP2 gathers layers where there are several
            assert many.gpu_bytes <= few.gpu_bytes
        assert many.drive_bytes <= few.drive_bytes
        if strategy.stage == 3:  # DeepSpeed's estimate of stage 2 on CPU grows with the ranks
            assert many.host_bytes <= few.host_bytes


@given(SIZES, st.sampled_from(["nvme-optimizer", "nvme-both"]), st.integers(1, 64))
def test_the_least_budget_is_less_than_the_whole(count, name, ranks):
    strategy, model, world = BY_NAME[name], of_count(count), World(ranks)
    assert 0 < fewest_bytes(strategy, model, world) < whole_bytes(strategy, model, world)


# What fits.


def test_the_fastest_that_fits_is_chosen():
    assert fastest(plans(of_count("1B"), machine(), World())).strategy.name == "zero1"  # type: ignore[union-attr]
    chosen = fastest(plans(SEVEN, machine(host_bytes=64 << 30), World()))
    assert chosen is not None
    assert chosen.strategy.name == "plain"  # DeepSpeed's estimate for the CPU is 168 GB
    assert chosen.budget_bytes is not None
    moved = streamed(chosen.strategy, SEVEN, World(), chosen.budget_bytes)
    assert chosen.phases[-1].formula.endswith(
        f"; drive ({moved.read / 1e9:.3g} GB read, {moved.written / 1e9:.3g} GB written; mixed 0.96 x 2.8 GB/s) = {update_seconds(chosen):.3g} s)"
    )
    assert update_seconds(chosen) == pytest.approx((moved.read + moved.written) / (2.8e9 * 0.96))
    assert chosen.written_bytes_a_day == pytest.approx(
        chosen.written_bytes * 86400 / chosen.seconds
    )  # type: ignore[operator]
    roomy = fastest(plans(SEVEN, machine(host_bytes=400 << 30), World()))
    assert roomy is not None
    assert (roomy.strategy.name, roomy.written_bytes) == ("plain", 0)
    assert (
        roomy.seconds
        < by_name(plans(SEVEN, machine(host_bytes=400 << 30), World()))["zero2-cpu"].seconds
    )


def test_what_does_not_fit_says_how_much_it_takes():
    found = by_name(
        plans(SEVEN, machine(host_bytes=32 << 30, drives=(Drive("/d", 50 << 30, SPEEDS),)), World())
    )
    assert found["zero3"].problems == (
        "128 GB of GPU memory with CUDA's context and DeepSpeed's buffers, and a GPU has 85.9 GB",
    )
    assert found["zero3-cpu"].problems == ("192 GB of host memory, and 34.4 GB are available",)
    assert found["nvme-optimizer"].problems == ("98 GB on the drive, and 53.7 GB are free",)
    smaller = machine(host_bytes=8 << 30, drives=(Drive("/d", 5 << 30, SPEEDS),))
    assert fastest(plans(SEVEN, smaller, World())) is None


def test_states_in_fewer_bits_are_for_where_nothing_exact_fits():
    card = Gpu("RTX 4090", 24 * 10**9)
    here = machine(gpu=card, host_bytes=32 << 30, drives=(Drive("/d", 60 * 10**9, SPEEDS),))
    found = plans(SEVEN, here, World())
    chosen = fastest([plan for plan in found if plan.strategy.door == "zero3"])
    assert chosen is by_name(found)["nvme-optimizer-compact"]
    # 4 bytes of states and 2 of the gradient
    assert chosen.drive_bytes == pytest.approx(6 * 7e9, rel=0.01)
    assert ds_config(chosen, asked_of(here))["nvme_offload"]["state_format"] == "compact"
    roomy = machine(gpu=card, host_bytes=32 << 30, drives=(Drive("/d", 1 << 40, SPEEDS),))
    found = by_name(plans(SEVEN, roomy, World()))
    assert found["nvme-optimizer-compact"].seconds < found["nvme-optimizer"].seconds
    assert fastest(list(found.values())).strategy.state_format == "exact"
    assert "state_format" not in ds_config(found["nvme-optimizer"], asked_of(roomy))["nvme_offload"]


def test_several_micro_batches_leave_all_gradients_on_the_gpu():
    """Under `no_sync`; in host memory they take none of the GPU's."""
    card = Gpu("RTX 4090", 24_564 << 20, 27e9)
    once, eight = (
        by_name(plans(SEVEN, machine(gpu=card), World(), Work(2048, 1, times))) for times in (1, 8)
    )
    for name in ("plain-in-backward", "plain-in-backward-compact"):
        assert once[name].fits
        assert not eight[name].fits
        # of weights and gradients
        assert once[name].gpu_bytes < (2 + 2) * 7e9 < eight[name].gpu_bytes
    host = "plain-host-gradients"
    assert eight[host].fits
    # which has a share of the states on the GPU before their updates
    assert eight[host].gpu_bytes == once[host].gpu_bytes < once["plain-in-backward"].gpu_bytes
    # gradients displace states once a step
    assert eight[host].written_bytes == once[host].written_bytes
    assert update_seconds(eight[host]) == update_seconds(once[host])
    # 12 bytes of states and 2 of the gradient
    assert eight[host].drive_bytes == 14 * 7_000_000_000
    several = by_name(plans(SEVEN, machine(), World(2), Work(2048, 1, 8)))
    assert several[host].problems == (
        'one rank, since accumulate="host" does not take parameters of FSDP2',
    )


def test_frozen_weights_have_no_gradients_and_no_states():
    adapters = dataclasses.replace(SEVEN, trainable=40_000_000)
    alone = Model(40_000_000, 40_000_000, 40_000_000)
    work = Work(2048, 2)
    weights = 2 * (SEVEN.parameters - alone.parameters)
    for strategy in STRATEGIES:
        if strategy.parameters == "drive":
            continue
        few, own = needs(strategy, adapters, World()), needs(strategy, alone, World())
        assert few.drive_bytes == own.drive_bytes
        if strategy.stage == 1 or (strategy.door == "plain" and strategy.updates == "after"):
            assert few.gpu_bytes == own.gpu_bytes + weights
        if strategy.ours:
            assert whole_bytes(strategy, adapters, World()) == whole_bytes(strategy, alone, World())
    # inputs have gradients everywhere, weights only in adapters
    frozen, trained = operations(adapters, work), operations(SEVEN, work)
    assert frozen.forward == trained.forward
    assert trained.backward - frozen.backward == 2 * work.tokens * (7_000_000_000 - 40_000_000)
    both = by_name(plans(adapters, machine(), World(), work, 2_000_000_000))["nvme-both"]
    assert both.drive_bytes == 2 * 7_000_000_000 + 14 * 40_000_000
    assert both.written_bytes < 16 * 40_000_000  # frozen weights are only read
    assert sum(phase.seconds for phase in both.phases) > 2 * 12e9 / 2.9e9


def test_without_a_drive_nothing_is_offloaded_to_one():
    found = plans(SEVEN, machine(drives=()), World())
    assert all(
        "a drive: no drive given, pass --path" in plan.problems
        for plan in found
        if plan.drive_bytes
    )
    roomy = by_name(plans(SEVEN, machine(drives=()), World(), Work(), 90_000_000_000))
    assert roomy["plain"].fits
    assert roomy["plain"].drive_bytes == 0
    assert not roomy["nvme-optimizer"].fits  # ZeRO-3 allocates space for all states


def test_a_budget_below_the_largest_parameter_is_refused():
    found = by_name(plans(SEVEN, machine(), World(), budget=1 << 30))
    assert found["nvme-optimizer"].problems == (
        "1.07 GB of host memory a rank for the swapper, which needs at least 1.62 GB",
    )
    (on_cpu,) = plans(SEVEN, machine(), World(), Work(), 1 << 30, [ON_CPU["nvme-optimizer"]])
    assert on_cpu.problems == (
        "1.07 GB of host memory a rank for the swapper, which needs at least 2.16 GB",
    )


def test_a_drive_that_was_never_swept_has_no_seconds_and_comes_last():
    never_swept = machine(host_bytes=96 << 30, drives=(Drive("/d", 1 << 40),))
    found = by_name(plans(SEVEN, never_swept, World()))
    assert found["nvme-optimizer"].seconds is None
    assert found["nvme-optimizer"].written_bytes_a_day is None
    chosen = fastest(list(found.values()))
    assert chosen is found["plain"]
    assert "aio" not in ds_config(found["nvme-optimizer"], asked_of(never_swept))
    roomy = plans(
        of_count("350M"), machine(drives=(Drive("/d", 1 << 40),), gpu=Gpu("x", 4 << 30)), World()
    )
    # everything fits in memory, so nothing depends on the drive
    assert by_name(roomy)["nvme-optimizer"].seconds is not None


def test_zero3_updates_where_the_gpu_has_room():
    places = {}
    for gpu_gb in (4, 16, 80):
        here = machine(gpu=Gpu("H100", gpu_gb * 10**9, 50e9))
        (found,) = plans(
            SEVEN, here, World(), Work(2048), 20 * 10**9, [BY_NAME["nvme-both-compact"]]
        )
        terms = {term.name: term.how for both in found.phases[-1].beside for term in both}
        places[gpu_gb] = (found.fits, "new parameters" in terms, terms.get("copies", "")[:7])
        assert found.gpu_bytes <= gpu_gb * 10**9
    # 4 bytes of states, 2 of the parameter, and 2 of the gradient while it is in host memory
    assert places == {
        4: (True, True, ""),
        16: (True, False, "56.1 GB"),
        80: (True, False, "42.1 GB"),
    }


def test_without_a_gpu_everything_is_in_host_memory():
    found = by_name(plans(of_count("1B"), machine(gpu=None), World(2)))
    assert {plan.gpu_bytes for plan in found.values()} == {0}
    assert found["zero3"].host_bytes > 9e9  # 18 bytes a parameter over two ranks
    assert passes_seconds(found["zero3"]) == 0  # compute on processors is not predicted


def test_ranks_share_drives_and_memory():
    alone, shared = (
        by_name(plans(SEVEN, machine(gpu=H100), World(ranks), budget=budget))
        for ranks, budget in ((1, 8_000_000_000), (4, 2_000_000_000))
    )
    assert shared["nvme-optimizer"].drive_bytes == alone["nvme-optimizer"].drive_bytes / 4
    assert shared["nvme-optimizer"].seconds == pytest.approx(
        alone["nvme-optimizer"].seconds, rel=0.1
    )
    nodes = by_name(plans(SEVEN, machine(), World(1, nodes=4), budget=2_000_000_000))
    assert nodes["nvme-optimizer"].seconds == pytest.approx(
        alone["nvme-optimizer"].seconds / 4, rel=0.15
    )  # type: ignore[operator]


def test_compute_and_activations_are_predicted_where_tokens_are_given():
    work = Work(sequence=4096, micro_batch=2)
    assert activation_bytes(SEVEN, Work()) == 0
    assert activation_bytes(SEVEN, work) == 8192 * (4211 * 2 * 32 + 6 * 32000)
    with_work, without = (
        by_name(plans(SEVEN, machine(), World(), each)) for each in (work, Work())
    )
    assert with_work["zero3-cpu"].gpu_bytes - without["zero3-cpu"].gpu_bytes == activation_bytes(
        SEVEN, work
    )
    # two operations a parameter, and attention's, for each token: forward once, in backward thrice
    compute = 4 * 8192 * (2 * 7e9 + 2 * 4096 * 4211 * 32) / (989e12 * UTILISATION)
    assert passes_seconds(with_work["zero3-cpu"]) > compute  # copies take longer
    assert passes_seconds(with_work["zero3-cpu-optimizer"]) == pytest.approx(compute)


# Several drives.


def test_drives_add_up_but_directories_of_one_drive_do_not():
    one, same, other = (
        Drive("/a", 10, SPEEDS, "x"),
        Drive("/a/b", 10, SPEEDS, "x"),
        Drive("/c", 30, {"read": 1.0, "write": 1.0, "mixed": 1.4}, "y"),
    )
    assert machine(drives=(one, same)).speeds == SPEEDS
    assert machine(drives=(one, same)).free_bytes == 10
    assert machine(drives=(one, other)).speeds == {
        "read": 4.0,
        "write": 3.5,
        "mixed": pytest.approx(4.2),
    }
    assert machine(drives=(one, other)).free_bytes == 40
    assert weights(machine(drives=(one, other))) == [0.6667, 0.3333]
    assert machine(drives=(one, Drive("/d", 1))).speeds == {}
    assert weights(machine(drives=(one, Drive("/d", 1)))) == [0.5, 0.5]
    assert machine(drives=()).speeds == {}


SETTING = Setting(1 << 20, 8, 4)


def profile(path: str, stripe: tuple[StripePath, ...] = ()) -> Profile:
    return profiles.profile(SPEEDS, SETTING, drive={"path": path}, stripe=stripe)


def test_drives_that_were_swept_together_are_as_fast_as_together():
    together = tuple(
        StripePath(path, "d", "m", SETTING, SPEEDS, dict.fromkeys(SPEEDS, 2.0), weight)
        for path, weight in (("/a", 0.7), ("/b", 0.3))
    )
    drives = tuple(
        Drive(path, 1 << 40, SPEEDS, path, profile(path, together)) for path in ("/b", "/a")
    )
    assert machine(drives=drives).speeds == {"read": 4.0, "write": 4.0, "mixed": 4.0}
    assert weights(machine(drives=drives)) == [0.3, 0.7]
    assert machine(drives=drives[:1]).speeds == SPEEDS


# Passes: compute, activations, and hidden transfers.


def test_tokens_that_hide_the_drive_are_those_of_equal_times():
    work = Work(sequence=4096, activations="keep")
    roomy = machine(gpu=Gpu("H100", 200 << 30, 55e9))
    found = by_name(plans(SEVEN, roomy, World(), work, budget=8_000_000_000))["plain-in-backward"]
    assert found.free_tokens is not None
    assert by_name(plans(SEVEN, roomy, World(), work))["plain"].free_tokens is None
    drive = sum(term.seconds for term in found.phases[-1].beside[-1])
    compute, updates = (term.seconds for term in found.phases[-1].beside[0])
    assert compute / drive == pytest.approx(4096 / found.free_tokens)
    longer = Work(sequence=4096, micro_batch=1 + int(found.free_tokens / 4096), activations="keep")
    hidden = by_name(plans(SEVEN, roomy, World(), longer, budget=8_000_000_000))
    in_backward, after = hidden["plain-in-backward"], hidden["plain"]
    # the GPU computes the updates, too, one thing after the other
    assert in_backward.seconds == pytest.approx(passes_seconds(after) + updates)
    assert after.seconds == pytest.approx(passes_seconds(after) + update_seconds(after))


def test_updates_run_under_the_pass_of_their_window():
    """And values that no window updates are updated in the step."""
    work, budget = Work(2048, 32), 8_000_000_000
    roomy = machine(gpu=Gpu("H100", 200 << 30, 55e9))
    found = by_name(plans(SEVEN, roomy, World(), work, budget))
    after, forward, provisional, both, backward = (
        found[f"plain{way}-compact"]
        for way in ("", "-in-forward", "-provisional", "-in-both", "-in-backward")
    )
    passes = {phase.name: phase.seconds for phase in after.phases}
    update = passes.pop("update")
    assert [phase.name for phase in forward.phases] == ["forward and update", "backward"]
    assert forward.seconds == pytest.approx(max(passes["forward"], update) + passes["backward"])
    assert [phase.name for phase in backward.phases] == ["forward", "backward and update"]
    assert backward.seconds == pytest.approx(passes["forward"] + max(passes["backward"], update))
    # what host memory holds is left to the step, and is not written
    *hidden, left = provisional.phases
    assert [phase.name for phase in hidden] == ["forward", "backward and update"]
    assert left.name == "update"
    assert 0 < left.seconds < 0.1 * update
    assert provisional.seconds == pytest.approx(backward.seconds + left.seconds)
    # each pass has the part of the updates that `NVMeOptimizer` makes under it
    assert provisional_updates.FORWARD_SHARE == FORWARD_SHARE
    assert [phase.name for phase in both.phases] == ["forward and update", "backward and update"]
    assert both.seconds == pytest.approx(
        max(passes["forward"], FORWARD_SHARE * update)
        + max(passes["backward"], (1 - FORWARD_SHARE) * update)
    )
    assert both.seconds < min(each.seconds for each in (forward, provisional, backward))
    # twice the space on the drive for the values on it, and for the replaced weights
    moved = after.written_bytes
    for each in (provisional, both):
        assert each.drive_bytes - after.drive_bytes == pytest.approx(moved)
        assert each.gpu_bytes - after.gpu_bytes == pytest.approx(2 * moved / 4, rel=0.01)
    assert forward.gpu_bytes == after.gpu_bytes
    assert after.concession == forward.concession < both.concession < backward.concession
    assert provisional.concession == both.concession
    windows = [each.free_tokens for each in (both, backward, forward)]
    assert [windows[0] / each for each in windows[1:]] == pytest.approx([6 / 8, 2 / 8])
    # in memory, which holds two versions of all states, or of a part
    twice, once = (
        by_name(plans(SEVEN, roomy, World(), work, nbytes)) for nbytes in (64 * 10**9, 40 * 10**9)
    )
    provisional, part = (each["plain-provisional-compact"] for each in (twice, once))
    assert provisional.seconds == pytest.approx(twice["plain-in-backward-compact"].seconds)
    states = 4 * SEVEN.parameters
    assert provisional.host_bytes - twice["plain-compact"].host_bytes == pytest.approx(
        states, rel=0.01
    )
    replaced = provisional.gpu_bytes - twice["plain-compact"].gpu_bytes
    assert replaced == pytest.approx(2 * SEVEN.parameters, rel=0.01)
    assert part.seconds is not None
    assert provisional.seconds < part.seconds < once["plain-compact"].seconds
    assert twice["plain-compact"].host_bytes < part.host_bytes < provisional.host_bytes
    several = by_name(plans(SEVEN, roomy, World(2), work, budget))
    assert all(several[f"plain-{way}"].fits for way in ("in-forward", "in-both", "provisional"))


def test_what_a_pass_and_its_update_have_of_one_gpu_and_one_drive_is_added():
    """Computing and packing on one processor, activations and states on another."""
    work = Work(2048, 8, activations="drive")
    roomy = machine(gpu=Gpu("H100", 200 << 30, 55e9))
    found = by_name(plans(SEVEN, roomy, World(), work, budget=8_000_000_000))
    after, under = found["plain-compact"], found["plain-in-backward-compact"]
    _, backward, update = after.phases
    both = {terms[0].name: terms for terms in under.phases[-1].beside}
    for names, each in ((("compute", "Adam"), "compute"), (("drive", "drive"), "drive")):
        assert tuple(term.name for term in both[each]) == names
        apart = [
            term.seconds
            for phase in (backward, update)
            for terms in phase.beside
            for term in terms
            if term.name in names
        ]
        assert [term.seconds for term in both[each]] == pytest.approx(apart)
    # the drive bounds both passes, and the update: nothing is hidden
    assert under.seconds == pytest.approx(after.seconds)


def test_micro_batches_are_passed_one_after_the_other_and_hide_the_drive_once():
    once, thrice = (
        by_name(plans(SEVEN, machine(), World(), Work(2048, 1, times), budget=8_000_000_000))
        for times in (1, 3)
    )
    for name in ("plain", "nvme-both", "zero2-cpu"):
        assert passes_seconds(thrice[name]) == pytest.approx(3 * passes_seconds(once[name]))
        assert update_seconds(thrice[name]) == pytest.approx(update_seconds(once[name]))
        assert thrice[name].tokens_per_second == pytest.approx(3 * 2048 / thrice[name].seconds)
    names = [(phase.name, phase.times) for phase in thrice["plain-in-backward"].phases]
    assert names == [("forward", 3), ("backward", 2), ("backward and update", 1)]


def test_activations_are_kept_computed_again_or_on_the_drive():
    sizes, computed, saved = {}, {}, {}
    for activations in ACTIVATIONS:
        work = Work(2048, 4, 1, activations)
        sizes[activations] = activation_bytes(SEVEN, work)
        computed[activations] = operations(SEVEN, work).backward / operations(SEVEN, work).forward
        saved[activations] = saved_bytes(SEVEN, work)
    assert sizes["keep"] == 8192 * (34 * 4211 * 32 + 6 * 32000)
    assert sizes["drive"] == 8192 * 6 * 32000  # the logits
    assert sizes["keep"] > sizes["checkpoint"] > sizes["checkpoint-drive"] > sizes["drive"]
    assert computed == {"keep": 2, "checkpoint": 3, "drive": 2, "checkpoint-drive": 3}
    assert saved["keep"] == saved["checkpoint"] == 0
    assert saved["drive"] == 16 * saved["checkpoint-drive"] == 32 * 8192 * 4211 * 32
    (found,) = plans(SEVEN, machine(), World(), Work(2048, 4, 1, "drive"), None, [BY_NAME["plain"]])
    (kept,) = plans(SEVEN, machine(), World(), Work(2048, 4, 1, "keep"), None, [BY_NAME["plain"]])
    there = int(saved["drive"]) - 2_000_000_000  # what save_on_nvme's host memory does not hold
    assert found.drive_bytes - kept.drive_bytes == there
    assert found.written_bytes - kept.written_bytes > 0.9 * there
    assert passes_seconds(found) > passes_seconds(kept)


def test_experts_that_a_token_does_not_use_do_not_compute():
    sparse = dataclasses.replace(SEVEN, idle=5_000_000_000)
    work = Work(2048)
    attention = 2 * 2048 * 4211 * 32
    assert operations(sparse, work).forward == 2048 * (2 * 2_000_000_000 + attention)
    assert activation_bytes(sparse, work) == activation_bytes(SEVEN, work)


def test_formats_move_what_the_table_of_bytes_says():
    budget = 4_000_000_000
    moved = {
        name: streamed(BY_NAME[name], SEVEN, World(), budget).total
        for name in ("plain", "plain-split", "plain-compact", "plain-compact24")
    }
    for name, each in zip(moved, STATE_BYTES.values(), strict=True):
        assert moved[name] == pytest.approx(2 * (each * 7e9 - budget), rel=0.05)
        assert needs(BY_NAME[name], SEVEN, World()).drive_bytes == int(each * 7e9)


def test_forward_passes_alone_stream_parameters():
    found = by_name(plans(SEVEN, machine(), World(), Work(2048), 4_000_000_000, INFERENCE))
    assert [each.fits for each in found.values()] == [True] * 4
    drive = found["inference-nvme"]
    assert drive.drive_bytes == 14_000_000_000
    assert drive.written_bytes == 0
    assert drive.seconds == pytest.approx(10e9 / (3.0e9 * 0.96), rel=0.01)
    assert found["inference-cpu"].host_bytes > 14e9 > found["inference-gpu"].host_bytes
    assert drive.gpu_bytes < 1e9 < found["inference-gpu"].gpu_bytes


def test_weights_that_stay_on_the_gpu_are_not_read_in_forward_passes():
    seconds = {}
    for gpu_memory in (6, 10, 24):
        here = machine(gpu=Gpu("NVIDIA H100", gpu_memory * 10**9, 50e9))
        found = by_name(plans(SEVEN, here, World(), Work(1), 4_000_000_000, INFERENCE))
        seconds[gpu_memory] = found["inference-offload"].seconds
    # a tenth stays free
    assert seconds[6] - seconds[10] == pytest.approx(0.9 * 4e9 / (3.0e9 * 0.96), rel=0.01)
    assert seconds[24] < 0.1


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_inference_saves_no_activations_on_a_drive(activations):
    here = machine(drives=(Drive("/never_swept", 1 << 40),))
    work = Work(8192, 2, activations=activations)
    found = by_name(plans(SEVEN, here, World(), work, strategies=INFERENCE))["inference-gpu"]
    assert (found.seconds, found.written_bytes) == (pytest.approx(0.574, rel=0.1), 0)


def _beside_bytes(state_format: str, *, in_one_pass: bool) -> int:
    """What `NVMeOptimizer` has it to be, of AdamW."""
    states = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
    traits = Traits(states, eager=False, separable=True, elementwise=True, why="")
    return beside_bytes(FORMATS[state_format], traits, torch.bfloat16, in_one_pass=in_one_pass)


@pytest.mark.parametrize("state_format", list(FORMATS))
@pytest.mark.parametrize("on_gpu", [True, False])
def test_buckets_are_those_of_the_optimizer(state_format, on_gpu):
    """On a GPU as packed by Triton, in one pass."""
    strategy = next(
        each for each in STRATEGIES if each.door == "plain" and each.state_format == state_format
    )
    value = strategy.state_bytes
    for budget in (10**9, 10**12):
        placed = strategy._replace(update_device="gpu" if on_gpu else "cpu")
        beside = _beside_bytes(state_format, in_one_pass=on_gpu)
        for memory in (0, 24 * 10**9, 150 * 10**9) if on_gpu else (0,):
            found = placement._bucket_elements(placed, budget, memory)
            wanted = most_elements(budget, value, beside, memory)
            assert found == pytest.approx(wanted, rel=0.001)


def test_what_is_in_memory_needs_no_room_on_the_drive():
    """As `Tier` has it, for the buckets that `NVMeOptimizer` makes; with FSDP2 of each rank."""
    world = World(ranks=2)
    for budget in (8 * 10**9, 60 * 10**9, 200 * 10**9):
        for name, each in (("plain-compact24", 3), ("plain", 12)):
            beside = _beside_bytes(BY_NAME[name].state_format, in_one_pass=True)
            bucket = each * most_elements(budget, each, beside)
            wanted = overflow(each * SEVENTY.parameters // 2, budget, bucket)
            found = beside_budget(BY_NAME[name], SEVENTY, world, budget)
            assert found == pytest.approx(wanted, rel=0.01)
    zero3 = BY_NAME["nvme-optimizer-compact24"]
    assert (
        beside_budget(zero3, SEVENTY, world, 60 * 10**9) == needs(zero3, SEVENTY, world).drive_bytes
    )


# The rows and the advice.


@settings(max_examples=40)
@given(
    st.sampled_from(["350M", "1B", "3B", "8B", "30B", "70B"]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([16, 64, 251]),
    st.sampled_from([50, 137, 2000]),
    st.sampled_from(["RTX 4090", "H100"]),
    st.sampled_from([1, 8]),
)
def test_advice_agrees_with_the_table(size, ranks, host_gb, drive_gb, gpu, accumulation):
    known = gpu_models.find(gpu)
    assert known is not None
    card = Gpu(gpu, known.memory_bytes(), known.link_bytes_per_second)
    here = machine(
        gpu=card,
        host_bytes=host_gb * 10**9,
        drives=(Drive("/d", drive_gb * 10**9, SPEEDS),),
    )
    asked = Question(of_count(size), here, World(ranks), Work(2048, 1, accumulation))
    found = asked.answers()
    chosen = fastest(found)
    rows = shown(found, chosen, 6)
    assert len(rows) <= 6
    assert [plan for plan in found if plan in rows] == rows
    if chosen is None:
        assert not any(plan.fits for plan in found)
        return
    assert chosen in rows
    for plan in faster(found, chosen):
        assert plan.fits
        assert plan.seconds < chosen.seconds
        assert plan.concession > chosen.concession
    if hidden := hiding(asked, found):
        plan, batch = hidden
        changed = dataclasses.replace(asked, work=asked.work._replace(micro_batch=batch))
        longer = by_name(changed.answers())[plan.strategy.name]
        assert longer.fits
        after = longer.strategy._replace(updates="after")
        (apart,) = plans(asked.model, here, asked.world, changed.work, None, [after])
        assert longer.seconds < apart.seconds


# Where nothing fits.


def question(**changes: object) -> Question:
    card = Gpu("RTX 4090", 24 * 10**9)
    here = machine(gpu=card, host_bytes=32 << 30, drives=(Drive("/d", 200 * 10**9, SPEEDS),))
    asked = Question(SEVEN, here, World(), Work(2048))
    return dataclasses.replace(asked, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "state_format": "exact",
                "machine": machine(host_bytes=24 << 30, drives=(Drive("/d", 50 << 30, SPEEDS),)),
            },
            "another state format",
        ),
        ({"way": "zero"}, "another way to train"),
        (
            {"work": Work(4096, 4, 1, "keep")},
            "activation checkpointing (--activations checkpoint)",
        ),
        (
            {"work": Work(16384, 8), "way": "zero3"},
            "--micro-batch 1 --accumulate 8",
        ),
        ({"budget": 1 << 20}, "no --budget"),
        ({"machine": machine(host_bytes=1 << 30)}, "2 GB of host memory"),
        (
            {"machine": machine(host_bytes=24 << 30, drives=())},
            "34 GB of host memory",
        ),
        (
            {"machine": machine(host_bytes=12 << 30, drives=())},
            "a drive with 14 GB free (--path DIR)",
        ),
        (
            {"machine": machine(host_bytes=8 << 30, drives=(Drive("/d", 9 << 30, SPEEDS),))},
            "17 GB free on the drive",
        ),
        (
            {"way": "zero", "machine": machine(host_bytes=1 << 30, drives=())},
            "another way to train and 2 GB of host memory and a drive with 21 GB free (--path DIR)",
        ),
    ],
)
def test_the_cheapest_change_with_which_something_fits_is_reported(changes, words):
    asked = question(**changes)
    assert fastest(asked.answers()) is None
    found = cheapest_change(asked)
    assert found is not None
    assert found.words == words
    assert found.plan.fits


def test_a_change_that_is_made_is_enough():
    here = machine(host_bytes=1 << 30, drives=(Drive("/d", 9 << 30, SPEEDS),))
    found = cheapest_change(question(machine=here))
    assert found is not None
    assert found.words == "2 GB of host memory and 21 GB free on the drive"
    for host, room, fits in ((2, 21, True), (1, 21, False), (2, 20, False)):
        changed = machine(host_bytes=host * 10**9, drives=(Drive("/d", room * 10**9, SPEEDS),))
        assert (fastest(question(machine=changed).answers()) is not None) == fits


def test_more_space_than_the_least_may_concede_less():
    here = machine(host_bytes=14 << 30, drives=())
    found = cheapest_change(question(machine=here))
    assert found is not None
    assert found.finer is not None
    assert found.finer.fits
    assert found.finer.strategy.state_format == "exact"
    assert found.finer.concession < found.plan.concession
    room = found.finer.drive_bytes
    drives = (Drive("/d", room, SPEEDS),)
    chosen = fastest(question(machine=machine(host_bytes=14 << 30, drives=drives)).answers())
    assert chosen is not None
    assert chosen.concession == found.finer.concession


def test_where_no_change_helps_that_is_reported():
    assert cheapest_change(question(model=of_count("900T"))) is None


# The configuration.


def test_the_config_is_what_the_plan_says():
    drives = (Drive("/a", 1 << 40, SPEEDS, "a", profile("/a")), Drive("/b", 1 << 40, SPEEDS, "b"))
    here = machine(drives=drives)
    found = by_name(plans(SEVEN, here, World(), budget=8_000_000_000))
    config = ds_config(found["nvme-both"], asked_of(here, Work(2048, 3)))
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/a", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/a", "pin_memory": True},
    }
    assert config["aio"] == aio_section(SETTING)
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert Settings.of(config) == Settings(
        host_memory=8_000_000_000, paths=("/a", "/b"), weights=(0.5, 0.5)
    )
    assert "nvme_offload" not in ds_config(
        by_name(plans(SEVEN, machine(gpu=Gpu("x", 1 << 40)), World()))["zero2"], asked_of(here)
    )


@pytest.mark.deepspeed
def test_deepspeed_takes_the_config_of_every_plan():  # but NVMeOptimizer's, which has none
    deepspeed = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    drives = (Drive("/a", 1 << 41, SPEEDS, "a", profile("/a")),)
    large = machine(gpu=Gpu("x", 1 << 41), host_bytes=1 << 41, drives=drives)
    strategies = [each for each in STRATEGIES if each.door != "plain"]
    found = plans(SEVEN, large, World(), strategies=strategies)
    assert all(plan.fits for plan in found)
    devices = {"gpu": None, "host": "cpu", "drive": "nvme"}
    for plan in found:
        zero = deepspeed.DeepSpeedConfig(ds_config(plan, asked_of(large))).zero_config
        assert zero.stage == plan.strategy.stage
        for part, place in (
            (zero.offload_optimizer, plan.strategy.optimizer),
            (zero.offload_param, plan.strategy.parameters),
        ):
            assert (part and part.device) == devices[place]


# This machine.


def test_nvidia_smi_is_read():
    reported = "NVIDIA H200, 143771, 5, 16\nNVIDIA L4, 23034, [N/A], [N/A]\n\nNVIDIA-SMI has failed, so, it, says\n"
    assert machines.parse_gpus(reported) == [
        Gpu("NVIDIA H200", 143_771 << 20, pytest.approx(54.8e9, rel=0.01)),
        Gpu("NVIDIA L4", 23_034 << 20, None),
    ]


def test_the_speed_of_memory_is_measured(monkeypatch):
    monkeypatch.setattr(machines, "_PROBE_BYTES", 8 << 20)
    assert 1e8 < machines.copy_bytes_per_second(0.01, threads=2) < 1e13


def test_this_machine_and_its_drive_are_seen(tmp_path, monkeypatch):
    from nvme_offload.hardware import profile_shelf
    from nvme_offload.hardware.drive import describe

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    found, ranks = this_machine([str(tmp_path)], probe_seconds=0)
    assert ranks >= 1
    assert found.host_bytes > 0
    assert (found.drives[0].path, found.drives[0].speeds, found.speeds) == (str(tmp_path), {}, {})
    kept = profile(str(tmp_path))
    kept.drive["identity"] = describe(tmp_path).identity
    profile_shelf.keep(kept)
    assert (drive_at(str(tmp_path)).speeds, drive_at(str(tmp_path)).profile) == (SPEEDS, kept)


def test_more_gpu_memory_makes_streamed_steps_shorter():
    model = Model(6_738_415_616, 131_072_000, 131_072_000, 32, 4096, 32000)
    work = Work(sequence=2048, micro_batch=1)
    steps = BY_NAME["streamed-in-backward-compact"]
    seconds = [
        plans(
            model,
            Machine(H200._replace(memory_bytes=gpu_gb * 10**9), 512 * 10**9),
            World(),
            work,
            256 * 10**9,
            [steps],
        )[0].seconds
        for gpu_gb in (5, 8, 12, 16, 24)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.7 * seconds[0]
