"""`python ranks_save.py DEVICE DIRECTORY`, of which four run together: save and load the states of
parameters that are sharded, replicated and distributed in every way.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import train, whole
from reference import differing, unlike
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from two_ranks import CASES, DEVICE, DIRECTORY, RANK, case, local, main, model, ours, sharded

from nvme_offload.errors import CorruptionError, OffloadError, UsageError
from nvme_offload.io import archive
from nvme_offload.io.manifest import Manifest
from nvme_offload.optim import NVMeOptimizer

CASES.clear()  # the cases of `ranks`
RANKS = int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def place(name: str = "optimizer.pt") -> Iterator[Path]:
    """A path in a new directory that all ranks share, removed afterwards."""
    folder = Path(DIRECTORY, "saved")
    if RANK == 0:
        folder.mkdir()
    dist.barrier()
    try:
        yield folder / name
    finally:
        dist.barrier()
        if RANK == 0:
            shutil.rmtree(folder)
        dist.barrier()


def refusal(act: Callable[[], Any], kind: type[Exception]) -> str:
    """The message of the *kind* of error that *act* raises; else another error."""
    try:
        act()
    except kind as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was done"


def states_of(optimizer: NVMeOptimizer) -> dict[int, Any]:
    """What this rank has of all states."""
    return {
        index: {key: local(value).clone() for key, value in state.items()}
        for index, state in optimizer.state_dict()["state"].items()
    }


def goes_on(
    make: Callable[[], nn.Module], path: Path, clipped: bool = True, **options: Any
) -> list[Any]:
    """Differences after a save to *path*, and a load into other objects."""
    nets = [make() for _ in range(2)]
    one, again = (ours(net.parameters(), **options) for net in nets)
    with one, again:
        train(nets[0], one, clipped=clipped)
        one.save(path)
        nets[1].load_state_dict(nets[0].state_dict())
        again.load(path)
        for net, optimizer in zip(nets, (one, again), strict=True):
            train(net, optimizer, first=3, clipped=clipped)
        return [
            *differing(*(whole(net) for net in nets)),
            *unlike(states_of(one), states_of(again)),
        ]


@case
def one_path_for_all_ranks() -> list[Any]:
    found = []
    for dtype, state_format in (
        (torch.float32, "exact"),
        (torch.bfloat16, "split"),
        (torch.bfloat16, "compact24"),
    ):
        with place() as path:
            for _ in range(2):  # the second save replaces the first
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    found += goes_on(
                        lambda dtype=dtype: sharded(dtype), path, state_format=state_format
                    )
                found += [str(one.message) for one in warned if "mesh" in str(one.message)]
            names = sorted(entry.name for entry in path.iterdir())
            if names != ["nvme_offload.json", *(f"rank{rank}.pt" for rank in range(RANKS))]:
                found.append(names)
            if left := [entry.name for entry in path.parent.iterdir() if entry != path]:
                found.append(left)
    return found


@case
def one_path_with_pending_updates() -> list[Any]:
    with place() as path:
        return goes_on(sharded, path, overlap_step=True)


@case
def replicas_of_shards() -> list[Any]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    with place() as path:
        return goes_on(lambda: sharded(mesh=mesh), path)


@case
def shards_of_tensor_parallel_parts() -> list[Any]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))

    def make() -> nn.Module:
        net = model()
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return sharded(net=net, mesh=mesh["data"])

    with place() as path:
        return goes_on(make, path, clipped=False)


def saved_and(path: Path, then: Callable[[nn.Module, NVMeOptimizer], list[Any]]) -> list[Any]:
    """What *then* finds with a trained net, whose states are at *path*."""
    net = sharded()
    with ours(net.parameters()) as optimizer:
        train(net, optimizer)
        optimizer.save(path)
        return then(net, optimizer)


@case
def a_path_for_each_rank() -> list[Any]:
    """The file of another rank is refused, and changes nothing."""
    with place(f"rank{RANK}.pt") as path:

        def then(net: nn.Module, optimizer: NVMeOptimizer) -> list[Any]:
            dist.barrier()
            other = (RANK + 1) % RANKS
            before = states_of(optimizer)
            for load in (
                lambda file: optimizer.load_state_dict(torch.load(file, mmap=True)),
                optimizer.load,
            ):
                said = refusal(
                    lambda load=load: load(path.with_name(f"rank{other}.pt")), UsageError
                )
                if f"that rank {other} of {RANKS} had, and rank {RANK} of {RANKS} has" not in said:
                    return [said]
                load(path)
            return unlike(states_of(optimizer), before)

        return saved_and(path, then)


@case
def the_state_dict_of_another_rank() -> list[Any]:
    def then(net: nn.Module, optimizer: NVMeOptimizer) -> list[Any]:
        mine = Path(DIRECTORY, "saved", f"dict{RANK}.pt")
        torch.save(optimizer.state_dict(), mine)
        dist.barrier()
        other = torch.load(mine.with_name(f"dict{RANK ^ 1}.pt"), weights_only=False)
        said = refusal(lambda: optimizer.load_state_dict(other), UsageError)
        return [] if f"that rank {RANK ^ 1} of {RANKS} had" in said else [said]

    with place() as path:
        return saved_and(path, then)


@case
def some_ranks_with_the_same_path() -> list[Any]:
    def then(net: nn.Module, optimizer: NVMeOptimizer) -> list[Any]:
        said = refusal(lambda: optimizer.save(path.with_name(f"of{RANK // 2}")), UsageError)
        return [] if f"{RANKS} ranks save to 2 paths" in said else [said]

    with place() as path:
        return saved_and(path, then)


@case
def ranks_in_another_order() -> list[Any]:
    turned = DeviceMesh(DEVICE, [3, 2, 1, 0])
    with place() as path:
        saved_and(path, lambda net, optimizer: [])
        with ours(sharded(mesh=turned).parameters()) as optimizer:
            before = states_of(optimizer)
            said = refusal(lambda: optimizer.load(path), UsageError)
            return [
                *([] if "has another part" in said else [said]),
                *unlike(states_of(optimizer), before),
            ]


def whole_states_of(net: nn.Module, optimizer: NVMeOptimizer) -> list[Any]:
    """The weights and all states of all ranks together."""
    states = {
        index: {
            key: getattr(value, "full_tensor", lambda value=value: value)().clone()
            for key, value in sorted(state.items())
        }
        for index, state in optimizer.state_dict()["state"].items()
    }
    return [[value.detach().clone() for value in whole(net)], states]


def states_after_load(
    path: Path, make: Callable[[], nn.Module], expected: list[Any], **options: Any
) -> list[Any]:
    """Differences from the *expected* weights and states, once a net of *make* has loaded them."""
    net = make()
    weights, states = expected
    set_whole(net, weights)
    with ours(net.parameters(), **options) as optimizer:
        optimizer.load(path)
        found = whole_states_of(net, optimizer)
        differences = [*differing(weights, found[0]), *unlike(states, found[1])]
        train(net, optimizer, first=3)
        again = whole_states_of(net, optimizer)[1]
        if not unlike(again, states):
            differences.append("training changes nothing")
        return differences


def set_whole(net: nn.Module, weights: list[torch.Tensor]) -> None:
    """Set the parameters of *net*, which may be distributed."""
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), weights, strict=True):
            if hasattr(parameter, "placements"):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            local(parameter).copy_(local(value))


@case
def another_number_of_ranks() -> list[Any]:
    """What four ranks saved is loaded by two, and by one, and the other way round."""
    found: list[Any] = []
    meshes = [DeviceMesh(DEVICE, [0, 1]), DeviceMesh(DEVICE, [2, 3])]
    for dtype, state_format in ((torch.float32, "exact"), (torch.bfloat16, "split")):
        options = {"state_format": state_format}

        def make(mesh: Any = None, dtype: torch.dtype = dtype) -> nn.Module:
            return sharded(dtype, **({} if mesh is None else {"mesh": mesh}))

        with place() as path:
            net = make()
            with ours(net.parameters(), **options) as optimizer:
                train(net, optimizer)
                optimizer.save(path)
                expected = whole_states_of(net, optimizer)
            two = path.with_name("two")
            if RANK < 2:
                found += states_after_load(path, lambda: make(meshes[0]), expected, **options)
                net = make(meshes[0])
                set_whole(net, expected[0])
                with ours(net.parameters(), **options) as optimizer:
                    optimizer.load(path)
                    optimizer.save(two)
            else:  # the optimizers of a rank are numbered
                for _ in range(2):
                    ours(model().parameters()).close()
            dist.barrier()
            found += states_after_load(two, make, expected, **options)
            found += states_after_load(two, lambda dtype=dtype: model(dtype), expected, **options)
    return found


@case
def loads_take_no_memory_but_the_budget() -> list[Any]:
    """What four ranks saved is loaded by four and by one, which have 32 and 128 MB of states."""

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))

    def growth(parameters: Any, path: Path) -> int:
        with NVMeOptimizer(parameters, paths=DIRECTORY, host_memory="8MB") as optimizer:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
            before = memory("VmRSS")
            optimizer.load(path)
            return memory("VmHWM") - before

    with place() as path:
        net = sharded(net=make())
        with NVMeOptimizer(net.parameters(), paths=DIRECTORY, host_memory="8MB") as optimizer:
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.save(path)
        grown = [growth(net.parameters(), path), growth(make().parameters(), path)]
        return [] if max(grown) < 24e6 else [f"it grew by {grown} bytes"]


def memory(field: str) -> int:
    """The bytes of memory of this process that the kernel reports as *field*."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


@case
def whole_states_of_one_process() -> list[Any]:
    """A file without parts of parameters, also of the plain optimizer, is loaded into parts."""
    with place() as path:
        plain = path.with_name("plain")
        net = model()
        with ours(net.parameters()) as optimizer:
            train(net, optimizer, everywhere_the_same=True)
            expected = whole_states_of(net, optimizer)
            if RANK == 0:
                optimizer.save(path)
                tree = torch.load(path)
                told = tree.pop("nvme_offload")
                torch.save(tree, plain)
                del told["part"]  # which says that there are other ranks
                torch.save({**tree, "nvme_offload": told}, path)
        dist.barrier()
        return [
            fault for file in (path, plain) for fault in states_after_load(file, sharded, expected)
        ]


@case
def shards_of_another_mesh() -> list[Any]:
    """Rows of four ranks become columns of two and rows of two."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))

    def make() -> nn.Module:
        net = model()
        parallelize_module(net, mesh["tensor"], {"0": RowwiseParallel(), "2": RowwiseParallel()})
        return sharded(net=net, mesh=mesh["data"])

    with place() as path:
        expected = saved_and(path, lambda net, optimizer: whole_states_of(net, optimizer))
        net = make()
        set_whole(net, expected[0])
        with ours(net.parameters()) as optimizer:
            optimizer.load(path)
            return unlike(expected[1], whole_states_of(net, optimizer)[1])


@case
def two_groups_with_one_path() -> list[Any]:
    """One group saves, and the save of the other group is refused."""
    meshes = [DeviceMesh(DEVICE, [0, 1]), DeviceMesh(DEVICE, [2, 3])]
    net = sharded(mesh=meshes[RANK // 2])
    with place() as path, ours(net.parameters()) as optimizer:
        train(net, optimizer)
        said = refusal(lambda: optimizer.save(path), OffloadError)
        everywhere: list[Any] = [None] * RANKS
        dist.all_gather_object(everywhere, said)
        refused = ["would replace them" in text for text in everywhere]
        if refused[::2] != refused[1::2] or sum(refused) != 2:
            return everywhere
        optimizer.save(path.with_name(f"group{RANK // 2}"))
    return []


def replicated() -> nn.Module:
    return DistributedDataParallel(model())


@case
def ddp() -> list[Any]:
    """Every rank loads the file of any rank."""
    found = []
    with place() as path:
        nets = [replicated() for _ in range(2)]
        one, again = (ours(net.parameters()) for net in nets)
        with one, again:
            for net, optimizer in zip(nets, (one, again), strict=True):
                train(net, optimizer)  # DDP sums in another order in its first step
            if RANK == 2:
                one.save(path)
            one.save(path.with_name("all"))
            dist.barrier()
            nets[1].load_state_dict(nets[0].state_dict())
            for file in (path, path.with_name("all")):
                again.load(file)
                again.load_state_dict(torch.load(file, mmap=True))
            for net, optimizer in zip(nets, (one, again), strict=True):
                train(net, optimizer, first=3)
            found += differing(*(whole(net) for net in nets))
    return found


@case
def zero_redundancy() -> list[Any]:
    """Each rank has other parameters, of shapes that others have, too."""
    found = []

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(33, 33) for _ in range(RANKS)))
        return net, ZeroRedundancyOptimizer(
            net.parameters(), NVMeOptimizer, lr=0.01, paths=DIRECTORY, host_memory=100_000
        )

    with place() as path:
        (net, one), (other, again) = make(), make()
        train(net, one, everywhere_the_same=True)
        states = one.optim
        said = refusal(lambda: states.save(path), UsageError)
        everywhere: list[Any] = [None] * RANKS
        dist.all_gather_object(everywhere, said)
        if sum("would replace them" in text for text in everywhere) != RANKS - 1:
            found += everywhere
        states.save(path.with_name(f"file{RANK}"))
        states.save(path.with_name("together"), group=dist.group.WORLD)
        other.load_state_dict(net.state_dict())
        for load in (
            lambda: again.optim.load(path),
            lambda: again.optim.load(path.with_name(f"file{RANK ^ 1}")),
        ):
            said = refusal(load, UsageError)
            if "whose parameters differ" not in said and everywhere[RANK] != said:
                found.append(said)
        again.optim.load(path.with_name(f"file{RANK}"))
        again.optim.load(path.with_name("together"))
        for trained, optimizer in ((net, one), (other, again)):
            train(trained, optimizer, first=3, everywhere_the_same=True)
        found += differing(whole(net), whole(other))
        one.optim.close()
        again.optim.close()
    return found


@case
def a_damaged_file_is_an_error_on_every_rank() -> list[Any]:
    def then(net: nn.Module, optimizer: NVMeOptimizer) -> list[Any]:
        found = []
        dist.barrier()
        if RANK == 0:
            data = bytearray((path / "rank2.pt").read_bytes())
            data[len(data) // 2] ^= 4
            (path / "rank2.pt").write_bytes(data)
        dist.barrier()
        train(net, optimizer, first=3)
        before = states_of(optimizer)
        said = refusal(lambda: optimizer.load(path), CorruptionError if RANK == 2 else OffloadError)
        if "rank2.pt" not in said:
            found.append(said)
        if RANK == 0:
            (path / "nvme_offload.json").unlink()
        dist.barrier()
        said = refusal(lambda: optimizer.load(path), UsageError)
        if "has no nvme_offload.json" not in said:
            found.append(said)
        return [*found, *unlike(states_of(optimizer), before)]

    with place() as path:
        return saved_and(path, then)


@case
def a_rank_that_fails_leaves_the_last_save() -> list[Any]:
    def then(net: nn.Module, optimizer: NVMeOptimizer) -> list[Any]:
        found = []
        train(net, optimizer, first=3)
        before, saved = states_of(optimizer), contents(path)
        write = archive.write
        dist.barrier()

        def fail(*_: Any) -> None:
            raise OSError(5, "made up")

        if RANK == 1:
            archive.write = fail
        said = refusal(lambda: optimizer.save(path), OffloadError)
        archive.write = write
        dist.barrier()
        if "Input/output error" not in said and "rank 1 failed" not in said:
            found.append(said)
        if contents(path) != saved or [entry.name for entry in path.parent.iterdir()] != [
            path.name
        ]:
            found.append("the last save was touched")
        optimizer.save(path)
        dist.barrier()
        if contents(path) == saved:
            found.append("the next save did nothing")
        return [*found, *unlike(states_of(optimizer), before)]

    with place() as path:
        return saved_and(path, then)


def contents(directory: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in directory.iterdir()}


@case
def in_place_of_a_file() -> list[Any]:
    """A directory takes the place of the file of one process."""

    def then(net: nn.Module, optimizer: NVMeOptimizer) -> list[Any]:
        one = path.with_name("one")
        if RANK == 0:
            torch.save(torch.load(path), one)
        dist.barrier()
        optimizer.save(one)
        optimizer.load(one)
        return [] if Manifest.read(one) is not None else ["the file is there"]

    with place(f"rank{RANK}.pt") as path:
        return saved_and(path, then)


@case
def a_save_that_was_killed_between_two_renames() -> list[Any]:
    """As on NFS, which cannot exchange two names."""

    def then(net: nn.Module, optimizer: NVMeOptimizer) -> list[Any]:
        before = states_of(optimizer)
        if RANK == 0:
            path.rename(path.with_name(f".{path.name}.replaced"))
        dist.barrier()
        optimizer.load(path)
        return unlike(states_of(optimizer), before)

    with place() as path:
        return saved_and(path, then)


@case
def a_path_that_is_not_there() -> list[Any]:
    def then(net: nn.Module, optimizer: NVMeOptimizer) -> list[Any]:
        said = refusal(lambda: optimizer.load(path.with_name("nowhere")), UsageError)
        return [] if "cannot be loaded (rank 0: not there" in said else [said]

    with place() as path:
        return saved_and(path, then)


@case
def in_the_midst_of_a_step_of_one_rank() -> list[Any]:
    """What one rank cannot save is an error on every rank."""

    def then(net: nn.Module, optimizer: NVMeOptimizer) -> list[Any]:
        params = optimizer.param_groups[0]["params"]
        if RANK == 3:
            params.append(params[0])
        said = refusal(lambda: optimizer.save(path), OffloadError)
        if RANK == 3:
            params.pop()
        optimizer.save(path)
        expected = "a parameter appears more than once in a group"
        return [] if expected in said else [said]

    with place() as path:
        return saved_and(path, then)


if __name__ == "__main__":
    main()
