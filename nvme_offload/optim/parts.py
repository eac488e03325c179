"""Which part of the parameters a rank has, and which ranks save their parts together.

Ranks of FSDP2 and of tensor parallelism have parts of the same parameters, and a mesh describes
them. Ranks with plain tensors have either the same parameters (DDP) or different ones
(`ZeroRedundancyOptimizer`, FSDP1, pipelines). The tensors do not say which, so a few of their
values are compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..io.ranks import Ranks
from .buckets import Weight, is_distributed, local

_SAMPLES = 64  # parameters of which one value is compared


def ranks_of(weights: Sequence[Weight], group: Any = None) -> Ranks | None:
    """The ranks that save *weights* together: *group*, or the ranks of the meshes over which the
    parameters are distributed; None for one rank, and for plain tensors.

    A submesh counts as its root mesh: the stages of a pipeline save together. Raises: UsageError.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    if group is None:
        roots = {_root_of(mesh) for mesh in _meshes(weights)}
        members = {rank for root in roots for rank in root.mesh.flatten().tolist()}
        if len(members) < 2:
            return None
        if len(members) < dist.get_world_size():
            for root in roots:
                if set(root.mesh.flatten().tolist()) == members:
                    return _of_mesh(root)
            raise UsageError(
                "parameters are distributed over several meshes, and none has all of their ranks: name these in group"
            )
    return Ranks.of_group(group)


def _meshes(weights: Sequence[Weight]) -> set[Any]:
    parameters: list[Any] = [weight.parameter for weight in weights]
    return {one.device_mesh for one in parameters if is_distributed(one)}


def _root_of(mesh: Any) -> Any:
    """The mesh that *mesh* was sliced from, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # in older releases of torch

    resources: Any = _mesh_resources
    return resources.get_root_mesh(mesh)


def _of_mesh(mesh: Any) -> Ranks:
    """The ranks of *mesh*, which has a group for each dimension but none for all ranks."""
    import torch.distributed as dist

    def gather(value: Any) -> list[Any]:
        found = [value]
        for dimension in reversed(range(mesh.ndim)):
            lists = Ranks.of_group(mesh.get_group(dimension)).gather(found)
            found = [item for items in lists for item in items]
        return found

    members = mesh.mesh.flatten().tolist()
    return Ranks(members.index(dist.get_rank()), len(members), gather)


def part_of(weights: Sequence[Weight]) -> dict[str, Any] | None:
    """The entry of a file that describes this rank's part of *weights*; None if there is only one
    rank.

    "rank" and "ranks": this rank and the number of ranks. "cuts": for each parameter its shape and,
    for each dimension of the mesh that cuts it, the number of ranks, the position of this rank and
    the placement; None if no parameter is cut. "values": for plain tensors, a digest of some
    values.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    cut = is_cut(weights)
    return {
        "rank": dist.get_rank(),
        "ranks": dist.get_world_size(),
        "cuts": cuts_of(weights) if cut else None,
        "values": None if cut else values_of(weights),
    }


def check_part(part: Mapping[str, Any] | None, weights: Sequence[Weight]) -> None:
    """Check that states with *part* belong to this rank's *weights*. Raises: UsageError."""
    own = None if part is None else part_of(weights)
    if part is None or own is None:
        return
    theirs = f"rank {part['rank']} of {part['ranks']}"
    mine = f"rank {own['rank']} of {own['ranks']}"
    if part["cuts"] is not None or own["cuts"] is not None:
        for weight, saved, here in zip(
            weights, part["cuts"] or (), own["cuts"] or (), strict=False
        ):
            if saved != here and saved[0] == here[0]:
                raise UsageError(
                    f"the states are of the part of a parameter of shape {list(weight.parameter.shape)} that {theirs} had, and {mine} has another part: "
                    "load what this rank has saved; for another number or order of ranks, let all ranks save to one path"
                )
    elif part["rank"] != own["rank"] and part["values"] != own["values"]:
        raise UsageError(
            f"the states were saved by {theirs}, whose parameters differ from the parameters of {mine}: if all ranks have the same parameters, load the "
            "model's weights before the states; otherwise load what this rank has saved"
        )


def is_cut(weights: Sequence[Weight]) -> bool:
    """Whether other ranks have other parts of *weights*."""
    return any(dimensions for _, dimensions in cuts_of(weights))


def cuts_of(weights: Sequence[Weight]) -> list[Any]:
    """The "cuts" of `part_of`, also where none of *weights* is cut."""
    found: list[Any] = []
    for weight in weights:
        dimensions = []
        if is_distributed(weight.parameter):
            parameter: Any = weight.parameter
            mesh = parameter.device_mesh
            for size, place, placement in zip(
                mesh.mesh.shape, mesh.get_coordinate() or (), parameter.placements, strict=False
            ):
                if size > 1 and not placement.is_replicate():
                    dimensions.append([int(size), int(place), str(placement)])
        found.append([list(weight.parameter.shape), dimensions])
    return found


def is_in_order(weights: Sequence[Weight]) -> bool:
    """Whether the ranks of all meshes ascend. Otherwise FSDP2 cuts parameters in the order of
    ranks, and DTensor cuts them in the order of the mesh.
    """
    return all(
        mesh.get_local_rank(number) == place
        for mesh in _meshes(weights)
        for number, place in enumerate(mesh.get_coordinate() or ())
    )


def values_of(weights: Sequence[Weight]) -> str:
    """A digest of some values of *weights*, on this rank."""
    digest = hashlib.sha256()
    trained = [weight for weight in weights if weight.fragments]
    for weight in trained[:: max(len(trained) // _SAMPLES, 1)][:_SAMPLES]:
        part = local(weight.parameter).detach()
        middle = part[tuple(size // 2 for size in part.shape)].item() if part.numel() else None
        digest.update(repr((tuple(part.shape), middle)).encode())
    return digest.hexdigest()


def differ(path: Path, ranks: Ranks) -> bool:
    """Whether all *ranks* give different paths. Raises: UsageError if only some paths differ."""
    given = ranks.gather(os.fspath(path.absolute()))
    different: int = len(set(given))
    if 1 < different < len(given):
        raise UsageError(
            f"{len(given)} ranks save to {different} paths: give all ranks the same path, or each rank its own"
        )
    return different > 1


def all_are_directories(path: Path, ranks: Ranks) -> bool:
    """Whether *path* is a directory on all *ranks*, and not a file. Raises: UsageError if the ranks
    disagree, or if it does not exist.
    """
    kinds = ranks.gather("directory" if path.is_dir() else "file" if path.exists() else "not there")
    if len(set(kinds)) > 1 or kinds[0] == "not there":
        found = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise UsageError(
            f"{path} cannot be loaded ({found}): give a directory that all ranks share, or a file to each rank"
        )
    found_directory: bool = kinds[0] == "directory"
    return found_directory


def claim_together(path: Path, moment: Sequence[int], ranks: Ranks) -> None:
    """`claim` for *ranks*, which save together. Raises: OffloadError, on every rank."""
    import torch.distributed as dist

    owner = json.dumps(ranks.gather(dist.get_rank()))
    ranks.together(
        lambda: claim(path, moment, owner) if ranks.rank == 0 else None, f"{path} was not saved"
    )


def claim(path: Path, moment: Sequence[int], owner: str) -> None:
    """Record that *owner* saves to *path*. *moment*: numbers that are equal on all ranks at this
    point of the training. Raises: UsageError if another owner saves there, since its states would
    be replaced.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    store = dist.distributed_c10d._get_default_store()
    if store is None:  # with MPI
        return
    key = json.dumps(["nvme_offload", os.fspath(path.absolute()), *moment])
    mine = json.dumps([dist.get_rank(), owner])
    rank, first = json.loads(store.compare_set(key, "", mine))
    if rank == dist.get_rank():
        store.set(key, mine)  # the weights may have been changed since
    elif first != owner:
        raise UsageError(
            f"rank {rank} saves the states of other parameters at {path}, and would replace them: give each rank its own path, or pass as group "
            "the ranks that save together, such as group=torch.distributed.group.WORLD"
        )
