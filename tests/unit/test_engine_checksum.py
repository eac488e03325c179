"""Checksums on the way to and from the drive: the same however the request was cut, and different
for any other bytes.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from nvme_offload import AioConfig, CorruptionError, Engine, UnsupportedError, UsageError
from nvme_offload.hardware.config import BACKENDS
from nvme_offload.io.engine import allocate

NBYTES = (1 << 20) + 777


@pytest.fixture(autouse=True)
def _built_in(tmp_path: Path) -> None:
    with Engine(AioConfig(direct="auto")) as engine:
        try:
            engine.write(b"", tmp_path / "empty", checksum=True)
        except UnsupportedError as error:
            pytest.skip(str(error))


@pytest.fixture
def payload() -> np.ndarray:
    return np.random.default_rng(11).integers(0, 256, NBYTES, dtype=np.uint8)


def written_sum(config: AioConfig, payload: np.ndarray, path: Path, offset: int) -> int:
    with Engine(config) as engine:
        ticket = engine.write(payload, path, offset, checksum=True)
        ticket.wait()
        assert ticket.checksum is not None
        return ticket.checksum


@pytest.mark.parametrize("offset", [0, 4096 * 5, 700])
def test_the_sum_depends_on_bytes_alone(tmp_path: Path, payload: np.ndarray, offset: int) -> None:
    aligned = np.frombuffer(allocate(NBYTES), np.uint8)
    aligned[:] = payload
    odd = np.frombuffer(allocate(NBYTES + 64), np.uint8)[13 : 13 + NBYTES]
    odd[:] = payload
    sums = set()
    for number, backend in enumerate(BACKENDS):
        for block_size, thread_count in [(4096, 1), (64 << 10, 3), (2 << 20, 1)]:
            try:
                config = AioConfig(
                    backend=backend, block_size=block_size, thread_count=thread_count, direct="auto"
                )
                sums.add(written_sum(config, aligned, tmp_path / f"{number}", offset))
                sums.add(written_sum(config, odd, tmp_path / f"{number}-odd", offset))
            except UnsupportedError as error:
                pytest.skip(str(error))
            with Engine(config) as engine:
                back = np.zeros_like(payload)
                ticket = engine.read(back, tmp_path / f"{number}", offset, checksum=True)
                ticket.wait()
                sums.add(ticket.checksum)
                assert np.array_equal(back, payload)
    assert len(sums) == 1


def test_a_flipped_bit_on_the_drive_is_found_and_placed(
    tmp_path: Path, payload: np.ndarray
) -> None:
    path = tmp_path / "data"
    config = AioConfig(block_size=64 << 10, direct="auto")
    expected = written_sum(config, payload, path, 4096)
    back = np.zeros_like(payload)
    with Engine(config) as engine:
        assert engine.read(back, path, 4096, checksum=expected).wait() == NBYTES
        for place in (0, 4095, 500_000, NBYTES - 1):
            with path.open("r+b") as file:
                file.seek(4096 + place)
                file.write(bytes([payload[place] ^ 0x10]))
            with pytest.raises(CorruptionError) as caught:
                engine.read(back, path, 4096, checksum=expected).wait()
            assert (caught.value.path, caught.value.offset, caught.value.nbytes) == (
                str(path),
                4096,
                NBYTES,
            )
            with path.open("r+b") as file:
                file.seek(4096 + place)
                file.write(bytes([payload[place]]))
        assert engine.read(back, path, 4096, checksum=expected).wait() == NBYTES


def test_blocks_that_changed_places_are_found(tmp_path: Path) -> None:
    """Two blocks swapped on the drive: a plain sum of sums would not see it."""
    path = tmp_path / "data"
    payload = np.repeat(np.arange(16, dtype=np.uint8), 4096)
    config = AioConfig(block_size=4096, direct="auto")
    expected = written_sum(config, payload, path, 0)
    swapped = payload.reshape(16, 4096).copy()
    swapped[[3, 9]] = swapped[[9, 3]]
    swapped.tofile(path)
    with Engine(config) as engine, pytest.raises(CorruptionError):
        engine.read(np.zeros_like(payload), path, checksum=expected).wait()


@pytest.mark.parametrize("asked", [-1, 1 << 64, 1.5, "sum", None])
def test_what_no_sum_can_be_is_refused(tmp_path: Path, payload: np.ndarray, asked: object) -> None:
    path = tmp_path / "data"
    payload.tofile(path)
    target = np.zeros_like(payload)
    with Engine(AioConfig(direct="auto")) as engine:
        with pytest.raises(UsageError, match=rf"2\*\*64 - 1, not {re.escape(repr(asked))}"):
            engine.read(target, path, checksum=asked)  # type: ignore[arg-type]
        assert engine.stats().read.requests == 0
    assert not target.any()


def test_no_sum_unless_asked_for(tmp_path: Path, payload: np.ndarray) -> None:
    with Engine(AioConfig(direct="auto")) as engine:
        ticket = engine.write(payload, tmp_path / "data")
        ticket.wait()
        assert ticket.checksum is None
