"""`python ranks_save_twice.py DEVICE DIRECTORY`, of which two run together: save the states of a
sharded model to one path, twice, in the directory that the environment names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ranks import train
from two_ranks import CASES, case, main, ours, sharded

CASES.clear()  # the cases of `ranks`


@case
def saved_twice() -> list[Any]:
    place = Path(os.environ["KILL_POINTS_ROOT"])
    net = sharded()
    with ours(net.parameters()) as optimizer:
        for first in (0, 3):
            train(net, optimizer, first=first)
            optimizer.save(place / "saved")
    return []


if __name__ == "__main__":
    main()
