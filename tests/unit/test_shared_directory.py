"""`SharedDirectory`, of one rank; `test_save_ranks.py` and `tests/zero3` have several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvme_offload.errors import UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io import archive, manifest
from nvme_offload.io.engine import Engine
from nvme_offload.io.manifest import Manifest
from nvme_offload.io.ranks import Ranks
from nvme_offload.io.shared_directory import SharedDirectory

FILE = "rank0.pt"


def directory(place: Path, engine: Engine) -> SharedDirectory:
    return SharedDirectory(
        place, Ranks.of_group(), engine, is_ours=FILE.__eq__, title="it", hint="share it"
    )


def write(made: SharedDirectory, engine: Engine, fill: int) -> None:
    tree = {"values": torch.full((5000,), fill)}
    made.write(FILE, lambda path: archive.write(path, tree, engine))


def test_a_second_run_that_saves_at_the_same_time_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    with Engine(AioConfig(backend="posix", direct=False)) as engine:
        first, second = directory(place, engine), directory(place, engine)
        first.begin()
        write(first, engine, 1)
        with pytest.raises(UsageError, match="another run is saving to it"):
            second.begin()
        second.discard()
        first.publish(None, step=1)
        first.discard()
        for fill in (2, 3):  # one after the other they may
            second.begin()
            write(second, engine, fill)
            second.publish(None, step=fill)
            second.discard()
            second = directory(place, engine)
        found = Manifest.read(place)
        assert found is not None
        for entry in found.files:
            manifest.verify(place, entry, engine, found.checksum)
    assert set(torch.load(place / FILE)["values"].tolist()) == {3}
    assert list(tmp_path.iterdir()) == [place]
