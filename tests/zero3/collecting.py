"""Drops engines for the garbage collector to find in the midst of another one's calls, and prints
one JSON object: what `test_collected.py` asks for.

The one argument is a JSON object: "directory"; "case", as `launch.Case` has it; "destroyed", whether
`destroy` was called first. Otherwise a `__del__` of the program's calls it: DeepSpeed's hooks keep
an engine that the program does not destroy.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import weakref
from typing import Any

from launch import Case
from training import Training, Watch, begin

STEPS = 4


class Program:
    """Has an *engine*, and is garbage for the collector alone."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.itself = self

    def __del__(self) -> None:
        self.engine.destroy()


class Collector:
    """Runs at one call to the engine of a store, which its store and, mostly, a swapper have their
    locks for.
    """

    def __init__(self) -> None:
        from nvme_offload.io.engine import Engine

        self.is_due = False
        self.amid = 0  # calls that it ran in
        self.then = contextlib.ExitStack()  # what to do after it ran
        submit = Engine._submit_at

        def submitting(*args: Any, **named: Any) -> Any:
            if self.is_due:
                self.amid += 1
                self.run()
            return submit(*args, **named)

        Engine._submit_at = submitting  # type: ignore[method-assign]

    def run(self) -> None:
        self.is_due = False
        gc.collect()
        self.then.close()


def main(request: dict[str, Any]) -> None:
    answers, deepspeed = begin(request)
    watch = Watch()
    watch.enable([])
    training = Training(Case(**request["case"]), request["directory"], True, watch)
    collector = Collector()
    gc.disable()  # but where it is asked for

    def drop(amid_steps: bool) -> weakref.ref[Any]:
        """An engine that is garbage after some steps, and not collected; with pending updates where
        possible.
        """
        engine = training._engine(1)
        training._step(engine, 0, 0)
        # the making of an engine waits for all updates
        if amid_steps and engine.optimizer.overlap is not None and not request["destroyed"]:
            collector.then.enter_context(engine.optimizer.overlap.paused())
        training._step(engine, 1, 0)
        if request["destroyed"]:
            engine.destroy()
        else:
            Program(engine)
        return weakref.ref(engine)

    def life(drops: bool) -> dict[str, Any]:
        """An engine's end, where others are collected in its making and in its steps."""
        dropped = []

        def garbage(amid_steps: bool) -> None:
            if drops:
                dropped.append(drop(amid_steps))
                collector.is_due = True

        garbage(False)
        engine = training._engine(0)
        for step in range(STEPS):
            garbage(True)
            training._step(engine, step, 0)
            collector.run()
        tier = engine.optimizer.tier
        end = training._final(engine)
        gc.collect()  # those that a `__del__` has destroyed meanwhile
        assert all(one() is None for one in dropped)
        held = {
            "values": sorted(
                name.partition("/")[0].rstrip("0123456789")
                for name in tier.swapper._schedule.names()
            ),
            "scratch": len(tier._scratch),
            "needed": tier._needed_bytes,
        }
        engine.destroy()
        return {"end": end, "held": held}

    alone = life(False)
    gc.collect()
    result = {"alone": alone, "among": life(True), "amid": collector.amid}
    print(json.dumps(result), file=answers, flush=True)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
