"""The systems that `sweeps.systems` compares: each makes a training step of the model of
`examples/big_models/train.py`, with the settings that its documentation recommends.

Source: the READMEs of DeepSpeed, FlashOptim, MegaTrain, torchao and bitsandbytes;
torch.distributed.fsdp.
"""

from __future__ import annotations

import functools
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvme_offload.errors import UsageError
from nvme_offload.parameters.weights import save

from . import apart

_EXAMPLE = apart.ROOT / "examples" / "big_models" / "train.py"
_ADAMW = {"lr": 1e-4, "weight_decay": 0.1}
_SUB_GROUP = 200_000_000  # parameters; the size of DeepSpeed's float32 buffers

Step = Callable[[torch.Tensor], float]


class System(NamedTuple):
    """A system: its title, and the factory of its step. The step takes tokens and returns the loss
    after the update. *loads*: from files that are on the drive before it starts, if they fit there.
    """

    title: str
    make: Callable[[dict[str, Any]], Step]
    loads: bool = False


@functools.cache
def example() -> dict[str, Any]:
    """The definitions of examples/big_models/train.py."""
    return runpy.run_path(str(_EXAMPLE))


def gpu_or_cpu() -> torch.device:
    """The device that computes: the GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _model(job: dict[str, Any], gpus: int = 1, device: torch.device | None = None) -> Any:
    """The model, sharded over *gpus* by FSDP2."""
    return example()["make_model"](job["model"], device or gpu_or_cpu(), gpus)


def _plain(
    model: Callable[..., Any], optimizer: Any, clip: Callable[[], Any] | None = None
) -> Step:
    """A plain training step."""

    def step(tokens: torch.Tensor) -> float:
        loss = model(tokens)
        found = float(loss)  # after backward, it would wait for copies of states from the GPU
        loss.backward()
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad()
        return found

    return step


_IN_BACKWARD = {"step_in_backward": True, **_ADAMW, "fused": True}


def _ours(
    state_format: str, job: dict[str, Any], model: Any = None, clips: bool = False, **when: Any
) -> Step:
    """*model*, by default on the GPUs, with packed states in host memory and on the drive. *when*:
    options of `NVMeOptimizer`; updates run in backward by default. *clips*: to a norm that no
    gradient reaches.
    """
    from nvme_offload import NVMeOptimizer

    model = _model(job, job["gpus"]) if model is None else model
    optimizer = NVMeOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        paths=job["directory"],
        host_memory=job["host_memory"],
        state_format=state_format,
        **{**_IN_BACKWARD, **when},
    )
    return _plain(model, optimizer, _clipping(optimizer) if clips else None)


def _clipping(optimizer: Any) -> Callable[[], Any]:
    return lambda: optimizer.clip_grad_norm_(1000.0)


def write_weights(llama: Any, directory: Path) -> bool:
    """Write random weights for *llama*, which is on the meta device, as safetensors, if the drive has
    room for them. Returns whether it has.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(one.nbytes for one in llama.parameters())
    if shutil.disk_usage(directory.parent).free < 1.02 * needed:
        return False
    noise = example()["Noise"](llama.config.initializer_range, 0, torch.device("cpu"))
    save(llama, directory, lambda weight: noise.fill(torch.empty_like(weight, device="cpu")))
    return True


def _streamed(state_format: str, job: dict[str, Any], clips: bool = False, **when: Any) -> Step:
    """Parameters and states in host memory, and on the drive beyond that. *when*, *clips*: as `_ours`."""
    from nvme_offload import Offload

    if job["gpus"] > 1:
        raise UsageError("Offload.parameters is for one process: leave out --gpus")
    offload = Offload(job["directory"], host_memory=job["host_memory"])
    stream = functools.partial(
        offload.parameters, device=gpu_or_cpu(), gpu_memory=job["gpu_memory"] or "auto"
    )
    weights = Path(job["directory"], "weights")
    if weights.is_dir():
        llama = example()["empty_llama"](job["model"])
        stream(llama, weights=weights)
        shutil.rmtree(weights)  # a drive may not hold them and the states
        model = example()["WithLoss"](llama).train()
    else:
        stream(model := _model(job, device=torch.device("cpu")))
    optimizer = offload.optimizer(
        model.parameters(),
        torch.optim.AdamW,
        state_format=state_format,
        **{**_IN_BACKWARD, **when},
    )
    return _plain(model, optimizer, _clipping(optimizer) if clips else None)


def _zero3(
    job: dict[str, Any],
    optimizer: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    **sections: Any,
) -> Step:
    """DeepSpeed ZeRO-3 in bfloat16, with these sections for the offload of the optimizer and the
    parameters, which are on the GPU without one.
    """
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": job["batch"],
        "steps_per_print": 1000,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": _ADAMW,
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": optimizer,
            **({"offload_param": parameters} if parameters else {}),
            "sub_group_size": _SUB_GROUP,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        },
        **sections,
    }
    model = _model(job, device=torch.device("cpu") if parameters else None)
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=list(model.parameters())
    )

    def step(tokens: torch.Tensor) -> float:
        loss = engine(tokens)
        found = float(loss)
        engine.backward(loss)
        engine.step()
        return found

    return step


def _stock(device: str, job: dict[str, Any]) -> Step:
    """States, and DeepSpeed's copy of the gradients, on *device*, "nvme" or "cpu"."""
    offload: dict[str, Any] = {"device": device, "pin_memory": True}
    if device == "nvme":
        offload |= {
            "nvme_path": job["directory"],
            "buffer_count": 14,  # an assertion fails with fewer
            "pipeline_read": True,
            "pipeline_write": True,
        }
    return _zero3(job, offload)


def _ours_in_zero3(job: dict[str, Any], both: bool = False, **settings: Any) -> Step:
    from nvme_offload import zero3

    zero3.enable()
    ours = {"host_memory": job["host_memory"], "state_format": "compact", **settings}
    # DeepSpeed's default is 1.0.
    clipping = {"gradient_clipping": 0.0} if settings.get("step_in_backward") else {}
    offload = {"device": "nvme", "nvme_path": job["directory"]}
    return _zero3(job, offload, offload if both else None, nvme_offload=ours, **clipping)


def _in_host_memory(model: Any) -> Any:
    """*model* with its parameters in host memory; the GPU computes in bfloat16."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    shard = functools.partial(
        fully_shard,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        offload_policy=CPUOffloadPolicy(pin_memory=gpu_or_cpu().type == "cuda"),
    )
    for layer in model.model.layers:
        shard(layer)
    return shard(model)


def _cpu_offload_policy_and_ours(job: dict[str, Any]) -> Step:
    """Parameters in bfloat16 and packed states in host memory."""
    return _ours("compact", job, _in_host_memory(_model(job)))


def _cpu_offload_policy(job: dict[str, Any]) -> Step:
    """Parameters, gradients and states in float32 in host memory."""
    model = _in_host_memory(_model(job).float())
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW, fused=True)
    return _plain(model, optimizer)


def _flashoptim(job: dict[str, Any]) -> Step:
    """Everything in the GPU's memory: 24-bit masters and 8-bit moments, gradients released."""
    from flashoptim import FlashAdamW, enable_gradient_release

    model = _model(job, job["gpus"])
    optimizer = FlashAdamW(model.parameters(), **_ADAMW)
    enable_gradient_release(model, optimizer)
    return _plain(model, optimizer)


def _torchao(job: dict[str, Any]) -> Step:
    """Parameters, gradients and states in bfloat16 in host memory, without fp32 masters."""
    from torchao.optim import CPUOffloadOptimizer

    model = _model(job)
    settings = {"offload_gradients": True, "fused": True, **_ADAMW}
    return _plain(model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **settings))


def _bitsandbytes(name: str, job: dict[str, Any]) -> Step:
    """States in CUDA's managed memory, without fp32 masters."""
    import bitsandbytes

    model = _model(job)
    return _plain(model, getattr(bitsandbytes.optim, name)(model.parameters(), **_ADAMW))


def _megatrain(job: dict[str, Any]) -> Step:
    """Parameters and gradients in bfloat16 and moments in float32, in host memory; layers are
    streamed through the GPU.
    """
    if job["gpus"] > 1:
        raise UsageError("megatrain has one process for all GPUs: leave out --gpus")
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from infinity import CPUMasterConfig, CPUMasterModel
    from transformers import AutoModelForCausalLM

    made = _model(job).cpu()
    made.model.gradient_checkpointing_disable()  # MegaTrain recomputes layers
    with torch.device("meta"):
        llama = AutoModelForCausalLM.from_config(made.model.config, dtype=torch.bfloat16)
    llama.model, llama.lm_head = made.model, made.loss.head
    torch.cuda.empty_cache()
    settings = CPUMasterConfig(
        dataset_name="none",
        attn_implementation="sdpa",
        max_seq_len=job["sequence"],
        batch_size=job["batch"],
        enable_timing=False,
    )
    model = CPUMasterModel(llama, settings)
    optimizer = DeepSpeedCPUAdam(model.get_parameters(), **_ADAMW, adamw_mode=True)

    # only with flash-attn does it combine a padding mask with a causal one
    causal = torch.ones(1, 1, job["sequence"], job["sequence"], dtype=torch.bool).tril()

    def step(tokens: torch.Tensor) -> float:
        loss, *_ = model.forward_and_backward(tokens.cpu(), causal, tokens.cpu())
        optimizer.step()
        model._sync_params_to_gpu()
        model.zero_grad()
        optimizer.zero_grad()
        return float(loss)

    return step


SYSTEMS = {
    "compact": System('NVMeOptimizer, "compact", in backward', functools.partial(_ours, "compact")),
    "compact24": System(
        'NVMeOptimizer, "compact24", in backward', functools.partial(_ours, "compact24")
    ),
    "compact-after": System(
        'NVMeOptimizer, "compact", after backward',
        functools.partial(_ours, "compact", step_in_backward=False),
    ),
    "compact-provisional": System(
        'NVMeOptimizer, "compact", provisional, clipping',
        functools.partial(_ours, "compact", clips=True, step_in_backward="provisional"),
    ),
    "compact-overlap": System(
        'NVMeOptimizer, "compact", provisional, `overlap_step`, clipping',
        functools.partial(
            _ours, "compact", clips=True, step_in_backward="provisional", overlap_step=True
        ),
    ),
    "zero3": System('ZeRO-3 with nvme_offload, "compact"', _ours_in_zero3),
    "zero3-exact": System(
        'ZeRO-3 with nvme_offload, "exact"',
        functools.partial(_ours_in_zero3, state_format="exact"),
    ),
    "zero3-exact-backward": System(
        'ZeRO-3 with nvme_offload, "exact", `step_in_backward`',
        functools.partial(_ours_in_zero3, state_format="exact", step_in_backward=True),
    ),
    "zero3-backward": System(
        'ZeRO-3 with nvme_offload, "compact", `step_in_backward`',
        functools.partial(_ours_in_zero3, step_in_backward=True),
    ),
    "zero3-cpu": System(
        'ZeRO-3 with nvme_offload, "compact", updates on the CPU',
        functools.partial(_ours_in_zero3, update_device="cpu"),
    ),
    "zero3-overlap": System(
        'ZeRO-3 with nvme_offload, "compact", `overlap_step`',
        functools.partial(_ours_in_zero3, overlap_step=True),
    ),
    "zero3-both": System(
        'ZeRO-3 with nvme_offload, "compact", parameters on the drive too',
        functools.partial(_ours_in_zero3, both=True),
    ),
    "exact": System('NVMeOptimizer, "exact", in backward', functools.partial(_ours, "exact")),
    "offload-compact": System(
        'Offload: streamed parameters, "compact", in backward',
        functools.partial(_streamed, "compact"),
        loads=True,
    ),
    "offload-provisional": System(
        'Offload: streamed parameters, "compact", provisional, clipping',
        functools.partial(_streamed, "compact", clips=True, step_in_backward="provisional"),
        loads=True,
    ),
    "offload-after": System(
        'Offload: streamed parameters, "compact", after backward, clipping',
        functools.partial(_streamed, "compact", clips=True, step_in_backward=False),
        loads=True,
    ),
    "offload-compact24": System(
        'Offload: streamed parameters, "compact24", in backward',
        functools.partial(_streamed, "compact24"),
        loads=True,
    ),
    "offload-exact": System(
        'Offload: streamed parameters, "exact", in backward',
        functools.partial(_streamed, "exact"),
        loads=True,
    ),
    "cpu-offload-policy-compact": System(
        'FSDP2 with CPUOffloadPolicy and NVMeOptimizer, "compact", in backward',
        _cpu_offload_policy_and_ours,
    ),
    "zero-infinity": System(
        "DeepSpeed ZeRO-3, states on the drive", functools.partial(_stock, "nvme")
    ),
    "zero-offload": System(
        "DeepSpeed ZeRO-3, states in host memory", functools.partial(_stock, "cpu")
    ),
    "cpu-offload-policy": System("FSDP2 with CPUOffloadPolicy", _cpu_offload_policy),
    "megatrain": System("MegaTrain", _megatrain),
    "torchao": System("torchao, `CPUOffloadOptimizer`, gradients offloaded, too", _torchao),
    "bitsandbytes": System(
        "bitsandbytes, `PagedAdamW8bit`", functools.partial(_bitsandbytes, "PagedAdamW8bit")
    ),
    "bitsandbytes-32bit": System(
        "bitsandbytes, `PagedAdamW32bit`", functools.partial(_bitsandbytes, "PagedAdamW32bit")
    ),
    "flashoptim": System("FlashOptim, in the GPU's memory", _flashoptim),
}
