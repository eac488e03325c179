"""`LateCopies` replaces the copies of a GPU in `GradientValues`."""

from __future__ import annotations

import torch


class LateCopies:
    """Copies of a GPU that are made as late as possible: when a caller waits for them."""

    def __init__(self):
        self.events = []

    def event(self, make):
        self.events.append(Event(make))
        return self.events[-1]

    def bring(self, into, source):
        into.copy_(source)
        before = source.clone()

        def unchanged():
            assert torch.equal(source, before), "read after its release"

        return self.event(unchanged)

    def send(self, place, values):
        before = values.clone()
        return self.event(lambda: place.copy_(before))

    def add(self, place, values, change):
        # copies to the GPU read immediately, copies from it write late
        total = place.clone()

        def make():
            change(total)
            place.copy_(total.add_(values))

        return self.event(make), total


class Event:
    def __init__(self, make):
        self.make = make

    def query(self):
        return self.make is None

    @torch.no_grad()
    def synchronize(self):
        make, self.make = self.make, None
        if make is not None:
            make()
