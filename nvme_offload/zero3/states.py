"""Saves and loads the states of a `Stage3` in the form of DeepSpeed's checkpoints.

A checkpoint has the sub-groups that the user configured, which ours divide. So it does not show
what wrote it: a run with states in memory loads it, and DeepSpeed's checkpoint tools read it. When
it is loaded, sub-groups may be cut differently. They never cross a parameter group and keep their
order, so each parameter group is one stream of elements.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, LOSS_SCALER, OPTIMIZER_STATE_DICT

from ..errors import OffloadError, UnsupportedError, UsageError
from ..io import archive
from ..io.archive import Part, Provider, fetch, offloaded, wait_all, whole
from ..io.engine import Ticket
from ..io.manifest import corrupt
from ..optimizer_states.tree import is_for_each
from .compat import lists_by_sub_group
from .weights import pieces, read_universal

if TYPE_CHECKING:
    from .stage3 import Stage3

_MASTER = ""  # the key of the master weights among those of the states
# Our key in DeepSpeed's state dict of the optimizer, which ignores it: see `AdamPowers`.
POWERS = "nvme_offload_adam_powers"
_UNIVERSAL_MASTER = "fp32"  # the same in a universal checkpoint


@contextlib.contextmanager
def in_users_groups(stage3: Stage3, masters: list[torch.Tensor] | None = None) -> Iterator[None]:
    """Context in which *stage3* shows the user's sub-groups, with *masters*: for DeepSpeed code
    that counts sub-groups.
    """
    groups = stage3.user_sub_groups
    first = [group[0] for group in groups]
    shown = {
        "fp16_groups": [
            list(itertools.chain.from_iterable(stage3.fp16_groups[index] for index in group))
            for group in groups
        ],
        "sub_group_to_group_id": {
            number: stage3.sub_group_to_group_id[index] for number, index in enumerate(first)
        },
        **{
            name: [getattr(stage3, name)[index] for index in first]
            for name in lists_by_sub_group(stage3)
        },
    }
    if masters is not None:
        shown["fp32_partitioned_groups_flat"] = masters
    kept = {name: getattr(stage3, name) for name in shown}
    try:
        for name, value in shown.items():
            setattr(stage3, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(stage3, name, value)


def save(stage3: Stage3, base: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What *base*, DeepSpeed's own method, makes of *stage3*: with the user's sub-groups, and with
    offloaded tensors (`archive.offloaded`).
    """
    masters: list[torch.Tensor] = []
    states: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    every = stage3.optimizer.state
    for group in stage3.user_sub_groups:
        parameters = [stage3.fp32_partitioned_groups_flat[index] for index in group]
        sizes = [stage3.fp16_partitioned_groups_flat_numel[index] for index in group]
        providers = [_provider(stage3, index) for index in group]
        starts = list(itertools.accumulate(sizes, initial=0))

        def shown(
            key: str,
            dtype: torch.dtype,
            providers: list[Provider] = providers,
            starts: list[int] = starts,
        ) -> torch.Tensor:
            return offloaded(
                [starts[-1]],
                dtype,
                [
                    Part(provider, key, start)
                    for provider, start in zip(providers, starts, strict=False)
                ],
            )

        master = shown(_MASTER, parameters[0].dtype).requires_grad_()
        masters.append(master)
        if parameters[0] in every:
            cut = _elementwise_states(stage3, group[0])
            states[master] = {
                key: shown(key, cut[key]) if key in cut else value
                for key, value in every[parameters[0]].items()
            }
    stage3.optimizer.state = states
    try:
        with in_users_groups(stage3, masters):
            return base()
    finally:
        stage3.optimizer.state = every
        stage3._clear_fp32_optimizer_param_groups()


def require_complete(stage3: Stage3, saved: Mapping[str, Any]) -> None:
    """Check that *saved* has a master weight and every state for each element of *stage3*. Raises:
    OffloadError.
    """
    tree = saved.get(OPTIMIZER_STATE_DICT) or {}
    masters = tree.get(FP32_FLAT_GROUPS, [])
    kept = tree.get(OPTIMIZER_STATE_DICT, {}).get("state", {}).values()
    sizes = {tuple(master.shape) for master in masters}
    found = [
        value.numel()
        for state in kept
        for value in state.values()
        if torch.is_tensor(value) and tuple(value.shape) in sizes
    ]
    numels = stage3.fp16_partitioned_groups_flat_numel
    wanted = sum(
        numel * len(_elementwise_states(stage3, index)) for index, numel in enumerate(numels)
    )
    if (sum(master.numel() for master in masters), sum(found)) != (sum(numels), wanted):
        raise OffloadError(
            f"the checkpoint would have {sum(master.numel() for master in masters)} of {sum(numels)} master weights and {sum(found)} of {wanted} "
            "optimizer states, so it was not saved: this is a bug of nvme_offload with this release of DeepSpeed"
        )


def load(stage3: Stage3, state_dict: Mapping[str, Any], load_optimizer_states: bool) -> None:
    """Load *state_dict* into *stage3* and its parameters. Its tensors may still be in a file.

    Raises: UsageError when the states are those of another model, before anything is changed.
    """
    masters, saved = state_dict[FP32_FLAT_GROUPS], state_dict[OPTIMIZER_STATE_DICT]
    spans = _spans(stage3, masters, saved["param_groups"])
    with in_users_groups(stage3):
        placement = stage3._zero3_partition_group_metadata()
    if state_dict.get("ds_zero_partition_groups") not in (None, placement):
        raise UsageError(
            "the checkpoint's expert parameters are on other ranks than this model's: load it with the placement that it was saved with"
        )
    loaded = _load_optimizer(stage3, saved, masters) if load_optimizer_states else None
    if loaded is not None:
        _restore_powers(stage3, state_dict, loaded)
    stage3.loss_scaler = state_dict[LOSS_SCALER]
    stage3.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
    stage3.overflow = state_dict["overflow"]
    identifiers = list(
        itertools.chain.from_iterable(group["params"] for group in saved["param_groups"])
    )
    for index, sources in enumerate(spans):

        def fill(key: str, into: torch.Tensor, sources: list[_Span] = sources) -> Iterator[Ticket]:
            for span in sources:
                tensor = (
                    masters[span.group]
                    if key == _MASTER
                    else saved["state"][identifiers[span.group]][key]
                )
                yield from fetch(tensor, span.start, into[span.offset : span.offset + span.numel])

        refill(
            stage3, index, None if loaded is None else copy.deepcopy(loaded[sources[0].group]), fill
        )


def refill(
    stage3: Stage3,
    index: int,
    states: Mapping[str, Any] | None,
    fill: Callable[[str, torch.Tensor], Iterable[Ticket]],
) -> None:
    """Rewrite the master weights of sub-group *index*, whose key is "", and its *states*, then
    update the parameters.

    *fill* is called with each key and its memory, and returns the tickets to wait for. *states*
    replace those of the optimizer; an empty tensor stands for one of the sub-group's size and its
    dtype. None keeps the optimizer's states.
    """
    parameter = stage3.fp32_partitioned_groups_flat[index]
    swapped = stage3.swaps_natively and stage3._swappable_optimizer_subgroup(index)
    stage3.partly_changed = True
    cut: dict[str, torch.dtype] = {}
    if states is not None:
        cut = {key: value.dtype for key, value in states.items() if _stands_for_whole(value)}
        rest = {key: value for key, value in states.items() if key not in cut}
        stage3.optimizer.state.pop(parameter, None)
        if states:
            stage3.optimizer.state[parameter] = rest
        if swapped:
            stage3.optimizer_swapper.renew(parameter, cut)
        else:
            made = {
                key: torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
                for key, dtype in cut.items()
            }
            stage3.optimizer.state[parameter].update(made)
    elif swapped:
        stage3.optimizer_swapper.swap_in_optimizer_state(parameter)
    try:
        places = {
            _MASTER: parameter.data,
            **{key: stage3.optimizer.state[parameter][key].data for key in cut},
        }
        wait_all(itertools.chain.from_iterable(fill(key, into) for key, into in places.items()))
        stage3._reassign_or_swap_out_partitioned_parameters(index)
    except BaseException:
        if swapped:
            stage3.optimizer_swapper.give_back()
        raise
    if swapped:
        stage3.optimizer_swapper.swap_out_optimizer_state(parameter)


def load_universal(
    stage3: Stage3, directory: str, load_optimizer_states: bool, load_from_fp32_weights: bool
) -> None:
    """Load the universal checkpoint in *directory* into *stage3*, one parameter after another.

    Raises: UsageError, UnsupportedError or CorruptionError, before anything is changed, when it has
    other parameter groups, or lacks states or parameters.
    """
    root = Path(directory) / "zero"
    read = functools.partial(archive.read, engine=stage3.tier.store.engine)
    loaded: list[dict[str, Any]] | None = None
    keys = [_UNIVERSAL_MASTER]
    if load_optimizer_states:
        shared = read(str(root / "optimizer_state.pt"))
        saved, masters = _first_sub_groups(stage3, shared)
        keys += {
            key: None
            for state, master in zip(saved["state"].values(), masters, strict=True)
            for key, value in state.items()
            if is_for_each(value, master.shape)
        }
    names = stage3.param_names
    for param in itertools.chain.from_iterable(stage3.fp16_groups):
        for key in keys:
            _require_universal(stage3, root / names[param], key)
    if load_optimizer_states:
        loaded = _load_optimizer(stage3, saved, masters)
        _restore_powers(stage3, shared, loaded)
        stage3._load_global_state_stage3(shared)
    for index, params in enumerate(stage3.fp16_groups):

        def fill(key: str, into: torch.Tensor, params: list[Any] = params) -> Iterator[Ticket]:
            parts = torch.split(into, [param.partition_numel() for param in params])
            for param, part in zip(params, parts, strict=True):
                file = root / names[param] / f"{key or _UNIVERSAL_MASTER}.pt"
                tickets = _fetch_universal(stage3, param, file, part, read)
                if load_optimizer_states or load_from_fp32_weights:
                    yield from tickets
                else:
                    wait_all(tickets)
                    part.copy_(part.to(stage3.dtype))

        group = stage3.sub_group_to_group_id[index]
        refill(stage3, index, None if loaded is None else copy.deepcopy(loaded[group]), fill)


def _first_sub_groups(
    stage3: Stage3, shared: Mapping[str, Any]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The optimizer's state dict in *shared*, the contents of optimizer_state.pt, with only the
    first sub-group of each parameter group; and the master weights of these.
    """
    saved = shared[OPTIMIZER_STATE_DICT]
    ours, groups = stage3.optimizer.param_groups, saved["param_groups"]
    if len(groups) != len(ours):
        raise UsageError(
            f"the universal checkpoint has {len(groups)} parameter groups, and the optimizer has {len(ours)}: make as many, or load the weights alone "
            "with load_optimizer_states=False"
        )
    first = [group["params"][0] for group in groups]
    states = {
        **saved,
        "state": {number: saved["state"].get(index, {}) for number, index in enumerate(first)},
        "param_groups": [{**group, "params": [number]} for number, group in enumerate(groups)],
    }
    return states, [shared[FP32_FLAT_GROUPS][index] for index in first]


def _require_universal(stage3: Stage3, folder: Path, key: str) -> None:
    if (folder / f"{key}.pt").exists():
        return
    if not folder.is_dir():
        raise UsageError(
            f"the universal checkpoint {folder.parents[1]} has no parameter {folder.name!r}: it is from another model"
        )
    if key == _UNIVERSAL_MASTER:
        raise corrupt(folder / f"{key}.pt", "it cannot be found")
    raise UnsupportedError(
        f"{type(stage3.optimizer).__name__} keeps {key!r}, and DeepSpeed's ds_to_universal converts exp_avg and exp_avg_sq only: "
        "load the checkpoint itself on as many ranks as saved it, or the weights alone with load_optimizer_states=False"
    )


def _fetch_universal(
    stage3: Stage3, param: Any, file: Path, part: torch.Tensor, read: Callable[[str], Any]
) -> Iterator[Ticket]:
    """Start reading the partition of *param* from *file* into *part*."""
    tensor = read_universal(str(file), read)
    if tensor.numel() != param.ds_numel:  # an expert's, or cut for tensor parallelism
        found = stage3.load_hp_checkpoint_state(str(file.parent), file.stem, param=param)
        if found.numel() != part.numel():
            raise UsageError(
                f"{file} has {tensor.numel()} elements, and the model's parameter has {param.ds_numel}: it is from another model"
            )
        part.copy_(found)
        return
    group = param.ds_process_group
    rank, ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
    for _, start, into in pieces(param.ds_numel, 1, rank, ranks, part):
        yield from fetch(tensor, start, into)


def take_masters_from_parameters(stage3: Stage3) -> None:
    """Set the master weights of all sub-groups from the 16-bit parameters. The optimizer's states
    stay.
    """
    for index, parameter in enumerate(stage3.fp32_partitioned_groups_flat):
        swapped = stage3.swaps_natively and stage3._swappable_optimizer_subgroup(index)
        if swapped:
            stage3.optimizer_swapper.swap_in_optimizer_state(parameter)
        try:
            if stage3.fp16_partitioned_groups_flat[index] is None:
                stage3._swap_in_sub_group_to_flat_buffer(parameter.data, index)
            else:
                parameter.data.copy_(stage3.fp16_partitioned_groups_flat[index].data)
        except BaseException:
            if swapped:
                stage3.optimizer_swapper.give_back()
            raise
        if swapped:
            stage3.optimizer_swapper.swap_out_optimizer_state(parameter)


@dataclasses.dataclass(frozen=True)
class _Span:
    """*numel* elements of the saved sub-group *group*, from *start*: those from *offset* of one of
    our sub-groups.
    """

    group: int
    start: int
    offset: int
    numel: int


def _spans(
    stage3: Stage3, masters: list[torch.Tensor], saved_groups: list[Mapping[str, Any]]
) -> list[list[_Span]]:
    """The parts of saved sub-groups that each of our sub-groups consists of."""
    ours: dict[int, list[int]] = defaultdict(list)
    for index in range(len(stage3.fp16_groups)):
        ours[stage3.sub_group_to_group_id[index]].append(index)
    spans: list[list[_Span]] = [[] for _ in stage3.fp16_groups]
    following = 0
    for number, saved_group in enumerate(saved_groups):
        saved = list(range(following, following + len(saved_group["params"])))
        following += len(saved)
        sizes = [masters[group].numel() for group in saved]
        wanted = [stage3.fp16_partitioned_groups_flat_numel[index] for index in ours[number]]
        if sum(sizes) != sum(wanted):
            raise UsageError(
                f"the checkpoint has {sum(sizes)} elements of parameter group {number} for this rank, and the model has {sum(wanted)}: "
                "it is from another model, other parameter groups, or another number of ranks"
            )
        for index, offset, group, start, numel in _overlaps(ours[number], wanted, saved, sizes):
            spans[index].append(_Span(group, start, offset, numel))
    if following != len(masters) or not all(spans):
        raise UsageError(
            f"the checkpoint has {len(saved_groups)} parameter groups, and the optimizer has {len(stage3.optimizer.param_groups)}"
        )
    return spans


def _overlaps(
    ours: list[int], our_sizes: list[int], theirs: list[int], their_sizes: list[int]
) -> Iterator[tuple[int, int, int, int, int]]:
    """The overlaps of two partitions of one stream: our sub-group and the offset in it, theirs and
    the offset in it, the number of elements.
    """
    our_ends, their_ends = (
        list(itertools.accumulate(our_sizes)),
        list(itertools.accumulate(their_sizes)),
    )
    edges = sorted({0, *our_ends, *their_ends})
    mine = other = 0
    for start, end in itertools.pairwise(edges):
        while our_ends[mine] <= start:
            mine += 1
        while their_ends[other] <= start:
            other += 1
        yield (
            ours[mine],
            start - (our_ends[mine] - our_sizes[mine]),
            theirs[other],
            start - (their_ends[other] - their_sizes[other]),
            end - start,
        )


def _load_optimizer(
    stage3: Stage3, saved: Mapping[str, Any], masters: list[torch.Tensor]
) -> list[dict[str, Any]]:
    """Let the optimizer load its hyperparameters. Returns the states that it makes of the saved
    ones, by saved sub-group, as `refill` takes them.
    """
    optimizer = stage3.optimizer
    parameters = [torch.empty(0, dtype=stage3.master_weights_and_grads_dtype) for _ in masters]
    kept = optimizer.state
    states = {}
    following = iter(zip(parameters, masters, strict=True))
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group["params"] = []
        for identifier in saved_group["params"]:
            parameter, master = next(following)
            group["params"].append(parameter)
            state = saved["state"].get(identifier, {})
            states[identifier] = {
                key: torch.empty(0, dtype=value.dtype)
                if is_for_each(value, master.shape)
                else whole(value)
                for key, value in state.items()
            }
    try:
        optimizer.load_state_dict(
            {
                **whole({key: value for key, value in saved.items() if key != "state"}),
                "state": {
                    **whole(
                        {key: value for key, value in saved["state"].items() if key not in states}
                    ),
                    **states,
                },
            }
        )
        loaded = optimizer.state
        return [dict(loaded.get(parameter, {})) for parameter in parameters]
    finally:
        ours = set(map(id, parameters))
        others = {key: value for key, value in optimizer.state.items() if id(key) not in ours}
        optimizer.state = kept
        optimizer.state.update(others)
        stage3._clear_fp32_optimizer_param_groups()


def _restore_powers(stage3: Stage3, saved: Mapping[str, Any], loaded: list[dict[str, Any]]) -> None:
    def last_step(states: Iterable[Mapping[str, Any]]) -> int:
        return max((int(state.get("step", 0)) for state in states), default=0)

    step, groups = last_step(loaded), stage3.groups_of_sub_groups
    if stage3.resumes:
        stage3.powers.restore(stage3.optimizer, saved.get(POWERS, {}), step, groups)
    elif last_step(filter(None, stage3.optimizer.state.values())) != step:
        stage3.powers.jump()


def _provider(stage3: Stage3, index: int) -> Provider:
    parameter = stage3.fp32_partitioned_groups_flat[index]

    @contextlib.contextmanager
    def lend() -> Iterator[Mapping[str, torch.Tensor]]:
        swapped = stage3.swaps_natively and stage3._swappable_optimizer_subgroup(index)
        if swapped:
            stage3.read_ahead(index)
            stage3.optimizer_swapper.swap_in_optimizer_state(parameter)
        try:
            state = stage3.optimizer.state.get(parameter, {})
            yield {
                _MASTER: parameter.data.cpu(),
                **{key: state[key].detach().cpu() for key in _elementwise_states(stage3, index)},
            }
        finally:
            if swapped:
                stage3.optimizer_swapper.release_swap_buffers(parameter)

    return lend


def _elementwise_states(stage3: Stage3, index: int) -> Mapping[str, torch.dtype]:
    """The elementwise states of sub-group *index*: their dtypes, by key."""
    parameter = stage3.fp32_partitioned_groups_flat[index]
    if stage3.swaps_natively and stage3._swappable_optimizer_subgroup(index):
        return stage3.optimizer_swapper.states(parameter)
    return {
        key: value.dtype
        for key, value in stage3.optimizer.state.get(parameter, {}).items()
        if is_for_each(value, parameter.shape)
    }


def _stands_for_whole(value: Any) -> bool:
    return torch.is_tensor(value) and value.shape == (0,)
