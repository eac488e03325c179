"""Every fault, at every transfer of a request, on every backend: the exact bytes, or the typed
error; nothing left pending.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE

from nvme_offload import (
    AioConfig,
    Engine,
    IOFailure,
    NoSpaceError,
    UnsupportedError,
)
from nvme_offload._aio import FaultKind
from nvme_offload.hardware.config import BACKENDS
from nvme_offload.io.engine import allocate

BLOCK = 16 << 10
SURROUNDINGS = 0x11

# Where a request lies, and how its buffer does: offset in the file, bytes, bytes of the buffer
# before its start.
SHAPES = {
    "aligned": (8192, 6 * BLOCK, 0),
    "unaligned-range": (8192 + 700, 5 * BLOCK + 333, 0),
    "unaligned-buffer": (8192, 5 * BLOCK, 13),
    "smaller-than-a-sector": (8192 + 100, 250, 3),
}

RECOVERABLE = {
    "EAGAIN": (FaultKind.FAIL, errno.EAGAIN),
    "EINTR": (FaultKind.FAIL, errno.EINTR),
    "short-aligned": (FaultKind.CUT, 4096),
    "short-odd": (FaultKind.CUT, 5001),
    "short-one-byte": (FaultKind.CUT, 1),
    "zero": (FaultKind.CUT, 0),
    "late": (FaultKind.DELAY, 3),
    "last": (FaultKind.DELAY, 1000),
    "refused": (FaultKind.REFUSE, errno.EAGAIN),
}
FATAL = {
    "EIO": (FaultKind.FAIL, errno.EIO),
    "ENOSPC": (FaultKind.FAIL, errno.ENOSPC),
    "EINVAL-refused": (FaultKind.REFUSE, errno.EINVAL),
}


@pytest.fixture(params=BACKENDS)
def config(request: pytest.FixtureRequest) -> AioConfig:
    config = AioConfig(backend=request.param, block_size=BLOCK, queue_depth=4, direct="auto")
    try:
        Engine(config).close()
    except UnsupportedError as error:
        pytest.skip(str(error))
    return config


class Range:
    """A file with known bytes, and a request on a part of it."""

    def __init__(self, directory: Path, shape: str) -> None:
        self.offset, self.nbytes, self.lead = SHAPES[shape]
        directory.mkdir(exist_ok=True)
        self.path = directory / "data"
        self.payload = np.random.default_rng(7).integers(0, 256, self.nbytes, dtype=np.uint8)
        self.surroundings = np.full(self.offset + self.nbytes + 9000, SURROUNDINGS, np.uint8)
        self.buffer = np.frombuffer(allocate(self.lead + self.nbytes + 64), np.uint8)[
            self.lead : self.lead + self.nbytes
        ]

    def lay_for(self, operation: str) -> None:
        contents = self.surroundings.copy()
        if operation == "read":
            contents[self.offset : self.offset + self.nbytes] = self.payload
            self.buffer[:] = 0
        else:
            self.buffer[:] = self.payload
        contents.tofile(self.path)

    def run(
        self, config: AioConfig, operation: str, faults: list[tuple[int, int, FaultKind, int]]
    ) -> int:
        with Engine(config, _faults=faults) as engine:
            ticket = (engine.read if operation == "read" else engine.write)(
                self.buffer, self.path, self.offset
            )
            try:
                return ticket.wait(timeout=PATIENCE)
            finally:
                assert ticket.done()
                stats = engine.stats()
                assert stats.read.in_flight == stats.write.in_flight == 0
                assert stats.oldest is None

    def assert_moved(self) -> None:
        assert np.array_equal(self.buffer, self.payload)
        expected = self.surroundings.copy()
        expected[self.offset : self.offset + self.nbytes] = self.payload
        assert np.array_equal(np.fromfile(self.path, np.uint8), expected)

    def assert_surroundings_untouched(self) -> None:
        contents = np.fromfile(self.path, np.uint8)
        assert np.all(contents[: self.offset] == SURROUNDINGS)
        assert np.all(contents[self.offset + self.nbytes :] == SURROUNDINGS)

    def transfers(self, config: AioConfig, operation: str) -> int:
        """How many transfers the request takes where nothing goes wrong: the first that a fault no
        longer reaches.
        """
        key = (config, operation, self.offset, self.nbytes, self.lead)
        if key not in _transfers:
            self.lay_for(operation)
            _transfers[key] = next(
                number for number in range(64) if self._succeeds(config, operation, number)
            )
        return _transfers[key]

    def _succeeds(self, config: AioConfig, operation: str, failing: int) -> bool:
        try:
            self.run(config, operation, [(failing, 1, FaultKind.FAIL, errno.EIO)])
        except IOFailure:
            return False
        return True


def at_once(work: Callable[[int], None], count: int) -> None:
    """Do *work* for 0 to *count* in as many threads: each makes an engine, and the kernel takes its
    time to end the queues of one.
    """
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


_transfers: dict[tuple[AioConfig, str, int, int, int], int] = {}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("fault", RECOVERABLE)
def test_a_transient_fault_at_any_transfer_costs_no_byte(
    tmp_path: Path, config: AioConfig, fault: str, operation: str, shape: str
) -> None:
    kind, value = RECOVERABLE[fault]

    def fail(number: int) -> None:
        place = Range(tmp_path / str(number), shape)
        place.lay_for(operation)
        assert place.run(config, operation, [(number, 1, kind, value)]) == place.nbytes
        place.assert_moved()

    at_once(fail, Range(tmp_path / "whole", shape).transfers(config, operation))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("fault", FATAL)
def test_a_permanent_fault_at_any_transfer_is_a_typed_error(
    tmp_path: Path, config: AioConfig, fault: str, operation: str, shape: str
) -> None:
    kind, value = FATAL[fault]

    def fail(number: int) -> None:
        place = Range(tmp_path / str(number), shape)
        place.lay_for(operation)
        with pytest.raises(IOFailure) as caught:
            place.run(config, operation, [(number, 1, kind, value)])
        error = caught.value
        assert isinstance(error, NoSpaceError) == (value == errno.ENOSPC)
        assert (error.errno, error.operation, error.path) == (value, operation, str(place.path))
        assert (error.offset, error.nbytes) == (place.offset, place.nbytes)
        assert 0 <= error.done < place.nbytes
        place.assert_surroundings_untouched()

    at_once(fail, Range(tmp_path / "whole", shape).transfers(config, operation))


@pytest.mark.parametrize("operation", ["read", "write"])
def test_faults_on_every_transfer_at_once(
    tmp_path: Path, config: AioConfig, operation: str
) -> None:
    """Short again and again, one sector at a time, with every third transfer interrupted: slow, and
    right.
    """
    place = Range(tmp_path, "unaligned-range")
    place.lay_for(operation)
    faults = [(number, 1, FaultKind.FAIL, errno.EINTR) for number in range(0, 600, 3)] + [
        (0, 600, FaultKind.CUT, 4096)
    ]
    assert place.run(config, operation, faults) == place.nbytes
    place.assert_moved()


def test_a_drive_that_never_takes_a_block_is_an_error_and_not_a_hang(
    tmp_path: Path, config: AioConfig
) -> None:
    faults = [(FaultKind.FAIL, errno.EAGAIN), (FaultKind.CUT, 0), (FaultKind.REFUSE, errno.EAGAIN)]

    def fail(number: int) -> None:
        operation, (kind, value) = ("read", "write")[number % 2], faults[number // 2]
        place = Range(tmp_path / str(number), "aligned")
        place.lay_for(operation)
        start = time.monotonic()
        with pytest.raises(IOFailure) as caught:
            place.run(config, operation, [(0, 1 << 40, kind, value)])
        assert time.monotonic() - start > 1, "the retries did not pause"
        assert caught.value.errno == (value or errno.EIO)
        assert caught.value.done == 0

    at_once(fail, 2 * len(faults))


def test_completions_in_reverse_order(tmp_path: Path, config: AioConfig) -> None:
    """Sixteen requests whose blocks all come back late and shuffled: each gets its own bytes."""
    path = tmp_path / "data"
    parts = np.random.default_rng(3).integers(0, 256, (16, 3 * BLOCK), dtype=np.uint8)
    faults = [(number, 1, FaultKind.DELAY, (number * 7) % 5) for number in range(200)]
    with Engine(config, _faults=faults) as engine:
        file = engine.open(path, "rw", size=parts.nbytes)
        for ticket in [
            engine.write(part, file, place * parts.shape[1]) for place, part in enumerate(parts)
        ]:
            ticket.wait(timeout=PATIENCE)
        back = np.zeros_like(parts)
        for ticket in [
            engine.read(part, file, place * parts.shape[1]) for place, part in enumerate(back)
        ]:
            ticket.wait(timeout=PATIENCE)
    assert np.array_equal(back, parts)
    assert np.array_equal(np.fromfile(path, np.uint8), parts.ravel())
