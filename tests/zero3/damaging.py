"""Saves a small checkpoint once, and loads it with one fault after the other in its files; prints
what came of each kind as JSON.

The one argument is a JSON object as `checkpointing.main` takes it, with "count", how many faults,
and "seed".
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from launch import Case
from training import Training, Watch, begin

sys.path.append(str(Path(__file__).parents[1] / "faults"))

import damage


def main(request: dict[str, Any]) -> None:
    answers, deepspeed = begin(request)
    from nvme_offload import zero3
    from nvme_offload.errors import OffloadError

    zero3.enable()
    training = Training(Case(**request["cases"][0]), request["directory"], True, Watch())
    engine = training._engine(0)
    training._step(engine, 0, 0)
    place = Path(request["directory"], "checkpoints")
    engine.save_checkpoint(str(place), tag="step1", client_state={"reported": 1})
    saved = training._final(engine)
    whole = {
        path: path.read_bytes() for path in [place / "latest", *sorted((place / "step1").iterdir())]
    }

    def check() -> bool:
        path, state = engine.load_checkpoint(str(place))
        return (
            path is not None
            and state["reported"] == 1
            and engine.global_steps == 1
            and training._final(engine) == saved
        )

    draw = random.Random(request["seed"])
    ends: Counter[str] = Counter()
    wrong = [] if check() else ["the whole one"]
    while sum(ends.values()) < request["count"]:
        path = draw.choice(list(whole))
        kind = draw.choice(damage.TEXT if path.suffix == ".json" else damage.BINARY)
        data = kind(whole[path], draw)
        if data == whole[path]:
            continue
        path.write_bytes(data)
        what = f"fault {sum(ends.values())}, {kind.__name__} in {path.name}"
        try:
            same = check()
        except OffloadError as error:
            end = "refused" if path.name in str(error) else "refused without the file's name"
        except Exception as error:
            end = "untyped"
            what += f": {error!r}"
        else:
            end = "the same" if same else "accepted silently"
        ends[end] += 1
        if end not in ("refused", "the same"):
            wrong.append(what)
        path.write_bytes(whole[path])
    if not check():
        wrong.append("the whole one in the end")
    print(json.dumps({"ends": ends, "wrong": wrong[:20]}), file=answers, flush=True)
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
