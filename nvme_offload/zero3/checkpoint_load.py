"""Loads checkpoints of engines with offloaded parameters or optimizer states. Every rank checks the
checkpoint, and all ranks agree on it, before anything is changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS

from ..errors import UnsupportedError, UsageError
from ..files import commit
from ..io import archive, manifest
from ..io import engine as io
from ..io.manifest import Manifest, corrupt
from . import compat, states
from .agreement import everywhere, of_all_ranks
from .checkpoint_engines import (
    GENERATION,
    STATE_FILES,
    SWAP_FILES,
    Reader,
    engine_of,
    loads,
    streams,
)
from .reader import CheckpointReader
from .replacing import replaced
from .stage3 import Stage3
from .stages import Inference


def agree_on_checkpoint(engine: Any, load_dir: str, tag: str | None) -> str | None:
    """The tag to load, on all ranks; None without *tag* and `latest`. Raises: UsageError."""
    latest = Path(load_dir) / (
        "latest_universal" if engine.load_universal_checkpoint() else "latest"
    )
    name = tag if tag is None else str(tag)
    found = "no checkpoint"

    def read_latest() -> None:
        nonlocal name
        if name is None and latest.is_file():
            name = _latest(latest)

    def recover() -> None:
        if name is not None and (engine.global_rank == 0 or engine.use_node_local_storage()):
            commit.recover_directory(Path(load_dir, name).resolve())

    def look() -> None:
        nonlocal found
        if name is None:
            return
        place = Path(load_dir, name).resolve()
        if (place / SWAP_FILES).is_dir() and getattr(engine.optimizer, "swaps_natively", False):
            raise UnsupportedError(
                f'{Path(load_dir, name)} was saved with the optimizer in DeepSpeed\'s own swap files (its directory "{SWAP_FILES}"), which lack '
                "moments and steps and fit only the run that made them; to go on from its weights, load it with "
                '"nvme_offload": {"swappers": "deepspeed"}, write them with engine.save_16bit_model, and start from those'
            )
        if _has_states(place):
            saved = Manifest.read(place)
            found = name if saved is None else f"{name} (save {saved.generation[:8]})"
        elif tag is None and loads(engine):
            raise corrupt(latest, "it names no checkpoint in its directory")

    for action in (read_latest, recover, look):
        everywhere(action)
    found_by_rank = of_all_ranks(found)
    if len(set(found_by_rank)) > 1:
        seen = ", ".join(f"rank {rank}: {what}" for rank, what in enumerate(found_by_rank))
        raise UsageError(
            f"the ranks find different checkpoints in {load_dir} ({seen}): load by its tag a checkpoint that every node has"
        )
    return name


def _has_states(directory: Path) -> bool:
    try:
        return any(entry.name.endswith(STATE_FILES) for entry in directory.iterdir())
    except OSError:
        return False


def verify(engine: Any, place: Path) -> None:
    """Check a checkpoint by its manifest or torch.save's checksums. Raises: any rank's error."""
    rank, ranks = engine.global_rank, dist.get_world_size()

    def check() -> None:
        found = Manifest.read(place)
        if found is None:
            files = [*sorted(place.glob("*_states.pt")), *sorted(place.glob("zero/**/*.pt"))]
            for number, path in enumerate(files):
                if number % ranks == rank or engine.use_node_local_storage():
                    manifest.verify_archive(path)
            return
        local = engine.use_node_local_storage() and found.ranks != ranks
        for number, entry in enumerate(found.files):
            if local and not (place / entry.name).exists():
                raise UsageError(
                    f"{place} lacks {entry.name}, which rank {entry.rank} of {found.ranks} saved on its node: to load it on another number of ranks, "
                    "copy the files of all nodes to each node"
                )
            if local or rank == (entry.rank if found.ranks == ranks else number % ranks):
                manifest.verify(place, entry, engine_of(engine), found.checksum)

    everywhere(check)


def takes_weights_alone(engine: Any, given: Mapping[str, Any]) -> bool:
    """Whether `load_checkpoint` with the arguments *given* loads no optimizer states."""
    return (
        isinstance(engine.optimizer, Inference)
        or given.get("load_module_only", False)
        or not given.get("load_optimizer_states", True)
    )


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint that was checked and is about to be loaded: the reader of its *values*; the *tree*
    of one rank's file of model states; *read*, which returns any other such file; and the *weights*,
    by name, that are loaded separately from states: frozen ones, all, or under ZeRO-1 and ZeRO-2
    none. *alone*: whether all weights are loaded this way, and no states.
    """

    values: CheckpointReader
    tree: Mapping[str, Any]
    read: Callable[[str], Any]
    weights: Mapping[str, Any]
    alone: bool


def open_checkpoint(engine: Any, load_dir: str, tag: str, given: Mapping[str, Any]) -> Opened:
    """Open a checkpoint that fits *engine*. Raises: OffloadError, before any change."""
    universal, strict = engine.load_universal_checkpoint(), given.get("load_module_strict", True)
    with_states, flat = not takes_weights_alone(engine, given), not loads(engine)
    alone = not with_states and not engine.has_moe_layers
    if alone and given.get("custom_load_fn") is not None:
        raise UnsupportedError(
            "custom_load_fn would need all weights in memory at the same time: leave it out, or load the optimizer states, too"
        )

    def model_states(rank: int) -> str:
        return compat.model_states_path(engine, load_dir, tag, rank)

    optimizer, original = engine.optimizer, engine.checkpoint_engine
    rank = dist.get_rank(group=optimizer.dp_process_group)
    engine._get_all_ckpt_names(load_dir, tag)  # raises if there is no such checkpoint
    in_memory: Callable[[str], Any]
    in_file: Callable[[str], Any]
    if original is None or compat.writes_archives(original):  # None: the engine has no optimizer
        keep = ("module", FROZEN_PARAM_FRAGMENTS) if flat else (FROZEN_PARAM_FRAGMENTS,)
        in_memory = functools.cache(functools.partial(archive.read_mapped, keep=keep))
        in_file = functools.partial(_read_states, engine=engine_of(engine))
    else:
        streams(engine)  # warns
        in_memory = in_file = functools.cache(functools.partial(original.load, map_location="cpu"))
    own, read = model_states(rank), Reader(original, in_file).load
    tree = Reader(original, in_memory).load(
        own if Path(own).exists() and not universal else model_states(0)
    )
    values = (
        CheckpointReader.of_flat_groups(tree, own, read, optimizer.nccl_start_alignment_factor)
        if flat
        else CheckpointReader.of_directory(
            tree, model_states, read, Path(load_dir, tag, "zero") if universal else None
        )
    )
    same_parts = tree["mp_world_size"] == engine.mp_world_size
    if not same_parts and not universal:
        raise UnsupportedError(
            f"{Path(load_dir, tag)} is of {tree['mp_world_size']} ranks of tensor parallelism, and the engine has {engine.mp_world_size}: convert it with "
            "DeepSpeed's ds_to_universal"
        )
    if engine.has_moe_layers and not universal and isinstance(optimizer, Stage3):
        # Experts are partitioned over a subset of the ranks, which the files do not record.
        if values.ranks != (ranks := dist.get_world_size(group=optimizer.dp_process_group)):
            raise UnsupportedError(
                f"{Path(load_dir, tag)} has experts, {values.ranks} ranks saved it, and {ranks} load it: load it on as many ranks"
            )
        values.take_rank(states.of_state_dict(optimizer, values.optimizer(rank)), rank)
    weights = {} if flat else {name: param for param, name in engine.param_names.items()}
    if not alone or (universal and isinstance(optimizer, Stage3)):
        # A universal checkpoint keeps the files of model states as they were saved.
        has_frozen = same_parts and tree.get(FROZEN_PARAM_FRAGMENTS)
        weights = {
            name: param
            for name, param in weights.items()
            if has_frozen and not compat.is_trained(param)
        }
    weights = values.match(weights, strict)
    if not isinstance(optimizer, Inference) and (universal or not alone):
        # A custom_load_fn may load weights of other names.
        by_name = strict and not (flat and given.get("custom_load_fn"))
        states.check(optimizer, values, by_name, with_states)
    return Opened(values, tree, in_memory, weights, alone)


def load_module(
    engine: Any, load: Callable[..., Any], opened: Opened, given: Mapping[str, Any]
) -> Any:
    """Load the parts of a checkpoint other than optimizer states. DeepSpeed's method *load*, which
    takes changes of the arguments *given*, loads buffers and counters, but from a universal
    checkpoint no buffers. Frozen weights, and all weights if no states are loaded, are loaded here.
    """
    optimizer, tree = engine.optimizer, opened.tree
    reader = Reader(engine.checkpoint_engine, opened.read)
    # DeepSpeed's refresh of masters would come before parameters are loaded.
    with (
        replaced(engine, checkpoint_engine=reader),
        replaced(optimizer, refresh_fp32_params=lambda: None),
    ):
        # Without states DeepSpeed would gather all weights here.
        result = load(**({"load_optimizer_states": True} if opened.alone else {}))
    if engine.load_universal_checkpoint() and tree["mp_world_size"] == engine.mp_world_size:
        engine.load_module_state_dict(
            checkpoint=tree,
            strict=given.get("load_module_strict", True),
            custom_load_fn=given.get("custom_load_fn"),
        )
    if isinstance(optimizer, Inference):
        optimizer.partition_all_parameters()
    elif opened.alone:
        optimizer.partly_changed = True
    opened.values.load_weights(
        opened.weights,
        isinstance(optimizer, Stage3) and optimizer.rounds_half_away_from_zero,
    )
    return result


def _latest(path: Path) -> str:
    try:
        tag = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or "\0" in tag or path.parent.resolve() not in (path.parent / tag).resolve().parents:
        raise corrupt(path, "it names no checkpoint in its directory")
    return tag


def _read_states(path: str, engine: io.Engine) -> Any:
    """`archive.read` for a file that belongs to the manifest in its directory."""
    tree = archive.read(path, engine)
    generation = tree.get(GENERATION) if isinstance(tree, dict) else None
    if generation is not None:
        found = Manifest.read(Path(path).parent)
        if found is None:
            raise corrupt(
                Path(path).with_name(manifest.NAME),
                "it is missing, so the checksums cannot be checked",
            )
        if found.generation != generation:
            raise corrupt(Path(path), f"it belongs to another save than {manifest.NAME} beside it")
    return tree
