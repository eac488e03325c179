"""Trains small models with DeepSpeed's ZeRO-3 on the CPU accelerator, and prints, one JSON object a
line for each case, what came of it to the bit.

The one argument is a JSON object: "cases", as `launch.Case` has them; "directory" on the drive;
"ours", whether `nvme_offload.zero3` is enabled; "fp16", whether DeepSpeed is to take the processor
for one that has it (the default); "faults", the faults of the engines, as `Engine` takes them, with
the kind of fault by name; "faulty_rank", the only one where it does;
"late", that no update of "overlap_step" is made before a caller waits for one; "in_gpu_memory", that
nothing is offloaded; "virtual_gpu", that updates run on a `VirtualGpu`.
The ranks are what the environment says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import os
import re
import sys
import time
import traceback
import weakref
from pathlib import Path
from typing import IO, Any

import nodes
import torch
from launch import Case
from looking import LOOPS as LOOKING
from models import ELEMENTWISE, MODELS, OPTIMIZERS, SCALAR
from outside import LOOPS, PROGRAMS
from outside import MODELS as OUTSIDE
from several import PROGRAMS as SEVERAL

SCALES = {
    "bf16": {"bf16": {"enabled": True}},
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "torch.float16"}},
    "fp16": {
        "fp16": {
            "enabled": True,
            "initial_scale_power": 10,
            "loss_scale_window": 2,
            "hysteresis": 1,
        }
    },
}
TOO_LARGE = 1e6
_to_the_end = contextlib.ExitStack()  # contexts that end with the process


def main(request: dict[str, Any]) -> None:
    answers, deepspeed = begin(request)
    watch = Watch()
    if request["ours"]:
        faulty = request.get("faulty_rank") in (None, int(os.environ["RANK"]))
        watch.enable(request.get("faults", []) if faulty else [])
        if request.get("late"):
            update_late()
    for number, fields in enumerate(request["cases"]):
        # so that no case finds the tier of another
        place = str(Path(request["directory"], str(number)))
        Path(place).mkdir(exist_ok=True)
        began = time.monotonic()
        case = Case(**fields)
        try:
            in_gpu_memory = bool(request.get("in_gpu_memory"))
            training = Training(case, place, request["ours"], watch, in_gpu_memory)
            with contextlib.ExitStack() as stack:
                if request.get("virtual_gpu"):
                    from on_virtual_gpu import on_virtual_gpu

                    stack.enter_context(on_virtual_gpu(case.name))
                result = training.result()
        except Exception as error:
            traceback.print_exc()
            result = {"error": type(error).__name__, "message": str(error)}
        result |= {"name": case.name, "seconds": round(time.monotonic() - began, 2)}
        print(json.dumps(result), file=answers, flush=True)
        if "error" in result and os.environ["WORLD_SIZE"] != "1":
            return  # the other ranks may wait for this one, and hear of it when the process ends
        gc.collect()
        gc.freeze()  # what this case has imported: the next collections need not visit it
    deepspeed.comm.destroy_process_group()


def begin(request: dict[str, Any]) -> tuple[IO[str], Any]:
    """Where to print the answers, and DeepSpeed, whose ranks are connected."""
    nodes.enter()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what DeepSpeed prints is not for the one who reads the answers
    import deepspeed

    if os.environ["DS_ACCELERATOR"] == "cpu":
        # DeepSpeed refuses fp16 where the processor has no instructions for it, though torch
        # computes it everywhere.
        deepspeed.get_accelerator().is_fp16_supported = lambda: request.get("fp16", True)
    # Between ranks plain gloo: DeepSpeed's own op would be compiled first, and spins, which ranks
    # that outnumber the cores do not stand.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if found := os.environ.get("CPU_ADAM"):
        # DeepSpeed would examine the compilers for 2 s, and the processor for 1 s in each optimizer.
        import cpuinfo
        from deepspeed.ops.op_builder.builder import OpBuilder
        from torch.utils.cpp_extension import _import_module_from_library

        built = json.loads(found)
        name, folder = "cpu_adam", str(Path(built["library"]).parent)
        OpBuilder._loaded_ops[name] = _import_module_from_library(name, folder, True)
        cpuinfo.get_cpu_info = lambda: built["processor"]
    deepspeed.init_distributed(
        dist_backend="gloo" if os.environ["DS_ACCELERATOR"] == "cpu" else "nccl", verbose=False
    )
    return answers, deepspeed


class Watch:
    """Looks on at this package's tiers: the stores, pools and swappers that they make."""

    def __init__(self) -> None:
        self.stores: list[Any] = []
        self.pools: list[Any] = []
        self.swappers: list[Any] = []
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()  # every live store
        self.overlapped = 0  # steps whose updates were made after them

    def enable(self, faults: list[tuple[int, int, str, int]]) -> None:
        """Enable the package, with *faults* in every engine of a store."""
        import nvme_offload.store.store
        import nvme_offload.swap.tier as tier
        from nvme_offload import zero3
        from nvme_offload._aio import FaultKind
        from nvme_offload.io.engine import Engine

        zero3.enable()
        self._count_overlapped()
        tier.TensorStore = self._kept(self.stores, tier.TensorStore)
        tier.PinnedPool = self._kept(self.pools, tier.PinnedPool)
        tier.TensorSwapper = self._kept(self.swappers, tier.TensorSwapper)
        if faults:
            nvme_offload.store.store.Engine = functools.partial(
                Engine,
                _faults=[
                    (first, count, getattr(FaultKind, kind), value)
                    for first, count, kind, value in faults
                ],
            )

    def swapped_in(self) -> int:
        """How often a value was swapped in since the last call of `traffic`."""
        counts = [swapper.stats() for swapper in self.swappers]
        return sum(count.hits + count.misses for count in counts)

    def traffic(self) -> dict[str, Any]:
        """The bytes moved, and the memory used, since the last call."""
        found = {
            "bytes_read": sum(swapper.stats().bytes_read for swapper in self.swappers),
            "bytes_written": sum(swapper.stats().bytes_written for swapper in self.swappers),
            "memory": [pool.nbytes for pool in self.pools],
            "peaks": [swapper.stats().peak_bytes for swapper in self.swappers],
            "retries": 0,
            "overlapped": self.overlapped,
        }
        self.overlapped = 0
        for store in self.stores:
            with contextlib.suppress(ValueError):  # UsageError: it is closed
                found["retries"] += sum(
                    side.retries for side in (store.engine.stats().read, store.engine.stats().write)
                )
        self.stores.clear()
        self.pools.clear()
        self.swappers.clear()
        return found

    def _count_overlapped(self) -> None:
        from nvme_offload.zero3.overlap import Overlap

        start = Overlap.start

        def counted(overlap: Any, *args: Any) -> None:
            self.overlapped += 1
            start(overlap, *args)

        Overlap.start = counted  # type: ignore[method-assign]

    def _kept(self, where: list[Any], kind: Any) -> Any:
        @functools.wraps(kind)
        def make(*args: Any, **named: Any) -> Any:
            made = kind(*args, **named)
            where.append(made)
            if where is self.stores:
                self.alive.add(made)
            return made

        return make


def update_late() -> None:
    """Make no queued update of this process before a thread waits for it."""
    from late import only_when_awaited

    _to_the_end.enter_context(only_when_awaited())


class Training:
    """One case, from its beginning."""

    def __init__(
        self, case: Case, directory: str, ours: bool, watch: Watch, in_gpu_memory: bool = False
    ) -> None:
        self.case = case
        self.ours = ours
        self.in_gpu_memory = in_gpu_memory
        self.watch = watch
        self.seeks = (
            {"smallest": 1, "double": 2}.get(case.section.get("host_memory"), 0) if ours else 0
        )
        self.config = self._config(directory)
        self.directory = directory
        self.refusals: list[str] = []  # of budgets that were too small
        self.kept: dict[str, Any] = {}  # by the case's loop
        self.reported: dict[str, Any] = {
            key: [] for key in ("losses", "norms", "scales", "skipped", "observed")
        }

    def result(self) -> dict[str, Any]:
        """What the case comes to: floats in hexadecimal, tensors by their hash."""
        torch.set_default_dtype(getattr(torch, self.case.default_dtype))
        try:
            return self._of_program() if self.case.program else self._of_steps()
        finally:
            torch.set_default_dtype(torch.float32)

    def _of_steps(self) -> dict[str, Any]:
        finals: dict[str, Any] = {key: {} for key in ("weights", "masters", "states", "scalars")}
        traffic, stats, swapped_in = {}, {}, 0
        for life in range(self.case.lives):
            engines = [self._engine(10 * life + number) for number in range(self.case.engines)]
            swapped_in = self.watch.swapped_in()
            for step in range(self.case.steps):
                for number, engine in enumerate(engines):
                    self._step(engine, step, number)
            for number, engine in enumerate(engines):
                for key, values in self._final(engine).items():
                    finals[key] |= {
                        f"{life}.{number}.{name}": value for name, value in values.items()
                    }
            if self.ours:
                traffic, stats = self.watch.traffic(), self._stats(engines[0])
            while engines:
                engines.pop().destroy()
            del engine
            gc.collect()
        return {
            **self.reported,
            **finals,
            "traffic": traffic,
            "stats": stats,
            "swapped in by initialize": swapped_in,
            # stores that outlive the engines, which are destroyed: a gigabyte of the drive each
            "left": len(self.watch.alive),
            "host_memory": self.config.get("nvme_offload", {}).get("host_memory"),
            "refusals": self.refusals,
        }

    def _of_program(self) -> dict[str, Any]:
        place = Path(self.directory, "ours" if self.ours else "stock")
        place.mkdir(exist_ok=True)  # by another rank
        made = (PROGRAMS | SEVERAL)[self.case.program](self.config, place)
        self.reported["losses"] = [float(loss).hex() for loss in made["losses"]]
        found = {
            **self.reported,
            **self._final(made["engine"]),
            "traffic": self.watch.traffic() if self.ours else {},
            "host_memory": self.config.get("nvme_offload", {}).get("host_memory"),
            "refusals": self.refusals,
        }
        # These programs do not destroy their engines; the cases that follow do not count them.
        self.watch.alive.clear()
        return found

    def _config(self, directory: str) -> dict[str, Any]:
        case = self.case
        zero = {
            "stage": 3,
            "sub_group_size": case.sub_group_size,
            "stage3_param_persistence_threshold": case.persistence,
            "stage3_prefetch_bucket_size": 20_000,
            "stage3_max_live_parameters": 50_000,
            "stage3_max_reuse_distance": 50_000,
            "reduce_bucket_size": 300_000,
        }
        for key, device in (("offload_param", case.parameters), ("offload_optimizer", case.states)):
            if self.in_gpu_memory:
                continue
            if device == "nvme" and self.ours:
                zero[key] = {"device": "nvme", "nvme_path": directory}
            elif device != "none":
                zero[key] = {"device": "cpu"}
        for key, value in case.zero.items():
            zero[key] = {**zero.get(key, {}), **value} if isinstance(value, dict) else value
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": case.accumulation,
            "gradient_clipping": case.clipping,
            "steps_per_print": 1_000_000,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "aio": {"block_size": 64 << 10, "queue_depth": 8, "thread_count": 1},
            **SCALES[case.dtype],
            **case.top,
        }
        if self.ours:
            config["nvme_offload"] = {**case.section, **({"host_memory": 1} if self.seeks else {})}
        if case.optimizer == "cpu_adam":
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
        return config

    def _engine(self, seed: int) -> Any:
        """An engine; for "host_memory": "smallest" with the size that refusals of less name, until
        one is accepted; for "double" with twice that.
        """
        while True:
            try:
                return self._try_engine(seed)
            except ValueError as refusal:  # UsageError is one
                named = re.search(r"at least (\d+)", str(refusal))
                if (
                    not self.seeks
                    or named is None
                    or int(named[1]) <= self.config["nvme_offload"]["host_memory"]
                ):
                    raise
                self.refusals.append(str(refusal))
            self.config["nvme_offload"]["host_memory"] = int(named[1]) * self.seeks

    def _try_engine(self, seed: int) -> Any:
        import deepspeed

        torch.manual_seed(seed)
        if self.case.zero_init:
            with deepspeed.zero.Init(config_dict_or_path=self.config):
                model = (MODELS | OUTSIDE)[self.case.model]()
        else:
            model = (MODELS | OUTSIDE)[self.case.model]()
        if hasattr(model, "adapt"):
            model.adapt()
        groups = self._groups(model)
        if self.case.optimizer == "none":
            return deepspeed.initialize(model=model, config=self.config)[0]
        if self.case.optimizer == "cpu_adam":
            engine = deepspeed.initialize(model=model, model_parameters=groups, config=self.config)[
                0
            ]
        else:
            engine = deepspeed.initialize(
                model=model, optimizer=OPTIMIZERS[self.case.optimizer](groups), config=self.config
            )[0]
        if not self.ours and self.case.section.get("state_format", "exact") != "exact":
            engine.optimizer._reassign_or_swap_out_partitioned_parameters = functools.partial(
                _round_half_away_from_zero, engine.optimizer
            )
        return engine

    def _groups(self, model: torch.nn.Module) -> list[Any]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.case.groups == 1:
            return trained
        return [
            {"params": trained[::2]},
            {
                "params": trained[1::2],
                "lr": 3e-3,
                **({"weight_decay": 0.0} if self.case.optimizer != "sign" else {}),
            },
        ]

    def _step(self, engine: Any, step: int, number: int) -> None:
        case = self.case
        for micro in range(case.accumulation):
            generator = torch.Generator().manual_seed(
                1000 * step + 10 * micro + engine.global_rank + 500 * number
            )
            loss = self._loss(engine, generator)
            if step == case.overflow_step:
                loss = loss * TOO_LARGE
            self.reported["losses"].append(loss.float().item().hex())
            if case.optimizer == "none":
                continue
            engine.backward(loss)
            if case.fragments and micro == case.accumulation - 1:
                self._use_gradients(engine, step)
            elif case.fragments:
                self._use_partial_gradients(engine)
            engine.step()
        if case.optimizer == "none":
            return
        self.reported["norms"].append(float(engine.get_global_grad_norm() or 0).hex())
        self.reported["scales"].append(float(engine.optimizer.loss_scale))
        self.reported["skipped"].append(engine.skipped_steps)
        if case.fragments:
            self._use_states(engine, step)
        if case.loop:
            self._observe(*(LOOPS | LOOKING)[case.loop](engine, self.kept))
        if case.evaluate:
            engine.eval()
            with torch.no_grad():
                self.reported["losses"].append(
                    self._loss(engine, torch.Generator().manual_seed(step)).float().item().hex()
                )
            engine.train()

    def _loss(self, engine: Any, generator: torch.Generator) -> torch.Tensor:
        inputs = engine.module.inputs(generator).to(engine.device)
        if inputs.is_floating_point():
            inputs = inputs.to(
                {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.case.dtype, torch.float32)
            )
        output = engine(inputs).float()
        return (
            (output - torch.linspace(-1, 1, output.shape[-1], device=output.device)).square().mean()
        )

    def _use_gradients(self, engine: Any, step: int) -> None:
        from deepspeed import utils

        params = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        for parameter in params:
            self._observe(
                utils.safe_get_full_grad(parameter),
                _without_padding(parameter, utils.safe_get_local_grad(parameter)),
            )
        if step == 1:
            utils.safe_set_full_grad(params[0], utils.safe_get_full_grad(params[0]) * 1.7)
            utils.safe_set_local_grad(params[1], utils.safe_get_local_grad(params[1]) / 3)
            utils.safe_update_full_grad_vectorized(params[1:3], lambda gradient, _: gradient + 1e-3)
            # a function that reads other values, of the same sub-group and of others
            utils.safe_update_full_grad_vectorized(
                params[::-1],
                lambda gradient, parameter: (
                    gradient
                    + 0.1 * utils.safe_get_full_fp32_param(parameter)
                    + 0.1 * utils.safe_get_full_grad(params[0]).norm()
                    + 0.1 * utils.safe_get_full_grad(params[-1]).norm()
                ),
            )
            # a function that sets other gradients, then a function that fails at the third parameter
            utils.safe_update_full_grad_vectorized(
                params, lambda gradient, _: self._set_first(params, gradient)
            )
            with contextlib.suppress(ZeroDivisionError):
                utils.safe_update_full_grad_vectorized(
                    params,
                    lambda gradient, parameter: 1 / 0 if parameter is params[2] else gradient * 0.9,
                )
            for parameter in params:
                self._observe(utils.safe_get_full_grad(parameter))
        if step == 2:
            engine.optimizer.zero_grad()  # the step uses the reduced gradients all the same
        self._observe_gradients(engine)

    @staticmethod
    def _set_first(params: list[Any], gradient: torch.Tensor) -> torch.Tensor:
        from deepspeed import utils

        utils.safe_set_full_grad(params[0], utils.safe_get_full_grad(params[0]) * 0.5)
        return gradient + 1e-3

    def _use_partial_gradients(self, engine: Any) -> None:
        """Before the last micro-batch, gradients are the last step's, or unavailable."""
        from deepspeed import utils

        first = next(iter(engine.module.parameters()))
        if self.case.section.get("missing_gradients") == "last":
            self._observe_gradients(engine)
        elif self.ours and self.case.states == "nvme":
            refused = ""
            try:
                utils.safe_get_full_grad(first)
            except ValueError as error:  # UsageError is one
                refused = str(error)
            assert "safe_get_full_grad" in refused

    def _observe_gradients(self, engine: Any) -> None:
        """Observe all gradients by every function that returns them."""
        from deepspeed import utils

        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                self._observe(
                    utils.safe_get_full_grad(parameter),
                    _without_padding(parameter, utils.safe_get_local_grad(parameter)),
                )
        params = itertools.chain.from_iterable(engine.optimizer.fp16_groups)
        partitions = engine.optimizer.get_fp32_grad_partitions()
        found = itertools.chain.from_iterable(group.values() for group in partitions.values())
        self._observe(*map(_without_padding, params, found))

    def _use_states(self, engine: Any, step: int) -> None:
        from deepspeed import utils

        self._observe_gradients(engine)  # the gradients of the finished step
        params = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        keys = [
            key for key in ELEMENTWISE[self.case.optimizer] if key in self._kept(engine, params[0])
        ]
        for parameter in params:
            self._observe(
                utils.safe_get_full_fp32_param(parameter),
                _without_padding(parameter, utils.safe_get_local_fp32_param(parameter)),
            )
            for key in keys:
                self._observe(
                    utils.safe_get_full_optimizer_state(parameter, key),
                    _without_padding(
                        parameter, utils.safe_get_local_optimizer_state(parameter, key)
                    ),
                )
        if step == 1:
            utils.safe_set_full_fp32_param(
                params[0], utils.safe_get_full_fp32_param(params[0]) * 1.25
            )
            utils.safe_set_local_fp32_param(
                params[1], utils.safe_get_local_fp32_param(params[1]) - 0.3
            )
            for key in keys[:1]:
                utils.safe_set_full_optimizer_state(
                    params[0], utils.safe_get_full_optimizer_state(params[0], key) * 0.5, key
                )
                utils.safe_set_local_optimizer_state(
                    params[1], utils.safe_get_local_optimizer_state(params[1], key) + 1e-4, key
                )

    @staticmethod
    def _kept(engine: Any, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """What the optimizer keeps for the sub-group of *parameter*."""
        optimizer = engine.optimizer
        for number, params in enumerate(getattr(optimizer, "bit16_groups", ())):  # of stages 1, 2
            if any(param is parameter for param in params):
                first: dict[str, Any] = optimizer.optimizer.state[
                    optimizer.optimizer.param_groups[number]["params"][0]
                ]
                return first
        index, _, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        kept: dict[str, Any] = optimizer.optimizer.state[
            optimizer.fp32_partitioned_groups_flat[index]
        ]
        return kept

    def _observe(self, *tensors: torch.Tensor) -> None:
        self.reported["observed"] += [_hash(tensor) for tensor in tensors]

    @staticmethod
    def _stats(engine: Any) -> dict[str, Any]:
        """What the last step of *engine* spent on the drive; {} where nothing is there."""
        from nvme_offload import zero3

        try:
            return dataclasses.asdict(zero3.stats(engine))
        except ValueError:  # UsageError is one
            return {}

    def _final(self, engine: Any) -> dict[str, dict[str, Any]]:
        from deepspeed import utils, zero

        weights, masters, states, scalars = {}, {}, {}, {}
        if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
            # DeepSpeed's stages 1 and 2 look for states before all groups have some.
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in engine.module.named_parameters():
            with zero.GatheredParameters([parameter]):
                weights[name] = _hash(parameter.data)
            if not parameter.requires_grad or self.case.optimizer == "none":
                continue
            masters[name] = _hash(utils.safe_get_full_fp32_param(parameter))
            kept = self._kept(engine, parameter)
            for key in ELEMENTWISE[self.case.optimizer]:
                if key in kept:
                    states[f"{name}.{key}"] = _hash(
                        utils.safe_get_full_optimizer_state(parameter, key)
                    )
            for key in SCALAR.get(self.case.optimizer, ()):
                if key in kept:
                    scalars[f"{name}.{key}"] = float(kept[key]).hex()
        return {"weights": weights, "masters": masters, "states": states, "scalars": scalars}


def _round_half_away_from_zero(optimizer: Any, index: int) -> None:
    """What DeepSpeed does after the update of a sub-group whose parameters are in memory, as
    `nvme_offload.optimizer_states` rounds them.
    """
    master = optimizer.fp32_partitioned_groups_flat[index].detach().cpu()
    rounded = (master.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)
    optimizer.fp16_partitioned_groups_flat[index].data.copy_(rounded)
    optimizer._unflatten_partitioned_parameters(index)


def _without_padding(parameter: torch.nn.Parameter, partition: torch.Tensor) -> torch.Tensor:
    """What *partition* has of *parameter*: where its size does not divide by the ranks, DeepSpeed
    leaves the last elements of the last one undefined.
    """
    return partition[: max(parameter.ds_numel - int(os.environ["RANK"]) * partition.numel(), 0)]


def _hash(tensor: torch.Tensor) -> str:
    if tensor.is_floating_point():
        # there are many NaNs, and a conversion may give any
        tensor = tensor.where(~tensor.isnan(), torch.nan)
    return hashlib.sha256(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:16]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
