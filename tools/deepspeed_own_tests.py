"""Runs DeepSpeed's own tests, on DeepSpeed as it is and after `nvme_offload.zero3.enable()`: python
tools/deepspeed_own_tests.py CHECKOUT.

CHECKOUT is a directory with DeepSpeed's `tests` in it; they are copied, and what they test is the
DeepSpeed that is installed. Prints a table of files and how many of their tests passed, each way.
The exit status is 1 when a test that passes on DeepSpeed as it is does not pass on this package.

Few of these tests offload. With --offloaded every stage-3 engine in them does, parameters and
states: DeepSpeed as it is to "cpu", this package to "nvme".

The same file is the plugin of pytest that enables this package, there and in the server that the
ranks of a test are forked from.
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

# What is about offload and ZeRO-3, and works on a processor.
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
# variables of the environment: which way, and where to tell of each test
WAY, TOLD = "DEEPSPEED_OWN_TESTS", "DEEPSPEED_OWN_TESTS_TOLD"
# the same where everything is offloaded: a directory on the drive
DRIVE = "DEEPSPEED_OWN_TESTS_DRIVE"


def prepare() -> None:
    """DeepSpeed in this process as the tests are to find it, which way the environment says."""
    import cpuinfo
    import deepspeed

    # imports torch's compiler: once here, and not in each rank of each test
    import deepspeed.runtime.zero.muon.muon_optimizer
    from deepspeed.accelerator import get_accelerator

    # a process of its own, of seconds, for each rank that loads an op
    known = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: dict(known)
    # torch computes it everywhere; without instructions for it their tests of it are skipped
    get_accelerator().is_fp16_supported = lambda: True
    # Its own op between ranks spins, which ranks that outnumber the cores do not stand.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if os.environ[WAY] == "ours":
        from nvme_offload import zero3
        from nvme_offload.swap import tier

        zero3.enable()
        check = tier._check_directory

        def make_and_check(path: Any) -> None:
            # as DeepSpeed does; here a directory that is missing is refused: its drive may not be
            # mounted
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
    """Have every configuration that DeepSpeed reads from now on offload *to*, with stage 3."""
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig.__init__

    def offload_and_read(self: Any, config: Any, *args: Any, **named: Any) -> None:
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        # What works with states in memory only is as it was, and what is on a drive already.
        if isinstance(zero, dict) and zero.get("stage") == 3 and not zero.get("zenflow"):
            # or it refuses optimizers that it takes where nothing is offloaded
            config.setdefault("zero_force_ds_cpu_optimizer", False)
            # refused beside what has replaced them
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
    """Leave out what an earlier session told of."""
    done = results(Path(os.environ[TOLD]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Tell of a test that begins: if nothing follows, it ended the session."""
    tell(nodeid, "ended pytest")


def pytest_runtest_logreport(report: Any) -> None:
    """Tell what a test came to."""
    if report.when == "call" or report.outcome != "passed":
        tell(report.nodeid, report.outcome)


def tell(nodeid: str, outcome: str) -> None:
    """Add a line to what is told."""
    with Path(os.environ[TOLD]).open("a") as file:
        print(json.dumps([nodeid, outcome]), file=file)


def results(told: Path) -> dict[str, str]:
    """What each test came to, by what was told last."""
    return dict(map(json.loads, told.read_text().splitlines())) if told.exists() else {}


def run(
    tests: Path, files: Iterable[str], way: str, told: Path, log: Path, patience: int, drive: str
) -> dict[str, str]:
    """What the tests of *files* come to; pytest is started again where a test ends it."""
    environment = {
        **os.environ,
        WAY: way,
        TOLD: str(told),
        DRIVE: drive,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        ),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # for its ninja
        "DS_ACCELERATOR": "cpu",
        "DS_UNITTEST_TIMEOUT": str(patience),
        "LOCAL_SIZE": "2",  # how many ranks there may be
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # All of their markers: what drives do is marked as to be run one after the other, and so
    # everything is.
    plugins = [
        "-p",
        Path(__file__).stem,
        *(word for name in ("cacheprovider", "xdist", "timeout") for word in ("-p", f"no:{name}")),
    ]
    options = ["-o", "addopts=", *plugins, "-q", "--tb=short", "--continue-on-collection-errors"]
    before = -1
    while len(results(told)) > before:
        before = len(results(told))
        with log.open("a") as output:
            subprocess.run(
                [sys.executable, "-m", "pytest", *options, *files],
                cwd=tests,
                env=environment,
                stdout=output,
                stderr=output,
            )
        if list(results(told).values())[-1:] != ["ended pytest"]:
            break
    return results(told)


def table(found: dict[str, dict[str, str]]) -> list[str]:
    """A line for each file: how many of its tests came to what, each way."""
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
    """Tests that came to something else, and to what each way."""
    names = dict.fromkeys(name for way in WAYS for name in found[way])
    both = {name: tuple(found[way].get(name, "not run") for way in WAYS) for name in names}
    return {name: outcomes for name, outcomes in both.items() if outcomes[0] != outcomes[1]}  # type: ignore[misc]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a directory with DeepSpeed's tests in it")
    parser.add_argument(
        "--files", nargs="+", default=FILES, help="files of its tests, or directories of them"
    )
    parser.add_argument(
        "--offloaded",
        action="store_true",
        help="have every stage-3 engine offload: parameters and states",
    )
    parser.add_argument(
        "--patience", type=int, default=300, help="seconds after which a test hangs"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help="a directory for pytest's output, and for what each test came to; what is there is not run again",
    )
    parser.add_argument("--output", type=Path, help="write the table there, too")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="deepspeed-own-") as place:
        # Copied without the package beside them, which they would import.
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
        *(["", "What differs:", ""] if differ else []),
        *(f"- `{name}`: {stock}, here {ours}" for name, (stock, ours) in differ.items()),
    ]
    print("\n".join(lines))
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
