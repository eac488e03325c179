"""`NVMeOptimizer.save`: states in a file as they are kept, and back."""

from __future__ import annotations

import cProfile
import errno
import pickle

import pytest
import torch
from covering import covering
from reference import (
    KINDS,
    OPTIMIZERS,
    SHAPES,
    copied,
    differing,
    parameters,
    set_gradients,
    tight,
    train,
    unlike,
)
from test_odd_states import Odd

from nvme_offload.errors import IOFailure, NoSpaceError, UnsupportedError, UsageError
from nvme_offload.io.engine import Engine
from nvme_offload.optim import NVMeOptimizer

FORMATS = ["exact", "split", "compact", "compact24"]


def roomy(params, place, optimizer_class=torch.optim.AdamW, **options):
    return NVMeOptimizer(params, optimizer_class, paths=place, host_memory="64MiB", **options)


def load(optimizer, path):
    optimizer.load_state_dict(torch.load(path, mmap=True))


@covering(dtype=[torch.bfloat16, torch.float32], state_format=FORMATS, is_tight_first=[True, False])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    tmp_path, state_format, dtype, is_tight_first
):
    """With other buckets, too: in the least memory parameters are cut."""
    before, after = (tight, roomy) if is_tight_first else (roomy, tight)
    params, path = parameters(dtype), tmp_path / "saved"
    with before(params, tmp_path, state_format=state_format) as optimizer:
        train(params, optimizer)
        optimizer.save(path)
        resumed = copied(params)
        train(params, optimizer, first=3)
        with after(resumed, tmp_path, state_format=state_format) as again:
            assert len(again._steps.binding.buckets) != len(optimizer._steps.binding.buckets)
            load(again, path)
            train(resumed, again, first=3)
            assert differing(params, resumed) == []
            assert unlike(optimizer.state_dict(), again.state_dict()) == []


CHANGES = {
    "in place": lambda parameter, _: parameter.mul_(0.7),
    "data": lambda parameter, _: parameter.data.mul_(0.7),
    "new data": lambda parameter, _: setattr(parameter, "data", parameter.data * 0.7),
    "some elements": lambda parameter, _: parameter.view(-1)[::2].mul_(0.7),
    "master": lambda parameter, state: state["master"].add_(2.0**-12),
}


@covering(
    when=["before saving", "after loading", "both"],
    change=list(CHANGES),
    state_format=FORMATS,
    way=["save", "state_dict"],
    mode=[{}, {"step_in_backward": "provisional"}, {"overlap_step": True}],
)
def test_a_weight_that_was_changed_is_resumed_as_it_goes_on(
    tmp_path, when, change, state_format, way, mode
):
    options = {"state_format": state_format, **mode}
    params, path = parameters(torch.bfloat16), tmp_path / "saved"

    def groups(params):
        return [{"params": params[:3]}, {"params": params[3:], "lr": 0.01}]

    def apply(params, optimizer):
        optimizer.synchronize()
        with torch.no_grad():
            for parameter in params[1::2]:
                CHANGES[change](parameter, optimizer.state[parameter])

    with tight(groups(params), tmp_path, **options) as optimizer:
        train(params, optimizer)
        if when != "after loading":
            apply(params, optimizer)
        if way == "save":
            optimizer.save(path)
        else:
            torch.save(optimizer.state_dict(), path)
        optimizer.synchronize()
        resumed = copied(params)
        if when != "before saving":
            apply(params, optimizer)
        train(params, optimizer, first=3)
        with roomy(groups(resumed), tmp_path, **options) as again:
            load(again, path)
            if when != "before saving":
                apply(resumed, again)
            train(resumed, again, first=3)
            again.synchronize()
            assert differing(params, resumed) == []
            assert unlike(optimizer.state_dict()["state"], again.state_dict()["state"]) == []


def test_load_takes_the_file_of_one_process(tmp_path):
    params, path = parameters(shapes=[(40, 30), (300, 20)]), tmp_path / "saved"
    with roomy(params, tmp_path, Odd) as optimizer:
        train(params, optimizer)
        optimizer.save(path)
        resumed = copied(params)
        with roomy(resumed, tmp_path, Odd) as again:
            with pytest.raises(pickle.UnpicklingError, match="weights_only"):
                again.load(path)  # of the class of a state
            again.load(path, weights_only=False)
            train(params, optimizer, first=3)
            train(resumed, again, first=3)
            assert differing(params, resumed) == []
            with pytest.raises(UsageError, match=r"has no nvme_offload\.json"):
                again.load(tmp_path)
            with pytest.raises(FileNotFoundError):
                again.load(tmp_path / "none")


@pytest.mark.parametrize("name", KINDS)
def test_what_is_kept_whole_is_in_the_file_as_in_a_state_dict(tmp_path, name):
    shapes = [shape for shape in SHAPES if 0 not in shape]  # which Adafactor cannot take
    params, path = parameters(shapes=shapes), tmp_path / "saved"
    with tight(params, tmp_path, OPTIMIZERS[name]) as optimizer:
        train(params, optimizer)
        optimizer.save(path)
        tree = torch.load(path)
        assert unlike(tree, optimizer.state_dict()) == []
    plain = OPTIMIZERS[name](copied(params))
    plain.load_state_dict(tree)
    assert unlike(plain.state_dict()["state"], tree["state"]) == []


@covering(after=FORMATS, before=FORMATS)
def test_from_one_format_to_another(tmp_path, before, after):
    """As by a state dict."""
    params, path = parameters(torch.bfloat16), tmp_path / "saved"
    with tight(params, tmp_path, state_format=before) as optimizer:
        train(params, optimizer)
        optimizer.save(path)
        found = []
        for tree in (torch.load(path, mmap=True), optimizer.state_dict()):
            resumed = copied(params)
            with tight(resumed, tmp_path, state_format=after) as again:
                again.load_state_dict(tree)
                train(resumed, again, first=3)
                found.append((resumed, again.state_dict()["state"]))
    assert differing(found[0][0], found[1][0]) == []
    assert unlike(found[0][1], found[1][1]) == []


@covering(shape=[(0, 3), (), (1,), (255,), (257,)], state_format=FORMATS)
def test_one_parameter_alone(tmp_path, state_format, shape):
    params = parameters(torch.bfloat16, shapes=[shape])
    with roomy(params, tmp_path, state_format=state_format) as optimizer:
        train(params, optimizer)
        optimizer.save(tmp_path / "saved")
        resumed = copied(params)
        with roomy(resumed, tmp_path, state_format=state_format) as again:
            load(again, tmp_path / "saved")
            assert unlike(again.state_dict(), optimizer.state_dict()) == []


def test_states_that_need_16_bits(tmp_path):
    params, path = parameters(torch.bfloat16), tmp_path / "saved"
    options = {"state_format": "compact", "betas": (0.98, 0.99)}
    with tight(params, tmp_path, **options) as optimizer:
        train(params, optimizer)
        optimizer.save(path)
        assert torch.load(path)["state"][0]["exp_avg"]["halves"].dtype == torch.bfloat16
        resumed = copied(params)
        train(params, optimizer, first=3)
        with roomy(resumed, tmp_path, **options) as again:
            load(again, path)
            train(resumed, again, first=3)
            assert unlike(optimizer.state_dict(), again.state_dict()) == []
    assert differing(params, resumed) == []


@pytest.mark.parametrize("state_format", FORMATS)
def test_parameters_with_other_strides(tmp_path, state_format):
    def made(format):
        weights = torch.randn(40, 30, 3, 5, generator=torch.Generator().manual_seed(1))
        matrix = torch.randn(300, 70, generator=torch.Generator().manual_seed(2)).bfloat16()
        return [
            torch.nn.Parameter(weights.bfloat16().to(memory_format=format)),
            torch.nn.Parameter(matrix.t() if format == torch.channels_last else matrix.t().clone()),
        ]

    params, path = made(torch.channels_last), tmp_path / "saved"
    with tight(params, tmp_path, state_format=state_format) as optimizer:
        train(params, optimizer)
        optimizer.save(path)
        whole = optimizer.state_dict()["state"]
    for memory_format in (torch.channels_last, torch.contiguous_format):
        resumed = made(memory_format)
        with torch.no_grad():
            for parameter, value in zip(resumed, params, strict=True):
                parameter.copy_(value)
        # where the order in memory is another one, "compact" rounds other blocks
        kept = state_format if memory_format == torch.channels_last else "exact"
        with tight(resumed, tmp_path, state_format=kept) as again:
            load(again, path)
            assert unlike(again.state_dict()["state"], whole) == []


@pytest.mark.parametrize("options", [{"overlap_step": True}, {"step_in_backward": "provisional"}])
def test_after_updates_that_are_on_their_way(tmp_path, options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])
    found = []
    with NVMeOptimizer(net.parameters(), paths=tmp_path, host_memory=350_000, **options) as one:
        for step in range(5):
            net(torch.full((3, 64), step / 5)).square().sum().backward()
            if step == 4 and "step_in_backward" in options:
                one.save(tmp_path / "saved")  # what backward() has updated is undone
                found.append(one.state_dict())
            one.step()
            one.save(tmp_path / "then")
            one.zero_grad()
        found.append(one.state_dict())
    assert unlike(torch.load(tmp_path / "then"), found.pop()) == []
    for whole in found:
        assert unlike(torch.load(tmp_path / "saved"), whole) == []


def test_the_file_has_what_is_kept_and_nothing_else_is_written(tmp_path):
    params = [torch.nn.Parameter(torch.randn(1000, 1000).bfloat16()) for _ in range(8)]
    path = tmp_path / "saved"
    for state_format, each in (("compact", 4), ("compact24", 3), ("exact", 12)):
        with NVMeOptimizer(
            params, paths=tmp_path, host_memory="24MiB", state_format=state_format
        ) as optimizer:
            train(params, optimizer)
            tier = optimizer._steps.tier
            tier.swapper.flush()
            written, used = tier.swapper.stats().bytes_written, tier.store.used_bytes
            engine = tier.store.engine.stats().write.bytes
            optimizer.save(path)
            assert each <= path.stat().st_size / 8e6 <= each * 1.01
            assert tier.store.engine.stats().write.bytes - engine <= each * 8e6 * 1.01
            assert (tier.swapper.stats().bytes_written, tier.store.used_bytes) == (written, used)


def test_a_drive_without_room_for_a_state_dict(tmp_path, mounted):
    """The states fill it; the file goes elsewhere."""
    shapes, place = [(100, 100)] * 90, mounted("ext4-full")
    params = parameters(shapes=shapes)
    with tight(params, place) as optimizer:
        train(params, optimizer)
        with pytest.raises(NoSpaceError, match=r"save\(path\) writes them to a file without that"):
            optimizer.state_dict()
        with pytest.raises(
            NoSpaceError, match=r"No space left on device; the file takes \d\.\d\d MiB"
        ):
            optimizer.save(place / "saved")
        assert not [left for left in place.iterdir() if "saved" in left.name]
        optimizer.save(tmp_path / "saved")
        resumed = copied(params)
        train(params, optimizer, first=3)
    with roomy(resumed, tmp_path) as again:
        load(again, tmp_path / "saved")
        train(resumed, again, first=3)
    assert differing(params, resumed) == []


def test_a_write_that_fails_leaves_the_old_file_and_the_training(tmp_path, monkeypatch):
    params, path = parameters(torch.bfloat16), tmp_path / "saved"
    plain = copied(params)
    with roomy(plain, tmp_path) as undisturbed:
        train(plain, undisturbed, steps=6)
    with tight(params, tmp_path) as optimizer:
        train(params, optimizer)
        optimizer.save(path)
        old, names, write = path.read_bytes(), sorted(tmp_path.iterdir()), Engine.write
        for last in (0, 3, 20):
            left = last

            def fail(engine, *args, **named):
                nonlocal left
                left -= 1
                if left < 0:
                    raise OSError(errno.EIO, "made up")
                return write(engine, *args, **named)

            with monkeypatch.context() as patched:
                patched.setattr(Engine, "write", fail)
                with pytest.raises(IOFailure, match="unchanged"):
                    optimizer.save(path)
            assert path.read_bytes() == old
            assert sorted(tmp_path.iterdir()) == names
        train(params, optimizer, first=3)
    assert differing(params, plain) == []


def test_where_it_cannot_be(tmp_path):
    params = parameters()
    with roomy(params, tmp_path) as optimizer:
        empty = tmp_path / "new" / "directories" / "empty"
        optimizer.save(empty)  # before the first step
        assert torch.load(empty)["state"] == {}
        load(optimizer, empty)
        with pytest.raises(IOFailure, match="Not a directory"):
            optimizer.save(empty / "below" / "saved")
    with pytest.raises(UsageError, match="closed"):
        optimizer.save(tmp_path / "saved")


def test_what_is_not_of_these_parameters_is_refused_and_changes_nothing(tmp_path):
    params, path = parameters(torch.bfloat16), tmp_path / "saved"
    with tight(params, tmp_path, state_format="compact") as optimizer:
        train(params, optimizer)
        optimizer.save(path)
        before = optimizer.state_dict()["state"]
        for spoil, reported in (
            (lambda state: state["exp_avg"].update(codes=torch.zeros(5, dtype=torch.uint8)), "has"),
            (lambda state: state["exp_avg"].update(codes=torch.zeros(40, 30)), "none that this"),
            (lambda state: state["exp_avg_sq"].update(exponents=torch.zeros(1)), "none that this"),
            (lambda state: state["exp_avg"].pop("signed"), "none that this"),
            (lambda state: state["master"].pop("low"), "none that this"),
        ):
            tree = torch.load(path)
            spoil(tree["state"][0])
            with pytest.raises(UsageError, match=reported):
                optimizer.load_state_dict(tree)
            assert unlike(optimizer.state_dict()["state"], before) == []
    wider = [torch.nn.Parameter(parameter.detach().float()) for parameter in params]
    with roomy(wider, tmp_path) as optimizer, pytest.raises(UsageError, match="bfloat16 weights"):
        load(optimizer, path)


def test_states_of_another_version_are_refused_and_change_nothing(tmp_path):
    params, path = parameters(), tmp_path / "saved"
    with roomy(params, tmp_path) as optimizer:
        train(params, optimizer)
        optimizer.save(path)
        tree = torch.load(path)
        before = optimizer.state_dict()
        tree["nvme_offload"]["version"] += 1
        tree["state"][0]["exp_avg"].add_(1)
        torch.save(tree, path)
        for act in (lambda: optimizer.load(path), lambda: optimizer.load_state_dict(tree)):
            with pytest.raises(
                UnsupportedError, match="version 2 and this package reads version 1"
            ):
                act()
            assert unlike(before, optimizer.state_dict()) == []
        del tree["nvme_offload"]["version"]  # as development versions saved
        optimizer.load_state_dict(tree)
        assert torch.equal(
            optimizer.state_dict()["state"][0]["exp_avg"], tree["state"][0]["exp_avg"]
        )


@pytest.mark.parametrize("other", [{"weight": torch.ones(3)}, torch.ones(3)])
def test_a_file_without_states_is_refused_and_changes_nothing(tmp_path, other):
    params = parameters()
    torch.save(other, tmp_path / "model.pt")
    with roomy(params, tmp_path) as optimizer:
        train(params, optimizer)
        before = optimizer.state_dict()
        with pytest.raises(UsageError, match="has no states of an optimizer"):
            optimizer.load(tmp_path / "model.pt")
        assert unlike(before, optimizer.state_dict()) == []


@pytest.mark.slow
def test_what_it_computes_grows_with_the_parameters_alone(tmp_path):
    """Calls of functions for each parameter, with a few in each bucket or with many."""
    calls = []
    for count in (32, 320):
        params = [torch.nn.Parameter(torch.randn(32, 32).bfloat16()) for _ in range(count)]
        with NVMeOptimizer(
            params, paths=tmp_path, host_memory=200_000, state_format="compact"
        ) as optimizer:
            set_gradients(params, 0)
            optimizer.step()
            optimizer.save(tmp_path / "saved")
            profile = cProfile.Profile()
            profile.runcall(optimizer.save, tmp_path / "saved")
            calls.append(sum(entry.callcount for entry in profile.getstats()) / count)
            buckets = len(optimizer._steps.binding.buckets)
    assert buckets > 20
    assert calls[1] < 1.2 * calls[0]
