"""The backend that moves no byte, for measuring the engine without a drive."""

from __future__ import annotations

import numpy as np
import pytest
from patience import PATIENCE

from nvme_offload.errors import UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine

MIB = 1 << 20
CONFIG = AioConfig(block_size=MIB, queue_depth=32, direct=False)


def test_no_byte_is_moved_and_every_one_is_counted(tmp_path):
    with Engine(CONFIG, _backend="null") as engine:
        memory = np.full(5 * MIB + 3, 7, np.uint8)
        with (tmp_path / "file").open("wb") as made:
            made.truncate(memory.size)
        with engine.open(tmp_path / "file", "rw") as file:
            engine.write(np.zeros_like(memory), file).wait(PATIENCE)
            assert engine.read(memory, file).wait(PATIENCE) == memory.size
        assert np.all(memory == 7)
        stats = engine.stats()
        assert (stats.read.bytes, stats.write.bytes) == (memory.size, memory.size)


def test_transfers_take_no_less_time_than_a_drive_of_the_speeds(tmp_path):
    """A busy machine may take longer, so only the lower bounds are tested."""
    read_speed, write_speed = 2e9, 4e9
    with Engine(CONFIG, _backend=f"null:{read_speed:.0f}:{write_speed:.0f}") as engine:
        memory = np.zeros(64 * MIB, np.uint8)
        for name in "ab":
            with (tmp_path / name).open("wb") as made:
                made.truncate(memory.size)
        files = [engine.open(tmp_path / name, "rw") for name in "ab"]
        for file in files:
            engine.write(memory, file).wait(PATIENCE)
        written = engine.stats().write
        assert written.busy_seconds >= 2 * memory.size / write_speed
        both = [engine.read(memory, files[0]), engine.write(memory, files[1])]
        for ticket in both:
            ticket.wait(PATIENCE)
        stats = engine.stats()
        longest = max(stats.read.busy_seconds, stats.write.busy_seconds - written.busy_seconds)
        assert longest >= 0.9 * memory.size * (1 / read_speed + 1 / write_speed)


@pytest.mark.parametrize("name", ["nul", "null:", "null:0:1", "null:1e9", "null:-1:5", "nullable"])
def test_speeds_that_no_drive_has_are_refused(name):
    with pytest.raises(UsageError, match="no backend called"):
        Engine(AioConfig(), _backend=name)
