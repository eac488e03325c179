"""Loads the weights of a ZeRO-3 checkpoint into the parameters of an engine, without optimizer
states. The numbers of ranks that saved and load it may differ.

Each rank's files have a partition of every weight: of trained ones in the flat master weights, in
the order of `param_shapes`; of frozen ones as a fragment in the parameter's dtype. A load reads only the
elements of this rank's partition, a few megabytes at a time.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_SHAPES,
)

from ..errors import UsageError, known
from ..io.archive import PIECE_BYTES, fetch, wait_all
from ..optimizer_states.split import split
from .param_swapper import ParameterSwapper


class _Place(NamedTuple):
    """A weight of *shape*, partitioned over *ranks*: on each its partition begins at element
    *start* of *source* of that rank.
    """

    shape: tuple[int, ...]
    ranks: int
    source: Callable[[int], torch.Tensor]
    start: int


class SavedWeights:
    """The weights of a checkpoint, for *rank* of *ranks*.

    *tree* is the contents of one rank's file of model states, *model_states* returns the path of a
    given rank's. *read* returns the contents of a file; its tensors may be in the file. *universal*
    is the directory of a universal checkpoint's trained weights.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        rank: int,
        ranks: int,
        model_states: Callable[[int], str],
        read: Callable[[str], Any],
        universal: Path | None = None,
    ) -> None:
        self._rank, self._ranks = rank, ranks
        self._aliases: Mapping[str, str] = tree.get("shared_params") or {}
        self._places: dict[str, _Place] = {}
        saved_ranks = int(tree["dp_world_size"])

        @functools.cache
        def states(rank: int) -> Mapping[str, Any]:
            path = Path(model_states(rank))
            name = path.name.replace("_model_states", "_optim_states")
            found = next((n for n in (name, f"bf16_{name}") if (path.parent / n).exists()), name)
            tree: Mapping[str, Any] = read(str(path.parent / found))[OPTIMIZER_STATE_DICT]
            return tree

        @functools.cache
        def frozen(rank: int) -> Mapping[str, torch.Tensor]:
            tree: Mapping[str, torch.Tensor] = read(model_states(rank))[FROZEN_PARAM_FRAGMENTS]
            return tree

        def master(group: int, rank: int) -> torch.Tensor:
            found: torch.Tensor = states(rank)[FP32_FLAT_GROUPS][group]
            return found

        def fragment(name: str, rank: int) -> torch.Tensor:
            return frozen(rank)[name]

        def whole(file: str, rank: int) -> torch.Tensor:
            return read_universal(file, read)

        def place(shape: Any, ranks: int, source: Any, key: Any, start: int = 0) -> _Place:
            return _Place(tuple(shape), ranks, functools.partial(source, key), start)

        for group, shapes in enumerate(tree.get(PARAM_SHAPES) or ()):
            start = 0
            for name, shape in shapes.items():
                if universal is None:
                    self._places[name] = place(shape, saved_ranks, master, group, start)
                else:
                    self._places[name] = place(shape, 1, whole, str(universal / name / "fp32.pt"))
                start += -(-math.prod(shape) // saved_ranks)
        for name, shape in (tree.get(FROZEN_PARAM_SHAPES) or {}).items():
            self._places[name] = place(shape, saved_ranks, fragment, name)

    def match(self, params: Mapping[str, Any], strict: bool) -> dict[str, Any]:
        """The items of *params*, by name, that the checkpoint has. Raises: UsageError where one has
        another shape, or with *strict* is missing.
        """
        missing = [name for name in params if self._place(name) is None]
        if missing and strict:
            raise UsageError(
                f"the checkpoint lacks {len(missing)} of the model's {len(params)} weights, such as {missing[0]!r}: it is from another model, or was saved "
                "without frozen weights; load_module_strict=False leaves these as they are"
            )
        for name, param in params.items():
            place = self._place(name)
            if place is not None and place.shape != _shape(param):
                raise UsageError(
                    f"{name!r} has the shape {place.shape} in the checkpoint and {_shape(param)} in the model: it is from another model"
                )
        return {name: param for name, param in params.items() if name not in missing}

    def load(self, params: Mapping[str, Any], half_away_from_zero: bool) -> None:
        """Set *params*, by name, to the weights in the checkpoint.

        Master weights are rounded to nearest. *half_away_from_zero*: the way of the packed state
        formats, instead of ties to even.
        """
        for name, param in params.items():
            place = known(self._place(name))
            with _partition(param) as partition:
                numel, mine = math.prod(place.shape), partition.numel()
                found = pieces(numel, place.ranks, self._rank, self._ranks, partition)
                # With as many ranks each finds its own partition, whichever of them share the
                # parameter.
                if self._ranks == place.ranks or not hasattr(param, "ds_id"):
                    own = pieces(mine, 1, 0, 1, partition)
                    found = ((self._rank, offset, into) for _, offset, into in own)
                for rank, offset, into in found:
                    _copy(place.source(rank), place.start + offset, into, half_away_from_zero)

    def _place(self, name: str) -> _Place | None:
        return self._places.get(self._aliases.get(name, name))


def pieces(
    numel: int, saved_ranks: int, rank: int, ranks: int, partition: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The pieces of *partition*, which *rank* of *ranks* has of a parameter of *numel* elements:
    each with the saved rank that has it, and its first element in that rank's partition.

    Padding is set to zero. A piece has a few megabytes at most.
    """
    theirs = -(-numel // saved_ranks)
    first = min(rank * -(-numel // ranks), numel)
    last = min(first + partition.numel(), numel)
    partition[last - first :].zero_()
    at = first
    while at < last:
        saved, offset = divmod(at, theirs)
        end = min(last, (saved + 1) * theirs, at + PIECE_BYTES // 4)
        yield saved, offset, partition[at - first : end - first]
        at = end


def read_universal(path: str, read: Callable[[str], Any]) -> torch.Tensor:
    """The tensor in a universal checkpoint's file *path*, flat; *read* as for `SavedWeights`."""
    tree = read(path)
    tensor: torch.Tensor = tree[PARAM] if isinstance(tree, Mapping) else tree
    flat = tensor.view(-1)
    if hasattr(tensor, "stored"):
        flat.stored = tensor.stored  # type: ignore[attr-defined]
    return flat


def _copy(source: torch.Tensor, start: int, into: torch.Tensor, half_away: bool) -> None:
    if not (half_away and into.dtype == torch.bfloat16 and source.dtype == torch.float32):
        wait_all(fetch(source, start, into))
        return
    master, low = (torch.empty(into.numel(), dtype=t) for t in (torch.float32, torch.int16))
    working = torch.empty(into.numel(), dtype=into.dtype)
    wait_all(fetch(source, start, master))
    split(master, working, low)
    into.copy_(working)


@contextlib.contextmanager
def _partition(param: Any) -> Iterator[torch.Tensor]:
    """The flat partition of *param* on this rank, to be filled."""
    if not hasattr(param, "ds_id"):
        yield param.data.view(-1)
    elif isinstance(param.nvme_swapper, ParameterSwapper):
        yield param.nvme_swapper.get_buffer(param, param.ds_tensor.ds_numel)
        param.nvme_swapper.swap_out_and_release([param])
    else:
        yield param.ds_tensor.data.view(-1)


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(param.ds_shape if hasattr(param, "ds_id") else param.shape)
