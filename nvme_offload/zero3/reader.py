"""`CheckpointReader` reads a checkpoint of ZeRO by parameter, on any number of ranks.

Four forms hold the same values. Under ZeRO-3, each rank's files have a partition of every
parameter: of a trained one in flat sub-groups of master weights and states, in the order of
`param_shapes`, of a frozen one as a fragment. Under ZeRO-1 and ZeRO-2, each rank's file has a
partition of every flat parameter group. A universal checkpoint has a file for each parameter and
state. DeepSpeed's state dict of an optimizer has the partitions of one rank.

A load reads only the elements that this rank updates, a few megabytes at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_SHAPES,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)

from ..errors import UnsupportedError, UsageError, known
from ..io.archive import PIECE_BYTES, fetch, wait_all
from ..io.engine import Ticket
from ..optimizer_states.split import split
from .param_swapper import ParameterSwapper

MASTER = ""  # the key of the weights; other keys name optimizer states
# A key in the state dict of an optimizer without Adam's states: maps `CONVERTED` to its states.
ALIASES = "nvme_offload_converted_states"
CONVERTED = ("exp_avg", "exp_avg_sq")  # the only states that ds_to_universal converts
_UNIVERSAL_MASTER = "fp32"


class Saved(NamedTuple):
    """A weight of a checkpoint. Its elements are consecutive in a flat tensor, from *offset* on. Each
    rank has *numel* elements of that tensor, which begin at *start* of *sub_group*. *sub_group* is
    None for a frozen weight.
    """

    shape: tuple[int, ...]
    numel: int
    sub_group: int | None = None
    start: int = 0
    offset: int = 0


def in_sub_groups(groups: Iterable[Mapping[str, Saved]]) -> dict[str, Saved]:
    """The weights of each sub-group of ZeRO-3, given by name and in order without their start."""
    found: dict[str, Saved] = {}
    for number, group in enumerate(groups):
        start = 0
        for name, saved in group.items():
            found[name] = saved._replace(sub_group=number, start=start)
            start += saved.numel
    return found


def in_flat_groups(
    groups: Iterable[Mapping[str, Sequence[int]]],
    partition_sizes: Sequence[int],
    paddings: Sequence[Sequence[int]] | None = None,
) -> dict[str, Saved]:
    """The weights of flat parameter groups; *paddings* are the elements between two weights."""
    found: dict[str, Saved] = {}
    for number, group in enumerate(groups):
        offset = 0
        for place, (name, shape) in enumerate(group.items()):
            found[name] = Saved(tuple(shape), partition_sizes[number], number, 0, offset)
            offset += math.prod(shape) + (paddings[number][place] if paddings else 0)
    return found


def as_of_stage_3(tree: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's state dict of ZeRO-1 or ZeRO-2, with ZeRO-3's keys. Raises: UnsupportedError."""
    if not isinstance(tree[BASE_OPTIMIZER_STATE], Mapping):
        raise UnsupportedError(
            'the checkpoint was saved with "elastic_checkpoint": load it with "device": "cpu", save it without that setting, and load the new one'
        )
    return {
        **tree,
        FP32_FLAT_GROUPS: tree[SINGLE_PARTITION_OF_FP32_GROUPS],
        OPTIMIZER_STATE_DICT: tree[BASE_OPTIMIZER_STATE],
    }


@dataclasses.dataclass(eq=False)
class CheckpointReader:
    """The values of a checkpoint that *ranks* have saved, with *trained* and *frozen* weights by
    name. *optimizer* returns DeepSpeed's state dict of the optimizer of a saved rank, *fragments*
    its partitions of frozen weights, and *contents* the contents of a file; tensors may be in the file.
    *aliases*: other names of weights, such as tied ones. *universal*: the directory with a file for
    each trained weight and key, in place of flat sub-groups. *partition_sizes*, of ZeRO-1 and
    ZeRO-2: the elements of a rank's partition of each parameter group.
    """

    ranks: int
    trained: Mapping[str, Saved]
    optimizer: Callable[[int], Mapping[str, Any]]
    frozen: Mapping[str, Saved] = dataclasses.field(default_factory=dict)
    fragments: Callable[[int], Mapping[str, torch.Tensor]] | None = None
    aliases: Mapping[str, str] | None = None
    universal: Path | None = None
    contents: Callable[[str], Any] | None = None
    partition_sizes: Sequence[int] | None = None
    _states: dict[int, list[dict[str, Any]]] = dataclasses.field(default_factory=dict, init=False)

    @classmethod
    def of_directory(
        cls,
        tree: Mapping[str, Any],
        model_states: Callable[[int], str],
        read: Callable[[str], Any],
        universal: Path | None = None,
    ) -> CheckpointReader:
        """The values of a directory of ZeRO-3. *tree*: the contents of one rank's file of model
        states. *model_states* returns the path of a given rank's file.
        """
        ranks = int(tree["dp_world_size"])

        @functools.cache
        def optimizer(rank: int) -> Mapping[str, Any]:
            if universal is not None:
                return known(read(str(universal / "optimizer_state.pt")))
            return known(read(_optimizer_states(model_states(rank)))[OPTIMIZER_STATE_DICT])

        @functools.cache
        def fragments(rank: int) -> Mapping[str, torch.Tensor]:
            return known(read(model_states(rank))[FROZEN_PARAM_FRAGMENTS])

        def saved(shape: Any, ranks: int = ranks) -> Saved:
            return Saved(tuple(shape), -(-math.prod(shape) // ranks))

        count = ranks if universal is None else 1
        return cls(
            ranks,
            in_sub_groups(
                {name: saved(shape, count) for name, shape in shapes.items()}
                for shapes in tree.get(PARAM_SHAPES) or ()
            ),
            optimizer,
            {name: saved(shape) for name, shape in (tree.get(FROZEN_PARAM_SHAPES) or {}).items()},
            fragments,
            tree.get("shared_params"),
            universal,
            read,
        )

    @classmethod
    def of_flat_groups(
        cls,
        tree: Mapping[str, Any],
        model_states: str,
        read: Callable[[str], Any],
        alignment: int,
    ) -> CheckpointReader:
        """The values of a directory of ZeRO-1 or ZeRO-2, in multiples of *alignment*."""
        place = Path(model_states)

        @functools.cache
        def optimizer(rank: int) -> Mapping[str, Any]:
            path = _optimizer_states(str(place.with_name(f"zero_pp_rank_{rank}_{place.name}")))
            return as_of_stage_3(read(path)[OPTIMIZER_STATE_DICT])

        ranks, groups = int(tree["dp_world_size"]), tree[PARAM_SHAPES]
        paddings = optimizer(0).get("param_alignment_paddings") or [[0] * len(g) for g in groups]
        sizes = [
            -(-(sum(map(math.prod, group.values())) + sum(padding)) // (alignment * ranks))
            * alignment
            for group, padding in zip(groups, paddings, strict=True)
        ]
        return cls(
            ranks,
            in_flat_groups(groups, sizes, paddings),
            optimizer,
            aliases=tree.get("shared_params"),
            partition_sizes=sizes,
        )

    def find(self, name: str) -> Saved | None:
        """The weight *name*; None if the checkpoint lacks it."""
        name = self.original(name)
        return self.trained.get(name, self.frozen.get(name))

    def lacks(self, name: str) -> bool:
        """Whether no weight *name* was trained."""
        return self.original(name) not in self.trained

    def original(self, name: str) -> str:
        """The name that the weight *name* has in the checkpoint."""
        return (self.aliases or {}).get(name, name)

    def rename(self, names: Iterable[str]) -> None:
        """Rename the trained weights to *names*, in order."""
        self.trained = dict(zip(names, self.trained.values(), strict=True))

    def take_rank(self, own: CheckpointReader, rank: int) -> None:
        """Read everything from files of *rank*, as experts need: trained weights as *own*."""
        self.trained, self.optimizer = own.trained, own.optimizer
        fragments = known(self.fragments)(rank) if self.frozen else {}
        self.fragments = lambda _: fragments
        self.frozen = {
            name: saved._replace(numel=fragments[name].numel())
            for name, saved in self.frozen.items()
        }

    def universal_file(self, name: str, key: str) -> Path:
        """The file of a universal checkpoint with the values *key* of the weight *name*."""
        file = key or _UNIVERSAL_MASTER
        if key and key not in CONVERTED:
            aliases = self.optimizer(0).get(ALIASES, {})
            file = next((alias for alias, state in aliases.items() if state == key), key)
        return known(self.universal) / self.original(name) / f"{file}.pt"

    def match(self, params: Mapping[str, Any], strict: bool) -> dict[str, Any]:
        """The items of *params*, by name, that the checkpoint has. Raises: UsageError if an item
        has another shape there or, with *strict*, is missing.
        """
        missing = [name for name in params if self.find(name) is None]
        if missing and strict:
            raise UsageError(
                f"the checkpoint lacks {len(missing)} of the model's {len(params)} weights, such as {missing[0]!r}: it is from another model, or was saved "
                "without frozen weights; load_module_strict=False leaves these as they are"
            )
        for name, param in params.items():
            saved = self.find(name)
            if saved is not None and saved.shape != shape_of(param):
                raise UsageError(
                    f"{name!r} has the shape {saved.shape} in the checkpoint and {shape_of(param)} in the model: it is from another model"
                )
        return {name: param for name, param in params.items() if name not in missing}

    def load_weights(self, params: Mapping[str, Any], half_away_from_zero: bool) -> None:
        """Set this rank's partitions of *params*, by name, rounded to nearest from the masters."""
        for name, param in params.items():
            with _partition(param) as partition:
                first = first_element(param) if hasattr(param, "ds_id") else 0
                for source in self._pieces(name, MASTER, first, partition):
                    _copy(*source, half_away_from_zero)

    def read(self, name: str, key: str, first: int, into: torch.Tensor) -> Iterator[Ticket]:
        """Start reading values from element *first* on; *into* is filled up with zeros."""
        for source in self._pieces(name, key, first, into):
            yield from fetch(*source)

    def states(self, rank: int) -> list[dict[str, Any]]:
        """The optimizer's states of each sub-group of the saved *rank*."""
        if rank not in self._states:
            tree = self.optimizer(rank)
            saved, aliases = tree[OPTIMIZER_STATE_DICT], tree.get(ALIASES, {})
            self._states[rank] = [
                {key: value for key, value in state.items() if key not in aliases}
                for group in saved["param_groups"]
                for state in (saved["state"].get(number, {}) for number in group["params"])
            ]
        return self._states[rank]

    def shapes(self, rank: int) -> list[torch.Size]:
        """The shapes of the elementwise states of each sub-group of the saved *rank*."""
        if self.partition_sizes is not None:
            return [torch.Size([size]) for size in self.partition_sizes]
        return [master.shape for master in self.optimizer(rank)[FP32_FLAT_GROUPS]]

    def whole(self, name: str, key: str, rank: int) -> tuple[torch.Tensor, int]:
        """The tensor in which *rank* stored a weight's values, and the index of the first one."""
        saved = known(self.find(name))
        if saved.sub_group is None:
            return known(self.fragments)(rank)[self.original(name)], 0
        if self.universal is not None:
            return _flat(known(self.contents)(str(self.universal_file(name, key)))), 0
        if key == MASTER:
            return self.optimizer(rank)[FP32_FLAT_GROUPS][saved.sub_group], saved.start
        return self.states(rank)[saved.sub_group][key], saved.start

    def _pieces(
        self, name: str, key: str, first: int, into: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
        """The source, the first element to copy from it, and the target of each piece of *into*."""
        saved = known(self.find(name))
        end = min(first + into.numel(), math.prod(saved.shape))
        into[max(end - first, 0) :].zero_()
        at = first
        while at < end:
            rank, place = divmod(saved.offset + at, saved.numel)
            stop = min(end, at - place + saved.numel)
            values, start = self.whole(name, key, rank)
            for piece in into[at - first : stop - first].split(PIECE_BYTES // 4):  # type: ignore[no-untyped-call]
                yield values, start + place, piece
                place += piece.numel()
            at = stop


def first_element(param: Any) -> int:
    """The first element of this rank's partition of *param*, which `zero.Init` has partitioned."""
    return int(dist.get_rank(group=param.ds_process_group) * param.partition_numel())


def shape_of(param: Any) -> tuple[int, ...]:
    """The shape of the whole parameter *param*."""
    return tuple(param.ds_shape if hasattr(param, "ds_id") else param.shape)


def _optimizer_states(model_states: str) -> str:
    path = Path(model_states)
    name = path.name.replace("_model_states", "_optim_states")
    found = next((n for n in (name, f"bf16_{name}") if (path.parent / n).exists()), name)
    return str(path.parent / found)


def _flat(tree: Any) -> torch.Tensor:
    tensor: torch.Tensor = tree[PARAM] if isinstance(tree, Mapping) else tree
    flat = tensor.view(-1)
    if hasattr(tensor, "stored"):
        flat.stored = tensor.stored  # type: ignore[attr-defined]
    return flat


def _copy(source: torch.Tensor, start: int, into: torch.Tensor, half_away: bool) -> None:
    if not (half_away and into.dtype == torch.bfloat16 and source.dtype == torch.float32):
        wait_all(fetch(source, start, into))
        return
    master, low, working = (
        torch.empty(into.numel(), dtype=dtype, device="cpu")
        for dtype in (torch.float32, torch.int16, into.dtype)
    )
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
