"""The code and the configuration that `nvme-offload plan` prints train as they are pasted, on as many
ranks as the plan is for.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pasted import make_batches, make_model, trained, weights_of
from patience import PATIENCE
from ports import free_port

sys.path.append(str(Path(__file__).parents[1] / "zero3"))
import forked

from nvme_offload.commands.script import script
from nvme_offload.hardware.machine import Gpu
from nvme_offload.planning.advice import Question
from nvme_offload.planning.model import of_count
from nvme_offload.planning.passes import Work
from nvme_offload.planning.paste import ds_config
from nvme_offload.planning.placement import INFERENCE, STRATEGIES, Strategy, World
from nvme_offload.planning.plan import Drive, Machine, plans

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"the pasted code trains with {name}"
    )
    for name in ("transformers", "accelerate")
]
LEARNING_RATE = 1e-5
CLIP_NORM = 1.0
BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}
SPEEDS = {"read": 3.0, "write": 2.5, "mixed": 2.8}


def question(drive: Path, ranks: int = 1, **work: Any) -> Question:
    drive.mkdir(exist_ok=True)
    machine = Machine(None, 128 << 30, 100e9, (Drive(str(drive), 1 << 40, SPEEDS),))
    asked = Work(8, activation_host_bytes=64 << 20, **work)
    return Question(of_count("1M"), machine, World(ranks), asked)


def code(asked: Question, strategy: Strategy) -> str:
    (plan,) = plans(asked.model, asked.machine, asked.world, asked.work, asked.budget, [strategy])
    assert plan.fits
    return script(plan, asked)


@functools.cache
def expected(accumulation: int = 1, clips: bool = True, tied: bool = False) -> list[torch.Tensor]:
    """The weights of AdamW over fp32 copies of bfloat16 parameters, all in memory."""
    model = make_model(tied).to(torch.bfloat16)
    parameters = list(model.parameters())
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    adam = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True)
    for number, batch in enumerate(make_batches(), 1):
        loss: Any = model(**batch).loss / accumulation
        loss.backward()
        if number % accumulation:
            continue
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            adam.step()
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    return weights_of(model)


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def through(door: str) -> list[Any]:
    return [pytest.param(each, id=each.name) for each in STRATEGIES if each.door == door]


PLAIN = [each for each in STRATEGIES if each.door == "plain"]
WORKS = ({"activations": "checkpoint", "accumulation": 2}, {"activations": "drive"})
OTHER_WORKS = ({"activations": "keep"}, {"activations": "checkpoint-drive", "accumulation": 4})


@pytest.mark.parametrize(
    ("name", "work"),
    [
        *(
            pytest.param(each.name, work, marks=[pytest.mark.slow] if (row + column) % 2 else [])
            for row, each in enumerate(PLAIN)
            for column, work in enumerate(WORKS)
            if each.state_format == "exact"
        ),
        *zip(("plain-in-backward", "plain-host-gradients"), OTHER_WORKS, strict=True),
        *((f"plain-{name}", WORKS[0]) for name in ("split", "in-both-compact", "compact24")),
        *((f"streamed-{name}", WORKS[0]) for name in ("in-backward", "host-gradients")),
        ("streamed-in-backward", OTHER_WORKS[0]),
    ],
    ids=str,
)
def test_the_code_trains_as_in_memory(name, work, tmp_path):
    strategy = BY_NAME[name]
    found = trained(code(question(tmp_path, **work), strategy))
    wanted = expected(work.get("accumulation", 1), clips=strategy.updates != "in backward")
    assert not equal(found, weights_of(make_model().to(torch.bfloat16)))
    if strategy.state_format == "exact":
        assert equal(found, wanted)
    else:
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)


def test_a_model_that_host_memory_cannot_have_is_read_from_files(tmp_path):
    from accelerate import init_empty_weights

    asked = question(tmp_path / "drive")
    machine = dataclasses.replace(asked.machine, gpu=Gpu("L4", 24 << 30), host_bytes=3_000_000_000)
    asked = dataclasses.replace(asked, model=of_count("1.8B"), machine=machine)
    text = code(asked, BY_NAME["streamed-in-backward"])
    make_model().to(torch.bfloat16).save_pretrained(tmp_path / "weights")
    text = text.replace("/models/safetensors", str(tmp_path / "weights")).replace("cuda", "cpu")
    with init_empty_weights():
        model = make_model()
    exec(text, {"model": model, "batches": make_batches()})
    assert equal(weights_of(model), expected(clips=False))
    assert "torch.device('cuda')" in code(asked, BY_NAME["plain-compact"])


@pytest.mark.parametrize("name", ["zero3", "nvme-both"])
def test_zero3_says_where_its_model_is_made(name, tmp_path):
    text = code(question(tmp_path), BY_NAME[name])
    assert text.index("deepspeed.zero.Init") < text.index("deepspeed.initialize")
    whole = dataclasses.replace(question(tmp_path), world=World(1, zero_init=False))
    assert "zero.Init" not in code(whole, BY_NAME[name])


def test_forward_passes_give_the_outputs_of_the_model_in_memory(tmp_path):
    (strategy,) = (each for each in INFERENCE if each.door == "plain")
    names = {"model": make_model(), "batches": make_batches()}
    exec(code(question(tmp_path), strategy), names)
    model = make_model().to(torch.bfloat16).eval()
    with torch.inference_mode():
        *_, last = (model(**batch) for batch in make_batches())
    assert torch.equal(names["output"].logits, last.logits)


def test_adapters_are_trained_and_frozen_weights_stay(tmp_path):
    found = {}
    for name in ("plain", "plain-host-gradients", "streamed-host-gradients"):
        asked = question(tmp_path / name, accumulation=2)
        asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, trainable=10_000))
        model = make_model().requires_grad_(False)
        adapters = {key: one for key, one in model.named_parameters() if "q_proj" in key}
        for one in adapters.values():
            one.requires_grad_()
        exec(code(asked, BY_NAME[name]), {"model": model, "batches": make_batches()})
        found[name] = weights_of(model)
        start = make_model().to(torch.bfloat16).state_dict()
        for (key, _), value in zip(model.named_parameters(), found[name], strict=True):
            assert torch.equal(value, start[key]) == (key not in adapters), key
        assert equal(found[name], found["plain"])


def test_gradients_are_clipped_in_the_reference():
    assert not equal(expected(), expected(clips=False))


def counting(calls: list[int], forward: Any, x: torch.Tensor) -> torch.Tensor:
    calls.append(1)
    return forward(x)


class Layered(torch.nn.Module):
    """A model that is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.relu(layer(x))
        Result = dataclasses.make_dataclass("Result", ["loss"])
        return Result(x.float().square().mean())


def test_layers_of_any_model_are_checkpointed(tmp_path):
    weights = {}
    for activations in ("keep", "checkpoint"):
        torch.manual_seed(0)
        model = Layered()
        computed: list[int] = []
        for layer in model.layers:
            layer.forward = functools.partial(counting, computed, layer.forward)
        batches = [{"x": torch.ones(2, 16, dtype=torch.bfloat16)}]
        asked = question(tmp_path, activations=activations)
        exec(code(asked, BY_NAME["plain"]), {"model": model, "batches": batches})
        weights[activations] = weights_of(model)
        assert len(computed) == (6 if activations == "checkpoint" else 3)
    assert equal(weights["keep"], weights["checkpoint"])


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_first_line_starts_all_ranks(nodes, tmp_path):
    asked = question(tmp_path, 2)
    asked = dataclasses.replace(asked, world=World(2, nodes))
    for name, launcher in (("plain", "# torchrun "), ("zero3", "# deepspeed ")):
        first = code(asked, BY_NAME[name]).splitlines()[0]
        assert first.startswith(launcher)
        assert ("--nproc-per-node 2" if name == "plain" else "--num_gpus 2") in first
        count = {"plain": f"--nnodes {nodes} ", "zero3": f"--num_nodes {nodes} "}[name]
        assert (count in first) == (nodes > 1)


def run_on_two_ranks(scripts: dict[str, str], directory: Path) -> list[list[torch.Tensor]]:
    """The trained weights by each of *scripts*."""
    paths = []
    for name, text in scripts.items():
        paths.append(directory / f"{name}.py")
        paths[-1].write_text(text)
    program = Path(__file__).parents[1] / "pasted.py"
    command = [sys.executable, "-W", "ignore", str(program.with_name("gloo_rank.py"))]
    command += [str(program), str(directory / "weights.pt"), *map(str, paths)]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "PORTS": " ".join(str(free_port()) for _ in scripts),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2"),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "".join(errors)
    found: list[list[torch.Tensor]] = torch.load(directory / "weights.pt")
    return found


@pytest.mark.slow
def test_the_code_shards_the_model_on_two_ranks(tmp_path):
    """Both ranks have the same batches, so the gradients are the gradients of one rank."""
    several = {"accumulation": 2, "activations": "checkpoint"}
    cases = {
        "backward": ("plain-in-backward", several, False),
        "backward-tied": ("plain-in-backward", {"activations": "checkpoint-drive"}, False),
        "after": ("plain", several, True),
        "both": ("plain-in-both", several, True),
    }
    scripts = {
        name: code(question(tmp_path / name, 2, **work), BY_NAME[strategy])
        for name, (strategy, work, _) in cases.items()
    }
    assert all("fully_shard(model)" in text for text in scripts.values())
    for (name, (_, work, clips)), found in zip(
        cases.items(), run_on_two_ranks(scripts, tmp_path), strict=True
    ):
        wanted = expected(work.get("accumulation", 1), clips, tied="tied" in name)
        if clips:  # the norm is a sum in another order
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-2)
        else:
            assert equal(found, wanted), name


TRAIN = """
import json, sys
import torch
from pasted import make_batches, make_model

model, batches = make_model(), make_batches() * 3
exec(open(sys.argv[1]).read())
with torch.no_grad():
    last = [engine(**batch).loss.item() for batch in make_batches()]
print("trained:" + json.dumps([sum(last) / len(last), engine.global_steps]))
"""


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "strategy",
    [
        *through("zero3"),
        *(pytest.param(each, id=each.name) for each in INFERENCE if each.door != "plain"),
    ],
)
def test_the_code_and_the_config_train(strategy, tmp_path):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed; pip install nvme-offload[deepspeed]")
    asked = dataclasses.replace(question(tmp_path / "drive", accumulation=2), budget=300_000_000)
    (found,) = plans(asked.model, asked.machine, asked.world, asked.work, asked.budget, [strategy])
    config = ds_config(found, asked)
    if strategy.optimizer is not None:
        config["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's Adam is not compiled for it
        config["optimizer"]["params"] |= {"torch_adam": True, "lr": 1e-3}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "pasted_code.py").write_text(script(found, asked))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    device = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    (tmp_path / "train.py").write_text(TRAIN)
    with (tmp_path / "said").open("w+") as said:
        status = forked.start(
            [str(tmp_path / "train.py"), "pasted_code.py"],
            env={**os.environ, **ranks, **address, **device, "PYTHONPATH": path},
            cwd=tmp_path,
            stdout=said,
            stderr=said,
        ).wait(PATIENCE)
    text = (tmp_path / "said").read_text()
    assert status == 0, text[-2000:]
    loss, steps = json.loads(re.findall(r"^trained:(.*)$", text, re.MULTILINE)[0])
    with torch.no_grad():
        before = [make_model()(**batch).loss.item() for batch in make_batches()]
    start = sum(before) / len(before)
    if strategy.optimizer is None:
        assert loss == pytest.approx(start, rel=0.01)
    else:
        assert loss < start - 0.1
        assert steps == 6
