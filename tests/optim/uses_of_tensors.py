"""Every operation of a program on a tensor, on one whose values are elsewhere and on the same in
memory: `python uses_of_tensors.py DIRECTORY {state,gradient}`. Prints each use whose effect
is another one; the last line is "done".
"""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing.reduction
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nvme_offload.optim import NVMeOptimizer

SHAPE = (4, 6)
# Not properties of a value: names, addresses, and functions that ask for input.
LEFT_OUT = {"__class__", "__dict__", "__dir__", "__doc__", "__init_subclass__", "__module__"} | {
    *("__new__", "__sizeof__", "__subclasshook__", "__weakref__", "__hash__", "__repr__"),
    *("__str__", "__format__", "__reduce__", "_use_count", "__setattr__", "__delattr__"),
    *("__getattribute__", "__init__", "type", "_typed_storage", "storage_type", "_cdata"),
    *("_python_dispatch", "_version", "new", "new_empty", "new_empty_strided"),
}
ARGUMENTS: list[Callable[[torch.Tensor], tuple[Any, ...]]] = [
    lambda _: (),
    lambda _: (1,),
    lambda _: (0, 1),
    lambda _: (2.0,),
    lambda _: ((24,),),
    lambda _: (-1, 3),
    lambda one: (torch.full_like(one, 0.5),),
    lambda one: (torch.full_like(one, 0.5), 0.5),
    lambda one: (torch.full_like(one, 0.5), torch.full_like(one, 3.0)),
    lambda one: (torch.zeros(SHAPE[::-1]),),
    lambda one: (one > 0.2, 0.5),
    lambda one: (0, torch.tensor([0, 2]), 0.5),
    lambda one: (0, torch.tensor([0, 2])),
    lambda one: (torch.float64,),
    lambda _: (lambda value: value + 1,),
    lambda _: (torch.nn.Parameter,),
]


def swap_with_others(one: torch.Tensor) -> None:
    torch.utils.swap_tensors(one, torch.full(SHAPE, 0.125))


def set_data(one: torch.Tensor) -> None:
    one.data = torch.full(SHAPE, 0.125)


def set_data_of_another_shape(one: torch.Tensor) -> None:
    one.data = torch.zeros(24)


def set_through_data(one: torch.Tensor) -> None:
    one.data[1:3].fill_(0.25)


def set_through_copy(one: torch.Tensor) -> None:
    copy.copy(one).fill_(0.25)


def pickled(one: torch.Tensor) -> Any:
    return pickle.loads(pickle.dumps(one))


def to_a_process(one: torch.Tensor) -> Any:
    return pickle.loads(bytes(multiprocessing.reduction.ForkingPickler.dumps(one)))


def saved(one: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file)


def as_array(one: torch.Tensor) -> Any:
    import numpy

    return torch.from_numpy(numpy.asarray(one).copy())


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{
        one.__name__: one
        for one in (swap_with_others, set_data, set_data_of_another_shape, set_through_data)
    },
    **{one.__name__: one for one in (set_through_copy, pickled, to_a_process, saved, as_array)},
    "deepcopy": copy.deepcopy,
    "from_dlpack": torch.from_dlpack,
    "to_dlpack": lambda one: torch.utils.dlpack.to_dlpack(one) and None,
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "tensor": torch.tensor,
    "Tensor": torch.Tensor,
    "Parameter": torch.nn.Parameter,
    "stack": lambda one: torch.stack([one, one]),
    "foreach": lambda one: torch._foreach_mul_([one], 2),
    "out": lambda one: torch.add(torch.ones(SHAPE), 1, out=one) and None,
    "grad": lambda one: torch.func.grad(lambda given: given.square().sum())(one),
    "vmap": lambda one: torch.func.vmap(lambda row: row * 2)(one),
    "jvp": lambda one: torch.func.jvp(torch.sin, (one,), (torch.ones(SHAPE),))[1],
    "functional": torch.nn.functional.gelu,
    "list": lambda one: [row.clone() for row in one],
    "memory": lambda one: memoryview(one),  # type: ignore[arg-type]
}


def uses() -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
    yield from FUNCTIONS.items()
    for name in dir(torch.Tensor):
        if name in LEFT_OUT or name.startswith(("_backward", "_dispatch", "_make", "_fix")):
            continue
        if not callable(getattr(torch.Tensor, name)):
            yield name, lambda one, name=name: getattr(one, name)  # type: ignore[misc]
            continue
        for number, arguments in enumerate(ARGUMENTS):

            def call(
                one: torch.Tensor,
                name: str = name,
                arguments: Callable[[torch.Tensor], tuple[Any, ...]] = arguments,
            ) -> Any:
                return getattr(one, name)(*arguments(torch.linspace(-1, 1, 24).view(SHAPE)))

            yield f"{name} {number}", call


def values(result: Any) -> Any:
    """Something that can be compared, whatever the class."""
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided or result.is_quantized or result.is_meta:
            return str(result.layout), result.shape
        plain = result.detach().clone()
        return plain.dtype, plain.shape, plain.resolve_conj().resolve_neg().tolist()
    if isinstance(result, list | tuple):
        return [values(one) for one in result]
    return result if isinstance(result, int | float | complex | str | torch.dtype) else None


def main() -> None:
    directory, kind = sys.argv[1:]
    parameter = torch.nn.Parameter(torch.ones(SHAPE))
    parameter.grad = torch.linspace(-1, 1, 24).view(SHAPE)
    optimizer = NVMeOptimizer(
        [parameter], paths=directory, accumulate="host" if kind == "gradient" else None
    )
    optimizer.step()

    def new() -> torch.Tensor:
        if kind == "gradient":
            optimizer.zero_grad()
            (parameter * torch.linspace(-1, 1, 24).view(SHAPE)).sum().backward()
            assert parameter.grad is not None
            return parameter.grad
        optimizer.state.clear()
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.linspace(-1, 1, 24).view(SHAPE).clone(),
            "exp_avg_sq": torch.ones(SHAPE),
        }
        optimizer._steps.states.take_up()
        found: torch.Tensor = optimizer.state[parameter]["exp_avg"]
        return found

    def now() -> torch.Tensor:
        if kind == "gradient":
            assert parameter.grad is not None
            return parameter.grad
        optimizer._steps.states.take_up()
        found: torch.Tensor = optimizer.state[parameter]["exp_avg"]
        return found

    for name, use in uses():
        print(name, end="", flush=True)
        plain = torch.linspace(-1, 1, 24).view(SHAPE).clone()
        torch.default_generator.manual_seed(0)  # alone: a GPU takes part in no use
        try:
            expected = values(use(plain)), values(plain)
        except Exception:
            print("\r" + " " * len(name) + "\r", end="")
            continue
        torch.default_generator.manual_seed(0)  # alone: a GPU takes part in no use
        with contextlib.suppress(Exception):
            given = new()
            got = values(use(given)), values(now())
            if repr(got) != repr(expected):
                print(f": {got} instead of {expected}"[:400], end="\n")
                continue
        print("\r" + " " * len(name) + "\r", end="")
    print("\ndone")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
