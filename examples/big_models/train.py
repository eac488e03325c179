"""Train a Llama of 1 to 70 billion parameters with its optimizer states on a drive, on one GPU:

    python train.py --model 13b --drive /local_nvme --host-memory 12GB

or on several, sharded by FSDP2, with one process and its own host memory per GPU:

    torchrun --nproc_per_node 2 train.py --model 70b --drive /local_nvme --host-memory 60GB

Weights and tokens are random: this measures steps, not learning. `--reference`
keeps states in the GPU's memory instead, for models that fit there: with `--format exact` and
`--deterministic` the losses of both runs are equal bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
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
LOGITS = 1024  # tokens whose logits are in memory together
NOISE = (1 << 22) + 9  # random numbers; odd, so that no two rows of a matrix are equal
LARGE_LAYER = 1 << 30  # bytes
SETTLED = 4  # steps until the order of use is learned and resident states are in memory


class StatesInMemory(torch.optim.Optimizer):
    """AdamW over fp32 copies of bfloat16 parameters, all in the GPU's memory.

    Parameters are updated one at a time, so only one fp32 gradient exists at a time.
    """

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.working = self.param_groups[0]["params"]
        masters = [p.detach().float().requires_grad_() for p in self.working]
        self.each = [torch.optim.AdamW([master], **options) for master in masters]

    @torch.no_grad()
    def step(self):
        """Update the copies, and round them into the parameters."""
        for parameter, adamw in zip(self.working, self.each, strict=True):
            master = adamw.param_groups[0]["params"][0]
            master.grad, parameter.grad = parameter.grad.float(), None
            adamw.step()
            parameter.copy_(master)
            master.grad = None


class Loss(torch.nn.Module):
    """The loss of next-token prediction from hidden states, with the logits of a few tokens at a
    time.
    """

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of *tokens*, rows of a batch."""
        hidden, labels = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()

        def summed(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.head(hidden).float(), labels, reduction="sum")

        parts = zip(hidden.split(LOGITS), labels.split(LOGITS), strict=True)
        losses = [checkpoint(summed, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / labels.numel()


class WithLoss(torch.nn.Module):
    """A language model whose forward pass returns its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model.model
        self.loss = Loss(model.lm_head)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of *tokens*, rows of a batch."""
        return self.loss(self.model(input_ids=tokens).last_hidden_state, tokens)


def shard(model: WithLoss) -> None:
    """Shard *model* by FSDP2, layer by layer; large layers matrix by matrix, so that each GPU holds
    only a few whole matrices at the same time.
    """
    for layer in model.model.layers:
        if sum(weight.nbytes for weight in layer.parameters()) > LARGE_LAYER:
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    fully_shard(module)
        fully_shard(layer)
    if model.loss.head.weight is not model.model.embed_tokens.weight:
        fully_shard(model.model.embed_tokens)
        fully_shard(model.loss)  # not its head, which is used several times
    fully_shard(model)


def empty_llama(name: str) -> torch.nn.Module:
    """A Llama in bfloat16 with values in its buffers alone, and with activation checkpointing."""
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
    with torch.device("meta"):
        llama = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    llama.model.rotary_emb = type(llama.model.rotary_emb)(config)
    return llama


def make_model(name: str, device: torch.device, ranks: int) -> WithLoss:
    """`empty_llama` with random weights, sharded over *ranks* processes."""
    llama = empty_llama(name)  # the whole model may not fit on one rank
    model = WithLoss(llama).train()
    if ranks > 1:
        shard(model)
    model.to_empty(device=device)
    llama.tie_weights()  # to_empty unties them without FSDP2
    seed = dist.get_rank() if ranks > 1 else 0  # each rank fills its shards
    noise = Noise(llama.config.initializer_range, seed, device)
    for weight in model.parameters():
        noise.fill(local(weight))
    with device:  # to_empty left its buffers uninitialized
        llama.model.rotary_emb = type(llama.model.rotary_emb)(llama.config)
    return model


class Noise:
    """A few million random numbers of the deviation *std*, repeated.

    On the CPU, torch draws random numbers on one core: for 7B, it would take more than a minute.
    """

    def __init__(self, std: float, seed: int, device: torch.device) -> None:
        numbers = std * torch.randn(NOISE, generator=torch.Generator().manual_seed(seed))
        self.numbers, self.begin = numbers.to(device, torch.bfloat16), 0

    def fill(self, weight: torch.Tensor) -> torch.Tensor:
        """Fill *weight*, a matrix, with the next numbers; or a vector with 1."""
        flat = weight.fill_(1).view(-1)[: 0 if weight.ndim == 1 else None]
        while flat.numel():
            part = self.numbers[self.begin : self.begin + flat.numel()]
            flat[: part.numel()] = part
            flat, self.begin = flat[part.numel() :], (self.begin + part.numel()) % NOISE
        return weight


def save(directory: Path, rank: int, step: int, model: WithLoss, optimizer: NVMeOptimizer) -> None:
    """Write what this rank has of weights and states to *directory*, which is new."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = [local(weight) for weight in model.parameters()]
    torch.save({"step": step, "weights": weights}, directory / f"weights-{rank}.pt")
    optimizer.save(directory / "states")


def resume(directory: Path, rank: int, model: WithLoss, optimizer: NVMeOptimizer) -> int:
    """Load what `save` has written by as many ranks; the steps that were made by then."""
    saved = torch.load(directory / f"weights-{rank}.pt", mmap=True)
    with torch.no_grad():
        for weight, value in zip(model.parameters(), saved["weights"], strict=True):
            local(weight).copy_(value)
    optimizer.load(directory / "states")
    return saved["step"]


def local(weight: torch.Tensor) -> torch.Tensor:
    """The local shard of *weight*."""
    return weight.detach().to_local() if isinstance(weight, DTensor) else weight.detach()


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
    parser.add_argument(
        "--drive",
        nargs="+",
        default=["/local_nvme"],
        help="directories on drives; with one per process, each process uses its own",
    )
    parser.add_argument("--format", default="compact", help="exact, split, compact or compact24")
    parser.add_argument(
        "--host-memory", default="8GB", help="the most that the offload takes in each process"
    )
    parser.add_argument(
        "--gpu-memory-gb", type=float, help="the most that this may take of the GPU"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences for each GPU")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--clip", type=float, default=0.0, help="the norm that gradients are cut to"
    )
    parser.add_argument(
        "--update",
        choices=("after", "in-backward", "under-forward", "both"),
        default="in-backward",
        help="when the drive works; in-backward leaves no gradients, but with --clip",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="of two runs all kernels give the same bits; needed to compare losses",
    )
    parser.add_argument("--reference", action="store_true", help="states in the GPU's memory")
    parser.add_argument("--save", type=Path, help="a directory for weights and states, at the end")
    parser.add_argument("--resume", type=Path, help="a directory of --save, by as many processes")
    options = parser.parse_args()

    if options.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the first use of cuBLAS
        torch.use_deterministic_algorithms(True)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        if options.gpu_memory_gb:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(options.gpu_memory_gb * 1e9 / total)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def tell(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    def over_ranks(value: float, operation: dist.ReduceOp = dist.ReduceOp.SUM) -> float:
        found = torch.tensor(value, dtype=torch.float64, device=device)
        if ranks > 1:
            dist.all_reduce(found, operation)
        return found.item()

    model = make_model(options.model, device, ranks)
    elements = sum(parameter.numel() for parameter in model.parameters())
    tell(f"{elements / 1e9:.2f} billion parameters")
    began = time.monotonic()
    settings = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
    if options.reference:
        optimizer = StatesInMemory(model.parameters(), **settings)
    else:
        optimizer = NVMeOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            paths=options.drive[rank::ranks] or options.drive,
            host_memory=options.host_memory,
            state_format=options.format,
            step_in_backward=options.update in ("in-backward", "both")
            and ("provisional" if options.clip else True),
            overlap_step=options.update in ("under-forward", "both"),
            **settings,
        )
    made = time.monotonic() - began
    tell(f"the optimizer was made in {made:.1f} s")
    tokens = torch.Generator().manual_seed(1 + rank)
    words = model.model.config.vocab_size
    losses, norms, seconds, used = [], [], [], []
    shape = (options.batch, options.sequence)
    with contextlib.nullcontext() if options.reference else optimizer:
        first = 0
        if options.resume:
            began = time.monotonic()
            first = resume(options.resume, rank, model, optimizer)
            tell(f"resumed after step {first} in {time.monotonic() - began:.1f} s")
            for _ in range(first):
                torch.randint(words, shape, generator=tokens)
        for step in range(first, first + options.steps):
            began = time.monotonic()
            loss = model(torch.randint(words, shape, generator=tokens).to(device))
            losses.append(loss.item())  # after backward(), it would wait for states copied back
            loss.backward()
            if options.clip:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.monotonic() - began)
            tell(
                f"step {step + 1}: loss {losses[-1]:.6f}, "
                + (f"norm of gradients {norms[-1].item():.3g}, " if norms else "")
                + f"{seconds[-1]:.2f} s; at most {peak_host_bytes() / 1e9:.1f} GB of host memory, {peak_gpu_bytes() / 1e9:.1f} GB of GPU"
            )
            # with updates that are still being made: of the step before
            stats = None if options.reference else optimizer.last_stats
            if stats is not None and (not used or stats.step > used[-1].step):
                used.append(stats)
                tell(f"  {stats}")
        if options.save:
            began = time.monotonic()
            save(options.save, rank, first + options.steps, model, optimizer)
            tell(f"saved in {time.monotonic() - began:.1f} s")
    typical = over_ranks(statistics.median(seconds[SETTLED:] or seconds), dist.ReduceOp.MAX)
    moved = [one.bytes_read + one.bytes_written for one in used[SETTLED:] or used]
    host = over_ranks(peak_host_bytes() / 1e9)
    result = {
        "model": options.model,
        "parameters": elements,
        "gpus": ranks,
        "format": "in memory" if options.reference else options.format,
        "update": options.update,
        "made_seconds": made,
        "step_seconds": typical,
        "tokens_per_second": ranks * options.batch * options.sequence / typical,
        "drive_gb_per_s": over_ranks(statistics.median(moved or [0]) / 1e9 / typical),
        "host_gb": host,
        "host_gb_per_billion": host * 1e9 / elements,
        "peak_gpu_gb": over_ranks(peak_gpu_bytes() / 1e9, dist.ReduceOp.MAX),
        "losses": [loss.hex() for loss in losses],
        "steps_clipped": sum(norm.item() > options.clip for norm in norms),
    }
    tell(json.dumps(result))
    if ranks > 1:
        del model, optimizer, loss
        gc.collect()  # of FSDP2's cycles, which keep gloo's threads beyond the end of Python
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
