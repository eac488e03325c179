"""Train a Llama of 3 to 70 billion parameters on one GPU, with its optimizer states on a drive:

    python train.py --model 13b --drive /local_nvme --host-memory 12GB

Weights and tokens are random: this shows what a step takes, not what a model learns. `--reference`
keeps states in the GPU's memory instead, for models that fit there: with `--format exact` and
`--deterministic` the losses of both runs are equal bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from nvme_offload import NVMeOptimizer

# width, of the MLP, layers, heads, heads of keys and values, words; tied embeddings
SHAPES = {
    "tiny": (64, 176, 2, 4, 2, 512, True),
    "1b": (2048, 8192, 16, 32, 8, 128256, True),  # Llama 3.2
    "3b": (3072, 8192, 28, 24, 8, 128256, True),  # Llama 3.2
    "7b": (4096, 11008, 32, 32, 32, 32000, False),  # Llama 2
    "8b": (4096, 14336, 32, 32, 8, 128256, False),  # Llama 3.1
    "13b": (5120, 13824, 40, 40, 40, 32000, False),  # Llama 2
    "33b": (6656, 17920, 60, 52, 52, 32000, False),  # LLaMA
    "70b": (8192, 28672, 80, 64, 8, 128256, False),  # Llama 3.1
}
SETTLED = 4  # steps until the order of use is learned and what stays in memory is there


class StatesInMemory(torch.optim.AdamW):
    """AdamW over fp32 copies of bfloat16 parameters, all in the GPU's memory."""

    def __init__(self, params, **options):
        self.working = list(params)
        super().__init__([p.detach().float().requires_grad_() for p in self.working], **options)

    @torch.no_grad()
    def step(self):
        """Update the copies, and round them into the parameters."""
        for master, parameter in zip(self.param_groups[0]["params"], self.working, strict=True):
            master.grad = parameter.grad.float()
        super().step()
        for master, parameter in zip(self.param_groups[0]["params"], self.working, strict=True):
            parameter.copy_(master)
            master.grad = None

    def zero_grad(self):
        """Let the parameters' gradients go."""
        for parameter in self.working:
            parameter.grad = None


def make_model(name: str, device: torch.device):
    """A Llama with random weights in bfloat16, which recomputes its layers in backward."""
    width, inner, layers, heads, kv_heads, words, tied = SHAPES[name]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=words,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_of(model, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each token from those before it; logits of a few rows at a time."""
    hidden = model.model(input_ids=tokens).last_hidden_state

    def summed(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(rows[:, :-1]).float()
        return functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )

    parts = zip(hidden.split(2), tokens.split(2), strict=True)
    losses = [checkpoint(summed, rows, labels, use_reentrant=False) for rows, labels in parts]
    return torch.stack(losses).sum() / tokens[:, 1:].numel()


def peak_host_bytes() -> int:
    """The most memory that this process ever had resident, pinned memory included."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def peak_gpu_bytes() -> int:
    """The most GPU memory that tensors of this process ever had."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def main() -> None:
    """Train, and print a line for each step and one of JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="7b")
    parser.add_argument("--drive", default="/local_nvme", help="a directory on the drive")
    parser.add_argument("--format", default="compact", help="exact, split, compact or compact24")
    parser.add_argument("--host-memory", default="8GB", help="the most that the offload takes")
    parser.add_argument(
        "--gpu-memory-gb", type=float, help="the most that this may take of the GPU"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--clip", type=float, default=0.0, help="the norm that gradients are cut to"
    )
    parser.add_argument(
        "--update",
        choices=("after", "in-backward", "under-forward", "both"),
        default="in-backward",
        help="when the drive works: in-backward leaves no gradients, and excludes --clip",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="of two runs all kernels give the same bits; needed to compare losses",
    )
    parser.add_argument("--reference", action="store_true", help="states in the GPU's memory")
    options = parser.parse_args()

    if options.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the first use of cuBLAS
        torch.use_deterministic_algorithms(True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.gpu_memory_gb and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(options.gpu_memory_gb * 1e9 / total)
    model = make_model(options.model, device)
    elements = sum(parameter.numel() for parameter in model.parameters())
    print(f"{elements / 1e9:.2f} billion parameters", flush=True)
    settings = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
    if options.reference:
        optimizer = StatesInMemory(model.parameters(), **settings)
    else:
        optimizer = NVMeOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            paths=options.drive,
            host_memory=options.host_memory,
            state_format=options.format,
            step_in_backward=options.update in ("in-backward", "both"),
            overlap_step=options.update in ("under-forward", "both"),
            **settings,
        )
    tokens = torch.Generator().manual_seed(1)
    losses, passes, seconds, used = [], [], [], []
    with contextlib.nullcontext() if options.reference else optimizer:
        for step in range(options.steps):
            began = time.monotonic()
            batch = torch.randint(
                model.config.vocab_size, (options.batch, options.sequence), generator=tokens
            ).to(device)
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())  # which waits for the GPU
            passes.append(time.monotonic() - began)
            if options.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.monotonic() - began)
            print(
                f"step {step + 1}: loss {losses[-1]:.6f}, {seconds[-1]:.2f} s, of which forward and "
                f"backward {passes[-1]:.2f} s; at most "
                f"{peak_host_bytes() / 1e9:.1f} GB of host memory, {peak_gpu_bytes() / 1e9:.1f} GB of GPU",
                flush=True,
            )
            # with updates that are still being made: of the step before
            stats = None if options.reference else optimizer.last_stats
            if stats is not None and (not used or stats.step > used[-1].step):
                used.append(stats)
                print(f"  {stats}", flush=True)
    settled = seconds[SETTLED:] or seconds
    typical = statistics.median(settled)
    drive = used[SETTLED:] or used
    result = {
        "model": options.model,
        "parameters": elements,
        "format": "in memory" if options.reference else options.format,
        "update": options.update,
        "step_seconds": typical,
        "passes_seconds": statistics.median(passes[SETTLED:] or passes),
        "tokens_per_second": options.batch * options.sequence / typical,
        "drive_gb_per_s": statistics.median(
            (one.bytes_read + one.bytes_written) / 1e9 / typical for one in drive
        )
        if drive
        else None,
        "peak_host_gb": peak_host_bytes() / 1e9,
        "peak_gpu_gb": peak_gpu_bytes() / 1e9,
        "losses": [loss.hex() for loss in losses],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
