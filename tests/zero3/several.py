"""Programs for `Case.program` in which parameters come from several contexts of `zero.Init` or
belong to several engines, or change outside of the optimizer's step. Each is given the
configuration and a directory.
"""

from __future__ import annotations

import copy
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvme_offload import OffloadError, UnsupportedError

FEATURES = 64


def layers(count: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential()
    for _ in range(count):
        made.append(nn.Linear(FEATURES, FEATURES))
        made.append(nn.Tanh())
    return made


def batch(step: int) -> torch.Tensor:
    from deepspeed.accelerator import get_accelerator

    made = torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(step))
    return made.to(get_accelerator().current_device_name(), torch.bfloat16)


def engine_of(model: nn.Module, config: dict[str, Any]) -> Any:
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def without_states(config: dict[str, Any]) -> dict[str, Any]:
    """*config* for an engine without an optimizer."""
    zero = dict(config["zero_optimization"])
    zero.pop("offload_optimizer", None)
    return {**config, "zero_optimization": zero}


def elsewhere(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """*config* with another directory and budget, where it offloads to a drive."""
    zero = dict(config["zero_optimization"])
    if "nvme_offload" not in config:
        return config
    place.mkdir(exist_ok=True)
    for key in ("offload_param", "offload_optimizer"):
        if zero.get(key, {}).get("device") == "nvme":
            zero[key] = {**zero[key], "nvme_path": str(place)}
    section = {**config["nvme_offload"], "host_memory": 300_000}
    return {**config, "zero_optimization": zero, "nvme_offload": section}


def step(engine: Any, number: int, target: torch.Tensor | float = 1.0) -> float:
    loss = (engine(batch(number)).float() - target).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss)


def two_contexts(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """A model whose parts were made in one context each, the last with other settings, and a
    part that no context has made.
    """
    import deepspeed

    parts = []
    for seed, settings in enumerate((config, config, elsewhere(config, place / "other"))):
        with deepspeed.zero.Init(config_dict_or_path=settings):
            parts.append(layers(2, seed))
    model = nn.Sequential(*parts, layers(1, 3).bfloat16())
    made = list(nn.Sequential(*parts).parameters())
    with torch.no_grad(), deepspeed.zero.GatheredParameters(made, modifier_rank=0):
        for parameter in made:
            parameter.mul_(1.5)
    engine = engine_of(model, config)
    losses = [step(engine, 0)]
    engine.save_checkpoint(str(place), tag="one")
    losses += [step(engine, number) for number in (1, 2)]
    engine.load_checkpoint(str(place), tag="one")
    losses += [step(engine, number) for number in (1, 2, 3)]
    return {"engine": engine, "losses": losses}


def two_engines(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """A reference model in an engine without an optimizer, and for a while another with settings of
    its own, that follow a trained one.
    """
    import deepspeed

    trained, model = layers(3, 0), layers(3, 1)
    engine = engine_of(trained, config)
    reference = deepspeed.initialize(model=model, config=without_states(config))[0]
    other = layers(3, 2)
    second = deepspeed.initialize(
        model=other, config=without_states(elsewhere(config, place / "other"))
    )[0]
    losses = []
    for number in range(5):
        with torch.no_grad():
            target = reference(batch(number)).float()
            if number < 3:
                target = target + second(batch(number)).float()
        losses.append(step(engine, number, target))
        followers = [model] + ([other] if number < 3 else [])
        every = [one for each in (trained, *followers) for one in each.parameters()]
        with torch.no_grad(), deepspeed.zero.GatheredParameters(every, modifier_rank=0):
            for follower in followers:
                for its, own in zip(follower.parameters(), trained.parameters(), strict=True):
                    its.mul_(0.4).add_(own, alpha=0.6)
        if number == 2:
            second.destroy()
            del second, other, follower, followers, every, its
            gc.collect()
    return {"engine": engine, "losses": losses}


def through_another(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """A generator and a discriminator, each in its engine. The generator's loss goes through the
    discriminator, which refuses to go on after gradients of a pass that it did not end.
    """
    generator, judge = engine_of(layers(2, 0), config), engine_of(layers(2, 1), config)
    losses = []

    def train(number: int, *, trained: bool) -> None:
        made = generator(batch(number))
        loss = judge(batch(number)).float().square().mean() + judge(made.detach()).float().mean()
        judge.backward(loss)
        judge.step()
        judge.module.requires_grad_(trained)
        losses.extend([float(loss), float(loss := judge(made).float().square().mean())])
        generator.backward(loss)
        generator.step()
        judge.module.requires_grad_(True)

    for number in range(3):
        train(number, trained=False)
    if "nvme_offload" in config:
        judge.save_checkpoint(str(place), tag="one")
        kept = losses.copy()
        train(3, trained=True)
        with pytest.raises(OffloadError, match=r"another engine's: call requires_grad_\(False\)"):
            judge(batch(4))
        judge.load_checkpoint(str(place), tag="one")
        losses[:] = kept
    losses.append(step(judge, 5))
    return {"engine": judge, "losses": losses}


def gathered_in_inference(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """A model of two contexts in an engine without an optimizer, then in one with it."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=config):
        first = layers(2, 0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        second = layers(2, 1)
    model = nn.Sequential(first, second)
    inference = deepspeed.initialize(model=model, config=without_states(config))[0]
    with torch.no_grad():
        losses = [float(inference(batch(number)).float().sum()) for number in range(3)]
    inference.destroy()
    engine = engine_of(model, config)
    losses += [step(engine, number) for number in range(3)]
    return {"engine": engine, "losses": losses}


class Clamped(nn.Linear):
    """Keeps its weights small in every forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


def changed_without_a_rank(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """Gathered parameters change without a modifier_rank: before the engine is made, in forward
    passes, and between steps.
    """
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=config):
        model = layers(4, 0)
        model.append(Clamped(FEATURES, FEATURES))
    parameters = list(model.parameters())
    parameters[-1].requires_grad_(False)

    def change(factor: float) -> None:
        with deepspeed.zero.GatheredParameters(parameters[:3]):
            parameters[0].mul_(factor)
            parameters[2].data.add_(0.01)
        with deepspeed.zero.GatheredParameters(parameters[3]):
            parameters[3].mul_(factor)
        parameters[4].all_gather(parameters[4:6])
        parameters[5].fill_(factor)
        parameters[4].partition(parameters[4:6])
        with deepspeed.zero.GatheredParameters(parameters[-2:]):
            parameters[-1].fill_(factor)
        with deepspeed.zero.GatheredParameters(parameters[:2]):
            assert not parameters[0].isnan().any()

    with torch.no_grad():
        change(0.5)
    engine = engine_of(model, config)
    losses = []
    for number in range(4):
        with torch.no_grad():
            change(0.9)
            losses.append(float(engine(batch(10 + number)).float().square().mean()))
        losses.append(step(engine, number))
    return {"engine": engine, "losses": losses}


def moved(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """A model from a context without a configuration, in engines that have its parameters on a
    drive, then in memory with a new layer, then on the CPU, then on a drive with another new layer.
    """
    import deepspeed

    with deepspeed.zero.Init(dtype=torch.bfloat16):
        model = layers(3, 0)
    model[2].requires_grad_(False)
    zero = config["zero_optimization"]
    in_memory = {key: value for key, value in zero.items() if key != "offload_param"}
    on_host = {**zero, "offload_param": {"device": "cpu"}}
    losses = []
    for number, settings in enumerate((zero, in_memory, on_host, zero)):
        if number % 2:
            model.extend(layers(1, number).bfloat16())
        engine = engine_of(model, {**config, "zero_optimization": settings})
        losses += [step(engine, 2 * number), step(engine, 2 * number + 1)]
        if number < 3:
            engine.destroy()
    return {"engine": engine, "losses": losses}


def quantized(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """Weights that DeepSpeed quantizes after they were partitioned."""
    import deepspeed
    from deepspeed.inference.quantization.quantization import (
        _init_group_wise_weight_quantization as quantize,
    )

    bits = {"num_bits": 8, "group_size": 32, "group_dim": 0, "symmetric": False}
    config = {**without_states(config), "weight_quantization": {"post_init_quant": {"": bits}}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = layers(3, 0)
    quantize(model, config)
    gc.collect()  # DeepSpeed's closures make each parameter a cycle
    parameters = list(model.parameters())
    if "nvme_offload" in config:
        tier = parameters[0].nvme_swapper.tier
        assert len(tier.swapper.names()) == len(parameters)
    engine = deepspeed.initialize(model=model, config=config)[0]
    with torch.no_grad():
        losses = [float(engine(batch(number).half()).float().sum()) for number in range(3)]
    return {"engine": engine, "losses": losses}


def thawed(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """Frozen layers require gradients again in the middle of the training, and the optimizer lacks a
    parameter. DeepSpeed does not train them, which a warning says once.
    """
    import deepspeed

    model = layers(4, 0)
    frozen = [one for index in (2, 4) for one in model[index].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    forgotten = model[6].bias
    passed = [one for one in model.parameters() if one is not forgotten]
    engine = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.AdamW(passed, lr=1e-2)
    )[0]
    warned = Warnings()
    logging.getLogger("nvme_offload").addHandler(warned)
    losses = [step(engine, 0)]
    for number, parameter in enumerate(frozen[:3]):
        parameter.requires_grad_(True)
        losses += [step(engine, 2 * number + 1), step(engine, 2 * number + 2)]
    if "nvme_offload" in config and engine.global_rank == 0:
        named = [line.partition("train them: ")[2].partition(":")[0] for line in warned.lines]
        assert named == ["6.bias (1)", "2.weight (1)", "2.bias (1)", "4.weight (1)"], warned.lines
    for parameter in (*frozen, forgotten):  # it has no master weight to compare
        parameter.requires_grad_(False)
    return {"engine": engine, "losses": losses}


class Warnings(logging.Handler):
    """Keeps the warnings in *lines*."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def exchanged(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """A program that exchanges the trained parameters, as BAdam does, is refused before it changes
    anything.
    """
    engine = engine_of(layers(2, 0), config)
    losses = [step(engine, 0)]
    if "nvme_offload" in config:
        groups = [{"params": list(engine.module[2].parameters())}]
        with pytest.raises(UnsupportedError, match="cannot change after deepspeed"):
            engine.optimizer._create_fp16_partitions_with_defragmentation(groups)
    losses.append(step(engine, 1))
    return {"engine": engine, "losses": losses}


def states_back(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """Training that returns to the optimizer's state dict of an earlier step."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=config):
        model = layers(3, 0)
    engine = engine_of(model, config)
    losses = [step(engine, number) for number in range(2)]
    rank = engine.global_rank
    kept = [None] * rank + [copy.deepcopy(engine.optimizer.state_dict())]
    losses += [step(engine, number) for number in range(2, 4)]
    engine.optimizer.load_state_dict(kept)
    with torch.no_grad():
        losses.append(float(engine(batch(9)).float().sum()))
    losses += [step(engine, number) for number in range(4, 6)]
    return {"engine": engine, "losses": losses}


def padded(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """An optimizer that computes norms of whole partitions, whose last elements belong to no
    parameter. Before that, other parameters had the memory: zeros, then values that are not numbers.
    """
    import deepspeed

    def fill_memory(value: float) -> None:
        with deepspeed.zero.Init(config_dict_or_path=config):
            filling = layers(20, 1)
        with (
            torch.no_grad(),
            deepspeed.zero.GatheredParameters(list(filling.parameters()), modifier_rank=0),
        ):
            for parameter in filling.parameters():
                parameter.fill_(value)

    def train() -> tuple[Any, list[float]]:
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = nn.Sequential(nn.Linear(FEATURES, 33), nn.Tanh(), nn.Linear(33, 3))
        optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
        engine = deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]
        return engine, [step(engine, number) for number in range(4)]

    with deepspeed.zero.Init(config_dict_or_path=config):
        kept = layers(1, 2)  # so that both trainings have the same memory
    runs = []
    for value in (0.0, float("nan")):
        fill_memory(value)
        gc.collect()
        engine, losses = train()
        runs.append(losses)
        if not value:
            engine.destroy()
            del engine
            gc.collect()
    del kept
    assert runs[0] == runs[1], runs
    return {"engine": engine, "losses": losses}


PROGRAMS = {
    "padded": padded,
    "thawed": thawed,
    "exchanged": exchanged,
    "states back": states_back,
    "moved": moved,
    "quantized": quantized,
    "changed without a rank": changed_without_a_rank,
    "two contexts": two_contexts,
    "two engines": two_engines,
    "through another": through_another,
    "inference first": gathered_in_inference,
}
