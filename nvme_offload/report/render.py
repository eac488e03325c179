"""A profile as one HTML page."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from nvme_offload.ds_config.edit import aio_section, zero_infinity
from nvme_offload.hardware.drive_warnings import rotational
from nvme_offload.hardware.profile import PHASES, Best, Profile, Setting
from nvme_offload.hardware.profile_grade import grade
from nvme_offload.planning import traffic
from nvme_offload.units import format_ratio

from . import charts, palette, summary, tables, wording
from .charts.canvas import Chart

if TYPE_CHECKING:
    import jinja2

# The keys of `drive` that the page does not show among the drive's facts.
_NOT_SHOWN = ("mount_point", "identity", "pcie_link_most", "cpu_numa_nodes", "gpu_numa_nodes")


def html(profile: Profile) -> str:
    """The page: one file that loads nothing else."""
    from markupsafe import Markup

    environment = environment_of_pages()
    drawn = charts.of(profile)
    drawings = _absent_are_none({name: Markup(chart.svg()) for name, chart in drawn.items()})
    return environment.get_template("report.html.j2").render(
        _context(profile, drawn), drawings=drawings, **page_parts(environment)
    )


def environment_of_pages() -> jinja2.Environment:
    """The templates, with their filters."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nvme_offload.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    named = (
        "size speed ratio interval inverse_interval duration percent shown label plural code_spans"
    )
    environment.filters |= {name: getattr(wording, name) for name in named.split()}
    environment.filters["decimal"] = wording.decimal_bytes
    return environment


def page_parts(environment: jinja2.Environment) -> dict[str, Any]:
    """The parts of every page: style, script, and the policy that allows nothing else."""
    from markupsafe import Markup

    style = environment.get_template("style.css.j2").render(
        light=palette.LIGHT.css(), dark=palette.DARK.css(), printed=palette.PRINT.css()
    )
    script = environment.get_template("copy.js.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # inline styles are not listed by hash, because the charts have hundreds of them
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return {"style": Markup(style), "script": Markup(script), "policy": policy}


def _context(profile: Profile, drawn: dict[str, Chart]) -> dict[str, Any]:
    chosen, drive = profile.chosen, profile.drive
    path = str(drive["path"])
    speeds, life = traffic.chosen_speeds(profile), tables.LIFE_BYTES / traffic.STATES.step_write
    sweep = f"nvme-sweep {shlex.quote(path)}"
    performance = profile.performance
    versions = [
        other.version.removeprefix("fio-") for other in profile.beside if other.name == "fio"
    ]
    facts = {key: value for key, value in drive.items() if value not in (None, "", [], ())}
    return {
        "profile": profile,
        "chosen": chosen,
        "drive_name": drive.get("model") or drive.get("device") or path,
        "lead": _lead(profile),
        "ranks": profile.workload.get("ranks", 1),
        "by_deepspeed": profile.engine.get("name") == "deepspeed",
        "phases": [phase for phase in PHASES if phase in performance],
        "phase_names": wording.PHASE_NAMES,
        "control_gb_per_s": {p: summary.control_gb_per_s(profile, p) or 0.0 for p in PHASES},
        "judgements": {phase: _judgement(best, chosen) for phase, best in performance.items()},
        "fio": summary.beside(profile, "fio"),
        "fio_version": f"fio {versions[0]}".strip() if versions else "",
        "aio": json.dumps({"aio": aio_section(chosen)}, indent=2),
        "ds_config": zero_infinity(profile, path).rstrip("\n"),
        "drive_facts": [
            (wording.label(key), _drive_fact(drive, key)) for key in facts if key not in _NOT_SHOWN
        ],
        "grade": grade(profile),
        "charts": _absent_are_none(drawn),
        "tables": _absent_are_none(tables.of(profile)),
        "speeds": speeds,
        "step_write_bytes": traffic.STEP_BYTES_7B,
        "life_seconds": traffic.floor(traffic.STATES, life, speeds).seconds if speeds else None,
        "rated_bytes": traffic.rated_bytes(profile),
        "last_stage": summary.last_stage(profile.trials),
        "settings_tried": len({trial.setting for trial in profile.trials}),
        "seconds_measured": sum(trial.seconds for trial in profile.trials),
        "bytes_moved": sum(trial.bytes for trial in profile.trials),
        "path_literal": json.dumps(path),
        "path_quoted": shlex.quote(path),
        "sweep": sweep,
        "sweep_command": f"{sweep} --config ds_config.json",
    }


def _drive_fact(drive: dict[str, Any], key: str) -> str:
    """The value of *key* as text, with an explanation if needed."""
    shown = wording.shown(drive[key], key)
    return f"{shown}: {note}" if key == "rotational" and (note := rotational(drive)) else shown


def _absent_are_none(found: dict[str, Any]) -> defaultdict[str, Any]:
    """*found* for templates, which look up every chart and table."""
    return defaultdict(lambda: None, found)


def _lead(profile: Profile) -> str:
    """The gain of the chosen setting, in a sentence that its interval supports."""
    mixed = profile.performance.get("mixed")
    if mixed is None:
        return "The sweep ended before it measured this setting."
    if summary.is_defaults(profile.chosen):
        return "These are DeepSpeed's defaults: on this drive, no setting of the last stage is significantly better."
    load = "reading and writing together, as in the optimizer step"
    sure = f"(90 % interval {wording.interval(mixed)})"
    times = format_ratio(mixed.relative)
    if mixed.relative_low > 1:
        return f"{times} times as fast as DeepSpeed's defaults {sure} at {load}."
    if mixed.relative_high >= 1:
        return f"It does not differ significantly from DeepSpeed's defaults {sure} at {load}."
    return f"{times} times the speed of DeepSpeed's defaults {sure} at {load}; see below why it was chosen nevertheless."


def _judgement(best: Best, chosen: Setting) -> str:
    """The chosen setting compared with the control: "same", "faster", "slower" or "alike" if the
    interval includes 1.
    """
    if summary.is_defaults(chosen):
        return "same"
    if best.relative_low > 1:
        return "faster"
    return "slower" if best.relative_high < 1 else "alike"
