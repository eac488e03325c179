"""Accelerate with parameters and optimizer states on a drive, by a YAML file that names a DeepSpeed
configuration:

accelerate launch --config_file accelerate.yaml train_accelerate.py

This model would fit in the configuration's 8 GB, so the script takes 4 MB of host memory per rank,
to make it use the drive. Leave --host_memory and its line out for your model.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

import nvme_offload.zero3


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--host_memory", default="4MB", help="of each rank")
    parser.add_argument("--out", metavar="DIRECTORY", help="save the model there")
    arguments = parser.parse_args()

    accelerator = Accelerator(mixed_precision="bf16")
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config["nvme_offload"]["host_memory"] = arguments.host_memory

    nvme_offload.zero3.enable()  # the one line that makes the difference

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
        )
    )
    sentences = DataLoader([(index + torch.arange(32)) % 100 for index in range(64)], batch_size=4)
    optimizer = DummyOptim(model.parameters(), lr=1e-3)  # the one of the DeepSpeed configuration
    model, optimizer, sentences = accelerator.prepare(model, optimizer, sentences)
    for step, words in zip(range(1, arguments.steps + 1), sentences, strict=False):
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if accelerator.is_main_process:
        print(nvme_offload.zero3.stats(model), flush=True)
    if arguments.out:
        accelerator.unwrap_model(model).save_pretrained(
            arguments.out,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
