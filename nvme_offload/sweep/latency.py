"""How long blocks take: requests of one block each, timed from submitting to done, while the queues
are kept as full as in a trial.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvme_offload.errors import WaitTimeout
from nvme_offload.hardware.profile import Latency, Setting
from nvme_offload.io.engine import Engine

if TYPE_CHECKING:
    from .trial import Rig

RAMP_SECONDS = 0.04  # in which the queues fill before anything is counted
LOOK_SECONDS = 0.0001  # between two looks at what is finished
LEAST_FOR_P999 = 1000  # blocks


def block_seconds(rig: Rig, setting: Setting, phase: str, seconds: float) -> list[float]:
    """What the blocks took that were submitted in a window of *seconds*, on *rig*'s files; what
    they bring is not verified.

    Raises: as `Rig.run`.
    """
    directions = ("read", "write") if phase == "mixed" else (phase,)
    depth = max(1, setting.queue_depth * setting.thread_count // len(directions))
    each = rig.request_bytes // setting.block_size
    taken: list[float] = []
    with rig.open_engine(setting) as engine:
        if not isinstance(engine, Engine):
            return []  # it does not tell of single requests
        places = itertools.cycle(range(0, rig.file_bytes, setting.block_size))
        blocks = [
            (
                direction,
                rig.file(direction),
                ring[index // each].data[index % each * setting.block_size :][: setting.block_size],
            )
            for direction in directions
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
                    oldest.wait(LOOK_SECONDS)
    return taken


def percentiles(setting: Setting, phase: str, seconds: Sequence[float]) -> Latency:
    """*seconds*, one at the least, as a profile keeps them."""
    ordered = sorted(seconds)

    def share(part: float) -> float:
        return 1000 * ordered[min(len(ordered), max(1, math.ceil(part * len(ordered)))) - 1]

    # the slowest of fewer blocks would pass for it
    rare = share(0.999) if len(ordered) >= LEAST_FOR_P999 else None
    return Latency(
        phase, setting, len(ordered), share(0.50), share(0.95), share(0.99), share(1.0), rare
    )
