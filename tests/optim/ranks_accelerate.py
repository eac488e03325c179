"""`python ranks_accelerate.py DEVICE DIRECTORY`, run as two ranks: Accelerate and the Trainer
with FSDP2, which replace the parameters of an optimizer that was made before, compared with the
plain optimizer. 20 steps, with a checkpoint in the middle, from which another run goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_USE_CPU"] = "true"

import accelerate
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from reference import differing
from two_ranks import DIRECTORY, RANK, case, inputs, local, main, model

from nvme_offload.optim import NVMeOptimizer

STEPS, HALF = 20, 10
SAVED = Path(DIRECTORY).parent / "saved_by_accelerate"

Make = Callable[[Any], torch.optim.Optimizer]


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def offloaded(**options: Any) -> Make:
    return lambda params: NVMeOptimizer(
        params, paths=DIRECTORY, host_memory=200_000, lr=0.01, **options
    )


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


def loop(make: Make, place: Path, *, first: int, last: int) -> list[Any]:
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
    return [local(parameter).detach().clone() for parameter in net.parameters()]


def compared(name: str, **options: Any) -> list[Any]:
    """The differences at the end, in an uninterrupted and in an interrupted run."""
    expected = loop(plain, shared("plain"), first=0, last=STEPS)
    place = shared(name)
    whole = loop(offloaded(**options), place, first=0, last=STEPS)
    resumed = loop(offloaded(**options), place, first=HALF, last=STEPS)
    return differing(whole, expected) + [
        f"resumed: {index}" for index in differing(resumed, expected)
    ]


@case
def accelerate_fsdp2() -> list[Any]:
    return compared("after")


@case
def accelerate_fsdp2_overlapped() -> list[Any]:
    return compared("overlapped", overlap_step=True)


@case
def accelerate_fsdp2_in_backward() -> list[Any]:
    return compared("in_backward", step_in_backward=True)


@case
def accelerate_fsdp2_provisional() -> list[Any]:
    return compared("provisional", step_in_backward="provisional")


def trainer(
    place: Path, *, resume: bool = False, arguments: dict[str, Any] | None = None, **options: Any
) -> list[Any]:
    """A tiny Llama, trained by the Trainer with FSDP2: the parameters."""
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

    run = OnTheCPU(
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
    return [local(parameter).detach().clone() for parameter in run.model.parameters()]


def trained_as(name: str, expected: list[Any], **options: Any) -> list[Any]:
    place = shared(name)
    whole = trainer(place, **options)
    resumed = trainer(place, resume=True, **options)
    return [f"{name}: {index}" for index in differing(whole, expected)] + [
        f"{name}, resumed: {index}" for index in differing(resumed, expected)
    ]


def by_class(**options: Any) -> Any:
    return (
        NVMeOptimizer,
        {"paths": DIRECTORY, "host_memory": 400_000, "lr": 0.01, **options},
    )


@case
def trainer_with_fsdp2() -> list[Any]:
    adamw = torch.optim.AdamW, {"lr": 0.01}
    expected = trainer(shared("plain"), optimizer_cls_and_kwargs=adamw)
    clipped = {"max_grad_norm": 0.5}
    return [
        *trained_as("after", expected, optimizer_cls_and_kwargs=by_class()),
        *trained_as(
            "in backward", expected, optimizer_cls_and_kwargs=by_class(step_in_backward=True)
        ),
        *trained_as(
            "clipped",
            trainer(shared("plain"), optimizer_cls_and_kwargs=adamw, arguments=clipped),
            optimizer_cls_and_kwargs=by_class(step_in_backward="provisional"),
            arguments=clipped,
        ),
    ]


if __name__ == "__main__":
    main()
