"""`Awaited`: a queued update, and the classes that its parameter and gradient have until it ends;
every use of a tensor of these classes waits for the update.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..parameters.entrances import Entrances, instances
from ..update.queue import Pending, UpdateQueue, wait_for_all
from .buckets import is_distributed

if TYPE_CHECKING:
    from .buckets import Weight
    from .overlap import Step

_KEY = "_nvme_offload_awaited"  # key in the __dict__ of a tensor


class Awaited(Pending):
    """The update of *weight* in *step*; the updates of its buckets are in *queue*.

    Attributes: *values*, of the gradient, None if there is none; *home*, the stream that was
    current in `step`. *home* changes under the queue's lock.
    """

    def __init__(self, queue: UpdateQueue, step: Step, weight: Weight) -> None:
        super().__init__()
        gradient = weight.parameter.grad
        self.queue = queue
        self.step = step
        self.weight = weight
        self.values = None if gradient is None else gradient.detach()
        self.home: Any = None
        self._guards: list[Any] = []

    def hold(self) -> None:
        """From now on, every use of the parameter and of its gradient waits."""
        self.weight.awaited = self
        for tensor in self._tensors():
            if type(tensor) in _WAITING:
                # A gradient must not keep this object alive, since the garbage collector does not
                # see a parameter's gradient.
                own = tensor is self.weight.parameter
                tensor.__dict__[_KEY] = self if own else weakref.ref(self)
                tensor.__class__ = _WAITING[type(tensor)]
                # torch.utils.swap_tensors refuses tensors with weak references: the pending update
                # would change the wrong tensor.
                self._guards.append(weakref.ref(tensor))

    def drop_gradient(self) -> None:
        """The updates are made: drop the values of the gradient."""
        self.values = None
        self.weight.awaited = None

    def order(self) -> None:
        """See `Pending`."""
        if self.event is None:
            return
        if is_distributed(self.weight.parameter):
            self.event.synchronize()  # FSDP2 gathers on separate streams
            return
        now = torch.cuda.current_stream(self.weight.parameter.device)
        for stream in {now, self.home}:
            stream.wait_event(self.event)

    def restore(self) -> None:
        """Restore the classes of both tensors; of a gradient that `.grad` no longer holds, at its use."""
        if self.weight.awaited is self:
            self.weight.awaited = None
        self._guards.clear()
        for tensor in self._tensors():
            if _awaited(tensor) is self:
                _restore(tensor)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield self.weight.parameter
        if self.weight.parameter.grad is not None:
            yield self.weight.parameter.grad


class Waits:
    """Mixin of the classes whose uses wait."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _WITHOUT_VALUES:
            # in C++, so that no exception comes before functions of subclasses are enabled again
            return torch._C._disabled_torch_function_impl(function, types, args, kwargs)
        found = list(instances(Waits, (args, kwargs)))
        for one in found:
            use(one)
        if not found:  # the tensor is in a container of another kind
            wait_for_all()
        return function(*args, **kwargs)

    def as_subclass(self, kind: Any) -> Any:
        """Wait first: torch does not dispatch this method to `__torch_function__`."""
        use(self)
        return self.as_subclass(kind)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Wait first: torch does not dispatch this method to `__torch_function__`."""
        use(self)
        return self.set_(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        # torch's method would create another tensor of this class
        use(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        use(self)
        return self.__reduce_ex__(protocol)


_WAITING: dict[type, Any] = {}
_OWN: dict[type, Any] = {}


def waiting_class(own: type, **members: Any) -> Any:
    """Make the class, with *members*, that tensors of class *own* have until their updates have ended."""

    def make(_: Any, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)  # some programs call `type(parameter)`

    made = type(f"Awaited{own.__name__}", (Waits, own), {"__new__": make, **members})
    _WAITING[own], _OWN[made] = made, own
    return made


AwaitedParameter = waiting_class(torch.nn.Parameter)
AwaitedTensor = waiting_class(torch.Tensor)


def has_waiting_class(tensor: torch.Tensor) -> bool:
    """Whether the class of *tensor* has a counterpart whose uses wait."""
    return type(tensor) in _WAITING or isinstance(tensor, Waits)


def use(tensor: Any) -> None:
    """Wait for the update of *tensor*, if one is pending. Raises: the error of that update."""
    awaited = _awaited(tensor)
    if (awaited is None or awaited.queue.use(awaited)) and isinstance(tensor, Waits):
        _restore(tensor)  # a gradient that `.grad` no longer holds


def _restore(tensor: Any) -> None:
    # It may have its own class already, if an exception has ended an earlier call.
    tensor.__class__ = _OWN.get(type(tensor), type(tensor))
    tensor.__dict__.pop(_KEY, None)


def _awaited(tensor: torch.Tensor) -> Any:
    found = tensor.__dict__.get(_KEY)
    return found() if isinstance(found, weakref.ref) else found


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wait(*args: Any, **kwargs: Any) -> Any:
        for one in instances(Waits, (args, kwargs)):
            use(one)
        return function(*args, **kwargs)

    return wait


_ENTRANCES = Entrances(_waiting)


def watch_entrances() -> None:
    """Make the functions of `Entrances` wait."""
    _ENTRANCES.wrap_loaded()


def use_module(module: torch.nn.Module, _: Any) -> None:
    """Before the forward pass of *module*, wait for its own parameters, which it may pass to a C++
    extension. Modules of torch with a fast path pass the parameters of their children, too.
    """
    for parameter in (
        module.parameters() if isinstance(module, _WITH_CHILDREN) else module._parameters.values()
    ):
        if isinstance(parameter, Waits):
            use(parameter)


_WITH_CHILDREN = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerEncoder,
    torch.jit.ScriptModule,
)


def _accessors() -> Iterator[Any]:
    for name in ("shape", "dtype", "device", "layout", "is_leaf", "grad_fn", "requires_grad"):
        yield getattr(torch.Tensor, name).__get__
    gradient: Any = torch.Tensor.grad
    yield from (gradient.__get__, gradient.__set__, gradient.__delete__)


# An update does not change the result of these accessors; `.grad` returns or replaces the gradient
# itself. `dim` has to wait: torch.func.vmap calls nothing else on a tensor.
_WITHOUT_VALUES = frozenset(_accessors())
