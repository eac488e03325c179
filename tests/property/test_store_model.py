"""The store against a dict: puts, gets, deletes, values that are retained and returned to, of odd
sizes in any order, over one to three drives.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from patience import PATIENCE

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.store import slabs
from nvme_offload.store.store import TensorStore
from nvme_offload.store.transfer import Transfer

PAGE = 4096
NAMES = st.sampled_from(["a", "b", "c", "d", "e/f", ""])
SIZES = st.one_of(
    st.integers(0, 10),
    st.integers(0, 5 * PAGE),
    st.sampled_from([PAGE, 8 * PAGE, 8 * PAGE + 1]),
    st.integers(0, 80 * PAGE),
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors are striped too, and slabs are many."""
    monkeypatch.setattr(slabs, "_GROWTH_BYTES", 64 * PAGE)
    monkeypatch.setattr(slabs, "_STRIPED_FROM_BYTES", 6 * PAGE)
    monkeypatch.setattr(slabs, "_STRIPE_UNIT_BYTES", PAGE)


def value_of(seed: int, size: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.model: dict[str, bytes] = {}
        self.retained: dict[str, bytes] = {}
        self.replaced: set[str] = set()  # names with a later value
        self.under_way: list[tuple[Transfer, npt.NDArray[np.uint8], bytes]] = []

    @initialize(
        weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=3), checksum=st.booleans()
    )
    def make(self, weights: list[float], checksum: bool) -> None:
        paths = [self.directory / str(number) for number in range(len(weights))]
        for path in paths:
            path.mkdir()
        config = AioConfig(block_size=2 * PAGE, queue_depth=4, thread_count=2, direct="auto")
        try:
            self.store = TensorStore(paths, config, weights=weights, checksum=checksum)
        except UnsupportedError:
            self.store = TensorStore(paths, config, weights=weights)

    @rule(name=NAMES, size=SIZES, seed=st.integers(0, 1 << 30))
    def put(self, name: str, size: int, seed: int) -> None:
        data = value_of(seed, size)
        self.under_way.append((self.store.put(name, data), data, data.tobytes()))
        self.model[name] = data.tobytes()
        if name in self.retained:
            self.replaced.add(name)

    @rule(name=NAMES)
    def retain(self, name: str) -> None:
        if name not in self.model:
            with pytest.raises(UsageError):
                self.store.retain(name)
            return
        self.store.retain(name)
        self.retained.setdefault(name, self.model[name])

    @rule(name=NAMES, back=st.booleans())
    def commit_or_roll_back(self, name: str, back: bool) -> None:
        act = self.store.roll_back if back else self.store.commit
        if name not in self.retained:
            with pytest.raises(UsageError, match="is retained"):
                act(name)
            return
        act(name)
        if back:
            self.model[name] = self.retained[name]
        self.forget_retained(name)

    def forget_retained(self, name: str) -> None:
        self.retained.pop(name, None)
        self.replaced.discard(name)

    @rule(name=NAMES)
    def get(self, name: str) -> None:
        if name not in self.model:
            with pytest.raises(UsageError):
                self.store.get(name, bytearray())
            return
        out = np.zeros(len(self.model[name]), np.uint8)
        self.under_way.append((self.store.get(name, out), out, self.model[name]))

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if self.model.pop(name, None) is None:
            with pytest.raises(UsageError):
                self.store.delete(name)
        else:
            self.store.delete(name)
            self.forget_retained(name)

    @rule(size=st.integers(0, 200 * PAGE))
    def reserve(self, size: int) -> None:
        self.store.reserve(size)
        assert self.store.used_bytes + self.store.free_bytes >= size

    @rule()
    def settle(self) -> None:
        """Wait for all, and check that each got its bytes and that no value takes more space than it
        needs.
        """
        for ticket, out, expected in self.under_way:
            assert ticket.wait(PATIENCE) == len(expected)
            assert out.tobytes() == expected
        self.under_way.clear()
        stored = [*self.model.values(), *(self.retained[name] for name in self.replaced)]
        assert self.store.used_bytes == sum(-(-len(value) // PAGE) * PAGE for value in stored)

    @invariant()
    def names_and_sizes(self) -> None:
        if hasattr(self, "store"):
            assert {name: self.store.nbytes(name) for name in self.store.names()} == {
                name: len(value) for name, value in self.model.items()
            }

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                with self.store:
                    self.settle()
                    for name in self.model:
                        self.get(name)
                    self.settle()
        finally:
            shutil.rmtree(self.directory)


def test_a_store_is_a_dict() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=30, stateful_step_count=30, deadline=None)
    )
