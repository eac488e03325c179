"""Random operations of a store, every byte of every get compared: python tests/faults/soak.py
DIRECTORY --operations 1000000 --backend posix.

With a sanitizer: tools/sanitized-tests builds into build/address; then

    LD_PRELOAD=$(cc -print-file-name=libasan.so):$(cc -print-file-name=libstdc++.so.6) ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
        PYTHONPATH=build/address python tests/faults/soak.py DIRECTORY ...
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nvme_offload
from nvme_offload.hardware.config import BACKENDS, AioConfig
from nvme_offload.store.store import TensorStore
from nvme_offload.store.transfer import Transfer

NAMES = 200
IN_FLIGHT = 16
LARGEST = 1 << 20
OPERATIONS_OF_A_STORE = 20_000  # then another one, with other settings

# every value is a part of these
BYTES = np.random.default_rng(1).integers(0, 256, 4 << 20, dtype=np.uint8)


class Soak:
    """One store, its expected contents, and its transfers in flight."""

    def __init__(self, store: TensorStore, directory: Path, chance: random.Random) -> None:
        self.store = store
        self.directory = directory
        self.chance = chance
        self.expected: dict[str, tuple[int, int]] = {}  # name -> where in BYTES, and how many
        # a ticket, the bytes read, the expected bytes
        self.under_way: deque[tuple[Transfer, Any, Any]] = deque()
        self.counts: Counter[str] = Counter()

    def size(self) -> int:
        kind = self.chance.random()
        if kind < 0.5:
            return self.chance.randint(0, 4095)
        if kind < 0.7:
            return 4096 * self.chance.randint(1, 8)
        return (
            self.chance.randint(4097, 70_001)
            if kind < 0.98
            else self.chance.randint(70_002, LARGEST)
        )

    def memory(self, nbytes: int) -> Any:
        """An array, or a tensor, at an address that is aligned to nothing in particular."""
        offset = self.chance.choice((0, 0, 1, 64))
        if self.chance.random() < 0.5:
            return np.empty(nbytes + offset, np.uint8)[offset:]
        return torch.empty(nbytes + offset, dtype=torch.uint8)[offset:]

    def operate(self) -> None:
        kind = self.chance.random()
        name = f"n{self.chance.randrange(NAMES)}"
        if kind < 0.45 or not self.expected:
            known = self.expected.get(name)
            nbytes = known[1] if known and self.chance.random() < 0.6 else self.size()
            start = self.chance.randrange(BYTES.size - nbytes)
            buffer = self.memory(nbytes)
            np.asarray(buffer)[:] = BYTES[start : start + nbytes]
            self.counts["overwrites" if known else "puts"] += 1
            self.under_way.append((self.store.put(name, buffer), None, None))
            self.expected[name] = start, nbytes
        elif kind < 0.95:
            name = name if name in self.expected else self.chance.choice(list(self.expected))
            start, nbytes = self.expected[name]
            buffer = self.memory(nbytes)
            self.counts["gets"] += 1
            self.under_way.append(
                (self.store.get(name, buffer), buffer, BYTES[start : start + nbytes])
            )
        else:
            name = name if name in self.expected else self.chance.choice(list(self.expected))
            self.counts["deletes"] += 1
            self.store.delete(name)
            del self.expected[name]
        while len(self.under_way) > self.chance.randint(0, IN_FLIGHT):
            self.settle()

    def settle(self) -> None:
        ticket, read, wanted = self.under_way.popleft()
        ticket.wait()
        if read is not None and not np.array_equal(np.asarray(read), wanted):
            raise SystemExit(f"other bytes of {ticket.name!r} after {dict(self.counts)}")
        self.counts["bytes checked"] += 0 if read is None else len(wanted)

    def finish(self) -> None:
        while self.under_way:
            self.settle()
        assert sorted(self.store.names()) == sorted(self.expected)
        for name, (start, nbytes) in self.expected.items():
            buffer = self.memory(nbytes)
            self.under_way.append(
                (self.store.get(name, buffer), buffer, BYTES[start : start + nbytes])
            )
            self.settle()


def stores(directory: Path, backend: str, chance: random.Random) -> Iterator[TensorStore]:
    while True:
        config = AioConfig(
            backend=backend,
            block_size=chance.choice((4096, 32 << 10, 1 << 20)),
            queue_depth=chance.choice((1, 4, 32)),
            thread_count=chance.choice((1, 2)),
            direct="auto",
        )
        with TensorStore(directory, config, checksum=chance.random() < 0.5) as store:
            yield store


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--backend", choices=BACKENDS, default="libaio")
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    print(f"{nvme_offload.__file__}: {asked.backend}, seed {asked.seed}", flush=True)
    began, done, counts = time.monotonic(), 0, Counter[str]()
    with contextlib.closing(stores(asked.directory, asked.backend, chance)) as made:
        while done < asked.operations:
            soak = Soak(next(made), asked.directory, chance)
            for _ in range(min(OPERATIONS_OF_A_STORE, asked.operations - done)):
                soak.operate()
                done += 1
            soak.finish()
            counts += soak.counts
            print(
                f"{done} operations, {time.monotonic() - began:.0f} s: {dict(counts)}", flush=True
            )


if __name__ == "__main__":
    main()
