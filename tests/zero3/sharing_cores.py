"""Gives DeepSpeed a model in several scenarios, on the cores of the one argument, a JSON
object, and prints for each the number of threads before and after, and the log: see
`test_cores.py`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from logging.handlers import BufferingHandler
from typing import Any

import torch
from training import begin


def main(request: dict[str, Any]) -> None:
    os.sched_setaffinity(0, request["cores"])
    answers, deepspeed = begin(request)
    from nvme_offload import zero3

    zero3.enable()
    for scenario in request["scenarios"]:
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(scenario["environment"])
        # as torch, when it is imported
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(request["cores"]))))
        before, handler = torch.get_num_threads(), BufferingHandler(1000)
        logging.getLogger("nvme_offload").addHandler(handler)
        model = torch.nn.Linear(64, 64)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=scenario["config"]
        )
        engine.destroy()
        logging.getLogger("nvme_offload").removeHandler(handler)
        log = [record.getMessage() for record in handler.buffer]
        print(json.dumps([before, torch.get_num_threads(), log]), file=answers, flush=True)
        for name in scenario["environment"]:
            del os.environ[name]
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
