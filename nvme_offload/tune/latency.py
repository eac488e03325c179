"""The latency of blocks: requests of one block each, timed while the queues are as full as in a
trial.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nvme_offload.errors import WaitTimeout
from nvme_offload.hardware.profile import Latency, Setting
from nvme_offload.io.engine import Engine

if TYPE_CHECKING:
    from .trial import Rig

RAMP_SECONDS = 0.04  # in which the queues fill before anything is counted
POLL_SECONDS = 0.0001  # between two polls for finished requests
LEAST_FOR_P999 = 1000  # blocks


def block_seconds(rig: Rig, setting: Setting, phase: str, seconds: float) -> list[float]:
    """The latencies in seconds of the blocks that were submitted in a window of *seconds*, on
    *rig*'s files. Their data are not verified. Raises: as `Rig.run`.
    """
    ways = ("read", "write") if phase == "mixed" else (phase,)
    depth = max(1, setting.queue_depth * setting.thread_count // len(ways))
    each = rig.request_bytes // setting.block_size
    taken: list[float] = []
    with rig.open_engine(setting) as engine:
        if not isinstance(engine, Engine):
            return []  # it does not report single requests
        places = itertools.cycle(range(0, rig.file_bytes, setting.block_size))
        blocks = [
            (
                direction,
                rig.file(direction),
                ring[index // each].data[index % each * setting.block_size :][: setting.block_size],
            )
            for direction in ways
            for ring in [rig.ring(direction, -(-depth // each))]
            for index in range(depth)
        ]
        begin = time.monotonic() + RAMP_SECONDS
        end = begin + seconds

        def submit(place: int) -> float:
            direction, file, buffer = blocks[place]
            move = engine.read if direction == "read" else engine.write
            tickets[place] = move(buffer, file, next(places))
            return time.monotonic()

        tickets = dict.fromkeys(range(len(blocks)))
        submitted = [submit(place) for place in range(len(blocks))]
        while (now := time.monotonic()) < end or len(taken) == 0:
            for place, ticket in tickets.items():
                if ticket is not None and ticket.done():
                    ticket.wait()
                    if submitted[place] >= begin:
                        taken.append(now - submitted[place])
                    submitted[place] = submit(place)
            oldest = tickets[min(range(len(blocks)), key=submitted.__getitem__)]
            if oldest is not None:
                with contextlib.suppress(WaitTimeout):
                    oldest.wait(POLL_SECONDS)
    return taken


def percentiles(setting: Setting, phase: str, seconds: Sequence[float]) -> Latency:
    """The percentiles of *seconds*, which has one value at least."""
    shares = 0.50, 0.95, 0.99, 1.0, 0.999
    found = 1000 * np.quantile(seconds, shares, method="inverted_cdf")
    p50, p95, p99, longest, rare = found.tolist()
    # of fewer blocks it would be the slowest one
    rare = rare if len(seconds) >= LEAST_FOR_P999 else None
    return Latency(phase, setting, len(seconds), p50, p95, p99, longest, rare)
