"""Every use of a streamed parameter sees its true values, or an error that says what to do."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import re
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from modules import Through
from torch import nn
from torch.autograd.functional import jacobian
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

from nvme_offload import Offload, UnsupportedError, UsageError
from nvme_offload.parameters import setup
from nvme_offload.parameters.buckets import Division

Make = Callable[..., Offload]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(12)))


@pytest.fixture
def pair(offload: Offload) -> tuple[nn.Sequential, nn.Sequential]:
    """A model whose parameters stream, and the same model in memory."""
    model = _model()
    in_memory = copy.deepcopy(model)
    offload.parameters(model, "cpu")
    return model, in_memory


def _assert_equal(model: nn.Module, in_memory: nn.Module) -> None:
    x = torch.randn(2, 24)
    with torch.no_grad():
        assert torch.equal(model(x), in_memory(x))
    for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_state_dict_has_copies_in_host_memory(pair):
    model, in_memory = pair
    state = model.state_dict()
    for key, values in in_memory.state_dict().items():
        assert torch.equal(state[key], values)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(state["0.weight"], in_memory[0].weight)  # it is a copy


def test_tied_weights_share_memory_in_the_state_dict(offload):
    model = _model()
    model[7].weight = model[2].weight
    in_memory = copy.deepcopy(model)
    offload.parameters(model, "cpu")
    sizes = []
    for each in (model, in_memory):
        file = io.BytesIO()
        torch.save(each.state_dict(), file)
        sizes.append(len(file.getvalue()))
    assert sizes[0] <= sizes[1]
    state = model.state_dict()
    with torch.no_grad():
        for each in (model, in_memory):
            each[2].weight.mul_(2)
    for again in (model[7].state_dict(destination=state, prefix="7."), model.state_dict()):
        assert torch.equal(again["7.weight"], in_memory[7].weight)
    plain: dict[str, torch.Tensor] = {}
    model.state_dict(destination=plain)
    assert torch.equal(plain["7.weight"], plain["2.weight"])


def test_a_loaded_state_dict_is_used(pair):
    model, in_memory = pair
    torch.manual_seed(1)
    other = nn.Sequential(*(nn.Linear(24, 24) for _ in range(12)))
    model.load_state_dict(other.state_dict())
    in_memory.load_state_dict(other.state_dict())
    _assert_equal(model, in_memory)


def test_assigned_weights_are_refused(pair):
    model, in_memory = pair
    for loaded in (model, model[3]):
        with pytest.raises(UsageError, match="leave assign out"):
            loaded.load_state_dict(loaded.state_dict(), assign=True)
    for each in pair:  # as adapters of peft
        each.append(nn.Linear(24, 24, device="meta"))
        state = {"12.weight": torch.eye(24), "12.bias": torch.zeros(24)}
        each.load_state_dict(state, strict=False, assign=True)
    _assert_equal(model, in_memory)


def test_torch_saves_the_values_of_the_state_dict(pair):
    model, in_memory = pair
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for key, values in torch.load(file).items():
        assert torch.equal(values, in_memory.state_dict()[key])


def _in_a_dispatch_mode(parameter):
    with FlopCounterMode(display=False):  # in which foreach functions leave the version alone
        torch._foreach_mul_([parameter], 0.5)


_LIBRARY = torch.library.Library("nvme_offload_tests", "DEF")
_LIBRARY.define("halve(Tensor(a!) values) -> Tensor")
_LIBRARY.impl("halve", lambda values: torch.from_numpy(values.numpy().__imul__(0.5)) + 1, "CPU")


CHANGES = {
    "by an operator of a library": lambda one: torch.ops.nvme_offload_tests.halve(one),
    "in a dispatch mode": _in_a_dispatch_mode,
    "in place": lambda one: one.mul_(0.5),
    "by data": lambda one: one.data.add_(1.0),
    "by detach": lambda one: one.detach().neg_(),
    "by an assignment to data": lambda one: setattr(one, "data", one.detach() * 3),
    "by set_": lambda one: one.set_(one.detach() * 3),
    "by set_ with a storage": lambda one: one.set_(
        (one.detach() * 3).untyped_storage(), 0, one.shape
    ),
    "by nn.init": lambda one: nn.init.constant_(one, 0.25),
    "by NumPy": lambda one: one.detach().numpy().fill(2.0),
    "by copy_": lambda one: one.copy_(torch.full_like(one, 4.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_to_every_parameter_is_kept(pair, change):
    model, in_memory = pair
    with torch.no_grad():
        for one in (*model.parameters(), *in_memory.parameters()):
            CHANGES[change](one)
    _assert_equal(model, in_memory)


def test_values_taken_before_an_assignment_to_data_are_the_old_ones(pair):
    x = torch.randn(2, 24)
    outputs = []
    for each in pair:
        trained = [one.data for one in each.parameters()]
        for factor in (2, 3):
            for one, values in zip(each.parameters(), trained, strict=True):
                one.data = factor * values
            outputs.append(each(x).detach())
        for one, values in zip(each.parameters(), trained, strict=True):
            one.data = values
        del trained, values
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    _assert_equal(*pair)


def test_data_of_another_tensor_is_shared_with_it(pair):
    shared = [[one.data.clone() for one in each.parameters()] for each in pair]
    for each, tensors in zip(pair, shared, strict=True):
        for one, values in zip(each.parameters(), tensors, strict=True):
            one.data = values
        for values in tensors:
            values.add_(0.5)
        each[3].bias.data = each[4].bias.data
        with torch.no_grad():
            each[4].bias.mul_(2)
    _assert_equal(*pair)
    states = [each.state_dict() for each in pair]
    assert all(torch.equal(values, states[1][key]) for key, values in states[0].items())
    del shared, tensors, values, states
    for _ in range(2):
        _assert_equal(*pair)


def test_backward_uses_the_values_of_the_forward_pass_after_an_assignment_to_data(pair):
    x = torch.randn(2, 24)
    for each in pair:
        for _ in range(3):
            loss = each(x).square().sum()
            for one in each.parameters():
                one.data = one.data + 0.1
            loss.backward()
    for one, other in zip(*(each.parameters() for each in pair), strict=True):
        assert torch.equal(one.grad, other.grad)
    _assert_equal(*pair)


def test_an_assignment_to_data_in_a_forward_pass_is_kept(offload):
    class Assigns(nn.Linear):
        def forward(self, x):
            self.weight.data = self.weight.detach() + 1
            self.weight.set_(self.weight.detach() * 0.5)
            self.bias.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Assigns(24, 24) for _ in range(8)))
    in_memory = copy.deepcopy(model)
    offload.parameters(model, "cpu")
    x = torch.randn(2, 24)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), in_memory(x))


def test_a_change_to_a_parameter_whose_neighbour_is_in_use_is_kept(offload):
    class Changes(nn.Linear):
        def forward(self, x):
            for one in changed:  # which this module does not own
                one.data.fill_(0.5)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Changes(8, 8), *(nn.Linear(8, 8) for _ in range(64)))
    offload.parameters(model, "cpu", gpu_memory=16 << 10)
    changed = [model[1].weight]  # of the same bucket
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert torch.equal(changed[0], torch.full((8, 8), 0.5))


@pytest.mark.parametrize("fused", [False, True])  # which leaves the versions alone
def test_an_optimizer_of_torch_trains_streamed_parameters(pair, fused):
    model, in_memory = pair
    for one in (model, in_memory):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, fused=fused)
        for step in range(3):
            torch.manual_seed(step)
            one(torch.randn(4, 24)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    _assert_equal(model, in_memory)


def test_an_average_of_the_parameters_is_that_of_the_model_in_memory(pair):
    averages = [[one.detach().clone() for one in each.parameters()] for each in pair]
    with torch.no_grad():
        for each, average in zip(pair, averages, strict=True):
            for one, mean in zip(each.parameters(), average, strict=True):
                one.add_(1)
                mean.lerp_(one, 0.1)
    assert all(map(torch.equal, *averages))


def test_a_parameter_is_copied_with_its_values(pair):
    model, in_memory = pair
    one, other = model[3].weight, in_memory[3].weight
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), one.clone(), one + 0):
        assert torch.equal(copied, other)
    assert type(copy.deepcopy(one)) is nn.Parameter
    assert repr(one) == repr(other)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_copy_of_the_model_does_not_stream(offload, compiled):
    model = _model()
    model[5].weight = model[2].weight
    if compiled:
        model[3].compile(backend="eager")
        model[4] = torch.compile(model[4], backend="eager")
    in_memory = copy.deepcopy(model)
    offload.parameters(model, "cpu")
    for copied, expected in (
        (copy.deepcopy(one), copy.deepcopy(one)) for one in (model, in_memory)
    ):
        assert copied[5].weight is copied[2].weight
        assert {type(one) for one in copied.parameters()} == {nn.Parameter}
        with torch.no_grad():
            for one, other in zip(copied.parameters(), expected.parameters(), strict=True):
                one.add_(1)
                other.add_(1)
        _assert_equal(copied, expected)
    _assert_equal(model, in_memory)
    torch._dynamo.reset()


def test_an_averaged_model_is_that_of_the_model_in_memory(pair):
    averages = [AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for one in pair]
    for each, average in zip(pair, averages, strict=True):
        for _ in range(2):
            with torch.no_grad():
                for one in each.parameters():
                    one.add_(1)
            average.update_parameters(each)
    _assert_equal(*averages)


def test_a_pickle_of_the_model_is_refused(pair):
    model, in_memory = pair
    with pytest.raises(UsageError, match=r"pickle a copy\.deepcopy\(\) of it"):
        pickle.dumps(model)
    _assert_equal(pickle.loads(pickle.dumps(copy.deepcopy(model))), in_memory)


def test_a_parameter_is_not_sent_to_another_process(pair):
    weight = pair[0][0].weight
    with pytest.raises(UsageError, match=r"send a clone\(\) of it"):
        ForkingPickler.dumps(weight)
    ForkingPickler.dumps(weight.detach().clone())


def test_the_form_of_a_parameter_does_not_bring_its_values(pair):
    model, in_memory = pair
    for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert isinstance(one, nn.Parameter)
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        assert (one.stride(), one.is_contiguous()) == (other.stride(), other.is_contiguous())
        assert one.numel() == other.numel()
        assert (one.is_leaf, one.requires_grad, one.grad) == (True, True, None)


def test_memory_is_returned_once_views_are_dropped(offload, caplog):
    storages = set()

    class Recording(nn.Linear):
        def forward(self, x):
            storages.add(self.weight.untyped_storage().data_ptr())
            return super().forward(x)

    model = nn.Sequential(*(Recording(24, 24) for _ in range(12)))
    offload.parameters(model, "cpu")
    x = torch.randn(2, 24)
    views = [one.detach() for one in model.parameters()]
    assert "more is taken" in caplog.text
    del views
    with torch.no_grad():
        for _ in range(2):
            model(x)
        storages.clear()
        model(x)
    assert len(storages) <= 4


@pytest.mark.parametrize(
    ("cached", "activations", "dtype"),
    [
        (True, False, torch.float32),
        (False, False, torch.float32),
        (True, True, torch.float32),
        (False, True, torch.float32),
        (True, False, torch.bfloat16),
    ],
)
def test_copies_that_autocast_keeps_are_announced(offload, caplog, cached, activations, dtype):
    model = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(12))).to(dtype)
    offload.parameters(model, "cpu", gpu_memory=10_240)
    with offload.activations(min_bytes=1) if activations else contextlib.nullcontext():
        with torch.no_grad(), torch.autocast("cpu"):
            model(torch.randn(2, 24))
        assert not caplog.messages
        with torch.autocast("cpu", cache_enabled=cached):
            model(torch.randn(2, 24, requires_grad=True))
    stay = dtype == torch.float32 and (cached or not activations)
    assert [("copies stay until backward" in one) for one in caplog.messages] == [True] * stay


@pytest.mark.parametrize("use", ["data_ptr", "untyped_storage", "share_memory_"])
def test_an_address_is_refused(pair, use):
    with pytest.raises(UsageError, match="needs the address of a streamed parameter"):
        getattr(pair[0][5].weight, use)()


_X = torch.randn(2, 24)
TRACERS = {
    "compile": lambda model: torch.compile(model, backend="eager")(_X),
    "compile a loss": lambda model: torch.compile(torch.mm, backend="eager")(
        model(_X), model[0].weight
    ),
    "fullgraph": lambda model: torch.compile(model, backend="eager", fullgraph=True)(_X),
    "compile a block": lambda model: (model[0].compile(backend="eager"), model(_X)),
    "export": lambda model: torch.export.export(model, (_X,)),
    "export, strict": lambda model: torch.export.export(model, (_X,), strict=True),
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, _X),
    "make_fx": lambda model: make_fx(model)(_X),
}


@pytest.mark.filterwarnings("ignore")  # the compiler warns, and torch.jit is deprecated
@pytest.mark.parametrize("trace", TRACERS.values(), ids=TRACERS)
def test_tracing_is_refused(pair, trace):
    with pytest.raises(Exception, match=r"torch\.jit cannot trace modules whose parameters stream"):
        trace(pair[0])
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler reads
def test_a_compiled_function_takes_a_clone_of_a_parameter(pair):
    function = torch.compile(torch.mm, backend="eager")
    outputs = [function(_X, one[0].weight.clone()) for one in pair]
    torch._dynamo.reset()
    assert torch.equal(*outputs)


def test_transforms_of_functions_are_refused(pair):
    model, _ = pair
    with pytest.raises(UnsupportedError, match=r"torch\.func, collectives and"):
        torch.func.grad(lambda weight: weight.sum())(model[0].weight)


DERIVATIVES = {
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(_X),
    "jacfwd": lambda model: torch.func.jacfwd(model)(_X),
    "hessian": lambda model: torch.func.hessian(lambda x: model(x).sum())(_X),
    "jvp": lambda model: torch.func.jvp(model, (_X,), (_X,)),
    "vjp, within a module": lambda model: Through(
        model, lambda one, x: torch.func.vjp(one[3], x)[0]
    )(_X),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("derive", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_of_the_model_by_functions_are_refused(pair, derive):
    with pytest.raises(UnsupportedError, match=r"torch\.autograd\.functional in their place"):
        derive(pair[0])


def test_derivatives_and_batches_of_the_model_are_those_in_memory(pair):
    model, in_memory = pair
    x = torch.randn(3, 24)
    for function in (torch.func.vmap, lambda one: functools.partial(jacobian, one)):
        for _ in range(2):
            assert torch.equal(function(model)(x), function(in_memory)(x))


def test_a_new_parameter_of_a_streamed_one_is_refused(pair):
    model, in_memory = pair
    with pytest.raises(UsageError, match="make it of a clone"):
        nn.utils.parametrizations.weight_norm(model[0])
    model[0].weight = nn.Parameter(model[0].weight.clone())
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.weight_norm(in_memory[0])
    _assert_equal(model, in_memory)


def test_a_swap_of_tensors_is_refused(pair):
    model, in_memory = pair
    with pytest.raises(UnsupportedError, match=r"torch\.utils\.swap_tensors cannot use"):
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(24, 24)))
    _assert_equal(model, in_memory)


@torch.no_grad()
def test_another_form_in_place_is_refused(pair):
    model, in_memory = pair
    for change in (torch.Tensor.t_, torch.Tensor.squeeze_, lambda one: one.unsqueeze_(0)):
        with pytest.raises(UsageError, match="keeps its shape, dtype, device and memory format"):
            change(model[0].weight)
    _assert_equal(model, in_memory)


def test_another_dtype_is_refused_after_streaming_and_the_same_is_not(pair):
    model, in_memory = pair
    model.to("cpu").float()
    _assert_equal(model, in_memory)
    with pytest.raises(UsageError, match="keeps its shape, dtype, device and memory format"):
        model.half()


@pytest.mark.parametrize(("dims", "size"), [(2, 3), (2, 1), (3, 2)])
def test_another_memory_format_is_refused_after_streaming(offload, dims, size):
    kind, memory_format = (
        (nn.Conv2d, torch.channels_last) if dims == 2 else (nn.Conv3d, torch.channels_last_3d)
    )
    model = nn.Sequential(*(kind(6, 6, size) for _ in range(4)))
    in_memory = copy.deepcopy(model)
    offload.parameters(model, "cpu")
    with pytest.raises(UsageError, match="keeps its shape, dtype, device and memory format"):
        model.to(memory_format=memory_format)
    for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(one, other)


def test_views_that_the_program_keeps_stay_valid(pair):
    model, in_memory = pair
    views = [one.detach() for one in model.parameters()]
    _assert_equal(model, in_memory)
    for view, other in zip(views, in_memory.parameters(), strict=True):
        assert torch.equal(view, other)


def test_the_device_holds_no_more_than_asked(make: Make):
    offload, model = make("1MB"), _model()
    in_memory = copy.deepcopy(model)
    with pytest.raises(UsageError, match=r"allow at least (\d+) bytes") as refused:
        offload.parameters(model, "cpu", gpu_memory=1000)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    offload.parameters(model, "cpu", gpu_memory=least)
    _assert_equal(model, in_memory)


def test_every_share_of_the_model_on_the_device_gives_the_same_bits(make: Make):
    for gpu_memory in ("16KB", "24KB", "1MB"):
        model = _model()
        in_memory = copy.deepcopy(model)
        make("1MB").parameters(model, "cpu", gpu_memory=gpu_memory)
        for _ in range(3):
            x = torch.randn(2, 24)
            model(x).sum().backward()
            in_memory(x).sum().backward()
        for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_small_and_few_trainable_parameters_stay_on_the_device(
    offload: Offload, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(setup, "DIVISION", Division(3 << 10, small_bytes=24 * 4))
    model = _model()
    for one in model[1:].parameters():
        one.requires_grad_(False)
    model.insert(1, nn.Linear(24, 2))
    model.append(nn.Linear(24, 24, bias=False))
    model[0].requires_grad_(False)
    offload.parameters(model, "cpu")
    assert type(model[0].bias) is nn.Parameter  # small
    assert type(model[0].weight) is not nn.Parameter


def test_parameters_of_other_kinds_are_refused(offload: Offload):
    class Special(nn.Parameter):
        pass

    class Quantized(torch.Tensor):  # as torchao's, it has no separate memory
        @staticmethod
        def __new__(cls):
            make = torch.Tensor._make_wrapper_subclass
            return make(cls, (24, 24), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, function, types, args, kwargs=None):
            return Quantized()

    for kind, make in ("Special", lambda: Special(torch.zeros(24, 24))), ("Quantized", Quantized):
        model = _model()
        for layer in model[:2]:
            layer.weight = nn.Parameter(make()) if kind == "Quantized" else make()
        with pytest.raises(UnsupportedError, match=rf"parameter 0.weight is a {kind}"):
            offload.parameters(model, "cpu")
    with pytest.raises(UsageError, match="on the meta device"):
        offload.parameters(nn.Linear(24, 24, device="meta"), "cpu")


def test_parameters_without_a_shape_are_refused(offload: Offload):
    model = nn.Sequential(nn.LazyLinear(24), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(UsageError, match=r"0\.weight has no shape yet"):
        offload.parameters(model, "cpu")
    model[0](torch.ones(2, 24))
    with pytest.raises(UsageError, match=r"1\.running_mean has no shape yet"):
        offload.parameters(model, "cpu")
    model(torch.ones(2, 24))
    offload.parameters(model, "cpu")


def test_8_bit_weights_stream(offload: Offload):
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            codes = torch.randint(0, 255, (24, 24), dtype=torch.uint8)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.scale = nn.Parameter(torch.rand(24) / 100)

        def forward(self, x):
            return x @ (self.codes.to(x.dtype) * self.scale)

    torch.manual_seed(0)
    model = nn.Sequential(*(Quantized() for _ in range(12)))
    in_memory = copy.deepcopy(model)
    offload.parameters(model, "cpu")
    for each in (model, in_memory):
        torch.manual_seed(1)
        each(torch.randn(2, 24)).sum().backward()
    for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_a_closed_offload_refuses_further_use(make: Make):
    model = _model()
    with make() as offload:
        offload.parameters(model, "cpu")
        model(torch.randn(2, 24))
    with pytest.raises(UsageError, match="is closed"), torch.no_grad():
        model(torch.randn(2, 24))


@pytest.mark.parametrize(("host_memory", "gpu_memory"), [("6MB", "auto"), ("40MB", "12MB")])
def test_buckets_are_as_small_as_the_memory_demands(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    host_memory: str,
    gpu_memory: str,
) -> None:
    """Layers of 1 MB, in buckets of up to 256 MB where there is room."""
    monkeypatch.setattr(setup, "DIVISION", Division())

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16)))

    streamed, whole, inputs = model(), model(), torch.randn(4, 512)
    make(host_memory).parameters(streamed, "cpu", gpu_memory=gpu_memory)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(streamed(inputs), whole(inputs))


def _enough(refused: pytest.ExceptionInfo[UsageError]) -> int:
    return int(re.findall(r"at least (\d+) bytes", str(refused.value))[0])


def test_a_refused_budget_names_one_that_is_enough_for_training(make: Make) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))

    with pytest.raises(UsageError, match="cannot hold the largest parameter") as refused:
        make("1MB").parameters(model(), "cpu")
    trained, offload = model(), make(_enough(refused))
    offload.parameters(trained, "cpu")
    optimizer = offload.optimizer(trained.parameters())
    with offload.activations():
        trained(torch.randn(600, 512)).sum().backward()
    optimizer.step()

    with pytest.raises(UsageError, match="by its argument host_memory") as refused:
        make("9MB").parameters(model(), "cpu", host_memory="1MB")
    make("9MB").parameters(model(), "cpu", host_memory=_enough(refused))


def test_a_refused_budget_names_one_that_is_enough_for_an_optimizer_of_whole_matrices(
    make: Make,
) -> None:
    def start(host_memory: int | str) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        offload = make(host_memory)
        offload.parameters(model, "cpu")
        offload.optimizer(model.parameters(), torch.optim.Adafactor)

    with pytest.raises(UsageError, match="cannot hold the largest bucket of states") as refused:
        start("4MB")
    start(_enough(refused))


def test_refused_device_memory_is_enough_also_if_much_stays_there(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "DIVISION", Division())

    def model() -> torch.nn.Module:
        layers = [torch.nn.Linear(256, 256) for _ in range(40)]
        return torch.nn.Sequential(torch.nn.Embedding(20000, 256), *layers)

    with pytest.raises(UsageError, match="is too little for the parameters in use") as refused:
        make("64MB").parameters(model(), "cpu", gpu_memory="2MB")
    make("64MB").parameters(model(), "cpu", gpu_memory=_enough(refused))
