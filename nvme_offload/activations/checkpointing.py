"""Offloads the tensors that `torch.utils.checkpoint` keeps past the hooks on saved tensors.

A non-reentrant checkpoint passes only the tensors among its positional arguments through the hooks.
Two more kinds stay in memory until backward: tensors in keyword arguments, containers and
`functools.partial`, which the recomputation has in a closure, and the results that a policy of
`create_selective_checkpoint_contexts` selects, which a dict keeps. Source: torch/utils/checkpoint.py,
`_checkpoint_without_reentrant_generator` and `_CachingTorchDispatchMode`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._pytree import tree_map

from ..device.modes import outside_of_modes
from ..device.stayed import innermost_hooks
from ..errors import known
from . import storages
from .cache import ActivationCache

# Of torch 2.14 or newer, and of older ones; the newer ones also have the second, which calls the first.
_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
# Both modules call the generator by a global name.
_CALLERS = ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")
_RESPECTS = "respect_saved_tensors_hooks"  # an argument of torch 2.14
_DEPTH = 8  # of containers in containers
_PARTS = 1000  # that are searched for tensors that stay in memory

_log = logging.getLogger(__name__)
_untyped_checkpoint: Any = checkpoint
_untyped_torch: Any = torch._C
_forward_ad: Any = torch.autograd.forward_ad


def install() -> None:
    """Let checkpoints offload where the innermost hooks on saved tensors belong to a cache.
    Elsewhere they run as before.
    """
    for name in _CALLERS:
        module = sys.modules.get(name)
        if module is None:
            continue
        called = _called_by(module)
        if called is None:
            _warn_unknown()
        elif not hasattr(getattr(module, called), "offloads"):
            setattr(module, called, _offloading(getattr(module, called)))


def _called_by(module: types.ModuleType) -> str | None:
    """The name of the generator that *module* calls; None if its source has another."""
    try:
        source = inspect.getsource(module)
    except OSError:
        return next((one for one in _GENERATORS if hasattr(module, one)), None)
    return next((one for one in _GENERATORS if f" = {one}(" in source), None)


@functools.cache
def _warn_unknown() -> None:
    _log.warning(
        "torch %s runs checkpoints in an unknown way: tensors in their keyword arguments and the results that a policy selects stay in memory",
        torch.__version__,
    )


def _offloading(generator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap *generator*, which runs before and after the forward pass of a checkpointed function."""
    signature = inspect.signature(generator)

    @functools.wraps(generator)
    def checkpointed(*given: Any, **keywords: Any) -> Any:
        cache = _innermost_cache()
        around = _forward.cache if innermost_hooks(ignores_tracing=False) else None
        if not torch.is_grad_enabled() or (cache is None and around is None):
            return generator(*given, **keywords)
        bound = signature.bind(*given, **keywords)
        bound.apply_defaults()
        call = bound.arguments
        if cache is None:
            _warn_bypassing(known(around), call["fn"], call["args"], call["kwargs"])
            return generator(*given, **keywords)
        if call["context_fn"] is not _untyped_checkpoint.noop_context_fn:
            call["context_fn"] = functools.partial(_contexts, cache, call["context_fn"])
            if call.get(_RESPECTS, False) is None:
                call[_RESPECTS] = False  # `_contexts` offloads, and torch would warn
        inputs = _Inputs(cache)
        function, call["kwargs"] = inputs.take((call["fn"], call["kwargs"]))
        # The generator itself saves the tensors that are positional arguments.
        call["args"] = tuple(
            one if isinstance(one, torch.Tensor) else inputs.take(one) for one in call["args"]
        )
        _warn_bypassing(cache, function, call["args"], call["kwargs"])
        call["fn"] = inputs.restoring(function)
        return _within(generator(*bound.args, **bound.kwargs), cache)

    checkpointed.offloads = True  # type: ignore[attr-defined]
    return checkpointed


def _warn_bypassing(
    cache: ActivationCache, function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    """Let *cache* report the tensors that a checkpoint of *function* keeps in memory: of the
    *arguments* only tensors pass the hooks.
    """
    others = [one for one in arguments if not isinstance(one, torch.Tensor)]
    code = getattr(function, "__code__", type(function))
    cache.warn_bypassing(_tensors((function, others, keywords)), code)


class _Forward(threading.local):
    """The cache of the outermost checkpoint whose forward pass runs in a thread. An exception leaves
    the cache here until the checkpoint's hooks are removed.
    """

    def __init__(self) -> None:
        self.cache: ActivationCache | None = None


_forward = _Forward()


def _within(generator: Iterator[None], cache: ActivationCache) -> Iterator[None]:
    """*generator*, between whose steps a checkpoint's forward pass runs."""
    _forward.cache = cache
    try:
        yield from generator
    finally:
        _forward.cache = None


def is_innermost() -> bool:
    """Whether the innermost hooks on saved tensors are a checkpoint's."""
    return getattr(_innermost_pack(), "__module__", "") == checkpoint.__name__


def _innermost_cache() -> ActivationCache | None:
    """The cache that the innermost hooks on saved tensors belong to."""
    owner = getattr(_innermost_pack(), "__self__", None)
    return owner if isinstance(owner, ActivationCache) else None


def _innermost_pack() -> Any:
    """The innermost hook on saved tensors, except that of streamed parameters, which passes all other
    tensors to the hook outside of it.
    """
    hooks = innermost_hooks(ignores_tracing=False)
    while hooks and getattr(hooks[0], "outer", None):
        hooks = hooks[0].outer
    return hooks[0] if hooks else None


class _Saved(torch.autograd.Function):
    """A node outside of any graph, which passes a tensor through the hooks."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)


_save: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _Saved.apply


class _Inputs:
    """The tensors that a checkpointed function has from elsewhere than its positional arguments.

    In place of each is an empty tensor on the same device: the checkpoint looks at its devices to
    decide which states of random number generators it keeps.
    """

    def __init__(self, cache: ActivationCache) -> None:
        self._cache = cache
        # By the address of the empty tensor.
        self._taken: dict[int, _Taken] = {}

    def take(self, value: Any) -> Any:
        """*value* without the tensors in it that can be offloaded."""
        return _replace(value, self._save)

    def restoring(self, function: Any) -> Any:
        """*function*, with which `take` was called, with the tensors put back into it and into its
        arguments.
        """
        if not self._taken:
            return function

        def restored(*arguments: Any, **keywords: Any) -> Any:
            whole, arguments, keywords = _replace((function, arguments, keywords), self._restore)
            return whole(*arguments, **keywords)

        return restored

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        # A node outside of any graph has no forward-mode derivative.
        if not self._cache.offloads(tensor) or _forward_ad._current_level >= 0:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._taken[id(empty)] = _Taken(
            empty, tensor, _save(torch.empty(0, requires_grad=True), tensor)
        )
        return empty

    def _restore(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._taken:
            return tensor
        taken = self._taken[id(tensor)]
        # The contexts of the recomputation are entered, and the drive's copies are no part of it.
        with outside_of_modes():
            # The caller may have kept it, or a tensor with the same storage, and even changed it,
            # which the recomputation sees without us.
            kept = taken.kept()
            saved: torch.Tensor = taken.saved() if kept is None else kept
        return saved


class _Taken:
    """A *tensor* that the node of *result* has saved, and the *empty* one in its place."""

    def __init__(self, empty: torch.Tensor, tensor: torch.Tensor, result: torch.Tensor) -> None:
        self._result = result  # before torch 2.13, a node without it has freed what it saved
        self._empty = empty  # keeps its address from being reused
        self._tensor = weakref.ref(tensor)
        self._storage = storages.weak_reference(tensor.untyped_storage())
        self._form = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._flags = tensor.requires_grad, tensor.is_conj() or tensor.is_neg()

    def saved(self) -> torch.Tensor:
        node: Any = self._result.grad_fn
        tensor: torch.Tensor = node.saved_tensors[0]
        return tensor

    def kept(self) -> torch.Tensor | None:
        """The tensor, if it or its storage is alive."""
        tensor, (requires_grad, is_lazy) = self._tensor(), self._flags
        if tensor is not None or is_lazy:
            return tensor
        storage = storages.locked(self._storage)
        if storage is None:
            return None
        rebuilt: Any = self._empty.new_empty(0)
        whole: torch.Tensor = rebuilt.set_(storage, *self._form)
        return whole.requires_grad_(requires_grad)


def _contexts(cache: ActivationCache, make: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """The contexts that *make* makes, of which selective checkpointing offloads to *cache*."""
    forward, recomputation = make()
    if isinstance(forward, _untyped_checkpoint._CachingTorchDispatchMode):
        # By operator: the results of its calls.
        storage = forward.storage
        kind = {dict: _Results, list: _ListedResults}.get(storage.default_factory)
        if kind is not None:
            mutable = getattr(recomputation, "allow_cache_entry_mutation", False)
            storage.default_factory = functools.partial(
                kind, functools.partial(_offload, cache, mutable)
            )
    return forward, recomputation


class _Results(dict[int, Any]):
    """The results that selective checkpointing keeps of an operator, by number of the call."""

    def __init__(self, offload: Callable[[Any], Any]) -> None:
        super().__init__()
        self._offload = offload

    def __setitem__(self, number: int, result: Any) -> None:
        super().__setitem__(number, self._offload(result))


class _ListedResults(list[Any]):
    """The same in releases of torch that keep a list."""

    def __init__(self, offload: Callable[[Any], Any]) -> None:
        super().__init__()
        self._offload = offload

    def append(self, result: Any) -> None:
        super().append(self._offload(result))


def _offload(cache: ActivationCache, mutable: bool, result: Any) -> Any:
    """Offload the tensors of *result*, unless the caller may modify them in place."""

    def one(part: Any) -> Any:
        if not (
            isinstance(part, _untyped_checkpoint._VersionWrapper)
            and isinstance(part.val, torch.Tensor)
            and cache.offloads(part.val)
        ):
            return part
        if mutable:
            cache.warn_bypassing([part.val])
            return part
        return _Offloaded(cache, part.val)

    return tree_map(one, result)


class _Offloaded:
    """Takes the place of torch's `_VersionWrapper`."""

    def __init__(self, cache: ActivationCache, tensor: torch.Tensor) -> None:
        self._cache = cache
        # This runs below autograd, where `detach` would not share the version counter. Source:
        # `_detach_helper` there.
        with _untyped_torch._SetExcludeDispatchKeyGuard(
            _untyped_torch.DispatchKey.ADInplaceOrView, False
        ):
            self._packed = cache.pack(tensor)

    def get_val(self, _: bool) -> torch.Tensor:
        """The tensor. Raises: RuntimeError when it was modified since."""
        return self._cache.unpack(self._packed)


def _replace(value: Any, change: Callable[[torch.Tensor], Any], depth: int = _DEPTH) -> Any:
    """*value*, with the result of *change* for each tensor in its tuples, lists, dicts and partials;
    *value* itself if none differs.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    kind: Any = type(value)
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if depth == 0 or not (named or kind in (tuple, list, dict, functools.partial)):
        return value
    if kind is functools.partial:
        parts = (value.func, value.args, value.keywords)
        changed = _replace(parts, change, depth)
        return value if changed is parts else kind(changed[0], *changed[1], **changed[2])
    before = list(value.values() if kind is dict else value)
    after = [_replace(one, change, depth - 1) for one in before]
    if all(map(operator.is_, before, after)):
        return value
    if kind is dict:
        return dict(zip(value, after, strict=True))
    return kind(*after) if named else kind(after)


def _tensors(
    value: Any, depth: int = _DEPTH, seen: set[int] | None = None
) -> Iterator[torch.Tensor]:
    """The tensors that *value* holds, in containers, dataclasses, closures and defaults, as far as
    they are among the first `_PARTS` objects.
    """
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0 and id(value) not in seen and len(seen) < _PARTS:
        seen.add(id(value))
        for part in itertools.islice(_parts(value), _PARTS):
            yield from _tensors(part, depth - 1, seen)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, tuple | list | set | frozenset):
        return value
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.FunctionType):
        return value.__defaults__, value.__kwdefaults__, *map(_content, value.__closure__ or ())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty so far
        return None
