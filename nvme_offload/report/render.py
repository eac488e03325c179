"""A profile as one HTML page."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import shlex
from typing import Any

from nvme_offload.ds_config.edit import aio_section, zero_infinity
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, PHASES, Best, Profile
from nvme_offload.hardware.profile_grade import grade
from nvme_offload.planning import traffic
from nvme_offload.units import format_ratio

from . import charts, tables, wording

# The keys of `drive` that the page does not show among the drive's facts.
# A virtual disk reports "rotational" as its host is configured; a warning says if a disk is one.
_NOT_SHOWN = (
    "mount_point",
    "identity",
    "pcie_link_most",
    "cpu_numa_nodes",
    "gpu_numa_nodes",
    "rotational",
)


def html(profile: Profile) -> str:
    """The page: one file that loads nothing else."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nvme_offload.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    names = "size speed ratio interval duration shown label plural code_spans decimal_bytes percent sustained"
    environment.filters |= {name: getattr(wording, name) for name in names.split()}
    script = environment.get_template("copy.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # styles are not listed by hash, because bars and cells have their own
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    page = environment.get_template("report.html.j2")
    return page.render(_context(profile), script=Markup(script), policy=policy)


def _context(profile: Profile) -> dict[str, Any]:
    chosen, drive = profile.chosen, profile.drive
    path = str(drive["path"])
    sweep = f"nvme-sweep {shlex.quote(path)}"
    facts = {key: value for key, value in drive.items() if value not in (None, "", [], ())}
    return {
        "profile": profile,
        "chosen": chosen,
        "drive_name": drive["model"] or drive["device"] or path,
        "lead": _lead(profile),
        "ranks": profile.workload.get("ranks", 1),
        "by_deepspeed": profile.engine.get("name") == "deepspeed",
        "phases": PHASES,
        "control_gb_per_s": {phase: tables.control_gb_per_s(profile, phase) for phase in PHASES},
        "judgements": {phase: _judgement(best) for phase, best in profile.performance.items()},
        "aio": json.dumps({"aio": aio_section(chosen)}, indent=2),
        "ds_config": zero_infinity(profile, path).rstrip("\n"),
        "drive_facts": {key: value for key, value in facts.items() if key not in _NOT_SHOWN},
        "grade": grade(profile),
        "heat_map": charts.heat_map(profile),
        "tables": tables.of(profile),
        "step_write_bytes": traffic.STEP_BYTES_7B,
        "settings_tried": len({trial.setting for trial in profile.trials}),
        "seconds_measured": sum(trial.seconds for trial in profile.trials),
        "bytes_moved": sum(trial.bytes for trial in profile.trials),
        "path_literal": json.dumps(path),
        "path_quoted": shlex.quote(path),
        "sweep": sweep,
        "sweep_command": f"{sweep} --config ds_config.json",
    }


def _lead(profile: Profile) -> str:
    """The gain of the chosen setting, in a sentence that its interval supports."""
    mixed = profile.performance["mixed"]
    load = "reading and writing together, as in the optimizer step"
    sure = f"(90 % interval {wording.interval(mixed)})"
    times = format_ratio(mixed.relative)
    return {
        "same": "These are DeepSpeed's defaults: on this drive, no setting of the last stage is significantly better.",
        "faster": f"{times} times as fast as DeepSpeed's defaults {sure} at {load}.",
        "alike": f"It does not differ significantly from DeepSpeed's defaults {sure} at {load}.",
        "slower": f"{times} times the speed of DeepSpeed's defaults {sure} at {load}; see below why it was chosen nevertheless.",
    }[_judgement(mixed)]


def _judgement(best: Best) -> str:
    """A setting compared with the control: "same", "faster", "slower" or "alike"."""
    if dataclasses.replace(best.setting, backend="libaio") == DEEPSPEED_DEFAULTS:
        return "same"
    if best.relative_low > 1:
        return "faster"
    return "slower" if best.relative_high < 1 else "alike"
