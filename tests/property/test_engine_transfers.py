"""Whatever reads and writes are in flight together, the files hold what a model in memory holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from patience import PATIENCE

from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, File, Ticket

Bytes = npt.NDArray[np.uint8]

PAGE = 4096
LENGTH = 160 << 10  # of each file at first; writes may go beyond
FILES = 2


@dataclasses.dataclass(frozen=True)
class Operation:
    """One request of a drawn sequence."""

    write: bool
    file: int
    offset: int
    size: int
    misalignment: int
    wait: bool


@dataclasses.dataclass
class Pending:
    """A request in flight, and the expected contents of its buffer at the end."""

    ticket: Ticket
    operation: Operation
    around: Bytes
    expected: Bytes


EDGES = st.builds(
    lambda unit, count, shift: max(0, unit * count + shift),
    st.sampled_from([512, PAGE, 16 << 10]),
    st.integers(0, 9),
    st.sampled_from([-1, 0, 1]),
)
OPERATIONS = st.builds(
    Operation,
    write=st.booleans(),
    file=st.integers(0, FILES - 1),
    offset=st.one_of(st.integers(0, LENGTH + PAGE), EDGES),
    size=st.one_of(st.integers(0, 3 * PAGE), st.integers(0, 80 << 10), EDGES),
    misalignment=st.sampled_from([0, 0, 1, 8, 511, 512, 4095]),
    wait=st.booleans(),
)
CONFIGS = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 16).map(lambda pages: pages * PAGE),
        "queue_depth": st.sampled_from([1, 2, 7, 32]),
        "thread_count": st.integers(1, 3),
        "single_submit": st.booleans(),
        "overlap_events": st.booleans(),
    }
)


def overlap(first: Operation, second: Operation) -> bool:
    return (
        first.file == second.file
        and first.offset < second.offset + second.size
        and second.offset < first.offset + first.size
    )


class Run:
    """Drives an engine and a model side by side."""

    def __init__(self, engine: Engine, paths: list[Path], seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.engine = engine
        self.paths = paths
        self.models = []
        for path in paths:
            model = self.generator.integers(0, 256, LENGTH, dtype=np.uint8).tobytes()
            path.write_bytes(model)
            self.models.append(bytearray(model))
        self.files: list[File] = [engine.open(path, "rw") for path in paths]
        self.pending: list[Pending] = []

    def settle(self, done: Callable[[Pending], bool]) -> None:
        """Wait for the requests in flight that *done* picks."""
        for pending in [one for one in self.pending if done(one)]:
            assert pending.ticket.wait(PATIENCE) == pending.operation.size
            assert_array_equal(pending.around, pending.expected, str(pending.operation))
            self.pending.remove(pending)

    def start(self, operation: Operation) -> None:
        model = self.models[operation.file]
        # reads end where the file does, and that is known only once the writes beyond it are
        # through
        if not operation.write:
            if operation.offset + operation.size > LENGTH:
                self.settle(
                    lambda one: one.operation.write and one.operation.file == operation.file
                )
            end = min(operation.offset + operation.size, len(model))
            operation = dataclasses.replace(operation, size=max(0, end - operation.offset))
        self.settle(
            lambda one: (
                (one.operation.write or operation.write) and overlap(one.operation, operation)
            )
        )

        end = operation.offset + operation.size
        around = self.generator.integers(0, 256, operation.size + 2 * PAGE, dtype=np.uint8)
        begin = (operation.misalignment - around.ctypes.data) % PAGE
        buffer = around[begin : begin + operation.size]
        expected = around.copy()
        if operation.write:
            if operation.size:
                model.extend(bytes(max(0, end - len(model))))
                model[operation.offset : end] = buffer.tobytes()
            ticket = self.engine.write(buffer, self.files[operation.file], operation.offset)
        else:
            expected[begin : begin + operation.size] = np.frombuffer(
                bytes(model[operation.offset : end]), np.uint8
            )
            ticket = self.engine.read(buffer, self.files[operation.file], operation.offset)
        self.pending.append(Pending(ticket, operation, around, expected))
        if operation.wait:
            self.settle(lambda one: one.ticket is ticket)

    def finish(self) -> None:
        self.settle(lambda one: True)
        for path, model in zip(self.paths, self.models, strict=True):
            assert_array_equal(np.fromfile(path, np.uint8), np.frombuffer(model, np.uint8))
        stats = self.engine.stats()
        assert (stats.read.in_flight, stats.write.in_flight) == (0, 0)


# The directory is the same for all the sequences; each begins with its files written anew. So many
# for each backend on each filesystem.
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(config=CONFIGS, operations=st.lists(OPERATIONS, max_size=24), seed=st.integers(0, 2**32 - 1))
@example(  # two writes that meet within a page, and a concurrent read
    config={"block_size": PAGE},
    operations=[
        Operation(write=True, file=0, offset=0, size=5000, misalignment=0, wait=False),
        Operation(write=True, file=0, offset=5000, size=5000, misalignment=1, wait=False),
        Operation(write=False, file=0, offset=10_000, size=10_000, misalignment=8, wait=False),
    ],
    seed=0,
)
@pytest.mark.every_filesystem
def test_files_hold_what_the_model_holds(
    configure: Callable[..., AioConfig],
    directory: Path,
    config: dict[str, object],
    operations: list[Operation],
    seed: int,
) -> None:
    paths = [directory / str(place) for place in range(FILES)]
    with Engine(configure(**config)) as engine:
        run = Run(engine, paths, seed)
        for operation in operations:
            run.start(operation)
        run.finish()
