"""What `nvme-offload plan` prints to paste, run on a small Llama: `python pasted.py WEIGHTS SCRIPT...`
runs each script on a new model, with one of PORTS for its process group, and writes the trained
weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
ROWS, TOKENS, MICRO_BATCHES = 2, 8, 4


def make_model(tied: bool = False) -> torch.nn.Module:
    """The same weights in every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, tie_word_embeddings=tied, attn_implementation="eager")
    return LlamaForCausalLM(config)


def make_batches() -> list[dict[str, torch.Tensor]]:
    """The arguments of the forward passes, the same in every call and rank."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(SHAPE["vocab_size"], (ROWS, TOKENS), generator=generator)
        found.append({"input_ids": tokens, "labels": tokens})
    return found


def trained(script: str, tied: bool = False) -> list[torch.Tensor]:
    """The weights after *script*, as it was pasted."""
    names: dict[str, Any] = {"model": make_model(tied), "batches": make_batches()}
    exec(script, names)
    return weights_of(names["model"])


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the weights; of DTensors the whole ones."""
    values = [parameter.detach() for parameter in model.parameters()]
    return [
        value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
        for value in values
    ]


if __name__ == "__main__":
    import torch.distributed as dist

    found = []
    for path, port in zip(sys.argv[2:], os.environ["PORTS"].split(), strict=True):
        os.environ["MASTER_PORT"] = port
        found.append(trained(Path(path).read_text(), tied="tied" in path))
        rank = dist.get_rank()
        dist.destroy_process_group()
    if rank == 0:
        torch.save(found, sys.argv[1])
