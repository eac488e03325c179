"""Run DeepSpeed's own tests twice, with plain DeepSpeed and after `nvme_offload.zero3.enable()`:
python tools/deepspeed_own_tests.py CHECKOUT.

CHECKOUT is a directory that contains DeepSpeed's `tests`. They are copied and run against the
installed DeepSpeed. Prints a table with the passed tests of each file in both runs. The exit status
is 1 if a test passes with plain DeepSpeed and not with this package.

Few of these tests offload. With --offloaded every stage-3 engine offloads parameters and states:
plain DeepSpeed to "cpu", this package to "nvme".

This file is also the pytest plugin that enables the package, in pytest and in the fork server of the
ranks.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Tests of offload and ZeRO-3 that run on a CPU.
FILES = (
    "unit/v1/nvme",
    "unit/v1/pin_memory",
    "unit/v1/zero",
    "unit/v1/half_precision",
    "unit/runtime/zero",
    "unit/runtime/half_precision/test_fp16.py",
    "unit/runtime/half_precision/test_zero_optim_overflow.py",
    "unit/runtime/zenflow",
    "unit/runtime/test_ds_config_dict.py",
    "unit/runtime/test_ds_initialize.py",
    "unit/runtime/test_multiple_models.py",
    "unit/runtime/test_mup_optimizers.py",
    "unit/runtime/test_no_sync_ctxt.py",
    "unit/checkpoint",
    "unit/ops/adam/test_adamw.py",
    "unit/ops/lion/test_lion.py",
    "unit/ops/muon/test_muon.py",
    "unit/v1/moe/test_autoep_checkpoint.py",
    "unit/v1/moe/test_autoep_grad_parity.py",
    "unit/v1/moe/test_autoep_integration.py",
    "unit/v1/compile/test_compile_zero.py",
    "unit/v1/compile/test_offload_opt_states.py",
    "unit/v1/compile/test_z3_eager_fallback.py",
)
WAYS = ("stock", "ours")
# environment variables: which run, and the file of outcomes
WAY, OUTCOMES = "DEEPSPEED_OWN_TESTS", "DEEPSPEED_OWN_TESTS_OUTCOMES"
# with --offloaded: a directory on the drive
DRIVE = "DEEPSPEED_OWN_TESTS_DRIVE"


def prepare() -> None:
    """Set up DeepSpeed in this process for the run that the environment names."""
    import cpuinfo
    import deepspeed

    # imports torch's compiler: once here instead of in each rank of each test
    import deepspeed.runtime.zero.muon.muon_optimizer
    from deepspeed.accelerator import get_accelerator

    # cached: each call starts a process that takes seconds
    known = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: dict(known)
    # torch computes fp16 on any CPU; DeepSpeed's tests skip it on CPUs without fp16 instructions
    get_accelerator().is_fp16_supported = lambda: True
    # This op busy-waits, which stalls more ranks than cores.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if os.environ[WAY] == "ours":
        from nvme_offload import zero3
        from nvme_offload.swap import tier

        zero3.enable()
        check = tier._check_directory

        def make_and_check(path: Any) -> None:
            # DeepSpeed makes a missing directory; this package refuses it, since the drive may not
            # be mounted
            Path(path).mkdir(parents=True, exist_ok=True)
            check(path)

        tier._check_directory = make_and_check
    if os.environ.get(DRIVE):
        offload_everything(
            {
                "stock": {"device": "cpu"},
                "ours": {"device": "nvme", "nvme_path": os.environ[DRIVE]},
            }[os.environ[WAY]]
        )


def offload_everything(to: dict[str, str]) -> None:
    """Patch DeepSpeedConfig so that every stage-3 configuration offloads *to*."""
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig.__init__

    def offload_and_read(self: Any, config: Any, *args: Any, **named: Any) -> None:
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        # Leave ZenFlow and sections that already offload to a drive unchanged.
        if isinstance(zero, dict) and zero.get("stage") == 3 and not zero.get("zenflow"):
            # otherwise DeepSpeed refuses optimizers that it accepts without offload
            config.setdefault("zero_force_ds_cpu_optimizer", False)
            # refused together with the keys that replaced them
            for deprecated in [key for key in zero if key.startswith("cpu_offload")]:
                del zero[deprecated]
            for key in ("offload_param", "offload_optimizer"):
                device = zero.get(key) or {}
                if device.get("device") != "nvme" and not device.get("super_offload"):
                    zero[key] = {**device, **to}
        read(self, config, *args, **named)

    DeepSpeedConfig.__init__ = offload_and_read


if os.environ.get(WAY):
    prepare()
    multiprocessing.set_forkserver_preload([__name__])


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselect tests with an outcome from an earlier session."""
    done = results(Path(os.environ[OUTCOMES]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record the start of a test; this stays its outcome if the test ends the session."""
    record(nodeid, "ended pytest")


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of a test."""
    if report.when == "call" or report.outcome != "passed":
        record(report.nodeid, report.outcome)


def record(nodeid: str, outcome: str) -> None:
    """Append an outcome to the file."""
    with Path(os.environ[OUTCOMES]).open("a") as file:
        print(json.dumps([nodeid, outcome]), file=file)


def results(outcomes: Path) -> dict[str, str]:
    """The last recorded outcome of each test."""
    return dict(map(json.loads, outcomes.read_text().splitlines())) if outcomes.exists() else {}


def run(
    tests: Path,
    files: Iterable[str],
    way: str,
    outcomes: Path,
    log: Path,
    patience: int,
    drive: str,
) -> dict[str, str]:
    """Run the tests of *files*; restart pytest when a test ends it. Returns outcomes by test."""
    environment = {
        **os.environ,
        WAY: way,
        OUTCOMES: str(outcomes),
        DRIVE: drive,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        ),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # for its ninja
        "DS_ACCELERATOR": "cpu",
        "DS_UNITTEST_TIMEOUT": str(patience),
        "LOCAL_SIZE": "2",  # the most ranks
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Sequentially, because tests that use a drive are marked sequential.
    plugins = [
        "-p",
        Path(__file__).stem,
        *(word for name in ("cacheprovider", "xdist", "timeout") for word in ("-p", f"no:{name}")),
    ]
    options = ["-o", "addopts=", *plugins, "-q", "--tb=short", "--continue-on-collection-errors"]
    before = -1
    while len(results(outcomes)) > before:
        before = len(results(outcomes))
        with log.open("a") as output:
            subprocess.run(
                [sys.executable, "-m", "pytest", *options, *files],
                cwd=tests,
                env=environment,
                stdout=output,
                stderr=output,
            )
        if list(results(outcomes).values())[-1:] != ["ended pytest"]:
            break
    return results(outcomes)


def table(found: dict[str, dict[str, str]]) -> list[str]:
    """A Markdown table: counts of outcomes by file and run."""
    lines = [
        "| file | tests | passed, stock | passed, ours | skipped, stock | skipped, ours |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for file in dict.fromkeys(name.partition("::")[0] for way in WAYS for name in found[way]):
        counts = [
            collections.Counter(
                outcome for name, outcome in found[way].items() if name.partition("::")[0] == file
            )
            for way in WAYS
        ]
        numbers = [max(counts[0].total(), counts[1].total())] + [
            count[outcome] for outcome in ("passed", "skipped") for count in counts
        ]
        lines.append(f"| {file.removeprefix('unit/')} | {' | '.join(map(str, numbers))} |")
    return lines


def differences(found: dict[str, dict[str, str]]) -> dict[str, tuple[str, str]]:
    """Tests whose outcomes differ between the runs, with both outcomes."""
    names = dict.fromkeys(name for way in WAYS for name in found[way])
    both = {name: tuple(found[way].get(name, "not run") for way in WAYS) for name in names}
    return {name: outcomes for name, outcomes in both.items() if outcomes[0] != outcomes[1]}  # type: ignore[misc]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a directory with DeepSpeed's tests in it")
    parser.add_argument(
        "--files", nargs="+", default=FILES, help="files of its tests, or directories of them"
    )
    parser.add_argument(
        "--offloaded",
        action="store_true",
        help="offload parameters and states in every stage-3 engine",
    )
    parser.add_argument(
        "--patience", type=int, default=300, help="seconds after which a test hangs"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help="a directory for pytest's output and the outcomes; tests with an outcome there are not run again",
    )
    parser.add_argument("--output", type=Path, help="write the table there, too")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="deepspeed-own-") as place:
        # A copy: next to the sources the tests would import those.
        tests = Path(shutil.copytree(arguments.checkout / "tests", Path(place) / "tests"))
        logs = arguments.logs or Path(place)
        logs.mkdir(parents=True, exist_ok=True)
        drive = str(Path(place) / "drive") if arguments.offloaded else ""
        found = {
            way: run(
                tests,
                arguments.files,
                way,
                logs / f"{way}.jsonl",
                logs / f"{way}.log",
                arguments.patience,
                drive,
            )
            for way in WAYS
        }
    differ = differences(found)
    lost = [name for name, (stock, _) in differ.items() if stock == "passed"]
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed", "pytest")
    )
    totals = {way: collections.Counter(found[way].values()) for way in WAYS}
    lines = [
        *(
            f"{way}: {', '.join(f'{count} {outcome}' for outcome, count in sorted(totals[way].items()))}."
            for way in WAYS
        ),
        f"{time.monotonic() - began:.0f} s on {os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}, {versions}.",
        "",
        *table(found),
        *(["", "Different outcomes:", ""] if differ else []),
        *(f"- `{name}`: {stock}, here {ours}" for name, (stock, ours) in differ.items()),
    ]
    print("\n".join(lines))
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
