"""`Entrances`: the functions that pass tensors to C++ without calling `__torch_function__`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

# The functions through which torch.func and torch.distributed's collectives receive tensors, and the
# function that gives one the memory of another.
_PLACES = (
    ("torch.utils", "swap_tensors"),
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),
    ("torch._functorch.eager_transforms", "_wrap_functional_tensor"),
    ("torch._functorch.vmap", "_add_batch_dim"),
    ("torch.distributed.distributed_c10d", "_check_single_tensor"),
    ("torch.distributed.distributed_c10d", "_check_tensor_list"),
)


class Entrances:
    """Replaces each of the functions by *wrapper* of it, once."""

    def __init__(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._wrapper = wrapper
        self._left = set(_PLACES)

    def wrap_loaded(self) -> None:
        """Wrap the functions of the modules that the program has imported."""
        for place in [place for place in self._left if place[0] in sys.modules]:
            self._left.remove(place)
            module: Any = sys.modules[place[0]]
            if hasattr(module, place[1]):
                setattr(module, place[1], self._wrapper(getattr(module, place[1])))


def instances(kind: type, value: Any) -> Iterator[Any]:
    """The objects of the class *kind* in the lists, tuples and dicts of *value*."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from instances(kind, one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from instances(kind, one)
