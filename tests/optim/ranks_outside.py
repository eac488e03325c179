"""`python ranks_outside.py DEVICE DIRECTORY`, run as two ranks: the loops of Accelerate, the
Trainer, Fabric and FSDP1, compared with the plain optimizer. 20 steps, with a checkpoint in the
middle, from which another run goes on.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

os.environ["ACCELERATE_USE_CPU"] = "true"

import accelerate
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from reference import differing
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from two_ranks import DIRECTORY, RANK, case, inputs, local, main, model

from nvme_offload.optim import NVMeOptimizer

STEPS, HALF = 20, 10
CAP, CAP_OF_LLAMA = 70_000, 100_000  # bytes of host memory: less than the states
SAVED = Path(DIRECTORY).parent / "saved_by_accelerate"

Make = Callable[[Any], torch.optim.Optimizer]


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


class Watched(NVMeOptimizer):
    """Counts the bytes that the optimizers of this class read from the drive."""

    read: ClassVar[list[int]] = []

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.read.append(self.stats().bytes_read)
        return loss


def offloaded(**options: Any) -> Make:
    return lambda params: Watched(params, paths=DIRECTORY, host_memory=CAP, lr=0.01, **options)


def fsdp2(accelerator: accelerate.Accelerator, **options: Any) -> None:
    """Accelerate uses FSDP2 only where there are GPUs, but its FSDP2 code works without them."""
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", **options
    )


def anew() -> None:
    """Forget the accelerator of the run before."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def shared(name: str) -> Path:
    """A directory of both ranks, which is empty."""
    place = SAVED / name
    if RANK == 0:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    dist.barrier()
    return place


def values(net: torch.nn.Module) -> list[Any]:
    return [local(parameter).detach().clone() for parameter in net.parameters()]


def with_accelerate(make: Make, place: Path, *, first: int, last: int) -> list[Any]:
    """The loop of Accelerate's documentation, from step *first* to *last*: the parameters."""
    anew()
    accelerator = accelerate.Accelerator(cpu=True)
    fsdp2(accelerator, auto_wrap_policy="size_based_wrap", min_num_params=1000)
    net: Any = model()
    optimizer: Any = make(net.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    if first:
        accelerator.load_state(str(place))
    for number in range(first, last):
        accelerator.backward(net(inputs(number)).square().mean())
        accelerator.clip_grad_norm_(net.parameters(), float("inf"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number == HALF - 1:
            accelerator.save_state(str(place))
    return values(net)


def with_fabric(make: Make, place: Path, *, first: int, last: int) -> list[Any]:
    """The same with Fabric, and DDP."""
    fabric = Fabric(
        accelerator="cpu", devices=2, strategy="ddp", plugins=[TorchElasticEnvironment()]
    )
    fabric.launch()
    net: Any = model()
    net, optimizer = fabric.setup(net, make(net.parameters()))
    kept = {"net": net, "optimizer": optimizer}
    if first:
        fabric.load(place / "kept.ckpt", kept)
    for number in range(first, last):
        fabric.backward(net(inputs(number)).square().mean())
        fabric.clip_gradients(net, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
        if number == HALF - 1:
            fabric.save(place / "kept.ckpt", kept)
    return values(net)


def with_fsdp1(
    make: Make, place: Path, *, first: int, last: int, use_orig_params: bool
) -> list[Any]:
    """The same with FSDP1, and its state dicts."""
    net = FullyShardedDataParallel(
        model(),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
    )
    # FSDP1 gathers one state after the other into one buffer. On the CPU "offload" does not copy it,
    # and every state gets the values of the last one.
    FullyShardedDataParallel.set_state_dict_type(
        net,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(),
        FullOptimStateDictConfig(offload_to_cpu=False),
    )
    optimizer = make(net.parameters())
    path = place / f"rank{RANK}.pt"
    if first:
        kept = torch.load(path)
        net.load_state_dict(kept["net"])
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(net, optimizer, kept["optimizer"])
        )
    for number in range(first, last):
        net(inputs(number)).square().mean().backward()
        net.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        if number == HALF - 1:
            states = FullyShardedDataParallel.optim_state_dict(net, optimizer)
            torch.save({"net": net.state_dict(), "optimizer": states}, path)
    return values(net)


def read_from_the_drive() -> list[str]:
    read = sum(Watched.read)
    Watched.read.clear()
    return [] if read else ["everything was in host memory"]


@functools.cache
def in_memory(program: Callable[..., list[Any]]) -> list[Any]:
    return program(plain, shared("plain"), first=0, last=STEPS)


def compared(program: Callable[..., list[Any]], name: str, **options: Any) -> list[Any]:
    """The differences at the end of *program*, in an uninterrupted and in an interrupted run."""
    expected = in_memory(program)
    place = shared(name)
    whole = program(offloaded(**options), place, first=0, last=STEPS)
    resumed = program(offloaded(**options), place, first=HALF, last=STEPS)
    return (
        differing(whole, expected)
        + [f"resumed: {index}" for index in differing(resumed, expected)]
        + read_from_the_drive()
    )


@case
def accelerate_fsdp2() -> list[Any]:
    return compared(with_accelerate, "after")


@case
def accelerate_fsdp2_overlapped() -> list[Any]:
    return compared(with_accelerate, "overlapped", overlap_step=True)


@case
def accelerate_fsdp2_in_backward() -> list[Any]:
    return compared(with_accelerate, "in_backward", step_in_backward=True)


@case
def accelerate_fsdp2_provisional() -> list[Any]:
    return compared(with_accelerate, "provisional", step_in_backward="provisional")


@case
def fabric_ddp() -> list[Any]:
    return compared(with_fabric, "fabric")


@case
def fsdp1() -> list[Any]:
    return compared(functools.partial(with_fsdp1, use_orig_params=False), "fsdp1")


@case
def fsdp1_original_parameters() -> list[Any]:
    return compared(functools.partial(with_fsdp1, use_orig_params=True), "fsdp1_original")


def trainer(
    place: Path,
    *,
    sharded: bool = True,
    resume: bool = False,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """A tiny Llama, trained by the Trainer with FSDP2, or else DDP: the parameters."""
    anew()
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )

    class OnTheCPU(transformers.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            fsdp2(
                self.accelerator,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            )
            self.is_fsdp_enabled = True

    run = (OnTheCPU if sharded else transformers.Trainer)(
        model=net,
        args=transformers.TrainingArguments(
            str(place),
            per_device_train_batch_size=1,
            max_steps=STEPS,
            save_steps=HALF,
            learning_rate=0.01,
            use_cpu=True,
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
            save_only_model=False,
            **{"max_grad_norm": 0.0, **(arguments or {})},
        ),
        train_dataset=[
            {"input_ids": (ids := (first + torch.arange(16)) % 64), "labels": ids}
            for first in range(2 * STEPS)
        ],
        **options,
    )
    run.train(resume_from_checkpoint=str(place / f"checkpoint-{HALF}") if resume else None)
    return values(run.model)


def trained_as(name: str, expected: list[Any], **options: Any) -> list[Any]:
    place = shared(name)
    whole = trainer(place, **options)
    resumed = trainer(place, resume=True, **options)
    return (
        [f"{name}: {index}" for index in differing(whole, expected)]
        + [f"{name}, resumed: {index}" for index in differing(resumed, expected)]
        + [f"{name}: {item}" for item in read_from_the_drive()]
    )


def by_class(**options: Any) -> Any:
    return (
        Watched,
        {"paths": DIRECTORY, "host_memory": CAP_OF_LLAMA, "lr": 0.01, **options},
    )


ADAMW = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01})}


@case
def trainer_with_ddp() -> list[Any]:
    return trained_as(
        "ddp",
        trainer(shared("plain"), sharded=False, **ADAMW),
        sharded=False,
        optimizer_cls_and_kwargs=by_class(),
    )


@case
def trainer_with_fsdp2() -> list[Any]:
    expected = trainer(shared("plain"), **ADAMW)
    clipped = {"max_grad_norm": 0.5}
    return [
        *trained_as("after", expected, optimizer_cls_and_kwargs=by_class()),
        *trained_as(
            "in backward", expected, optimizer_cls_and_kwargs=by_class(step_in_backward=True)
        ),
        *trained_as(
            "clipped",
            trainer(shared("plain"), arguments=clipped, **ADAMW),
            optimizer_cls_and_kwargs=by_class(step_in_backward="provisional"),
            arguments=clipped,
        ),
    ]


if __name__ == "__main__":
    main()
