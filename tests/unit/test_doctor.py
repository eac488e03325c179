"""The command `nvme-offload`: its checks, its output and its exit status."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from processes import finished
from profiles import profile

from nvme_offload.commands import checks, cli
from nvme_offload.hardware import machine as machines
from nvme_offload.hardware import profile_shelf
from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.profile import PHASES, Setting
from nvme_offload.optimizer_states import on_gpu
from nvme_offload.planning.passes import Work
from nvme_offload.zero3.settings import Settings

NARROW, WIDE = checks.Precisions("AVX2", False, False), checks.Precisions("AVX512", True, True)
COMMAND = [sys.executable, "-m", "nvme_offload.commands"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(machines, "_PROBE_BYTES", 4 << 20)


def keep_profile(path: Path, gb_per_s: float, seconds: float = 0.6) -> None:
    kept = {"at": path, "runs": 4, "seconds": seconds, "drive": {"model": "made up"}}
    profile_shelf.keep(profile(gb_per_s, Setting(1 << 20, 8, 4), **kept))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.command, [*map(str, arguments)], standalone_mode=False)


def ended(*arguments: object) -> subprocess.CompletedProcess[str]:
    return finished([*COMMAND, *map(str, arguments)])


# nvme-offload plan


def plan(*arguments: object) -> Result:
    return run(
        *("plan", "--gpus", 1, "--gpu", "H100", "--gpu-memory", "80GB", "--host-memory", "64GB"),
        *arguments,
    )


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """As wide as lines are by default; pytest-xdist says 80."""
    monkeypatch.setenv("COLUMNS", "100")


def test_the_answer_comes_first_then_what_to_paste_then_the_table(tmp_path):
    keep_profile(tmp_path, 4.0)
    ask = ("--params", "1B", "--budget", "3GB", "--path", tmp_path)
    done = plan(*ask, "--gpu-memory", "8GB", "--host-memory", "16GB", "--all")
    assert done.return_value == 0
    lines = done.output.splitlines()
    assert lines[0].startswith("Train it with NVMeOptimizer: it fits, ")
    code = lines.index("    optimizer = NVMeOptimizer(")
    assert lines[code + 3 : code + 5] == [
        f'        paths="{tmp_path}",',
        "        host_memory=3000000000,",
    ]
    head = next(index for index, line in enumerate(lines) if "way to train" in line)
    wear = next(index for index, line in enumerate(lines) if line.startswith("It writes "))
    faster = next(index for index, line in enumerate(lines) if line.startswith("Faster, if "))
    assert wear < faster < code < lines.index("How the seconds were found:") < head
    (chosen,) = [line for line in lines if line.startswith("*")]
    assert chosen.split("  ")[1].strip() == "NVMeOptimizer"
    at = next(index for index, line in enumerate(lines) if "ZeRO-1" in line)
    assert lines[at + 1].startswith("     needs 22.4 GB of GPU memory with CUDA's context")
    assert "It writes " in done.output
    assert not re.search(r"\de\+\d", done.output)  # 1,000 GB/s, not 1e+03
    reported = " ".join(done.output.split())
    assert " DeepSpeed's buffers, and a GPU has 8 GB" in reported
    assert f" TB a day to {tmp_path}: a drive that is rated for 1,200 TB lasts " in reported
    assert (
        "1 billion parameters; the largest layer has 70.43 million, if the model has the usual shape"
        in reported
    )
    assert "1 rank, GPU H100 with 8 GB (989 Tflop/s), 16 GB of host memory at 50 GB/s." in reported
    assert "read 4, write 4, mixed 4 GB/s." in reported
    assert "communication between ranks" in reported


def schema_keys(object_name: str) -> set[str]:
    """The keys of an object of the JSON, as docs/planning.md documents them."""
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    table = page.partition(f"### {object_name}\n")[2].partition("###")[0]
    return {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}


def test_a_plan_as_json_has_everything(tmp_path):
    keep_profile(tmp_path, 4.0)
    done = plan(
        *("--params", "7B", "--path", tmp_path, "--gpus", 2, "--nodes", 8, "--seq", 2048),
        *("--micro-batch", 2, "--json"),
    )
    reported: dict[str, Any] = json.loads(done.output)
    assert set(reported) == schema_keys("plan")
    assert all(set(each) == schema_keys("each of plans") for each in reported["plans"])
    assert reported["world"] == {"ranks": 2, "nodes": 8, "zero_init": True}
    assert reported["work"] == Work(sequence=2048, micro_batch=2)._asdict()
    assert reported["model"]["parameters"] == 7_000_000_000
    assert reported["machine"]["drives"][0]["gb_per_s"] == dict.fromkeys(PHASES, 4.0)
    assert len(reported["plans"]) == 56
    assert reported["fastest"] in {each["name"] for each in reported["plans"] if each["fits"]}
    for each in reported["plans"]:
        assert each["fits"] == (not each["problems"])
        assert each["seconds"] == pytest.approx(sum(phase["seconds"] for phase in each["phases"]))
        for phase in each["phases"]:
            beside = [sum(term["seconds"] for term in terms) for terms in phase["beside"]]
            assert phase["seconds"] == pytest.approx(phase["times"] * max(beside, default=0))
        assert each["tokens_per_second"] == pytest.approx(2 * 2048 * 16 / each["seconds"])
    assert reported["ds_config"]["train_micro_batch_size_per_gpu"] == 2


def test_the_config_is_written_aside_and_never_over_another(tmp_path):
    keep_profile(tmp_path, 4.0)
    config = tmp_path / "ds_config.json"
    ask = (
        *("--params", "2B", "--path", tmp_path, "--gpu-memory", "12GB", "--host-memory", "20GB"),
        *("--write", config),
    )
    done = plan(*ask)
    assert done.return_value == 0
    assert done.output.endswith(f"Wrote {config}: set the learning rate.\n")
    written = json.loads(config.read_text())
    assert written["zero_optimization"]["offload_optimizer"] == {
        "device": "nvme",
        "nvme_path": str(tmp_path),
        "pin_memory": True,
    }
    assert written["aio"]["intra_op_parallelism"] == 4
    printed = json.loads(plan(*ask[:-2], "--way", "zero3", "--json").output)
    expected = printed["ds_config"]["nvme_offload"]["host_memory"]
    assert Settings.of(written).host_memory == expected
    again = plan(*ask)
    assert "exists: give another name" in str(again.exception)
    assert json.loads(config.read_text()) == written


def test_a_huggingface_config_is_taken(tmp_path):
    pytest.importorskip("transformers")
    shape = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    done = plan("--model", tmp_path)
    assert (
        f"{tmp_path / 'config.json'}, 0.1244 billion parameters; the largest layer has 38.6 million."
        in " ".join(done.output.split())
    )


def test_nothing_that_fits_is_said_with_status_3(tmp_path):
    done = ended(
        *("plan", "--params", "70B", "--gpus", 0, "--host-memory", "32GB"),
        *("--write", tmp_path / "none.json"),
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert " ".join(done.stdout.split()).startswith(
        "Nothing fits as asked. The cheapest change that helps: a drive with 339 GB free (--path DIR); then "
        "Offload, compact24, in backward fits, and its speed is not known"
    )
    assert not (tmp_path / "none.json").exists()


def test_without_a_sweep_the_plan_says_what_to_run(tmp_path):
    done = plan(
        "--params", "2B", "--path", tmp_path, "--gpu-memory", "12GB", "--host-memory", "20GB"
    )
    assert f"not swept: run `nvme-sweep {tmp_path}`" in " ".join(done.output.split())
    assert "its speed is not known before the drive is measured" in done.output.splitlines()[0]


def test_a_gpu_brings_its_memory_and_its_speed():
    seconds = {}
    for name in ("T4", "L4", "L40", "NVIDIA L40S", "h100", "NVIDIA H100 PCIe", "RTX 5090"):
        ask = ("--params", "350M", "--gpu", name, "--host-memory", "64GB", "--seq", 2048, "--json")
        answer = json.loads(run("plan", *ask).output)
        seconds[name] = answer["plans"][0]["seconds"]
        assert not [said for said in answer["not_modelled"] if "not known" in said], name
    assert len(set(seconds.values())) == len(seconds)


def test_a_gpu_that_is_not_known_has_no_compute_and_that_is_said():
    done = plan("--params", "350M", "--seq", 2048, "--gpu", "Abacus")
    assert " s a step without compute. " in done.output.splitlines()[0]
    assert "GPU Abacus with 80 GB (speed unknown: compute is left out)" in done.output
    assert "compute (the speed of this GPU is not known)" in " ".join(done.output.split())


DRIVE = ("--drive-read", "3GB", "--drive-write", "2.5GB")


@pytest.mark.parametrize("alone", [("--gpu", "L40"), ("--gpu-memory", "24GB"), DRIVE])
def test_what_is_asked_of_another_machine_is_answered_alike(alone, monkeypatch):
    available = iter(range(8 << 30, 9 << 30, 1 << 28))
    monkeypatch.setattr("nvme_offload.planning.plan.available_bytes", lambda: next(available))
    monkeypatch.setattr("nvme_offload.planning.plan.copy_bytes_per_second", pytest.fail)
    assert len({run("plan", "--params", "1B", "--seq", 2048, *alone).output for _ in range(3)}) == 1


def test_a_drive_is_described_by_its_speeds():
    reported = json.loads(plan("--params", "7B", *DRIVE, "--drive-free", "1TB", "--json").output)
    (drive,) = reported["machine"]["drives"]
    assert (drive["path"], drive["free_bytes"]) == ("/local_nvme", 10**12)
    assert drive["gb_per_s"] == {"read": 3.0, "write": 2.5, "mixed": pytest.approx(2.727, rel=1e-3)}
    reported = json.loads(plan("--params", "7B", *DRIVE, "--drive-mixed", "2GB", "--json").output)
    assert reported["machine"]["drives"][0]["gb_per_s"]["mixed"] == 2.0
    assert reported["machine"]["drives"][0]["free_bytes"] is None


def test_a_way_and_a_format_can_be_asked_for():
    names = []
    for way in cli.DOORS:
        ask = ("--params", "7B", *DRIVE, "--way", way, "--state-format", "compact", "--json")
        names.append([each["name"] for each in json.loads(plan(*ask).output)["plans"]])
    zero, deepspeed, zero3, plain = names
    assert len(zero) == 6
    assert deepspeed == ["deepspeed-nvme-optimizer", "deepspeed-nvme-both"]
    assert zero3 == ["nvme-optimizer-compact", "nvme-both-compact"]
    updates = "", "-in-forward", "-host-gradients", "-provisional", "-in-both", "-in-backward"
    streamed = (f"streamed{updates[place]}-compact" for place in (0, 2, 3, 5))
    assert plain == [*(f"plain{each}-compact" for each in updates), *streamed]
    reported = json.loads(plan("--params", "7B", *DRIVE, "--inference", "--json").output)
    names = [each["name"] for each in reported["plans"]]
    assert names == ["inference-gpu", "inference-offload", "inference-cpu", "inference-nvme"]
    assert "optimizer" not in reported["ds_config"]


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
@pytest.mark.parametrize("memory", ["24GB", "1GB"])
def test_lines_end_within_the_terminal(columns, memory, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    done = plan("--params", "7B", "--gpu-memory", memory, *DRIVE, "--all")
    answer, _, rest = done.output.partition("The training script, for ")
    code, _, others = rest.partition("How the seconds")
    assert max(map(len, code.splitlines()), default=0) <= 100  # which is not wrapped
    longest = max((answer + others).splitlines(), key=len)
    assert len(longest) <= max(columns, 60), longest
    assert "NVMeOptimizer, compact, in backward" in done.output


def test_what_concedes_something_else_is_not_hidden_by_what_is_faster():
    ask = ("--params", "7B", "--gpu", "RTX 4090", "--gpu-memory", "24GB")
    drive = ("--drive-read", "7GB", "--drive-write", "6GB", "--drive-free", "1TB")
    text = " ".join(plan(*ask, *drive).output.split())
    for title, condition in {
        "compact, host gradients": "if states may be rounded to 8 bits; it does not write",
        "in backward": "if gradients are not clipped by a norm",
        "compact, in backward": "if states may be rounded to 8 bits and gradients are not clipped",
    }.items():
        assert f"tokens a second: NVMeOptimizer, {title}, {condition}" in text
    reported = json.loads(plan(*ask, *drive, "--json").output)
    seconds = {each["name"]: each["seconds"] for each in reported["plans"]}
    assert seconds["plain-in-backward"] > seconds["plain-host-gradients-compact"]


CARD = ("--gpu", "RTX 4090", "--gpu-memory", "24564MiB", "--host-memory", "64GB")


def test_a_slower_way_is_not_called_faster_and_a_way_that_fits_is_not_denied():
    ask = ("--params", "10B", *CARD, "--drive-read", "3.5GB", "--drive-write", "3GB")
    text = " ".join(plan(*ask, "--drive-free", "85GB").output.split())
    assert text.startswith("Train it with Offload, split: it fits, ")
    assert "without that, if gradients are not clipped by a norm, NVMeOptimizer, in back" in text
    reported = json.loads(plan(*ask, "--drive-free", "85GB", "--json").output)
    seconds = {each["title"]: each["seconds"] for each in reported["plans"] if each["fits"]}
    named = re.findall(r"tokens a second: ((?:NVMeOptimizer|Offload|ZeRO).*?), if ", text)
    assert named
    assert all(seconds[title] < seconds["Offload, split"] for title in named)


@pytest.mark.parametrize("memory", ["24GB", "70GB"])
def test_a_batch_that_hides_the_drive_fits(memory):
    ask = ("--params", "8B", "--drive-read", "3.5GB", "--drive-write", "3GB")
    ask = (*ask, "--gpu-memory", memory)
    text = " ".join(plan(*ask).output.split())
    ((batch, title),) = re.findall(
        r"With --micro-batch (\d+), the drive no longer limits (.*?): ", text
    )
    assert "no longer limits" not in plan(*ask, "--micro-batch", batch).output
    reported = json.loads(plan(*ask, "--micro-batch", batch, "--json").output)
    (longer,) = [each for each in reported["plans"] if each["title"] == title]
    assert longer["fits"]
    hiding = [each for each in longer["phases"] if each["name"].endswith("and update")]
    assert hiding
    for each in hiding:
        compute, drive = (
            sum(term["seconds"] for term in terms)
            for terms in each["beside"]
            if terms[0]["name"] in ("compute", "drive")
        )
        assert compute > drive


def test_the_code_of_any_title_in_the_table_can_be_asked_for():
    ask = ("--params", "8B", *CARD, *DRIVE)
    table = json.loads(plan(*ask, "--json").output)["plans"]
    for row in table[::7]:
        (only,) = json.loads(plan(*ask, "--way", row["title"], "--json").output)["plans"]
        assert only == row
    asked = plan(*ask, "--way", "NVMeOptimizer, compact, in backward")
    assert asked.output.startswith("Train it with NVMeOptimizer, compact, in backward: it fits, ")
    assert 'state_format="compact",\n        step_in_backward=True,' in asked.output
    refused = plan(*ask, "--way", "NVMeOptimizer, quickly").exception
    assert isinstance(refused, click.UsageError)
    assert "plan --all" in refused.message


@pytest.mark.parametrize(
    ("machine", "where"),
    [
        ((*CARD, "--gpus", 1), "on one GPU"),
        ((*CARD, "--gpus", 2), None),
        (("--gpus", 0, "--host-memory", "64GB"), "in host memory"),
    ],
)
def test_a_model_that_fits_one_device_needs_no_deepspeed(machine, where):
    done = run("plan", "--params", "7B", "--trainable", "40M", *machine)
    assert done.output.startswith("Train it with ZeRO-")
    said = re.search(r"Everything fits (.+?), so torch.optim.AdamW", " ".join(done.output.split()))
    assert (said and said[1]) == where


def test_steps_of_hours_are_whole_numbers():
    text = plan("--params", "70B", "--drive-read", "100MB", "--drive-write", "100MB").output
    assert re.search(r"it fits, \d+,\d{3} s a step", " ".join(text.split()))
    assert re.search(r"\d+ +\d+,\d{3} +0\.\d+$", text, re.M)
    assert re.search(r"s a step, 0\.\d+ tokens a second", text)
    assert "e+" not in text


def test_six_ways_are_shown_unless_all_are_asked_for():
    few, every = (
        plan("--params", "7B", *CARD, *DRIVE, *all_of).output for all_of in ((), ["--all"])
    )
    rows = [line for line in few.splitlines() if re.match(r"[ *]  \S.*\d$", line)]
    assert 1 < len(rows) - 1 <= 6  # and the head
    assert set(rows[1:]) <= {line.replace("      ", "") for line in every.splitlines()} | set(rows)
    assert re.search(r"^--all shows 5\d more\.$", few, re.M)
    assert "--all shows" not in every
    assert len(every.splitlines()) > 40


def test_the_life_of_a_drive_is_reported():
    ask = ("--params", "8B", *CARD, *DRIVE)
    reported = json.loads(plan(*ask, "--json").output)
    (chosen,) = [each for each in reported["plans"] if each["name"] == reported["fastest"]]
    for option, terabytes in (((), 1200), (("--drive-rated", "600TB"), 600)):
        text = " ".join(plan(*ask, *option).output.split())
        days = terabytes * 1e12 / chosen["written_bytes_a_day"]
        assert f"a drive that is rated for {terabytes:,} TB lasts {days:.0f} days." in text


def test_trainable_parameters_are_asked_for():
    reported = json.loads(plan("--params", "7B", "--trainable", "40M", *DRIVE, "--json").output)
    assert reported["model"]["trainable"] == 40_000_000
    (plain,) = [each for each in reported["plans"] if each["name"] == "plain"]
    assert plain["fits"]
    assert plain["drive_bytes"] <= 12 * 40_000_000


def test_a_described_machine_has_tokens_a_second_without_seq():
    reported = json.loads(plan("--params", "7B", *DRIVE, "--json").output)
    assert reported["work"]["sequence"] == 2048
    assert all(each["tokens_per_second"] for each in reported["plans"])


@pytest.mark.parametrize(
    ("gpu", "mebibytes"),  # as nvidia-smi reports them
    [
        ("H100", 81_559),
        ("NVIDIA H100 80GB HBM3", 81_559),
        ("H200", 143_771),
        ("B200", 183_359),
        ("T4", 15_360),
        ("RTX A6000", 49_140),
        ("RTX 4090", 24_564),
        ("RTX4090", 24_564),
        ("RTX 5090", 32_607),
        ("MI300X", 196_592),
        ("MI250X", 65_520),
        ("L40", 46_068),
        ("L4", 23_034),
        ("A100 80GB", 81_920),
        ("NVIDIA A100-SXM4-40GB", 40_960),
        ("A100 80G", 81_920),
        ("NVIDIA GeForce RTX 3090 Ti", 24_564),
        ("RTX 3090Ti", 24_564),
    ],
)
def test_a_gpu_is_known_by_its_name(gpu, mebibytes):
    reported = json.loads(run("plan", "--params", "350M", "--gpu", gpu, "--json").output)
    assert reported["machine"]["gpu"]["memory_bytes"] == mebibytes << 20
    assert reported["machine"]["gpu"]["link_bytes_per_second"] > 10e9


def test_a_gpu_without_bfloat16_gets_fp16():
    for gpu, precision in (("T4", "fp16"), ("L4", "bf16")):
        reported = json.loads(run("plan", "--params", "350M", "--gpu", gpu, "--json").output)
        assert reported["ds_config"][precision] == {"enabled": True}


def test_what_would_help_is_reported_where_nothing_fits(tmp_path):
    ask = ("--params", "7B", "--gpu", "RTX 4090", "--host-memory", "64GB", "--seq", 2048, *DRIVE)
    ask = (*ask, "--micro-batch", 4, "--activations", "keep", "--json")
    done = run("plan", *ask)
    assert done.return_value == 3
    change = json.loads(done.output)["change"]
    assert change["words"] == "activation checkpointing (--activations checkpoint)"
    assert change["plan"]["fits"]
    asked = [{"keep": "checkpoint"}.get(str(each), each) for each in ask]
    assert json.loads(run("plan", *asked).output)["fastest"] == change["plan"]["name"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "give the model: --params COUNT or --model FILE"),
        (["plan", "--params", "7B", "--model", "x"], "give the model"),
        (["plan", "--params", "seven"], "'seven' is not a number of parameters"),
        (["plan", "--model", "/nowhere.json"], "/nowhere.json does not exist"),
        (["plan", "--params", "7B", "--path", "/nowhere"], "'/nowhere' does not exist"),
        (["plan", "--params", "7B", "--gpu-memory", "80 fish"], "'80 fish' is not a size"),
        (["plan", "--params", "7B", "--ranks", "0"], "0 is not in the range"),
        (
            ["plan", "--params", "7B", "--gpu-memory", "24"],
            "24 without a unit is 24 bytes: did you mean 24GB?",
        ),
        (["plan", "--params", "7B", "--host-memory", "1.5"], "did you mean 1.5GB?"),
        (["plan", "--params", "7B", "--drive-rated", "600"], "did you mean 600TB?"),
        (["plan", "--params", "8"], "8 without a unit is 8 parameters: did you mean 8B?"),
        (["plan", "--params", "8B", "--trainable", "40"], "did you mean 40M?"),
        (["plan", "--params", "7B", "--host-memory", "0GB"], "0GB is not a size: give one above 0"),
        (["plan", "--params", "-1"], "'-1' is not a number of parameters"),
        (
            ["plan", "--params", "7B", "--gpus", "1", "--gpu", "A100"],
            'A100 is sold with different memory: give --gpu "A100 40GB" or --gpu "A100 80GB"',
        ),
        (
            ["plan", "--params", "7B", "--gpu", "Abacus"],
            "the memory of a GPU 'Abacus' is not known",
        ),
        (["plan", "--params", "7B", "--gpu", "RTX 4070 Laptop"], "Known are B200, GH200, H200,"),
        (["plan", "--params", "7B", "--gpus", "0", "--gpu", "L4"], "trains without GPUs"),
        (["plan", "--params", "7B", "--gpus", "2"], "no GPU is visible here: give --gpu"),
        (["plan", "--params", "7B", "--drive-read", "3GB"], "both --drive-read and --drive-write"),
        (["plan", "--params", "7B", *DRIVE, "--path", "/tmp"], "--path is a drive of this machine"),
        (["plan", "--params", "7B", "--budget", "-1"], "'-1' is not a size"),
        *(
            (["plan", "--params", "7B", "--inference", option, value], f"leave out {option}")
            for option, value in (
                ("--state-format", "split"),
                ("--trainable", "40M"),
                ("--accumulate", "2"),
            )
        ),
        (["plan", "--params", "7B", "--inference", "--way", "ZeRO-1"], "no way with --inference"),
        (["plan", "--params", "7B", "--way", "ZeRO-Inference, on GPU"], "without --inference"),
        (
            ["plan", "--params", "7B", "--way", "NVMeOptimizer", "--state-format", "split"],
            "'NVMeOptimizer' is no way with --state-format split",
        ),
        (["plan", "--params", "7B", "--gpu", "L4", "--ranks", "2"], "give --gpus 2"),
        (["plan", "--params", "7B", "--drive-rated", "1TB"], "--drive-rated describes no drive"),
        (
            ["plan", "--params", "7B", "--gpu", "RTX 4090 48GB"],
            'give --gpu "RTX 4090 24GB", or --gpu-memory',
        ),
        (["plan", "--params", "7B", "--gpu", ""], "the memory of a GPU '' is not known"),
        (["repair"], "No such command 'repair'"),
    ],
)
def test_what_is_asked_wrongly_is_one_line_and_status_2(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nvme-offload", *arguments])
    assert cli.main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("nvme-offload: ")
    assert message in said.err
    assert said.err.count("\n") == 1


def test_a_failure_is_one_line_and_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *("nvme-offload", "plan", "--params", "1B", "--host-memory", "1TB"),
            *("--write", str(tmp_path / "no" / "where.json")),
        ],
    )
    assert cli.main() == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_help_is_what_it_says_without_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nvme-offload"])
    assert cli.main() == 0
    said = capsys.readouterr().out
    assert "plan" in said
    assert "doctor" in said


# nvme-offload doctor


def test_the_doctor_looks_at_everything(tmp_path):
    keep_profile(tmp_path, 4.0)
    done = ended("doctor", "--path", tmp_path, "--json")
    reported = json.loads(done.stdout)
    names = {each["name"] for each in reported["checks"]}
    expected = "libaio aio-max-nr io_uring memlock GPU torch packing processor DeepSpeed compilers"
    assert names >= {*expected.split(), "huge pages", f"drive {tmp_path}"}
    assert done.returncode == (0 if reported["works"] else 3)
    assert reported["works"] == all(each["status"] != "problem" for each in reported["checks"])
    assert all(
        each["remedy"] for each in reported["checks"] if each["status"] in ("warning", "problem")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["config"]  # nothing is left


@pytest.mark.parametrize(
    ("faults", "found"),
    [
        ([None, None], "ok"),
        ([None, "Triton cannot be used: ImportError: none"], "warning"),
    ],
)
def test_the_doctor_says_where_states_are_packed_slowly(monkeypatch, faults, found):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(faults))
    monkeypatch.setattr(on_gpu, "fault", lambda device: faults[device.index])
    packing = checks.packing()
    assert packing.status == found
    assert [why for why in faults if why and why not in packing.found] == []


def test_the_doctor_prints_what_to_do_and_ends_with_3_where_something_is_needed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        checks, "_number", {"/proc/sys/fs/aio-max-nr": 65536, "/proc/sys/fs/aio-nr": 65500}.get
    )
    done = run("doctor")
    assert done.return_value == 3
    lines = done.output.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("PROBLEM"))
    assert lines[at].split(maxsplit=2) == ["PROBLEM", "aio-max-nr", "36 of 65536 requests are free"]
    assert lines[at + 1].strip().startswith("-> sudo sysctl fs.aio-max-nr=1048576")
    assert lines[-1] == "1 of these must be put right before anything can be offloaded."


def test_a_swept_drive_is_well_and_an_unswept_one_is_not(tmp_path):
    before = list(checks.drive(str(tmp_path)))
    assert before[0].status == "ok"
    assert before[-1].status == "warning"
    assert before[-1].remedy == f"nvme-sweep {tmp_path}"
    keep_profile(tmp_path, 4.0)
    swept = list(checks.drive(str(tmp_path)))[-1]
    assert (swept.status, swept.found) == (
        "ok",
        "swept 2025-01-02: read 4.00, write 4.00, mixed 4.00 GB/s; the evidence is good",
    )
    keep_profile(tmp_path, 4.0, seconds=0.1)
    swept = list(checks.drive(str(tmp_path)))[-1]
    assert swept.status == "warning"
    assert "mixed 4.00 GB/s; the evidence is poor (read: 0 of 2 final trials" in swept.found
    assert swept.remedy == f"nvme-sweep {tmp_path}, while no other process uses the drive"


def test_direct_io_is_tried_on_the_path_and_nothing_is_left(directory):
    found = checks.direct_io(str(directory), "drive")
    assert (found.status, found.found.partition(",")[0]) == ("ok", "O_DIRECT")
    assert {path.name for path in directory.iterdir()} <= {"config"}


def test_memory_is_no_drive():
    if not Path("/dev/shm").is_dir() or not describe("/dev/shm").is_memory:
        pytest.skip("/dev/shm is not in memory here")
    seen, direct, *_ = checks.drive("/dev/shm")
    assert (seen.status, direct.status) == ("problem", "warning")


def test_a_read_only_directory_is_a_problem(tmp_path):
    missing = tmp_path / "missing"
    assert checks.direct_io(str(missing), "drive").status == "problem"
    assert next(checks.drive(str(missing))).status == "problem"


@pytest.mark.parametrize(
    ("finding", "status", "found"),
    [
        (checks.aio_requests(65536, 0), "ok", "65536 of 65536 requests are free"),
        (checks.aio_requests(65536, 60000), "warning", "5536 of 65536 requests are free"),
        (checks.aio_requests(None, None), "note", "the kernel does not report it"),
        (
            checks.locked_memory(64 << 20, resource.RLIM_INFINITY),
            "ok",
            "memory can be locked, no limit",
        ),
        (
            checks.locked_memory(8 << 20, 8 << 20),
            "warning",
            "8 MiB could be locked, a limit of 8 MiB",
        ),
        (checks.huge_pages("always [madvise] never"), "ok", "granted (madvise)"),
        (checks.huge_pages("always madvise [never]"), "warning", "off: "),
        (checks.huge_pages(None), "note", "this kernel has no transparent huge pages"),
        (checks.torch_version("2.11.0"), "ok", "2.11.0"),
        (checks.torch_version(None), "warning", "not installed"),
        (checks.processor(None, False, ""), "note", "not checked: torch is not installed"),
        (
            checks.processor(NARROW, True, "fp16"),
            "ok",
            "AVX2, without instructions for bf16 and fp16",
        ),
        (checks.processor(WIDE, False, ""), "ok", "AVX512, with instructions for bf16 and fp16"),
        (
            checks.processor(WIDE._replace(fp16=False), False, "bf16"),
            "ok",
            "AVX512, without instructions for fp16",
        ),
        (
            checks.processor(WIDE._replace(fp16=False), False, ""),
            "warning",
            "AVX512, without instructions for fp16: without a GPU DeepSpeed refuses fp16",
        ),
        (
            checks.processor(NARROW, False, ""),
            "warning",
            "AVX2, without instructions for bf16 and fp16: without a GPU bf16 is many times slower than fp32, and",
        ),
        (
            checks.processor(NARROW, False, "bf16"),
            "warning",
            "AVX2, without instructions for bf16 and fp16: without a GPU bf16 is many times slower",
        ),
        (checks.processor(NARROW, False, "fp32"), "ok", "AVX2"),
        (checks.deepspeed_version("0.19.8"), "ok", "0.19.8"),
        (checks.deepspeed_version("0.16.9"), "ok", "0.16.9"),
        (checks.deepspeed_version("0.18.2+abc"), "ok", "0.18.2+abc"),
        (checks.deepspeed_version("0.16.8"), "warning", "0.16.8; zero3 needs 0.16.9 or newer"),
        (checks.deepspeed_version("0.9.10"), "warning", "0.9.10; zero3 needs 0.16.9 or newer"),
        (checks.deepspeed_version("0.20.0"), "warning", "0.20.0; zero3 was tried up to 0.19.8"),
        (checks.deepspeed_version(None), "note", "not installed"),
        (checks.compilers(True, lambda name: None), "warning", "c++, ninja, nvcc not found"),
        (
            checks.compilers(False, lambda name: None if name == "ninja" else name),
            "warning",
            "ninja not found",
        ),
    ],
)
def test_what_is_found_has_its_status(finding, status, found):
    assert (finding.status, finding.found[: len(found)]) == (status, found)
    assert bool(finding.remedy) == (
        status == "warning" or (finding.name, status) == ("DeepSpeed", "note")
    )


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "fp16"),
        ({"bf16": {}}, "bf16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, ""),
    ],
)
def test_the_precision_of_a_config(config, precision):
    assert checks.precision_of(config) == precision


@pytest.mark.parametrize(("native", "status"), [(NARROW, 3), (WIDE, 0)])
def test_a_config_of_fp16_is_a_problem_where_deepspeed_refuses_it(
    native, status, tmp_path, monkeypatch
):
    monkeypatch.setattr(checks, "precisions", lambda: native)
    monkeypatch.setattr(checks, "gpu_count", lambda: 0)
    config = tmp_path / "ds.json"
    config.write_text('{"fp16": {"enabled": true}}  // with a comment')
    done = run("doctor", "--config", config)
    assert done.return_value == status
    assert ("PROBLEM  processor" in done.output) == (status == 3)
    assert ('enable "bf16" in place of "fp16"' in done.output) == (status == 3)


def test_a_backend_that_does_not_run_is_a_problem_where_it_is_needed(monkeypatch):
    import nvme_offload.io.engine
    from nvme_offload.errors import UnsupportedError

    def refuse(config: object) -> None:
        raise UnsupportedError("the kernel refuses")

    monkeypatch.setattr(nvme_offload.io.engine, "Engine", refuse)
    assert (checks.backend("libaio").status, checks.backend("io_uring").status) == (
        "problem",
        "note",
    )
    assert checks.backend("libaio").found == "the kernel refuses"


def test_a_doctor_without_the_extension_still_says_what_works(tmp_path):
    program = (
        "import sys; sys.modules['nvme_offload._aio'] = None; "
        "from nvme_offload.commands.cli import main; sys.exit(main())"
    )
    done = finished([sys.executable, "-c", program, "doctor", "--path", str(tmp_path), "--json"])
    assert done.returncode == 3, done.stderr
    said = json.loads(done.stdout)
    by_name = {each["name"]: each for each in said["checks"]}
    assert not said["works"]
    assert by_name["extension"]["status"] == "problem"
    assert "build it again" in by_name["extension"]["remedy"]
    assert torch.__version__.startswith(by_name["torch"]["found"])
    assert f"drive {tmp_path}" in by_name
