"""The files of an optimizer's states: a file of one process, or a directory with a file of each rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError, UsageError
from ..files import commit
from ..io import archive, manifest
from ..io.archive import MappedFiles
from ..io.engine import Engine
from ..io.manifest import Manifest
from ..io.ranks import Ranks
from ..io.shared_directory import SharedDirectory
from . import parts, resharding
from .buckets import Weight
from .steps import Steps

_FILE = re.compile(r"rank\d+\.pt")  # in the directory that several ranks write

Tree = Mapping[str, Any]


def save(
    states: Callable[[], AbstractContextManager[Tree]],
    path: Path,
    steps: Steps,
    moment: Sequence[int],
    group: Any,
) -> None:
    """Write *states* to *path*, completely or not at all: see `NVMeOptimizer.save`. *moment*: as for
    `parts.claim`.
    """
    engine, weights = steps.tier.store.engine, steps.binding.weights
    ranks = parts.ranks_of(weights, group)
    if ranks is not None and not parts.differ(path, ranks):
        parts.claim_together(path, moment, ranks)
        _write_together(states, path, engine, ranks, steps.count)
        return
    with states() as tree:
        if ranks is None:
            parts.claim(path, moment, parts.values_of(weights))
        try:
            with commit.new_file(path) as partial:
                archive.write(str(partial), tree, engine)
        except (RuntimeError, OSError) as error:
            raise archive.as_failure(error, path) from error


def read(file: Path, mapped: MappedFiles, weights_only: bool) -> Any:
    """The states in *file*, mapped. Raises: UsageError if it has none; as torch.load."""
    tree = mapped.load(file, weights_only)
    if not (isinstance(tree, Mapping) and {"state", "param_groups"} <= tree.keys()):
        raise UsageError(
            f"{file} has no states of an optimizer: give the path that optimizer.save() wrote, and load a model's file into the model"
        )
    return tree


def load(
    path: Path,
    steps: Steps,
    group: Any,
    read: Callable[[Path], Any],
    check: Callable[[Tree], Any],
    load_state_dict: Callable[[Tree], None],
) -> None:
    """Load the states at *path* by *load_state_dict*, once *check* has accepted the states of every
    rank: see `NVMeOptimizer.load`.
    """
    commit.recover_directory(path.resolve())
    ranks = parts.ranks_of(steps.binding.weights, group)
    if ranks is None and path.is_dir():
        ranks = Ranks.of_group()
    if ranks is None or not parts.all_are_directories(path, ranks):
        steps.bind()
        tree = read(path)
        is_cut = resharding.is_cut(tree)
        load_state_dict(tree if is_cut else resharding.fitting([tree], steps.binding.weights))
        return
    refusal, found = f"{path} was not loaded", {}

    def prepare() -> None:
        steps.bind()
        weights = steps.binding.weights
        trees = _read_together(path, steps.tier.store.engine, ranks, read, weights)
        found.update(resharding.fitting(trees, weights))
        check(found)

    ranks.together(prepare, refusal)
    ranks.together(lambda: load_state_dict(found), refusal)


def _write_together(
    states: Callable[[], AbstractContextManager[Tree]],
    path: Path,
    engine: Engine,
    ranks: Ranks,
    step: int,
) -> None:
    """Write the *states* of *ranks* to the directory *path*: a file for each rank, or none."""
    directory = SharedDirectory(
        path,
        ranks,
        engine,
        is_ours=lambda name: _FILE.fullmatch(name) is not None,
        title=f"{path}",
        hint="give a directory on a filesystem that all ranks share, or a path with the rank's number in it to each rank",
    )
    failure = None
    try:
        directory.begin()
        try:
            with states() as tree:
                directory.write(
                    f"rank{ranks.rank}.pt",
                    lambda aside: archive.write(aside, tree, engine, directory.checksum == "xxh3"),
                )
        except Exception as error:
            failure = error
        directory.publish(failure, step)
    finally:
        directory.discard()


def _read_together(
    directory: Path,
    engine: Engine,
    ranks: Ranks,
    read: Callable[[Path], Any],
    weights: Sequence[Weight],
) -> list[Any]:
    """The results of *read* for the files in *directory* that this rank needs for *weights*: its
    own file, if it has the same parts of them; otherwise all files that `_write_together` wrote.

    Each file is first compared with the manifest; if the number of ranks has changed, by one of the
    ranks.
    """
    found = Manifest.read(directory)
    files = sorted(
        (entry for entry in (found.files if found else ()) if _FILE.fullmatch(entry.name)),
        key=lambda entry: entry.rank,
    )
    if found is None or not files:
        raise UsageError(
            f"{directory} has no {manifest.NAME} of optimizer states: give the path that save() was called with"
        )
    if [entry.rank for entry in files] != list(range(found.ranks)):
        raise manifest.corrupt(directory / manifest.NAME, "it does not have a file of each rank")
    same = found.ranks == ranks.count
    own = files[ranks.rank : ranks.rank + 1] if same else files[ranks.rank :: ranks.count]
    for entry in own:
        manifest.verify(directory, entry, engine, found.checksum)
    if same:
        tree = read(directory / own[0].name)
        if resharding.fits(tree, weights):
            return [tree]
        for entry in files:
            manifest.verify(directory, entry, engine, found.checksum)
    trees = [read(directory / entry.name) for entry in files]
    if not all(map(resharding.is_cut, trees)):
        raise UnsupportedError(
            f"{directory}: {found.ranks} ranks with plain tensors saved these states, and {ranks.count} load them: load them with as many; for another "
            "number, save by torch.distributed.checkpoint after that"
        )
    return trees
