"""Accelerate with FSDP2 and optimizer states on a drive:

accelerate launch --config_file accelerate_fsdp2.yaml train_accelerate_fsdp2.py

This model would fit in memory, so the script allows 2 MB of host memory, to make it use the drive.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

from nvme_offload import NVMeOptimizer


def main() -> None:
    """Train, and save or resume."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--paths", default="/local_nvme", help="a directory on the drive")
    parser.add_argument("--host_memory", default="2MB", help="of each rank")
    parser.add_argument("--save", metavar="DIRECTORY", help="save the state there after the steps")
    parser.add_argument("--resume", metavar="DIRECTORY", help="go on from the state there")
    parser.add_argument("--first", type=int, default=1, help="the number of the first step")
    arguments = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        GPT2Config(
            vocab_size=100,
            n_positions=32,
            n_embd=128,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )
    count = 4 * arguments.steps * accelerator.num_processes
    data = [(index + torch.arange(32)) % 100 for index in range(count)]
    sentences = DataLoader(data, batch_size=4)
    # prepare() replaces the parameters by sharded ones; the first step makes the states of those
    optimizer = NVMeOptimizer(
        model.parameters(),
        paths=arguments.paths,
        host_memory=arguments.host_memory,
        lr=1e-3,
    )
    model, optimizer, sentences = accelerator.prepare(model, optimizer, sentences)
    if accelerator.distributed_type == "NO" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        print("Accelerate found no GPU: each process trains the whole model alone", flush=True)
    if arguments.resume:
        accelerator.load_state(arguments.resume)
    for step, words in enumerate(sentences, 1):
        if step < arguments.first:
            continue
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)
    if accelerator.is_main_process:
        print(optimizer.optimizer.stats(), flush=True)
    if arguments.save:
        accelerator.save_state(arguments.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
