"""DeepSpeed ZeRO-3 with parameters and optimizer states on a drive, under every launcher that
DeepSpeed works with.

On one machine, with two GPUs:

    deepspeed --num_gpus=2 train_deepspeed.py --deepspeed ds_config.json
    OMP_NUM_THREADS=16 torchrun --nproc-per-node=2 train_deepspeed.py --deepspeed ds_config.json

On several machines; each rank uses its machine's drive under the same path. With
a hostfile of lines such as "node1 slots=8", and pdsh and ssh without a password from the first
machine to all:

    deepspeed --hostfile=hostfile train_deepspeed.py --deepspeed ds_config.json

Without ssh, on the machine number N (0, 1, ...) of the hostfile; or with torchrun:

    deepspeed --hostfile=hostfile --no_ssh --node_rank=N --master_addr=node1 train_deepspeed.py --deepspeed ds_config.json
    torchrun --nnodes=2 --node-rank=N --nproc-per-node=8 --master-addr=node1 train_deepspeed.py --deepspeed ds_config.json

With --checkpoint DIRECTORY the run is saved there at its end; where one is saved already, it goes
on.
"""

import argparse
from pathlib import Path

import deepspeed
import torch
from torch import nn

import nvme_offload.zero3

WIDTH = 512


def model() -> nn.Module:
    """Eight layers."""
    layers = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def batch(step: int, rank: int) -> torch.Tensor:
    """The inputs of rank *rank* at *step*, which the model learns to reproduce."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * (step % 4) + rank))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--deepspeed", metavar="FILE", default="ds_config.json", help="the DeepSpeed configuration"
    )
    parser.add_argument("--steps", type=int, default=10, help="train up to this step")
    parser.add_argument(
        "--checkpoint",
        metavar="DIRECTORY",
        help="go on from the checkpoint there, if there is one, and save one at the end",
    )
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    arguments = parser.parse_args()

    nvme_offload.zero3.enable()  # the one line that makes the difference

    deepspeed.init_distributed()
    torch.manual_seed(0)
    # every layer goes to the drive as soon as it is made
    with deepspeed.zero.Init(config_dict_or_path=arguments.deepspeed):
        network = model()
    engine, *_ = deepspeed.initialize(
        model=network, model_parameters=network.parameters(), config=arguments.deepspeed
    )
    if arguments.checkpoint and Path(arguments.checkpoint, "latest").exists():
        engine.load_checkpoint(arguments.checkpoint)
    for step in range(engine.global_steps + 1, arguments.steps + 1):
        inputs = batch(step, engine.global_rank).to(engine.device, torch.bfloat16)
        loss = nn.functional.mse_loss(engine(inputs), inputs)
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if engine.global_rank == 0:
        print(nvme_offload.zero3.stats(engine), flush=True)
    if arguments.checkpoint:
        engine.save_checkpoint(arguments.checkpoint)
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
