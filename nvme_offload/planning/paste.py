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
    return "\n".join(_script(plan, question)) + "\n"


def _script(plan: Plan, question: Question) -> Iterator[str]:
    strategy, machine, world = plan.strategy, question.machine, question.world
    work, plain = question.work, strategy.door == "plain"
    trains = strategy.optimizer is not None
    shards = plain and world.size > 1
    paths = [drive.path for drive in machine.drives] or [DESCRIBED_PATH]
    where = json.dumps(paths[0] if len(paths) == 1 else paths)
    windows = plain and strategy.updates in ("provisional", "in both", "in backward")
    offloads = trains and work.offloads

    # imports
    several_nodes = world.nodes > 1
    if not plain:
        hosts = f"--hostfile HOSTS --num_nodes {world.nodes} " if several_nodes else ""
        yield f"# deepspeed {hosts}--num_gpus {world.ranks} train.py"
    elif shards:
        hosts = f"--nnodes {world.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
        yield f"# torchrun {hosts * several_nodes}--nproc-per-node {world.ranks} train.py"
    if windows and work.accumulation > 1:
        yield "import contextlib"
    if trains and work.recomputes:
        yield "import functools"
    if shards and machine.gpu:
        yield "import os"
    yield ""
    yield "import torch"
    if shards:
        yield "import torch.distributed as dist"
        yield "from torch.distributed.fsdp import fully_shard"
    if trains and work.recomputes:
        yield "from torch.utils.checkpoint import checkpoint"
    if not plain:
        yield "import deepspeed"
    if strategy.door == "zero3":
        yield "import nvme_offload.zero3"
    streams = strategy.streams
    ours = ["Offload"] * streams + ["NVMeOptimizer"] * (plain and not streams)
    ours += ["save_on_nvme"] * offloads
    if ours:
        yield f"from nvme_offload import {', '.join(ours)}"
    yield ""

    # the model
    if strategy.door == "zero3":
        yield "nvme_offload.zero3.enable()"
    if strategy.stage == 3 and not plain and world.zero_init:
        yield "# the memory of the plan is for a `model` that is made here, under"
        yield '# deepspeed.zero.Init(config_dict_or_path="ds_config.json")'
    if shards:
        if machine.gpu:
            yield 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
        yield f'dist.init_process_group("{"nccl" if machine.gpu else "gloo"}")'
    too_large = WEIGHT_BYTES * question.model.parameters * world.ranks > machine.host_bytes
    if plain and too_large and streams:
        yield f"# host memory cannot have it: make `model` on the meta device, and give {_WEIGHTS}"
        yield '# the directory of its files (docs/streaming.md, "From files of safetensors")'
    elif plain and too_large and shards:
        yield "# all ranks together cannot have it in host memory: make `model` under torch.device('meta'),"
        yield "# and load its weights after fully_shard (torch.distributed.checkpoint.state_dict)"
    elif plain and too_large:
        yield "# host memory cannot have it: make `model` on the GPU, under torch.device('cuda')"
    if plain:
        to_gpu = '"cuda", ' if machine.gpu and not shards and not streams else ""
        yield f"model.to({to_gpu}torch.bfloat16)"
    if trains:
        yield "model.train()"
    if shards or (trains and work.recomputes):
        yield "lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]"
        yield "layers = max(lists, key=len, default=())"
    if trains and work.recomputes:
        for name in ("activation", "gradient"):  # in transformers 5, and before
            yield f'enable = {"enable or " * (name == "gradient")}getattr(model, "{name}_checkpointing_enable", None)'
        yield "if enable:  # a model of transformers"
        yield '    enable({"use_reentrant": False})'
        yield "else:"
        yield "    for layer in layers:"
        yield "        again = functools.partial(checkpoint, layer.forward, use_reentrant=False)"
        yield "        layer.forward = again"
    if shards:
        yield "parts = list(layers)"
        yield "named = list(model.named_parameters(remove_duplicate=False))"
        yield "if len(named) == len(list(model.parameters())):  # no weight is used twice"
        yield "    inside = {each for layer in layers for each in layer.modules()}"
        yield "    kinds = torch.nn.Embedding, torch.nn.Linear"
        yield "    outside = [each for each in model.modules() if each not in inside]"
        yield "    parts += [each for each in outside if isinstance(each, kinds)]"
        yield "for part in parts:"
        yield "    fully_shard(part)"
        yield "fully_shard(model)"
    yield ""

    # the optimizer, or the engine
    budget = plan.budget_bytes or 0
    if streams:
        own = parameters_budget(question.model, budget)
        device = "cuda" if machine.gpu else "cpu"
        yield f"memory = Offload({where}, host_memory={budget})"
        files = f", weights={_WEIGHTS}" if too_large else ""
        yield f'memory.parameters(model, "{device}", host_memory={own}{files})'
        budget -= own
    if plain:
        yield f"optimizer = {'memory.optimizer' if streams else 'NVMeOptimizer'}("
        yield "    model.parameters(),"
        yield "    torch.optim.AdamW,"
        if not streams:
            yield f"    paths={where},"
        yield f"    host_memory={budget},"
        if strategy.state_format != "exact":
            yield f'    state_format="{strategy.state_format}",'
        yield from {
            "in forward": ["    overlap_step=True,"],
            "host gradients": ['    accumulate="host",'],
            "provisional": ['    step_in_backward="provisional",'],
            "in both": ['    step_in_backward="provisional",', "    overlap_step=True,"],
            "in backward": ["    step_in_backward=True,"],
        }.get(strategy.updates, [])
        yield f"    lr={_learning_rate(question):.0e},".replace("e-0", "e-")
        yield ")"
    else:
        yield 'engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")'
    if offloads:
        yield f"offload = save_on_nvme({where}, host_memory={work.activation_host_bytes})"
    yield ""

    # the steps
    if not trains:
        yield from ("engine.eval()", "with torch.no_grad():", "    for batch in batches:")
        if machine.gpu:
            yield '        batch = {key: value.to("cuda") for key, value in batch.items()}'
        yield "        output = engine(**batch)"
        return
    name, count = "model" if plain else "engine", work.accumulation if plain else 1
    several = count > 1
    divided = f" / {count}" if several else ""
    yield f"for {'number, batch in enumerate(batches, 1)' if several else 'batch in batches'}:"
    indent = "    "
    if machine.gpu:
        yield '    batch = {key: value.to("cuda") for key, value in batch.items()}'
    if several:
        yield f"    last = number % {count} == 0"
    if several and windows:
        yield "    with contextlib.nullcontext() if last else optimizer.no_sync():"
        indent *= 2
    if offloads:
        yield f"{indent}with offload:"
        yield f"{indent}    loss = {name}(**batch).loss{divided}"
    else:
        yield f"{indent}loss = {name}(**batch).loss{divided}"
    if not plain:
        yield from ("    engine.backward(loss)", "    engine.step()")
        return
    yield f"{indent}loss.backward()"
    if several:
        yield "    if not last:"
        yield "        continue"
    if strategy.updates == "host gradients":
        yield f"    optimizer.clip_grad_norm_({_CLIP_NORM})"
    elif strategy.updates != "in backward":
        yield f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {_CLIP_NORM})"
    yield "    optimizer.step()"
    yield "    optimizer.zero_grad()"
    yield "memory.close()" if streams else "optimizer.close()"
    if offloads:
        yield "offload.close()"


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
