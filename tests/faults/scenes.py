"""The durable changes that this package makes on a drive, each as two scripts, and a function that
judges the state after an interruption: old, new, or neither.

The scripts run with `place`, a directory. `before` makes the old state; its end syncs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from profiles import profile

from nvme_offload.ds_config import edit as ds_config
from nvme_offload.files import commit
from nvme_offload.hardware.profile import Profile

PROFILE = profile(runs=4).to_json()
_CONFIG = '{\n  // mine\n  "aio": {"block_size": 1048576},\n  "mine": "' + "x" * 9000 + '"\n}\n'
_CHANGED = ds_config.edit(_CONFIG, {"block_size": 4 << 20})

_HEAD = f"""
import dataclasses, os, sys
from pathlib import Path
from nvme_offload.ds_config import edit as ds_config
from nvme_offload.hardware import profile_shelf
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.profile import Profile
place = Path(sys.argv[1])
profile = Profile.from_json({PROFILE!r})
os.environ["XDG_CONFIG_HOME"] = str(place)

def optimizer(fill):
    import torch
    from nvme_offload import NVMeOptimizer
    weight = torch.nn.Parameter(torch.zeros(30_000))
    weight.grad = torch.full_like(weight, fill)
    aio = AioConfig(backend="posix", direct="auto")
    with NVMeOptimizer([weight], torch.optim.SGD, momentum=0.9, lr=0.1, paths=sys.argv[2], aio=aio) as made:
        made.step()
        made.save(place / "saved")

def weights(fill):
    import torch
    from nvme_offload import Offload
    model = torch.nn.Linear(100, 300, bias=False)
    torch.nn.init.constant_(model.weight, fill)
    aio = AioConfig(backend="posix", direct="auto")
    offload = Offload(sys.argv[2], "64MiB", aio=aio)
    offload.parameters(model, "cpu")
    offload.save(place / "model")
    offload.close()

def report():
    from nvme_offload.tune import results
    from nvme_offload.tune.progress import Progress
    results.write_report(profile, "drive", place / "reports", Progress(None))
"""


class Scene(NamedTuple):
    """*judge* is given the place as it was found, a directory for its own use, and the place as the
    change left it; it says "none", "old" or "new".
    """

    before: str
    change: str
    judge: Callable[[Path, Path, Path], str]


def script(text: str) -> str:
    """*text* as a program whose arguments are the place and another directory."""
    return _HEAD + text


def run_here(text: str, place: Path, scratch: Path) -> None:
    """Run *text* in this process, which need not import torch again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["-c", str(place), str(scratch)])
        patch.setenv("XDG_CONFIG_HOME", str(place))
        exec(script(text), {})


def _config(found: Path, _: Path, __: Path) -> str:
    path = found / "config.json"
    kept = commit.kept_of(path)
    text = path.read_text()
    # written in place: the next edit says so, and where the old text is
    if kept.exists() and text not in (_CONFIG, _CHANGED):
        text = kept.read_text()
    return {_CONFIG: "old", _CHANGED: "new"}[text]


def _profile(found: Path, _: Path, __: Path) -> str:
    (path,) = (found / "nvme-offload" / "profiles").glob("*.json")
    return Profile.load(path).command


def _optimizer(found: Path, _: Path, __: Path) -> str:
    import torch

    state = torch.load(found / "saved")["state"][0]["momentum_buffer"]
    assert len(state) == 30_000
    (fill,) = set(state.tolist())
    return {1: "old", 2: "new"}[fill]


def _weights(found: Path, _: Path, __: Path) -> str:
    from safetensors.torch import load_file

    assert (found / "model" / "of the user" / "notes.txt").read_text() == "mine"
    (fill,) = set(load_file(found / "model" / "model.safetensors")["weight"].flatten().tolist())
    return {1: "old", 2: "new"}[fill]


def _report(found: Path, _: Path, final: Path) -> str:
    shown = list((found / "reports").glob("[!.]*")) if (found / "reports").exists() else []
    if not shown:
        return "none"
    (report,) = shown
    assert contents(report) == contents(final / "reports" / report.name)
    return "new"


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of every file in *directory*."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


SCENES = {
    "config": Scene(
        f"(place / 'config.json').write_text({_CONFIG!r})",
        "ds_config.apply(place / 'config.json', {'block_size': 4 << 20})",
        _config,
    ),
    "config with another name": Scene(
        f"(place / 'config.json').write_text({_CONFIG!r}); os.link(place / 'config.json', place / 'other.json')",
        "ds_config.apply(place / 'config.json', {'block_size': 4 << 20})",
        _config,
    ),
    "profile": Scene(
        "profile_shelf.keep(dataclasses.replace(profile, command='old'))",
        "profile_shelf.keep(dataclasses.replace(profile, command='new'))",
        _profile,
    ),
    "optimizer": Scene("optimizer(1)", "optimizer(2)", _optimizer),
    "weights": Scene(
        "weights(1); notes = place / 'model' / 'of the user' / 'notes.txt'; notes.parent.mkdir(); notes.write_text('mine')",
        "weights(2)",
        _weights,
    ),
    "report": Scene("", "report()", _report),
}
