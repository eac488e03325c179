"""The classes of a streamed parameter: `UsedParameter` while a module uses it, and `IdleParameter` at
other times. A function that gets an idle parameter brings its values for the time of the call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, NoReturn

import torch

from ..device.modes import outside_of_modes
from ..errors import UnsupportedError, UsageError
from .entrances import Entrances, instances

_FRAMES = 12  # of a caller in torch
_functorch: Any = torch._C._functorch
_TRACERS = "torch._dynamo", "torch._export"
_KEY = "_nvme_offload_streamed"  # key in the __dict__ of a parameter


class _NoAddressError(UsageError, NotImplementedError):
    """A streamed parameter has no lasting address. After a NotImplementedError, the `merge_and_unload`
    of peft, which compares the addresses of tied weights, goes on.
    """


class Exposure(NamedTuple):
    """Tensors through which a streamed parameter may change while its version stays: *times*, how
    often a caller got one; *lasts*, whether a caller may still have one.
    """

    times: int
    lasts: bool


class _StreamedParameter(torch.nn.Parameter):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a Parameter: some programs call `type(parameter)`."""
        return torch.nn.Parameter(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        with torch.no_grad():
            return repr(torch.nn.Parameter(self.clone(), self.requires_grad))

    def detach(self) -> Any:
        """As of a Tensor. Raises: UsageError for a new Parameter, which torch makes of the result."""
        if sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
            raise UsageError(
                "nn.Parameter cannot be made of a streamed parameter: make it of a clone() of the parameter, "
                "assign the same Parameter to both modules, or parametrize the model before offload.parameters"
            )
        return super().detach()

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = torch.nn.Parameter(self.clone(), self.requires_grad)
        return memo[id(self)]

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """As an assignment to `data`: torch does not dispatch this method to `__torch_function__`."""
        values = args[0] if len(args) == 1 and not kwargs else None
        if not torch.is_tensor(values):
            empty: Any = torch.empty(0, dtype=self.dtype, device=self.device)
            values = empty.set_(*args, **kwargs)
        streamer_of(self).replace_data(self, values)
        return self


class UsedParameter(_StreamedParameter):
    """A streamed parameter with its values on the device. Functions get it as any Parameter."""

    @property
    def data(self) -> torch.Tensor:
        """As of a Tensor. A change of the result does not change the parameter's version."""
        streamer_of(self).changes(self)
        values: torch.Tensor = _data.__get__(self)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        streamer_of(self).replace_data(self, values)


class IdleParameter(_StreamedParameter):
    """A streamed parameter that no module uses at present. Its memory may hold no values."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call *function* with the values. Raises: UsageError; as `TensorSwapper.swap_in`."""
        kwargs = kwargs or {}
        if function in _WITHOUT_VALUES:
            return torch._C._disabled_torch_function_impl(function, types, args, kwargs)
        for kind in IdleParameter, _StreamedParameter:  # another thread may use it by now
            found = list({id(one): one for one in instances(kind, (args, kwargs))}.values())
            if found:
                break
        if not found:
            raise UsageError(
                f"{_name(function)} got a streamed parameter in a container other than a list, tuple or dict: pass a clone() of the parameter"
            )
        if function in _OF_FORM:
            with outside_of_modes():
                form = torch.empty(found[0].shape, dtype=found[0].dtype, device="meta")
            return function(form, *args[1:], **kwargs)
        if function in _ADDRESSES or (function == _CUDA_ARRAY and found[0].is_cuda):
            _refuse_address(function)
        if function in _CHANGES_OF_FORM:
            refuse_form()
        if function is torch.autograd.grad and not kwargs.get("materialize_grads"):
            return function(*_as_edges(args), **_as_edges(kwargs))
        if function == _SET_DATA and isinstance(args[0], IdleParameter):
            return streamer_of(args[0]).replace_data(args[0], args[1])
        by_streamer: dict[Any, list[Any]] = {}
        for one in found:
            by_streamer.setdefault(streamer_of(one), []).append(one)
        with contextlib.ExitStack() as uses:
            for streamer, parameters in by_streamer.items():
                uses.enter_context(streamer.using(parameters))
            result = function(*args, **kwargs)
            # These may have changed them and left the versions alone: torch._fused_adamw_, operators of
            # extensions, and torch._foreach_mul_ in a TorchDispatchMode.
            is_foreach = _name(function).startswith("_foreach_")
            if result is None or is_foreach or isinstance(function, _OPERATORS):
                for one in instances(
                    _StreamedParameter, args[:1] if is_foreach else (args, kwargs)
                ):
                    streamer_of(one).changes(one)
            return result

    def as_subclass(self, kind: Any) -> Any:
        """Refused: torch does not dispatch this method to `__torch_function__`, though it returns a
        tensor that shares the memory.
        """
        _refuse_address(torch.Tensor.as_subclass)

    def __reduce_ex__(self, protocol: Any) -> Any:
        copied: Any = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied.__reduce_ex__(protocol)


def _refuse_sending(_: _StreamedParameter) -> NoReturn:
    # Memory of a copy made here would be freed before the other process opens it.
    raise UsageError("a streamed parameter cannot be sent to another process: send a clone() of it")


for _kind in UsedParameter, IdleParameter:
    ForkingPickler.register(_kind, _refuse_sending)


def as_it_is(function: Any, *args: Any) -> Any:
    """Call *function* without bringing the values of the idle parameters that it uses.

    C++ restores the state of this thread: a KeyboardInterrupt at the end of a ``with`` would leave
    idle parameters without protection.
    """
    return torch._C._disabled_torch_function_impl(function, (), args, {})


def bind(parameter: torch.nn.Parameter, streamer: Any) -> None:
    """Have *streamer* bring the values of *parameter*."""
    parameter.__dict__[_KEY] = streamer
    parameter.__class__ = IdleParameter


def unbind(parameter: torch.nn.Parameter) -> None:
    """Undo `bind`."""
    parameter.__class__ = torch.nn.Parameter
    parameter.__dict__.pop(_KEY, None)


def streamer_of(parameter: Any) -> Any:
    """The streamer that brings the values of *parameter*; None if it is not streamed."""
    return parameter.__dict__.get(_KEY)


def address_of(tensor: torch.Tensor) -> int:
    """The address of *tensor*; of a streamed parameter, a number that changes when the program
    assigns to its `data`.
    """
    streamer = streamer_of(tensor)
    if streamer is None:
        return tensor.data_ptr()
    number: int = streamer.number_of_memory(tensor)
    return number


def exposure_of(tensor: Any) -> Exposure | None:
    """The exposure of a streamed parameter; None of any other tensor."""
    streamer = streamer_of(tensor)
    found: Exposure | None = None if streamer is None else streamer.exposure_of(tensor)
    return found


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """`detach` of *tensor*, for a caller that changes it only through a tensor that it detaches: for a
    streamed parameter, this does not count as an exposure.
    """
    streamer = streamer_of(tensor)
    if streamer is None:
        return tensor.detach()
    with streamer.using([tensor], exposes=False):
        return tensor.detach()


def _as_edges(value: Any) -> Any:
    """*value* with the edge of the graph in place of each idle parameter: a gradient needs no
    values of its parameter.
    """
    if isinstance(value, IdleParameter):
        return as_it_is(torch.autograd.graph.get_gradient_edge, value)
    if isinstance(value, list | tuple):
        return [_as_edges(one) for one in value]
    if isinstance(value, dict):
        return {key: _as_edges(one) for key, one in value.items()}
    return value


def _name(function: Any) -> str:
    attribute = getattr(function, "__self__", None)  # of a getter
    named = attribute.fget if isinstance(attribute, property) else function
    return str(getattr(named, "__name__", named))


def refuse_form() -> NoReturn:
    """Refuse a change of shape, dtype, device or memory format. Raises: UsageError."""
    raise UsageError(
        "a streamed parameter keeps its shape, dtype, device and memory format: convert, resize or move the model before offload.parameters"
    )


class _TracingError(UnsupportedError, AttributeError):
    """A model that streams cannot be traced. After an AttributeError, programs that ask for the name
    of a hook, as torch.jit.script does, but need none, go on.
    """


def refuse_tracing() -> NoReturn:
    """Refuse to compile, export, trace or script a model. Raises: UnsupportedError."""
    raise _TracingError(
        "torch.compile, torch.export and torch.jit cannot trace modules whose parameters stream: compile blocks before offload.parameters, "
        "call generate() of transformers with disable_compile=True, pass a clone() of a parameter to another compiled function, "
        "or trace another model, into which you load the state_dict()"
    )


def check_no_derivative() -> None:
    """Raises: UnsupportedError in a transform of torch.func other than vmap: it takes no hooks on saved
    tensors, and no changes of memory such as those by which parameters stream.
    """
    transforms = _functorch.get_interpreter_stack()
    if transforms and any(one.key() != _functorch.TransformType.Vmap for one in transforms):
        raise UnsupportedError(
            "torch.func.grad, vjp, jvp and their like cannot use streamed parameters: use torch.autograd.grad or torch.autograd.functional in their place"
        )


def _refuse_address(function: Any) -> NoReturn:
    # torch.compile compares the addresses of all tensors that it finds, torch.export makes fake tensors.
    caller: Any = sys._getframe(2)
    for _ in range(_FRAMES):
        if caller is not None and caller.f_globals.get("__name__", "").startswith(_TRACERS):
            refuse_tracing()
        caller = caller.f_back if caller is not None else None
    raise _NoAddressError(
        f"{_name(function)} needs the address of a streamed parameter, which changes from use to use: call it in the forward() of the module "
        "that has the parameter, or on a clone() of the parameter"
    )


def _refusing(function: Any) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if any(True for _ in instances(IdleParameter, (args, kwargs))):
            raise UnsupportedError(
                "torch.func, collectives and torch.utils.swap_tensors cannot use a streamed parameter: pass a clone() of the parameter, or change it by copy_()"
            )
        return function(*args, **kwargs)

    return refuse


_ENTRANCES = Entrances(_refusing)


def refuse_in_transforms() -> None:
    """Make the functions of `Entrances` refuse idle parameters."""
    _ENTRANCES.wrap_loaded()


# Their schemas may be wrong about changes, if an extension has them.
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _without_values() -> Iterator[Any]:
    for name in (
        *("shape", "dtype", "device", "layout", "is_leaf", "grad_fn", "requires_grad", "ndim"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "output_nr", "itemsize"),
        *("nbytes", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad"),
        *("grad_dtype", "is_nested", "is_mkldnn", "_grad_fn", "_base", "is_xpu", "is_mps"),
    ):
        if hasattr(torch.Tensor, name):
            yield getattr(torch.Tensor, name).__get__
    for name in ("grad", "requires_grad", "_grad", "_backward_hooks"):
        attribute: Any = getattr(torch.Tensor, name)
        yield attribute.__get__
        yield attribute.__set__
        yield attribute.__delete__
    for name in (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point"),
        *("is_complex", "is_signed", "is_inference", "get_device", "requires_grad_", "__len__"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__hash__"),
        *("is_neg", "is_conj", "_is_zerotensor", "has_names"),
    ):
        if hasattr(torch.Tensor, name):
            yield getattr(torch.Tensor, name)
    yield from (torch.is_floating_point, torch.is_complex, torch.numel, torch.is_grad_enabled)


# The results of these do not depend on the values.
_WITHOUT_VALUES = frozenset(_without_values())
# Nor do these, but an idle parameter may have other strides than in use.
_OF_FORM = frozenset({torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset})
_ADDRESSES = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("data_ptr", "const_data_ptr", "mutable_data_ptr", "untyped_storage", "storage"),
        *("_typed_storage", "share_memory_", "is_shared", "__dlpack__", "is_set_to"),
    )
    if hasattr(torch.Tensor, name)
)
_CHANGES_OF_FORM = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
        *("resize_", "resize_as_", "as_strided_"),
    )
)
_untyped: Any = torch.Tensor
_CUDA_ARRAY = _untyped.__cuda_array_interface__.__get__  # a dictionary with the address
_data: Any = torch.Tensor.data
_SET_DATA = _data.__set__
