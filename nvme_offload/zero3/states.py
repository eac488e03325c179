"""Saves the states of a `Stage3` in the form of DeepSpeed's checkpoints, and loads states of a
`Stage3` or a `Stages1And2`.

A checkpoint has the sub-groups that the user configured; our sub-groups divide them. Its format is
DeepSpeed's: a run with states in memory can load it, and DeepSpeed's checkpoint tools can read it.
The run that loads it may cut sub-groups differently. Sub-groups never cross a parameter group and
keep their order, so each parameter group is one stream of elements.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)

from ..errors import OffloadError, UnsupportedError, UsageError, known
from ..io.archive import Part, Provider, offloaded, wait_all, whole
from ..io.engine import Ticket
from ..io.manifest import corrupt
from ..optimizer_states.tree import is_for_each
from .compat import lists_by_sub_group
from .reader import (
    ALIASES,
    CONVERTED,
    MASTER,
    CheckpointReader,
    Saved,
    as_of_stage_3,
    in_sub_groups,
    shape_of,
)
from .replacing import replaced
from .updates import quiesce

if TYPE_CHECKING:
    from .stage3 import Stage3
    from .stage_1_and_2 import Stages1And2

    Owner: TypeAlias = Stage3 | Stages1And2

# Our key in DeepSpeed's state dict of the optimizer, which ignores it: see `AdamPowers`.
POWERS = "nvme_offload_adam_powers"
# The key for the state of the scaler of "torch_autocast", which DeepSpeed does not save.
SCALER = "torch_autocast_gradscaler"


def in_users_groups(
    stage3: Stage3, masters: list[torch.Tensor] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Context in which *stage3* shows the user's sub-groups, with *masters*, to DeepSpeed. Called after
    pending updates, which read the lists of our sub-groups in another thread.
    """
    quiesce(stage3.tier)
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
    return replaced(stage3, **shown)


def save(stage3: Stage3, base: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The state dict of *base*, DeepSpeed's method, with the user's sub-groups, offloaded."""
    masters: list[torch.Tensor] = []
    states: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    for group in stage3.user_sub_groups:
        master, state = joined(stage3, group)
        masters.append(master.requires_grad_())
        if state:
            states[master] = state
    aliases = _add_converted(states) if stage3.leaves_states_offloaded else {}
    try:
        with replaced(stage3.optimizer, state=states), in_users_groups(stage3, masters):
            return base() | ({ALIASES: aliases} if aliases else {})
    finally:
        stage3._clear_fp32_optimizer_param_groups()


def joined(
    owner: Owner, group: Sequence[int], weights: int | None = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The first *weights* master weights of the sub-groups *group*, or all, and the optimizer's state, as of
    one parameter, offloaded.
    """
    sizes = [owner.fp16_partitioned_groups_flat_numel[index] for index in group]
    *starts, numel = itertools.accumulate(sizes, initial=0)
    weights = numel if weights is None else weights
    lenders = [
        (provider(owner, index, max(weights - start, 0)), start)
        for index, start in zip(group, starts, strict=True)
    ]

    def whole(key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        parts = [Part(lend, key, start) for lend, start in lenders if start < numel]
        return offloaded([numel], dtype, parts)

    parameter, cut = (
        owner.fp32_partitioned_groups_flat[group[0]],
        _elementwise_states(owner, group[0]),
    )
    state = {
        key: whole(key, cut[key], numel) if key in cut else value
        for key, value in owner.optimizer.state.get(parameter, {}).items()
    }
    return whole(MASTER, parameter.dtype, weights), state


def _add_converted(states: Mapping[torch.Tensor, dict[str, Any]]) -> dict[str, str]:
    """Add to *states* a key that ds_to_universal converts for each elementwise state, if there are
    enough of these keys. Returns the names of the states, by the added keys.
    """
    aliases: dict[str, str] = {}
    for master, state in states.items():
        found = [key for key, value in state.items() if is_for_each(value, master.shape)]
        missing = [key for key in CONVERTED if key not in found]
        others = [key for key in found if key not in CONVERTED]
        if found and len(others) <= len(missing):
            aliases = dict(zip(missing, [*others, *[found[-1]] * len(missing)], strict=False))
            state.update({alias: state[key] for alias, key in aliases.items()})
    return aliases


def require_complete(
    owner: Owner, saved: Mapping[str, Any], weights: int, sizes: Iterable[int] = ()
) -> None:
    """Check that *saved* has *weights* master weights, and every state for each element of *owner*.
    *sizes*: of elementwise states, in addition to the sizes of master weights. Raises: OffloadError.
    """
    tree = saved.get(OPTIMIZER_STATE_DICT) or {}
    if SINGLE_PARTITION_OF_FP32_GROUPS in tree:
        tree = as_of_stage_3(tree)
    masters = [master.numel() for master in tree.get(FP32_FLAT_GROUPS, [])]
    expected = {*masters, *sizes}
    kept = tree.get(OPTIMIZER_STATE_DICT, {}).get("state", {}).values()
    found = sum(
        value.numel()
        for state in kept
        for value in {id(value): value for value in state.values()}.values()
        if torch.is_tensor(value) and value.dim() == 1 and value.numel() in expected
    )
    wanted = sum(
        numel * len(_elementwise_states(owner, index))
        for index, numel in enumerate(owner.fp16_partitioned_groups_flat_numel)
    )
    if (sum(masters), found) != (weights, wanted):
        raise OffloadError(
            f"the checkpoint would have {sum(masters)} of {weights} master weights and {found} of {wanted} "
            "optimizer states, so it was not saved: this is a bug of nvme_offload with this release of DeepSpeed"
        )


def of_state_dict(stage3: Stage3, tree: Mapping[str, Any]) -> CheckpointReader:
    """The values in *tree*, DeepSpeed's state dict of the optimizer on this rank. Its sub-groups
    may be cut differently from the sub-groups of *stage3*. Raises: UsageError if they belong to
    another model.
    """
    with in_users_groups(stage3):
        placement = stage3._zero3_partition_group_metadata()
    if tree.get("ds_zero_partition_groups") not in (None, placement):
        raise UsageError(
            "the checkpoint's expert parameters are on other ranks than this model's: load it with the placement that it was saved with"
        )
    masters, saved_groups = tree[FP32_FLAT_GROUPS], tree[OPTIMIZER_STATE_DICT]["param_groups"]
    _require_groups(stage3, len(saved_groups))
    sub_groups: list[dict[str, Saved]] = []
    for group, saved_group in enumerate(saved_groups):
        ours = _trained(stage3, group)
        count = len(saved_group["params"])
        sizes = [master.numel() for master in masters[len(sub_groups) : len(sub_groups) + count]]
        ends = list(itertools.accumulate(sizes))
        cut: list[dict[str, Saved]] = [{} for _ in sizes]
        number, end = 0, 0
        for name, param in ours.items():
            end += param.partition_numel()
            while number < len(ends) - 1 and end > ends[number]:
                number += 1
            if number < len(cut):
                cut[number][name] = Saved(shape_of(param), param.partition_numel())
        found = [sum(saved.numel for saved in sub_group.values()) for sub_group in cut]
        if found != sizes:
            raise UsageError(
                f"the checkpoint has {sum(sizes)} elements of parameter group {group} for this rank, and the model has {end}: "
                "it is from another model, other parameter groups, or another number of ranks"
            )
        sub_groups += cut
    return CheckpointReader(_ranks(stage3), in_sub_groups(sub_groups), lambda _: tree)


def _trained(owner: Owner, group: int | None = None) -> dict[str, Any]:
    return {
        owner.param_names[param]: param
        for number, params in enumerate(owner.trained_groups)
        if group in (None, number)
        for param in params
    }


def _require_groups(owner: Owner, saved: int) -> None:
    if saved != (ours := len(owner.optimizer.param_groups)):
        raise UsageError(
            f"the checkpoint has {saved} parameter groups, and the optimizer has {ours}: make as many, or load the weights alone "
            "with load_optimizer_states=False"
        )


def check(owner: Owner, saved: CheckpointReader, strict: bool, load_optimizer_states: bool) -> None:
    """Check that *saved* has every value of *owner*, in the same parameter groups. Raises:
    UsageError, UnsupportedError, CorruptionError.
    """
    ours = _trained(owner)
    if not strict and len(saved.trained) == len(ours) and any(map(saved.lacks, ours)):
        saved.rename(ours)  # DeepSpeed matches parameters only by their order
    for name, param in ours.items():
        if saved.lacks(name):
            raise UsageError(
                f"the checkpoint has no optimizer states of {name!r}, which the optimizer trains: it is from another model, or this weight was frozen; "
                "load the checkpoint itself with load_optimizer_states=False for the weights alone"
            )
        saved.match({name: param}, strict)
    if more := saved.trained.keys() - set(map(saved.original, ours)):
        raise UsageError(
            f"the checkpoint has optimizer states of {min(more)!r}, which the optimizer does not train: it is from another model, or this weight is "
            "frozen now; load the checkpoint itself with load_optimizer_states=False for the weights alone"
        )
    keys = {MASTER}
    if load_optimizer_states:
        reference = _reference(owner, saved)
        groups = saved.optimizer(reference)[OPTIMIZER_STATE_DICT]["param_groups"]
        _require_groups(owner, len(groups))
        group_of = [number for number, group in enumerate(groups) for _ in group["params"]]
        for number in range(len(groups)):
            for name in _trained(owner, number):
                found = group_of[known(known(saved.find(name)).sub_group)]
                if found != number:
                    raise UsageError(
                        f"the checkpoint has {name!r} in parameter group {found}, and the optimizer in {number}: pass the parameters in the groups of "
                        "the run that saved it, or load the weights alone with load_optimizer_states=False"
                    )
        for state, size in zip(saved.states(reference), saved.shapes(reference), strict=True):
            keys |= {key for key, value in state.items() if is_for_each(value, size)}
    if saved.universal is not None:
        for name in ours:
            for key in sorted(keys):
                _require_file(owner, saved.universal_file(name, key), key)
    elif load_optimizer_states and saved.ranks != _ranks(owner):
        for rank in range(saved.ranks):
            _require_same(owner, saved, rank)


def _require_same(owner: Owner, saved: CheckpointReader, rank: int) -> None:
    """Check that *rank* has saved the same values as rank 0, except elementwise states."""
    for ours, theirs, shape in zip(
        saved.states(0), saved.states(rank), saved.shapes(rank), strict=True
    ):
        for key in ours.keys() | theirs.keys():
            one, other = ours.get(key), theirs.get(key)
            if torch.is_tensor(one) and one.dim() > 0:
                same = is_for_each(other, shape)  # left in its file
            elif torch.is_tensor(one):
                same = torch.is_tensor(other) and torch.equal(whole(one), whole(other))
            else:
                same = whole(one) == whole(other)
            if not same:
                raise UnsupportedError(
                    f"{type(owner.optimizer).__name__} keeps {key!r} for all elements of a rank together, so it cannot go on with other numbers of "
                    "elements: load the checkpoint on as many ranks as saved it, or the weights alone with load_optimizer_states=False"
                )


def _require_file(owner: Owner, path: Path, key: str) -> None:
    if path.exists():
        return
    if not path.parent.is_dir():
        raise UsageError(
            f"the universal checkpoint {path.parents[2]} has no parameter {path.parent.name!r}: it is from another model"
        )
    if key == MASTER:
        raise corrupt(path, "it cannot be found")
    raise UnsupportedError(
        f"{type(owner.optimizer).__name__} keeps {key!r}, and DeepSpeed's ds_to_universal converts exp_avg and exp_avg_sq only: "
        "load the checkpoint itself, or the weights alone with load_optimizer_states=False"
    )


def _ranks(owner: Owner) -> int:
    return int(dist.get_world_size(group=owner.dp_process_group))


def _reference(owner: Owner, saved: CheckpointReader) -> int:
    """The saved rank from which this rank loads states that are not elementwise."""
    same = saved.ranks == _ranks(owner) and saved.universal is None
    return int(dist.get_rank(group=owner.dp_process_group)) if same else 0


class Share(NamedTuple):
    """The elements of *param* that a sub-group has: *numel* from *first* on, at *place*."""

    param: Any
    first: int
    numel: int
    place: int


def load(
    owner: Owner, saved: CheckpointReader, load_optimizer_states: bool, exactly: bool = True
) -> None:
    """Load *saved*, which has passed `check`, into *owner* and its parameters. With *exactly* False,
    master weights get the values of the 16-bit parameters.
    """
    loaded: list[dict[str, Any]] | None = None
    if load_optimizer_states:
        tree = saved.optimizer(_reference(owner, saved))
        loaded = _load_optimizer(owner, saved)
        _restore_powers(owner, tree, loaded)
        owner.load_global_state(tree)
    for index in range(len(owner.fp32_partitioned_groups_flat)):
        shares = owner.shares(index)

        def fill(key: str, into: torch.Tensor, shares: list[Share] = shares) -> Iterator[Ticket]:
            end = 0
            for share in shares:
                into[end : share.place].zero_()
                end = share.place + share.numel
                part = into[share.place : end]
                tickets = _fetch(owner, saved, share, key, part)
                if exactly:
                    yield from tickets
                else:
                    wait_all(tickets)
                    part.copy_(part.to(owner.dtype))
            into[end:].zero_()

        sub_group = known(known(saved.find(owner.param_names[shares[0].param])).sub_group)
        refill(owner, index, None if loaded is None else copy.deepcopy(loaded[sub_group]), fill)
    owner.partly_changed = False


def _fetch(
    owner: Owner, saved: CheckpointReader, share: Share, key: str, part: torch.Tensor
) -> Iterator[Ticket]:
    name, param = owner.param_names[share.param], share.param
    if saved.universal is not None:
        values, _ = saved.whole(name, key, 0)
        if values.numel() != param.ds_numel:  # an expert's, or cut for tensor parallelism
            file = saved.universal_file(name, key)
            found = owner.load_hp_checkpoint_state(str(file.parent), file.stem, param=param)
            if found.numel() != part.numel():
                raise UsageError(
                    f"{file} has {values.numel()} elements, and the model's parameter has {param.ds_numel}: it is from another model"
                )
            part.copy_(found)
            return
    yield from saved.read(name, key, share.first, part)


def refill(
    owner: Owner,
    index: int,
    states: Mapping[str, Any] | None,
    fill: Callable[[str, torch.Tensor], Iterable[Ticket]],
) -> None:
    """Rewrite the master weights of sub-group *index*, whose key is "", and its *states*, then
    update the parameters.

    *fill* is called with each key and its memory, and returns the tickets to wait for. *states*
    replace the optimizer's states; an empty tensor stands for a tensor of the sub-group's size and
    the empty tensor's dtype. None keeps the optimizer's states.
    """
    parameter = owner.fp32_partitioned_groups_flat[index]
    owner.partly_changed = True
    cut: dict[str, torch.dtype] = {}
    if states is not None:
        cut = {key: value.dtype for key, value in states.items() if _stands_for_whole(value)}
        owner.optimizer.state.pop(parameter, None)
        if states:
            state = {key: value for key, value in states.items() if key not in cut}
            owner.optimizer.state[parameter] = state
            for key, dtype in () if owner.swaps(index) else cut.items():
                state[key] = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
    renewed = None if states is None else cut
    with owner.in_memory(index, changed=True, renewed=renewed) as held:
        _fill_all({key: held[key].data for key in (MASTER, *cut)}, fill)
        owner._reassign_or_swap_out_partitioned_parameters(index)


def _fill_all(
    places: Mapping[str, torch.Tensor],
    fill: Callable[[str, torch.Tensor], Iterable[Ticket]],
) -> None:
    """Call *fill* to fill each tensor of *places*; a tensor on a GPU is filled through host memory."""
    if all(place.is_cpu for place in places.values()):
        wait_all(itertools.chain.from_iterable(fill(key, into) for key, into in places.items()))
        return
    for key, place in places.items():
        into = torch.empty_like(place, device="cpu")
        wait_all(fill(key, into))
        place.copy_(into)


def _load_optimizer(owner: Owner, saved: CheckpointReader) -> list[dict[str, Any]]:
    """Load the optimizer's options. Returns the states for `refill`, by saved sub-group."""
    reference = _reference(owner, saved)
    tree = saved.optimizer(reference)[OPTIMIZER_STATE_DICT]
    states, shapes = saved.states(reference), saved.shapes(reference)
    optimizer = owner.optimizer
    # Use the device of updates: torch's optimizers move loaded states to it.
    dtype, device = owner.master_weights_and_grads_dtype, owner.update_device
    parameters = [torch.empty(0, dtype=dtype, device=device) for _ in states]
    kept = optimizer.state
    groups, start = [], 0
    for group, saved_group in zip(optimizer.param_groups, tree["param_groups"], strict=True):
        numbers = range(start, start := start + len(saved_group["params"]))
        group["params"] = [parameters[number] for number in numbers]
        groups.append({**saved_group, "params": list(numbers)})
    named = {
        number: {
            key: torch.empty(0, dtype=value.dtype) if is_for_each(value, shape) else whole(value)
            for key, value in state.items()
        }
        for number, (state, shape) in enumerate(zip(states, shapes, strict=True))
    }
    identifiers = {number for group in tree["param_groups"] for number in group["params"]}
    others = {key: value for key, value in tree["state"].items() if key not in identifiers}
    try:
        optimizer.load_state_dict(
            whole({**tree, "param_groups": groups, "state": {**others, **named}})
        )
        loaded = optimizer.state
        return [dict(loaded.get(parameter, {})) for parameter in parameters]
    finally:
        ours = set(map(id, parameters))
        made = {key: value for key, value in optimizer.state.items() if id(key) not in ours}
        optimizer.state = kept
        optimizer.state.update(made)
        owner._clear_fp32_optimizer_param_groups()


def _restore_powers(owner: Owner, saved: Mapping[str, Any], loaded: list[dict[str, Any]]) -> None:
    def last_step(states: Iterable[Mapping[str, Any]]) -> int:
        return max((int(state.get("step", 0)) for state in states), default=0)

    step, groups = last_step(loaded), owner.groups_of_sub_groups
    if owner.resumes:
        owner.powers.restore(owner.optimizer, saved.get(POWERS, {}), step, groups)
    elif last_step(filter(None, owner.optimizer.state.values())) != step:
        owner.powers.jump()


def provider(owner: Owner, index: int, weights: int) -> Provider:
    """The provider of the first *weights* master weights, with the key "", and elementwise states."""

    @contextlib.contextmanager
    def lend() -> Iterator[Mapping[str, torch.Tensor]]:
        if owner.swaps(index):
            owner.read_ahead(index)
        with owner.in_memory(index) as held:
            lent = {key: held[key].detach().cpu() for key in _elementwise_states(owner, index)}
            yield {**lent, MASTER: held[MASTER].detach()[:weights].cpu()}

    return lend


def _elementwise_states(owner: Owner, index: int) -> Mapping[str, torch.dtype]:
    parameter = owner.fp32_partitioned_groups_flat[index]
    if owner.swaps(index):
        return owner.optimizer_swapper.states(parameter)
    return {
        key: value.dtype
        for key, value in owner.optimizer.state.get(parameter, {}).items()
        if is_for_each(value, parameter.shape)
    }


def _stands_for_whole(value: Any) -> bool:
    return torch.is_tensor(value) and value.shape == (0,)
