"""Requests that start after others, and requests that are cancelled: the order holds, nothing is
moved in vain, and no other bytes change.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from patience import PATIENCE
from transfers import Configure, RandomBytes, Stall, on_disk

from nvme_offload._aio import FaultKind
from nvme_offload.errors import (
    CancelledError,
    CorruptionError,
    OffloadError,
    TruncatedError,
    UsageError,
)
from nvme_offload.io.engine import Engine, Ticket, cancel_all

PAGE = 4096
ODD = 150_001  # three blocks of the fixture's engine, the last of which is unaligned


def outcome(ticket: Ticket) -> type[OffloadError] | int:
    try:
        return ticket.wait(PATIENCE)
    except OffloadError as error:
        return type(error)


# After


def test_a_chain_runs_by_itself_in_order(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    """The bytes travel through a hundred places; one step that began early would carry zeros on."""
    steps = 100
    data = random_bytes(ODD)
    buffers = [data, *(np.zeros_like(data) for _ in range(steps))]
    with engine.open(directory / "data", "rw", size=steps * ODD) as file:
        ticket = None
        for step in range(steps):
            written = engine.write(
                buffers[step], file, step * ODD, after=[ticket] if ticket else []
            )
            ticket = engine.read(buffers[step + 1], file, step * ODD, after=[written])
        assert ticket is not None
        assert ticket.wait(PATIENCE) == ODD
    assert_array_equal(buffers[-1], data)
    assert_array_equal(on_disk(directory / "data").reshape(steps, ODD), np.tile(data, (steps, 1)))


def test_a_held_request_is_not_in_flight_and_starts_in_time(
    engine: Engine, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    first, second = random_bytes(ODD), random_bytes(ODD)
    out = np.zeros(ODD, np.uint8)
    path = stalling_directory / "data"
    with engine.open(path, "rw", size=ODD) as file, stall() as let_go:
        blocker = engine.write(first, file)
        follower = engine.read(out, file, after=[blocker])
        last = engine.write(second, file, after=[follower])
        stats = engine.stats()
        assert (stats.read.requests, stats.read.in_flight, stats.read.busy_seconds) == (1, 0, 0)
        assert (stats.write.requests, stats.write.in_flight) == (2, 1)
        assert stats.oldest is not None
        assert stats.oldest.operation == "write"
        assert not follower.done()
        let_go()
        assert last.wait(PATIENCE) == ODD
        assert follower.done()
        assert blocker.done()
        stats = engine.stats()
        assert (stats.read.in_flight, stats.write.in_flight, stats.oldest) == (0, 0, None)
        assert (stats.read.bytes, stats.write.bytes) == (ODD, 2 * ODD)
    assert_array_equal(out, first)
    assert_array_equal(on_disk(path), second)


def test_requests_without_bytes_take_part(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(ODD)
    out = np.zeros_like(data)
    nothing = np.zeros(0, np.uint8)
    with engine.open(directory / "data", "rw", size=ODD) as file:
        written = engine.write(data, file)
        joint = engine.write(nothing, file, after=[written])
        joint = engine.read(nothing, file, after=[joint])
        assert engine.read(out, file, after=[joint]).wait(PATIENCE) == ODD
        assert joint.wait(0) == 0
        failed = engine.read(np.zeros(1, np.uint8), file, offset=ODD)
        assert outcome(engine.write(nothing, file, after=[failed])) is CancelledError
        assert outcome(failed) is TruncatedError
    assert_array_equal(out, data)


def test_tickets_need_not_be_kept(
    configure: Configure, directory: Path, random_bytes: RandomBytes
) -> None:
    """`close` also waits for held requests, and for the requests after them."""
    data = random_bytes(ODD)
    path = directory / "data"
    with (
        Engine(configure(block_size=PAGE)) as engine,
        engine.open(path, "rw", size=3 * ODD) as file,
    ):
        copy = np.zeros_like(data)
        engine.write(
            copy, file, ODD, after=[engine.read(copy, file, after=[engine.write(data, file)])]
        )
    assert_array_equal(on_disk(path)[: 2 * ODD], np.tile(data, 2))


def test_another_engines_ticket_cannot_be_followed(
    engine: Engine, configure: Configure, directory: Path
) -> None:
    with Engine(configure()) as other, other.open(directory / "other", "w") as file:
        ticket = other.write(b"elsewhere", file)
        with pytest.raises(UsageError, match="same engine"):
            engine.write(b"here", directory / "data", after=[ticket])
        with pytest.raises(UsageError, match="same engine"):
            cancel_all([ticket, engine.write(b"here", directory / "data")])
    assert engine.stats().write.requests == 1


# Failures on the way


def test_what_follows_a_failure_is_not_started(
    configure: Configure, directory: Path, random_bytes: RandomBytes
) -> None:
    """Of a chain of a thousand; `close` raises the failed request's error only."""
    path = directory / "data"
    before = random_bytes(2 * PAGE)
    before.tofile(path)
    engine = Engine(configure(block_size=PAGE))
    with engine.open(path, "rw") as file:
        failing = engine.read(np.zeros(PAGE + 1, np.uint8), file, offset=PAGE)
        chain = [engine.write(random_bytes(PAGE), file, after=[failing])]
        while len(chain) < 1000:
            chain.append(engine.write(random_bytes(PAGE), file, after=[chain[-1]]))
        for ticket in (
            chain[-1],
            chain[0],
            engine.write(random_bytes(PAGE), file, after=[failing]),
        ):
            with pytest.raises(
                CancelledError, match="a transfer that it waited for failed"
            ) as caught:
                ticket.wait(PATIENCE)
            assert (
                caught.value.operation,
                caught.value.path,
                caught.value.nbytes,
                caught.value.done,
            ) == ("write", str(path), PAGE, 0)
        assert engine.stats().write.bytes == 0
    with pytest.raises(TruncatedError):
        engine.close()
    engine.close()
    assert_array_equal(on_disk(path), before)


def test_close_is_silent_of_followers(configure: Configure, directory: Path) -> None:
    path = directory / "data"
    path.write_bytes(bytes(PAGE))
    with Engine(configure()) as engine, engine.open(path, "rw") as file:
        failing = engine.read(np.zeros(PAGE + 1, np.uint8), file)
        engine.write(np.ones(PAGE, np.uint8), file, after=[failing])
        assert outcome(failing) is TruncatedError
    assert path.read_bytes() == bytes(PAGE)


def test_any_graph(configure: Configure, directory: Path, random_bytes: RandomBytes) -> None:
    """Requests that follow random others, some of which fail: each ends as its ancestors say, and
    only the intended bytes are written.
    """
    count = 300
    chance = random.Random(3)
    parts = random_bytes(count * PAGE).reshape(count, PAGE)
    path = directory / "data"
    with (
        Engine(configure(block_size=PAGE, queue_depth=4, thread_count=2)) as engine,
        engine.open(path, "rw", size=count * PAGE) as file,
    ):
        tickets: list[Ticket] = []
        expected: list[type[OffloadError] | int] = []
        for place, part in enumerate(parts):
            ancestors = chance.sample(range(place), min(place, chance.choice((0, 1, 1, 2, 5))))
            fails = chance.random() < 0.02
            after = [tickets[ancestor] for ancestor in ancestors]
            if fails:
                tickets.append(
                    engine.read(np.zeros(PAGE, np.uint8), file, count * PAGE, after=after)
                )
            else:
                tickets.append(engine.write(part, file, place * PAGE, after=after))
            in_vain = any(expected[ancestor] != PAGE for ancestor in ancestors)
            expected.append(CancelledError if in_vain else TruncatedError if fails else PAGE)
        assert [outcome(ticket) for ticket in tickets] == expected
    assert 0 < expected.count(CancelledError) < count
    written = on_disk(path).reshape(count, PAGE)
    for place, end in enumerate(expected):
        assert_array_equal(written[place], parts[place] if end == PAGE else 0)


# Checksums


def test_a_read_is_held_against_the_write_that_it_follows(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(ODD)
    out, other = np.zeros_like(data), np.zeros_like(data)
    with engine.open(directory / "data", "rw", size=2 * ODD) as file:
        written = engine.write(data, file, checksum=True)
        read = engine.read(out, file, checksum=written)
        elsewhere = engine.read(other, file, PAGE, checksum=written)
        assert read.wait(PATIENCE) == ODD
        assert read.checksum == written.checksum
        assert outcome(elsewhere) is CorruptionError
        with pytest.raises(UsageError, match="does not sum its bytes"):
            engine.read(out, file, checksum=engine.write(data, file))
    assert_array_equal(out, data)


# Cancelling


def test_cancelling_what_is_held_ends_it_and_what_follows(
    engine: Engine, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    data = random_bytes(ODD)
    path = stalling_directory / "data"
    with engine.open(path, "rw", size=ODD) as file, stall() as let_go:
        blocker = engine.write(data, file)
        held = engine.write(np.zeros(ODD, np.uint8), file, after=[blocker])
        follower = engine.read(np.zeros(ODD, np.uint8), file, after=[held])
        assert held.cancel()
        assert held.done()
        assert follower.done()
        with pytest.raises(CancelledError, match="it was cancelled before it started"):
            held.wait(0)
        with pytest.raises(CancelledError, match="a transfer that it waited for failed"):
            follower.wait(0)
        assert not held.cancel()
        assert not follower.cancel()
        let_go()
        assert blocker.wait(PATIENCE) == ODD
        assert (engine.stats().read.bytes, engine.stats().write.bytes) == (0, ODD)
    assert_array_equal(on_disk(path), data)


def test_what_has_started_or_ended_is_not_cancelled(
    engine: Engine, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    data = random_bytes(ODD)
    path = stalling_directory / "data"
    with engine.open(path, "rw", size=ODD) as file, stall() as let_go:
        ticket = engine.write(data, file)
        follower = engine.write(data, file, after=[ticket])
        while ticket.cancel():  # until a worker was quicker
            assert outcome(follower) is CancelledError
            ticket = engine.write(data, file)
            follower = engine.write(data, file, after=[ticket])
            os.sched_yield()
        assert not cancel_all([follower, ticket])
        let_go()
        assert follower.wait(PATIENCE) == ODD
        assert not ticket.cancel()
        assert not follower.cancel()
    assert_array_equal(on_disk(path), data)


def test_all_of_several_are_cancelled_or_none(
    engine: Engine, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    with engine.open(stalling_directory / "data", "rw", size=4 * ODD) as file, stall() as let_go:
        blocker = engine.write(random_bytes(ODD), file)
        held = [
            engine.write(random_bytes(ODD), file, place * ODD, after=[blocker]) for place in (1, 2)
        ]
        chained = engine.write(random_bytes(ODD), file, 3 * ODD, after=held)
        assert cancel_all([*held, chained])
        assert [outcome(ticket) for ticket in (*held, chained)] == [CancelledError] * 3
        assert not cancel_all([])
        let_go()
        assert blocker.wait(PATIENCE) == ODD
    assert np.all(on_disk(stalling_directory / "data")[ODD:] == 0)


@pytest.mark.parametrize("backend", ["posix"], indirect=True)  # which has no part in it
def test_a_long_chain_is_cancelled_at_once(
    engine: Engine, stalling_directory: Path, stall: Stall
) -> None:
    """Step by step: a hundred thousand frames would be more than a thread's stack holds."""
    with engine.open(stalling_directory / "data", "rw", size=PAGE) as file, stall():
        buffer = np.zeros(PAGE, np.uint8)
        first = ticket = engine.write(buffer, file, after=[engine.write(buffer, file)])
        for _ in range(100_000):
            ticket = engine.write(buffer, file, after=[ticket])
        assert first.cancel()
        assert outcome(ticket) is CancelledError


def test_a_cancelled_request_releases_its_buffer(
    engine: Engine, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    with engine.open(stalling_directory / "data", "rw", size=PAGE) as file, stall() as let_go:
        blocker = engine.write(random_bytes(PAGE), file)
        buffer = np.zeros(PAGE, np.uint8)
        gone = weakref.ref(buffer)
        ticket = engine.write(buffer, file, after=[blocker])
        del buffer
        assert gone() is not None
        assert ticket.cancel()
        assert gone() is None
        let_go()
        blocker.wait(PATIENCE)


def test_cancelling_from_many_threads_while_requests_start(
    configure: Configure, directory: Path, random_bytes: RandomBytes
) -> None:
    """Each request is either cancelled, and leaves its place as it was, or moved whole."""
    count = 2000
    data = random_bytes(PAGE)
    path = directory / "data"
    cancelled = np.zeros(count, bool)
    with (
        Engine(configure(block_size=PAGE, queue_depth=4, thread_count=2)) as engine,
        engine.open(path, "rw", size=(count + 1) * PAGE) as file,
    ):
        blockers = [engine.write(data, file, count * PAGE)]
        tickets = []
        for place in range(count):
            tickets.append(engine.write(data, file, place * PAGE, after=blockers))
            if place % 20 == 19:
                blockers = [engine.read(np.zeros(PAGE, np.uint8), file, count * PAGE)]

        def cancel(start: int) -> None:
            for place in range(start, count, 4):
                cancelled[place] = tickets[place].cancel()

        # every other one is left to itself
        threads = [threading.Thread(target=cancel, args=(start,)) for start in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [outcome(ticket) is CancelledError for ticket in tickets] == cancelled.tolist()
    written = on_disk(path).reshape(-1, PAGE)
    for place in range(count):
        assert_array_equal(written[place], 0 if cancelled[place] else data)


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.REFUSE])
def test_a_fault_at_any_transfer_of_a_chain(
    configure: Configure, directory: Path, random_bytes: RandomBytes, kind: FaultKind
) -> None:
    """What came before it is whole, it says why, what comes after it never starts."""
    length = 6
    for failing in range(length + 1):
        path = directory / f"data-{failing}"
        parts = random_bytes(length * PAGE).reshape(length, PAGE)
        faults = [(failing, 1, kind, errno.EIO)]
        with (
            Engine(configure(block_size=PAGE), _faults=faults) as engine,
            engine.open(path, "rw", size=parts.nbytes) as file,
        ):
            tickets: list[Ticket] = []
            for place, part in enumerate(parts):
                tickets.append(engine.write(part, file, place * PAGE, after=tickets[-1:]))
            for place, ticket in reversed(list(enumerate(tickets))):
                if place > failing:
                    with pytest.raises(CancelledError):
                        ticket.wait(PATIENCE)
                elif place == failing:
                    with pytest.raises(OSError, match="Input/output error"):
                        ticket.wait(PATIENCE)
                else:
                    assert ticket.wait(PATIENCE) == PAGE
            stats = engine.stats()
            assert (stats.write.in_flight, stats.oldest) == (0, None)
        written = on_disk(path).reshape(length, PAGE)
        assert_array_equal(written[:failing], parts[:failing])
        assert not written[failing:].any()


# Python 3.12 and later warn of every fork in a process with threads
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_can_neither_follow_nor_cancel(
    engine: Engine, stalling_directory: Path, stall: Stall, random_bytes: RandomBytes
) -> None:
    data = random_bytes(ODD)
    path = stalling_directory / "data"
    with engine.open(path, "rw", size=ODD) as file, stall() as let_go:
        blocker = engine.write(np.zeros(ODD, np.uint8), file)
        held = engine.write(data, file, after=[blocker])
        child = os.fork()
        if child == 0:
            refused = 0
            try:
                for attempt in (held.cancel, lambda: engine.write(data, file, after=[held])):
                    try:
                        attempt()
                    except UsageError:
                        refused += 1
                del held, blocker
            finally:
                os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        let_go()
        assert held.wait(PATIENCE) == ODD
    assert_array_equal(on_disk(path), data)
