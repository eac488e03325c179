"""The swapper against a dict of bytes: whatever is created, used, changed, released and deleted, in
whatever budget, and whatever fails.
"""

from __future__ import annotations

import errno
import random
import tempfile
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from nvme_offload._aio import FaultKind
from nvme_offload.errors import CancelledError, IOFailure, NoSpaceError, OffloadError, UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.io.pool import PinnedPool
from nvme_offload.store.store import TensorStore
from nvme_offload.store.transfer import Stage, Transfer
from nvme_offload.swap.swapper import TensorSwapper

PAGE = 4096
NAMES = st.sampled_from("abcdefgh")
SIZES = st.one_of(
    st.sampled_from([0, 1, 511, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE]), st.integers(0, 5 * PAGE)
)
# Of the transfers between memory and drive, from which on, how many, and how.
FAULTS = st.lists(
    st.tuples(
        st.integers(1, 120),
        st.integers(1, 6),
        st.sampled_from(
            [
                (FaultKind.FAIL, errno.EIO),
                (FaultKind.FAIL, errno.ENOSPC),
                (FaultKind.CUT, 1000),
                (FaultKind.DELAY, 3),
                (FaultKind.DELAY, 9),
            ]
        ),
    ),
    max_size=4,
)


class LateRequest:
    """A request that starts when it is waited for, or when chance says so: as late as a drive may
    be.
    """

    def __init__(self, start: Callable[[], None], chance: random.Random) -> None:
        self.start = start
        self.chance = chance

    def done(self) -> bool:
        if self.chance.random() < 0.05:
            self.start()
        return False


class LateStore:
    """A store whose transfers are late."""

    interrupted = False

    def __init__(self, store: TensorStore) -> None:
        self.store = store
        self.chance = random.Random(4)
        self.pending: dict[Transfer, torch.Tensor] = {}

    def start(self, transfer: Transfer, memory: torch.Tensor) -> None:
        self.pending[transfer] = memory
        transfer.stage = Stage.IN_FLIGHT
        transfer.requests.append(LateRequest(partial(self.start_now, transfer), self.chance))  # type: ignore[arg-type]

    def start_now(self, transfer: Transfer) -> None:
        memory = self.pending.pop(transfer, None)
        if memory is None:
            return
        for blocker in transfer.after:
            self.start_now(blocker)
        transfer.requests.clear()
        try:
            if any(blocker.failure is not None for blocker in transfer.after):
                reason = "a transfer that it waited for failed"
                raise CancelledError(reason, operation="read", path="", offset=0, nbytes=0, done=0)
            self.store.start(transfer, memory)
        except OffloadError as refusal:
            transfer.failure = refusal
            transfer.stage = Stage.RECORDED

    def finish(self, transfer: Transfer, timeout: float | None = None) -> None:
        self.start_now(transfer)
        if transfer.stage is Stage.IN_FLIGHT:
            self.store.finish(transfer, timeout)

    def delete(self, name: str, *, missing_ok: bool) -> None:
        self.store.delete(name, missing_ok=missing_ok)

    def retain(self, name: str) -> None:
        self.store.retain(name)

    def commit(self, name: str) -> None:
        self.store.commit(name)

    def roll_back(self, name: str) -> None:
        self.store.roll_back(name)


class SwapperMachine(RuleBasedStateMachine):
    """A swapper, and the expected values: their bytes, and how many of them count."""

    faulty = False
    small = False

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, bytes] = {}  # the bytes that count
        self.room: dict[str, int] = {}
        self.retained: dict[str, bytes] = {}
        self.held: dict[str, tuple[torch.Tensor, bytes]] = {}
        self.generator = np.random.default_rng(3)

    @initialize(
        pages=st.integers(5, 14),
        lookahead=st.none() | st.integers(0, 10 * PAGE),
        late=st.booleans(),
        faults=FAULTS,
        most=st.integers(1, 4),
        room=st.integers(0, 24),
    )
    def make(self, pages, lookahead, late, faults, most, room):
        config = AioConfig(block_size=2 * PAGE, queue_depth=3, backend="posix", direct="auto")
        script = [(first, count, *fault) for first, count, fault in faults] if self.faulty else []
        self.directory = tempfile.TemporaryDirectory()
        self.engine = Engine(config, _faults=script)
        self.store = TensorStore(self.directory.name, engine=self.engine)
        if self.small:
            self.store.reserve(room * PAGE)
            self.resize_drive(full)
        self.pool = PinnedPool(pages * PAGE, pin=False, reserve=24 * PAGE)
        self.swapper = TensorSwapper(
            LateStore(self.store) if late else self.store, self.pool, lookahead_bytes=lookahead
        )
        self.most = most
        for name in "abcdefgh":  # more than fits, to begin with
            self.swap_out(name, 2 * PAGE)

    def resize_drive(self, grow: Callable[[int], None] | None) -> None:
        """Have the store's drive *grow* so; as drives do, where None."""
        for slabs in self.store._space.drives:
            if grow is None:
                del slabs.grow
            else:
                slabs.grow = grow

    def bytes_of(self, count: int) -> bytes:
        return self.generator.integers(0, 256, count, dtype=np.uint8).tobytes()

    def write(self, name: str, count: int | None = None) -> None:
        """New bytes into all the room of *name*, in use, of which the first *count* will be
        kept.
        """
        tensor, _ = self.held[name]
        data = self.bytes_of(self.room[name])
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else tensor)
        self.held[name] = tensor, data[:count]

    def attempt(self, call: Callable[[], object]) -> bool:
        """Whether *call* went well; where it may, it fails with a drive's error, or for want of
        memory besides the values in use.
        """
        failure = None
        try:
            call()
        except OffloadError as error:
            failure = error
        if isinstance(failure, UsageError):
            assert self.held, "one at a time always fits"
            assert "are in use by" in str(failure)
            event("no memory besides the values in use")
        elif failure is not None:
            assert self.faulty or (self.small and isinstance(failure, NoSpaceError))
            assert isinstance(failure, IOFailure)
            assert isinstance(failure, NoSpaceError) == (failure.errno == errno.ENOSPC)
            event("the drive failed")
        return failure is None

    def make_way(self, name: str) -> None:
        if name in self.held:
            self.let_go(name)
        while len(self.held) >= self.most:
            self.let_go(next(iter(self.held)))

    def let_go(self, name: str) -> None:
        self.check(name)
        del self.held[name]
        self.swapper.release(name, changed=False)

    def check(self, name: str) -> None:
        tensor, expected = self.held[name]
        assert tensor.numel() == self.room[name]
        assert tensor.numpy()[: len(expected)].tobytes() == expected

    @rule(name=NAMES, nbytes=SIZES)
    def create(self, name, nbytes):
        self.make_way(name)

        def call() -> None:
            self.held[name] = self.swapper.create(name, nbytes), b""

        if self.attempt(call):
            self.room[name] = nbytes
            self.write(name)
            self.model[name] = self.held[name][1]
            self.retained.pop(name, None)
        elif name not in self.swapper:
            self.forget(name)

    @rule(name=NAMES, nbytes=SIZES)
    def swap_out(self, name, nbytes):
        self.make_way(name)
        data = self.bytes_of(nbytes)
        if self.attempt(
            lambda: self.swapper.swap_out(
                name,
                torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0),
            )
        ):
            self.model[name], self.room[name] = data, nbytes
            self.retained.pop(name, None)
        elif name not in self.swapper:
            self.forget(name)

    def forget(self, name: str) -> None:
        for known in (self.model, self.room, self.retained, self.held):
            known.pop(name, None)

    @rule(
        names=st.lists(NAMES, min_size=1, max_size=8),
        change=st.sampled_from(["never", "always", "some"]),
    )
    def use(self, names, change):
        """Some training: the values one after the other."""
        for name in names:
            if name in self.model and name not in self.held:
                self.make_way(name)
                self.swap_in(name)
                if name in self.held and (change == "always" or (change == "some" and name < "d")):
                    self.write(name)
                    self.model[name] = self.held[name][1]
                    self.swapper.release(name, changed=True)
                    del self.held[name]

    @rule(name=NAMES)
    def hold(self, name):
        if name in self.model:
            self.make_way(name)
            self.swap_in(name)

    def swap_in(self, name: str) -> None:
        def call() -> None:
            self.held[name] = self.swapper.swap_in(name), self.model[name]

        if self.attempt(call):
            self.check(name)

    @rule(name=NAMES, changed=st.booleans(), share=st.none() | st.floats(0, 1))
    def release(self, name, changed, share):
        if name in self.held:
            self.check(name)
            count = None if share is None else int(share * self.room[name])
            if changed:
                self.write(name, count)
                self.model[name] = self.held[name][1]
            self.swapper.release(name, changed=changed, nbytes=count)
            del self.held[name]

    @rule(name=NAMES)
    def discard(self, name):
        if name in self.model:
            self.swapper.discard(name)
            self.forget(name)

    @rule(names=st.lists(NAMES, min_size=1, max_size=8))
    def change_provisionally(self, names):
        for name in names:
            if name in self.model and name not in self.held:
                self.make_way(name)
                stored = self.attempt(lambda name=name: self.swapper.write_back(name))
                self.swap_in(name)
                if name in self.held:
                    if stored and self.model[name] != b"":
                        self.swapper.retain(name)
                        self.retained.setdefault(name, self.model[name])
                    self.release(name=name, changed=True, share=None)

    @rule(names=st.lists(NAMES, min_size=1, max_size=8), back=st.booleans())
    def decide(self, names, back):
        for name in names:
            if name in self.held:
                self.let_go(name)
            if not back:
                self.swapper.commit(name)
            elif name in self.retained:
                self.swapper.roll_back(name)
                self.model[name] = self.retained[name]
                event("rolled back")
            else:
                with pytest.raises(UsageError, match="nothing is retained"):
                    self.swapper.roll_back(name)
            self.retained.pop(name, None)

    @rule(names=st.lists(NAMES, max_size=5))
    def prefetch(self, names):
        self.swapper.prefetch(names)

    @rule(name=NAMES, discard=st.booleans(), nbytes=SIZES)
    def change_of_mind(self, name, discard, nbytes):
        """The prefetched value is not used after all."""
        self.swapper.prefetch([name])
        if discard:
            self.discard(name)
        else:
            self.swap_out(name, nbytes)

    @rule()
    def step(self):
        self.swapper.step()

    @rule(pages=st.integers(1, 4))
    def grow(self, pages):
        before = {name: tensor.data_ptr() for name, (tensor, _) in self.held.items()}
        self.swapper.grow(min(self.pool.nbytes + pages * PAGE, 24 * PAGE))
        assert {name: tensor.data_ptr() for name, (tensor, _) in self.held.items()} == before

    @rule()
    def flush(self):
        if self.attempt(self.swapper.flush):
            for name, expected in self.model.items():
                if name not in self.held and expected:
                    out = torch.empty(len(expected), dtype=torch.uint8)
                    if self.attempt(lambda name=name, out=out: self.store.get(name, out).wait()):
                        assert out.numpy().tobytes() == expected

    @invariant()
    def the_books_are_right(self):
        if not hasattr(self, "swapper"):
            return
        assert set(self.swapper.names()) == set(self.model)
        assert {name: self.swapper.nbytes(name) for name in self.model} == self.room
        stats = self.swapper.stats()
        assert stats.resident_bytes <= stats.peak_bytes <= self.pool.nbytes
        for name in self.held:
            self.check(name)

    def teardown(self):
        if not hasattr(self, "swapper"):
            return
        if self.small:
            self.resize_drive(None)
        for name in list(self.held):
            self.let_go(name)
        for name, expected in self.model.items():
            for _ in range(40):  # every fault is over some time
                if self.attempt(lambda name=name: self.swap_in_raising(name)):
                    break
            tensor, _ = self.held[name]
            assert tensor.numpy()[: len(expected)].tobytes() == expected
            self.let_go(name)
        event(f"read from the drive: {self.swapper.stats().misses > 0}")
        for resource in (self.swapper, self.store, self.engine):
            try:
                resource.close()
            except OffloadError:
                assert self.faulty or self.small
        self.pool.close()
        self.directory.cleanup()

    def swap_in_raising(self, name: str) -> None:
        self.held[name] = self.swapper.swap_in(name), self.model[name]


class FaultySwapperMachine(SwapperMachine):
    """The same on a drive that fails now and then."""

    faulty = True


class SmallDriveMachine(SwapperMachine):
    """The same on a drive without space for all values."""

    small = True


def full(nbytes: int) -> None:
    raise NoSpaceError(
        errno.ENOSPC, "full", operation="reservation", path="", offset=0, nbytes=nbytes, done=0
    )


@pytest.mark.parametrize(
    "machine",
    [SwapperMachine, FaultySwapperMachine, SmallDriveMachine],
    ids=["sound", "failing", "small"],
)
def test_the_swapper_is_a_dict_of_bytes(machine: type[SwapperMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
