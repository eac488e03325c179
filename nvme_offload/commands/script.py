"""The training script of a plan, to paste: `templates/script.py.j2` with the values of the plan."""

from __future__ import annotations

import json

from nvme_offload.planning.advice import Question
from nvme_offload.planning.paste import CLIP_NORM, learning_rate
from nvme_offload.planning.placement import parameters_budget
from nvme_offload.planning.plan import DESCRIBED_PATH, Plan
from nvme_offload.planning.traffic import WEIGHT_BYTES

_WEIGHTS = '"/models/safetensors"'  # of a model that is read from files


def script(plan: Plan, question: Question) -> str:
    """A training script for *plan*, without the definitions of `model`, a torch.nn.Module, and of
    `batches`, the arguments of its forward passes, whose result has the attribute `loss`.

    With DeepSpeed it reads the configuration of `paste.ds_config` from "ds_config.json".
    """
    import jinja2

    strategy, machine, world = plan.strategy, question.machine, question.world
    work, plain, streams = question.work, strategy.door == "plain", strategy.streams
    trains, shards = strategy.optimizer is not None, plain and world.size > 1
    offloads = trains and work.offloads
    paths = [drive.path for drive in machine.drives] or [DESCRIBED_PATH]
    budget = plan.budget_bytes or 0
    ours = ["Offload"] * streams + ["NVMeOptimizer"] * (plain and not streams)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nvme_offload.commands"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    made = environment.get_template("script.py.j2").render(
        strategy._asdict(),
        world=world,
        work=work,
        gpu=machine.gpu,
        drives=machine.drives,
        plain=plain,
        streams=streams,
        shards=shards,
        trains=trains,
        recomputes=trains and work.recomputes,
        offloads=offloads,
        in_backward=plain and strategy.updates in ("provisional", "in both", "in backward"),
        several=plain and work.accumulation > 1,
        ours=ours + ["save_on_nvme"] * offloads,
        too_large=plain
        and WEIGHT_BYTES * question.model.parameters * world.ranks > machine.host_bytes,
        paths=json.dumps(paths[0] if len(paths) == 1 else paths),
        budget=budget,
        own_budget=parameters_budget(question.model, budget) if streams else 0,
        weights=_WEIGHTS,
        learning_rate=f"{learning_rate(question):.0e}".replace("e-0", "e-"),
        clip_norm=CLIP_NORM,
    )
    return made.lstrip("\n")
