"""The README's changes to a script of the Hugging Face Trainer and of DeepSpeed: both sides train,
and end with the same weights. The first scripts of docs/trainers.md and docs/zero3.md train, too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from doors import ACCELERATE, needs, run_well
from ports import free_port

README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs"
BEFORE_TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
)
model = LlamaForCausalLM(config)
data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (24, 16))]
arguments = TrainingArguments(
    "out", max_steps=3, learning_rate=1e-5, optim="adamw_torch", report_to="none",
    use_cpu=True, save_strategy="no",
)
"""
BEFORE_DEEPSPEED = """
import os
import deepspeed
import torch

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost",
                  MASTER_PORT="0000")
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
    "nvme_offload": {"host_memory": "8MB"},
}
"""
AFTER_DEEPSPEED = """
for batch in torch.randn(3, 8, 64).bfloat16():
    engine.backward(engine(batch).square().mean())
    engine.step()
"""
LAST = """
import hashlib

import deepspeed

with deepspeed.zero.GatheredParameters(list(model.parameters())):
    weights = b"".join(each.detach().float().numpy().tobytes() for each in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
"""


def sides(word: str) -> dict[str, str]:
    """Both sides of the README's diff that has *word*."""
    diffs = re.findall(r"^```diff\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = (diff for diff in diffs if word in diff)
    return {
        side: "\n".join(line[1:] for line in found.splitlines() if line[0] != other)
        for side, other in (("before", "+"), ("after", "-"))
    }


@pytest.mark.deepspeed
@needs("deepspeed", "transformers", "accelerate")
@pytest.mark.parametrize(
    ("word", "before", "after"),
    [("Trainer", BEFORE_TRAINER, ""), ("deepspeed", BEFORE_DEEPSPEED, AFTER_DEEPSPEED)],
)
def test_both_sides_of_a_diff_train_to_the_same_weights(word, before, after, tmp_path):
    # one after the other in one interpreter
    both = ("\n".join([before, code, after, LAST]) for code in sides(word).values())
    text = f"for side in {[*both]!r}:\n    exec(side, {{'__name__': '__main__'}})"
    text = text.replace("0000", str(free_port())).replace("/local_nvme", str(tmp_path))
    (tmp_path / "both.py").write_text(text)
    (ended,) = run_well([sys.executable, str(tmp_path / "both.py")])
    without, ours = re.findall(r"^weights (\w+)$", ended.said, re.MULTILINE)
    assert without == ours


def blocks(page: str, language: str) -> list[str]:
    """The blocks of *page* in *language*."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_script(code: str, place: Path, *launcher: str) -> str:
    """The output of *code*, run in the directory *place*, which is its drive, too."""
    code = code.replace("/local_nvme", str(place))
    (place / "train.py").write_text(f"import os\n\nos.chdir({str(place)!r})\n{code}")
    (ended,) = run_well([sys.executable, *launcher, str(place / "train.py")])
    return ended.said


@needs("transformers", "accelerate")
def test_the_script_for_the_trainer_trains(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "tiny")
    (tmp_path / "train.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    code = blocks("trainers.md", "python")[0]
    for old, new in (
        ('"meta-llama/Llama-3.1-8B", 2048', '"tiny", 64'),
        ('TrainingArguments("out"', 'TrainingArguments("out", use_cpu=True, max_steps=3'),
    ):
        assert old in code
        code = code.replace(old, new)
    said = run_script(code, tmp_path)
    assert "train_loss" in said
    assert (tmp_path / "out" / "model.safetensors").exists()


@needs("accelerate")
def test_the_script_for_accelerate_trains(tmp_path):
    code = next(code for code in blocks("trainers.md", "python") if "Accelerator" in code)
    said = run_script(code, tmp_path, *ACCELERATE[1:], "--cpu")
    assert "step 8: " in said
    assert (tmp_path / "checkpoint" / "optimizer.bin").exists()


@pytest.mark.deepspeed
@needs("deepspeed")
def test_the_script_for_deepspeed_trains(tmp_path):
    config = blocks("zero3.md", "json")[0].replace("/local_nvme", str(tmp_path))
    config = config.replace('"8GB"', '"40MB"')  # of 150 that the model has
    (tmp_path / "ds_config.json").write_text(config)
    one_rank = ["-m", "torch.distributed.run", "--nproc-per-node=1", f"--master-port={free_port()}"]
    said = run_script(blocks("zero3.md", "python")[0], tmp_path, *one_rank)
    assert len(re.findall(r"^step \d: loss [\d.]+$", said, re.MULTILINE)) == 4
    read, wrote = map(float, re.findall(r"read ([\d.]+) GB and wrote ([\d.]+) GB", said)[-1])
    assert read > 0
    assert wrote > 0
