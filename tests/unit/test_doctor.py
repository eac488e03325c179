"""The command `nvme-offload`: what its checks find, what it prints, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nvme_offload.commands import checks, cli
from nvme_offload.hardware import machine as machines
from nvme_offload.hardware import profile_shelf
from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.profile import PHASES, Best, Profile, Setting, Trial
from nvme_offload.zero3.settings import Settings

NARROW, WIDE = checks.Precisions("AVX2", False, False), checks.Precisions("AVX512", True, True)
COMMAND = [sys.executable, "-m", "nvme_offload.commands"]
SETTING = Setting(1 << 20, 8, 4)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(machines, "_PROBE_BYTES", 4 << 20)


def keep_profile(path: Path, gb_per_s: float, seconds: float = 0.6) -> None:
    trials = tuple(
        Trial(
            phase=phase,
            **dataclasses.asdict(SETTING),
            bytes=int(gb_per_s * seconds * 1e9),
            seconds=seconds,
            gb_per_s=gb_per_s,
            read_gb_per_s=gb_per_s,
            write_gb_per_s=0.0,
            stage="final",
            control=False,
            relative=1.0,
            started_seconds=float(number),
        )
        for number in range(4)
        for phase in PHASES
    )
    best = {
        phase: Best(
            SETTING.block_size,
            SETTING.queue_depth,
            SETTING.thread_count,
            False,
            True,
            "libaio",
            gb_per_s,
            1,
            1,
            1,
        )
        for phase in PHASES
    }
    described = {**describe(path).as_dict(), "model": "made up"}
    profile_shelf.keep(
        Profile(
            "0",
            "2001-02-03T04:05:06",
            "",
            described,
            {"ranks": 1},
            {"name": "native"},
            trials,
            best,
            SETTING,
            best,
            (),
            steady=True,
            warnings=(),
        )
    )


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.command, [*map(str, arguments)], standalone_mode=False)


def ended(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


# nvme-offload plan


def plan(*arguments: object) -> Result:
    return run(
        "plan",
        "--gpus",
        1,
        "--gpu",
        "H100",
        "--gpu-memory",
        "80GB",
        "--host-memory",
        "64GB",
        *arguments,
    )


def test_a_plan_is_printed_with_its_formula(tmp_path):
    keep_profile(tmp_path, 4.0)
    done = plan(
        "--params",
        "1B",
        "--budget",
        "3GB",
        "--path",
        tmp_path,
        "--gpu-memory",
        "8GB",
        "--host-memory",
        "16GB",
    )
    assert done.return_value == 0
    lines = done.output.splitlines()
    assert (
        lines[0]
        == "1B parameters: 1 billion parameters, the largest layer 70.43 million (of the usual shape)"
    )
    assert lines[1].startswith("1 rank, H100 with 8 GB; 16 GB of host memory, which streams ")
    assert lines[2].startswith(f"{tmp_path}: ")
    assert lines[2].endswith("read 4, write 4, mixed 4 GB/s")
    chosen = [line for line in lines if line.startswith("*")]
    assert len(chosen) == 1
    assert chosen[0].split("  ")[1].strip() == "nvme_offload, optimizer on NVMe"
    assert "needs 21.5 GB of GPU memory" in next(line for line in lines if "ZeRO-1" in line)
    answer = next(line for line in lines if line.startswith("Fastest that fits: "))
    assert answer.startswith("Fastest that fits: nvme_offload, optimizer on NVMe, ")
    assert 'with "host_memory": 3000000000 a rank, call nvme_offload.zero3.enable()' in done.output
    assert " TB a day to " in done.output
    assert "communication between ranks" in lines[-1]


def test_a_plan_as_json_has_everything(tmp_path):
    keep_profile(tmp_path, 4.0)
    done = plan(
        "--params",
        "7B",
        "--path",
        tmp_path,
        "--ranks",
        2,
        "--nodes",
        8,
        "--seq",
        2048,
        "--micro-batch",
        2,
        "--json",
    )
    told: dict[str, Any] = json.loads(done.output)
    assert (told["world"], told["work"]) == (
        {"ranks": 2, "nodes": 8, "zero_init": True},
        {"sequence": 2048, "micro_batch": 2},
    )
    assert told["model"]["parameters"] == 7_000_000_000
    assert told["machine"]["drives"][0]["gb_per_s"] == dict.fromkeys(PHASES, 4.0)
    assert len(told["plans"]) == 12
    assert told["fastest"] in {each["name"] for each in told["plans"] if each["fits"]}
    for each in told["plans"]:
        assert each["fits"] == (not each["problems"])
        terms = each["terms"]
        parts = [
            [term["seconds"] for term in terms[name]] for name in ("passes", "update", "drive")
        ]
        assert each["seconds"] == pytest.approx(
            max(parts[0], default=0) + max(sum(parts[1]), sum(parts[2]))
        )
    assert told["ds_config"]["train_micro_batch_size_per_gpu"] == 2


def test_the_config_is_written_aside_and_never_over_another(tmp_path):
    keep_profile(tmp_path, 4.0)
    config = tmp_path / "ds_config.json"
    ask = (
        "--params",
        "2B",
        "--path",
        tmp_path,
        "--gpu-memory",
        "12GB",
        "--host-memory",
        "20GB",
        "--write",
        config,
    )
    done = plan(*ask)
    assert done.return_value == 0
    assert done.output.endswith(f"Wrote {config}: set learning rate and batch size.\n")
    written = json.loads(config.read_text())
    assert written["zero_optimization"]["offload_optimizer"] == {
        "device": "nvme",
        "nvme_path": str(tmp_path),
        "pin_memory": True,
    }
    assert written["aio"]["intra_op_parallelism"] == 4
    assert (
        Settings.of(written).host_memory
        == json.loads(plan(*ask[:-2], "--json").output)["ds_config"]["nvme_offload"]["host_memory"]
    )
    again = plan(*ask)
    assert "exists: give another name" in str(again.exception)
    assert json.loads(config.read_text()) == written


def test_a_huggingface_config_is_taken(tmp_path):
    shape = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    done = plan("--model", tmp_path)
    assert done.output.startswith(
        f"{tmp_path / 'config.json'}: 0.1244 billion parameters, the largest layer 38.6 million\n"
    )


def test_nothing_that_fits_is_said_with_status_3(tmp_path):
    done = ended(
        "plan",
        "--params",
        "70B",
        "--gpus",
        0,
        "--host-memory",
        "16GB",
        "--write",
        tmp_path / "none.json",
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert "Nothing fits. Name a directory on a drive with --path." in done.stdout
    assert not (tmp_path / "none.json").exists()


def test_without_a_sweep_the_plan_says_what_to_run(tmp_path):
    done = plan(
        "--params", "2B", "--path", tmp_path, "--gpu-memory", "12GB", "--host-memory", "20GB"
    )
    assert f"not swept: run `nvme-sweep {tmp_path}`" in done.output
    assert "whose drive was never swept." in done.output


def test_a_gpu_brings_its_memory_and_its_speed():
    seconds = {}
    for name in ("T4", "L4", "L40", "NVIDIA L40S", "h100", "NVIDIA H100 PCIe", "RTX 5090"):
        asked = [
            "--params",
            "350M",
            "--gpu",
            name,
            "--host-memory",
            "64GB",
            "--seq",
            2048,
            "--json",
        ]
        answer = json.loads(run("plan", *asked).output)
        seconds[name] = answer["plans"][0]["seconds"]
        assert not [said for said in answer["not_modelled"] if "not known" in said], name
    assert len(set(seconds.values())) == len(seconds)


def test_a_gpu_that_is_not_known_has_no_compute_and_that_is_said():
    done = plan("--params", "350M", "--seq", 2048, "--gpu", "Abacus")
    assert "compute of a GPU 'Abacus', whose speed is not known here" in done.output


def test_what_is_asked_of_another_machine_is_answered_alike():
    assert len({plan("--params", "1B", "--seq", 2048).output for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "give the model: --params COUNT or --model FILE"),
        (["plan", "--params", "7B", "--model", "x"], "give the model"),
        (["plan", "--params", "seven"], "'seven' is no number of parameters"),
        (["plan", "--model", "/nowhere.json"], "/nowhere.json does not exist"),
        (["plan", "--params", "7B", "--path", "/nowhere"], "Directory '/nowhere' does not exist"),
        (["plan", "--params", "7B", "--gpu-memory", "80 fish"], "'80 fish' is not a size"),
        (["plan", "--params", "7B", "--ranks", "0"], "0 is not in the range"),
        (
            ["plan", "--params", "7B", "--gpu-memory", "24"],
            "24 is 24 bytes: give a unit, such as 24GB",
        ),
        (["plan", "--params", "7B", "--host-memory", "64"], "give a unit, such as 64GB"),
        (
            ["plan", "--params", "7B", "--gpus", "1", "--gpu", "A100"],
            "how much memory such a GPU has is not known here: give --gpu-memory",
        ),
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
            "nvme-offload",
            "plan",
            "--params",
            "1B",
            "--host-memory",
            "1TB",
            "--write",
            str(tmp_path / "no" / "where.json"),
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
    told = json.loads(done.stdout)
    names = {each["name"] for each in told["checks"]}
    assert names >= {
        "libaio",
        "aio-max-nr",
        "io_uring",
        "memlock",
        "huge pages",
        "GPU",
        "torch",
        "processor",
        "DeepSpeed",
        "compilers",
        f"drive {tmp_path}",
    }
    assert done.returncode == (0 if told["works"] else 3)
    assert told["works"] == all(each["status"] != "problem" for each in told["checks"])
    assert all(
        each["remedy"] for each in told["checks"] if each["status"] in ("warning", "problem")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["config"]  # nothing is left


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
    assert lines[at].split() == [
        "PROBLEM",
        "aio-max-nr",
        "36",
        "of",
        "65536",
        "requests",
        "are",
        "free",
    ]
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
        "swept 2001-02-03: read 4.00, write 4.00, mixed 4.00 GB/s; the evidence is good",
    )
    keep_profile(tmp_path, 4.0, seconds=0.1)
    swept = list(checks.drive(str(tmp_path)))[-1]
    assert swept.status == "warning"
    assert "mixed 4.00 GB/s; the evidence is poor (read: 0 of 2 final trials" in swept.found
    assert swept.remedy == f"nvme-sweep {tmp_path}, while nobody else uses the drive"


def test_direct_io_is_tried_on_the_path_and_nothing_is_left(directory):
    found = checks.direct_io(str(directory), "drive")
    assert (found.status, found.found.partition(",")[0]) == ("ok", "O_DIRECT")
    assert {path.name for path in directory.iterdir()} <= {"config"}


def test_memory_is_no_drive():
    if not Path("/dev/shm").is_dir() or not describe("/dev/shm").is_memory:
        pytest.skip("/dev/shm is not in memory here")
    seen, direct, *_ = checks.drive("/dev/shm")
    assert (seen.status, direct.status) == ("problem", "warning")


def test_a_directory_that_nobody_may_write_to_is_a_problem(tmp_path):
    missing = tmp_path / "missing"
    assert checks.direct_io(str(missing), "drive").status == "problem"
    assert next(checks.drive(str(missing))).status == "problem"


@pytest.mark.parametrize(
    ("finding", "status", "found"),
    [
        (checks.aio_requests(65536, 0), "ok", "65536 of 65536 requests are free"),
        (checks.aio_requests(65536, 60000), "warning", "5536 of 65536 requests are free"),
        (checks.aio_requests(None, None), "note", "the kernel does not tell"),
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
        (checks.huge_pages(None), "note", "this kernel has none"),
        (checks.torch_version("2.11.0"), "ok", "2.11.0"),
        (checks.torch_version(None), "warning", "not installed"),
        (checks.processor(None, False, ""), "note", "not looked at: torch does that"),
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


def test_the_entry_point_is_installed_beside_the_sweeps():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'nvme-offload = "nvme_offload.commands.cli:main"' in text
    if (
        shutil.which("nvme-offload", path=os.pathsep.join([str(Path(sys.executable).parent)]))
        is None
    ):
        pytest.skip("the package was installed before it had this command")
    assert subprocess.run(
        [Path(sys.executable).parent / "nvme-offload", "--version"], capture_output=True, text=True
    ).stdout.startswith("nvme-offload, version ")
