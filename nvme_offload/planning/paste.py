"""Output of a plan to paste: a DeepSpeed configuration, or a training script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..ds_config.edit import aio_section
from ..hardware import gpu_models
from .advice import Question
from .placement import parameters_budget
from .plan import DESCRIBED_PATH, Machine, Plan, measured_together
from .traffic import WEIGHT_BYTES

# Usual ones for training all weights of a pretrained model, and for adapters next to frozen weights.
_LEARNING_RATE, _ADAPTER_LEARNING_RATE = 1e-5, 1e-4
_CLIP_NORM = 1.0
_WEIGHTS = '"/models/safetensors"'  # of a model that is read from files


def ds_config(plan: Plan, question: Question) -> dict[str, Any]:
    """A DeepSpeed configuration for *plan*, complete except for the learning rate, which the user edits.

    The plan fits, and its door is not "plain".
    """
    strategy, machine, work = plan.strategy, question.machine, question.work
    zero: dict[str, Any] = {"stage": strategy.stage}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        _precision(machine): {"enabled": True},
        # required by Lightning's test and predict
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": _learning_rate(question)}},
        "gradient_clipping": _CLIP_NORM,
        "zero_optimization": zero,
    }
    if work.accumulation > 1:  # Lightning refuses this key; it sets it from its Trainer
        config["gradient_accumulation_steps"] = work.accumulation
    if strategy.optimizer is None:
        del config["optimizer"], config["gradient_clipping"]
    for key, place in (
        ("offload_optimizer", strategy.optimizer),
        ("offload_param", strategy.parameters),
    ):
        if place == "host":
            zero[key] = {"device": "cpu", "pin_memory": True}
        elif place == "drive":
            zero[key] = {"device": "nvme", "nvme_path": machine.drives[0].path, "pin_memory": True}
    if strategy.parameters == "drive" and not strategy.ours:
        # otherwise DeepSpeed keeps the first billion parameters in host memory
        zero["offload_param"] |= {"max_in_cpu": 0}
    profile = machine.drives[0].profile if strategy.uses_drive else None
    if profile:
        config["aio"] = aio_section(profile)
    if strategy.ours:
        section: dict[str, Any] = {"host_memory": plan.budget_bytes}
        if strategy.state_format != "exact":
            section["state_format"] = strategy.state_format
        if profile and profile.chosen.backend != "libaio":
            section["backend"] = profile.chosen.backend
        if len(machine.drives) > 1:
            section["paths"] = [drive.path for drive in machine.drives]
            if machine.speeds:
                section["weights"] = weights(machine)
        config["nvme_offload"] = section
    return config


def script(plan: Plan, question: Question) -> str:
    """A training script for *plan*, without the definitions of `model`, a torch.nn.Module, and of
    `batches`, the arguments of its forward passes, whose result has the attribute `loss`.

    With DeepSpeed it reads the configuration of `ds_config` from "ds_config.json".
    """
    return "\n".join(_script(plan, question)).lstrip("\n") + "\n"


_LAYERS = """\
lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
layers = max(lists, key=len, default=())
"""
# the name is another one before transformers 5
_CHECKPOINTING = """\
enable = getattr(model, "activation_checkpointing_enable", None)
enable = enable or getattr(model, "gradient_checkpointing_enable", None)
if enable:  # a model of transformers
    enable({"use_reentrant": False})
else:
    for layer in layers:
        again = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        layer.forward = again
"""
_SHARDING = """\
parts = list(layers)
named = list(model.named_parameters(remove_duplicate=False))
if len(named) == len(list(model.parameters())):  # no weight is used twice
    inside = {each for layer in layers for each in layer.modules()}
    kinds = torch.nn.Embedding, torch.nn.Linear
    outside = [each for each in model.modules() if each not in inside]
    parts += [each for each in outside if isinstance(each, kinds)]
for part in parts:
    fully_shard(part)
fully_shard(model)
"""
_WITHOUT_ROOM = {  # by the kind of the weights
    "streams": f"""\
# host memory cannot have it: make `model` on the meta device, and give {_WEIGHTS}
# the directory of its files (docs/streaming.md, "From files of safetensors")
""",
    "shards": """\
# all ranks together cannot have it in host memory: make `model` under torch.device('meta'),
# and load its weights after fully_shard (torch.distributed.checkpoint.state_dict)
""",
    "": "# host memory cannot have it: make `model` on the GPU, under torch.device('cuda')",
}
_ZERO_INIT = """\
# the memory of the plan is for a `model` that is made here, under
# deepspeed.zero.Init(config_dict_or_path="ds_config.json")
"""
_SETTINGS = {  # of `NVMeOptimizer`, by `Strategy.updates`
    "in forward": ("overlap_step=True",),
    "host gradients": ('accumulate="host"',),
    "provisional": ('step_in_backward="provisional"',),
    "in both": ('step_in_backward="provisional"', "overlap_step=True"),
    "in backward": ("step_in_backward=True",),
}


def _script(plan: Plan, question: Question) -> Iterator[str]:
    strategy, machine, world = plan.strategy, question.machine, question.world
    work, plain, streams = question.work, strategy.door == "plain", strategy.streams
    trains = strategy.optimizer is not None
    shards = plain and world.size > 1
    paths = [drive.path for drive in machine.drives] or [DESCRIBED_PATH]
    where = json.dumps(paths[0] if len(paths) == 1 else paths)
    recomputes, offloads = trains and work.recomputes, trains and work.offloads
    in_backward = plain and strategy.updates in ("provisional", "in both", "in backward")
    count = work.accumulation if plain else 1
    several_nodes = world.nodes > 1

    def lines(condition: object, *texts: str) -> Iterator[str]:
        for text in texts if condition else ():
            yield from text.splitlines() or [""]

    # imports
    hosts = f"--hostfile HOSTS --num_nodes {world.nodes} " * several_nodes
    yield from lines(not plain, f"# deepspeed {hosts}--num_gpus {world.ranks} train.py")
    hosts = f"--nnodes {world.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    hosts *= several_nodes
    yield from lines(shards, f"# torchrun {hosts}--nproc-per-node {world.ranks} train.py")
    yield from lines(in_backward and count > 1, "import contextlib")
    yield from lines(recomputes, "import functools")
    yield from lines(shards and machine.gpu, "import os")
    yield from ("", "import torch")
    yield from lines(shards, "import torch.distributed as dist")
    yield from lines(shards, "from torch.distributed.fsdp import fully_shard")
    yield from lines(recomputes, "from torch.utils.checkpoint import checkpoint")
    yield from lines(not plain, "import deepspeed")
    yield from lines(strategy.door == "zero3", "import nvme_offload.zero3")
    ours = ["Offload"] * streams + ["NVMeOptimizer"] * (plain and not streams)
    ours += ["save_on_nvme"] * offloads
    yield from lines(ours, f"from nvme_offload import {', '.join(ours)}")
    yield ""

    # the model
    yield from lines(strategy.door == "zero3", "nvme_offload.zero3.enable()")
    yield from lines(strategy.stage == 3 and not plain and world.zero_init, _ZERO_INIT)
    local = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
    yield from lines(shards and machine.gpu, local)
    yield from lines(shards, f'dist.init_process_group("{"nccl" if machine.gpu else "gloo"}")')
    too_large = WEIGHT_BYTES * question.model.parameters * world.ranks > machine.host_bytes
    brought = "streams" if streams else "shards" if shards else ""
    yield from lines(plain and too_large, _WITHOUT_ROOM[brought])
    to_gpu = '"cuda", ' if machine.gpu and not brought else ""
    yield from lines(plain, f"model.to({to_gpu}torch.bfloat16)")
    yield from lines(trains, "model.train()")
    # so that no memory is kept for an optimizer
    yield from lines(streams and not trains, "model.eval().requires_grad_(False)")
    yield from lines(shards or recomputes, _LAYERS)
    yield from lines(recomputes, _CHECKPOINTING)
    yield from lines(shards, _SHARDING)
    yield ""

    # the optimizer, or the engine
    budget = plan.budget_bytes or 0
    yield from lines(
        plain and not machine.drives, "# any directory that exists: nothing is written there"
    )
    if streams:
        own = parameters_budget(question.model, budget)
        device = "cuda" if machine.gpu else "cpu"
        share = f", host_memory={own}" if trains else ""
        files = f", weights={_WEIGHTS}" if too_large else ""
        yield f"memory = Offload({where}, host_memory={budget})"
        yield f'memory.parameters(model, "{device}"{share}{files})'
        budget -= own
    if plain and trains:
        arguments = ["model.parameters()", "torch.optim.AdamW"]
        arguments += [f"paths={where}"] * (not streams)
        arguments.append(f"host_memory={budget}")
        arguments += [f'state_format="{strategy.state_format}"'] * (
            strategy.state_format != "exact"
        )
        arguments += _SETTINGS.get(strategy.updates, ())
        arguments.append(f"lr={_learning_rate(question):.0e}".replace("e-0", "e-"))
        arguments.append("fused=True")  # packed states are then updated in one pass
        yield f"optimizer = {'memory.optimizer' if streams else 'NVMeOptimizer'}("
        yield from (f"    {each}," for each in arguments)
        yield ")"
    elif not plain:
        yield 'engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")'
    saving = f"offload = save_on_nvme({where}, host_memory={work.activation_host_bytes})"
    yield from lines(offloads, saving)
    yield ""

    # the steps
    moved = 'batch = {key: value.to("cuda") for key, value in batch.items()}'
    if not trains:
        yield from lines(not plain, "engine.eval()")
        yield f"with torch.{'inference_mode' if plain else 'no_grad'}():"
        yield "    for batch in batches:"
        yield from lines(machine.gpu, f"        {moved}")
        yield f"        output = {'model' if plain else 'engine'}(**batch)"
        yield from lines(plain, "memory.close()")
        return
    several = count > 1
    yield f"for {'number, batch in enumerate(batches, 1)' if several else 'batch in batches'}:"
    yield from lines(machine.gpu, f"    {moved}")
    yield from lines(several, f"    last = number % {count} == 0")
    indent = "    "
    if several and in_backward:
        yield "    with contextlib.nullcontext() if last else optimizer.no_sync():"
        indent *= 2
    yield from lines(offloads, f"{indent}with offload:")
    divided = f" / {count}" if several else ""
    inner = indent + "    " * offloads
    yield f"{inner}loss = {'model' if plain else 'engine'}(**batch).loss{divided}"
    if not plain:
        yield from ("    engine.backward(loss)", "    engine.step()")
        return
    yield f"{indent}loss.backward()"
    yield from lines(several, "    if not last:", "        continue")
    if strategy.updates == "host gradients":
        yield f"    optimizer.clip_grad_norm_({_CLIP_NORM})"
    elif strategy.updates != "in backward":
        yield f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {_CLIP_NORM})"
    yield from ("    optimizer.step()", "    optimizer.zero_grad()")
    yield "memory.close()" if streams else "optimizer.close()"
    yield from lines(offloads, "offload.close()")


def _learning_rate(question: Question) -> float:
    return _LEARNING_RATE if question.model.trainable is None else _ADAPTER_LEARNING_RATE


def _precision(machine: Machine) -> str:
    known = gpu_models.find(machine.gpu.name) if machine.gpu else None
    return "fp16" if known and not known.bfloat16 else "bf16"


def weights(machine: Machine) -> list[float]:
    """The share of the bytes for each drive, with which all drives finish at the same time."""
    drives = machine.drives
    if together := measured_together(drives):
        by_path = {path.path: path.weight for path in together.stripe}
        return [round(by_path[each.path], 4) for each in drives]
    mixed = [drive.speeds["mixed"] if machine.speeds else 1.0 for drive in drives]
    return [round(each / sum(mixed), 4) for each in mixed]
