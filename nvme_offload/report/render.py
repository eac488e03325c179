"""A profile as files for people: `report.html`, `report.md` and `trials.csv`."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvme_offload.ds_config import aio_section
from nvme_offload.profile import DEEPSPEED_DEFAULTS, PHASES, Best, Profile, Setting, Trial
from nvme_offload.units import format_bytes

from . import charts, summary

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

_CHARTS = (charts.heat_map, charts.by_threads, charts.by_bytes_in_flight, charts.comparison, charts.drift, charts.over_time)
_TIMES, _DASH, _SPACE = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{NO-BREAK SPACE}"

_UNITS = ("_bytes_per_second", "_bytes", "_seconds", "_celsius", "_kib")

# What a reader wants of `drive`, in this order; `workload` and `engine` are shown whole, under their own keys.
_DRIVE_LABELS = {
    "path": "Path",
    "model": "Model",
    "device": "Device",
    "physical_devices": "Disks",
    "layers": "Layers",
    "filesystem": "Filesystem",
    "mount_options": "Mount options",
    "firmware": "Firmware",
    "size_bytes": "Size",
    "free_bytes": "Free",
    "pcie_link": "PCIe link",
    "link_bytes_per_second": "Link carries, each way",
    "scheduler": "I/O scheduler",
    "max_block_kib": "Largest request not split",
    "temperature_celsius": "Temperature",
    "numa_node": "NUMA node",
}


def write(profile: Profile, directory: Path) -> list[Path]:
    """Write the three files into *directory*, which is made when it is missing, over what is there; the paths written.

    `profile.json` and `ds_config.json`, which the pages link to, are the caller's.
    Raises: OSError when a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    environment = _environment()
    context = _context(profile)
    written = []
    for name in ("report.html", "report.md"):
        written.append(directory / name)
        written[-1].write_text(environment.get_template(f"{name}.j2").render(context), encoding="utf-8")
    written.append(directory / "trials.csv")
    _write_trials(profile, written[-1])
    return written


def _write_trials(profile: Profile, path: Path) -> None:
    import pandas

    names = [field.name for field in dataclasses.fields(Trial) if field.name != "samples"]
    pandas.DataFrame([[getattr(trial, name) for name in names] for trial in profile.trials], columns=names).to_csv(path, index=False)


def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nvme_offload.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        size=lambda count: format_bytes(count).replace(" ", _SPACE),
        decimal=_decimal_bytes,
        speed=summary.three_digits,
        ratio=lambda relative: f"{relative:.2f}{_TIMES}",
        interval=_interval,
        duration=_duration,
        shown=_shown,
        label=_label,
        plural=lambda count, word: f"{count} {word}{'' if count == 1 else 's'}",
        code_spans=_code_spans,
        cell=_markdown_cell,
        prose=_markdown_prose,
    )
    return environment


def _context(profile: Profile) -> dict[str, Any]:
    from markupsafe import Markup

    chosen, drive = profile.chosen, profile.drive
    stages: dict[str, list[Trial]] = {}
    for trial in profile.trials:
        stages.setdefault(trial.flaw or trial.stage, []).append(trial)
    link = drive.get("link_bytes_per_second")
    return {
        "profile": profile,
        "chosen": chosen,
        "drive_name": drive.get("model") or drive.get("device") or drive["path"],
        "lead": _lead(profile),
        "phases": [phase for phase in PHASES if phase in profile.performance],
        "control_gb_per_s": {phase: summary.control_gb_per_s(profile, phase) for phase in PHASES},
        "judgements": {phase: _judgement(best, chosen) for phase, best in profile.performance.items()},
        "link_shares": {phase: best.gb_per_s * 1e9 / link for phase, best in profile.performance.items() if link and phase != "mixed"},
        "aio": json.dumps({"aio": aio_section(chosen)}, indent=2),
        "drive_facts": [(label, drive[key], key) for key, label in _DRIVE_LABELS.items() if drive.get(key) not in (None, "", [], ())],
        "charts": {chart.__name__: Markup(chart(profile)) for chart in _CHARTS},
        "heat_phase": next(iter(summary.phases_tried(profile.trials)), ""),
        "step_times": summary.step_times(profile),
        "step_bytes_per_parameter": summary.STEP_BYTES_PER_PARAMETER,
        "finalists": summary.finalists(profile),
        "last_stage": summary.last_stage(profile.trials),
        "controls": {trial.setting for trial in profile.trials if trial.control} or {DEEPSPEED_DEFAULTS},
        "stages": [(stage, trials, {trial.setting for trial in trials}, any(trial.flaw for trial in trials)) for stage, trials in stages.items()],
        "settings_tried": len({trial.setting for trial in profile.trials}),
        "seconds_measured": sum(trial.seconds for trial in profile.trials),
        "bytes_moved": sum(trial.bytes for trial in profile.trials),
        "sweep_command": f"nvme-sweep {shlex.quote(str(drive['path']))} --config ds_config.json",
    }


def _lead(profile: Profile) -> str:
    """What the chosen setting gains, in a sentence that claims no more than the interval allows."""
    mixed = profile.performance.get("mixed")
    if mixed is None:
        return "The sweep ended before it had measured this setting."
    if profile.chosen == DEEPSPEED_DEFAULTS:
        return "These are DeepSpeed's defaults: on this drive, nothing that was tried is better."
    load = "reading and writing at once, as the optimizer step does"
    if mixed.relative_low > 1:
        return f"{mixed.relative:.2f} times as fast as DeepSpeed's defaults at {load}."
    if mixed.relative_high >= 1:
        return f"As fast as DeepSpeed's defaults at {load}: the trials cannot tell the two apart."
    return f"{mixed.relative:.2f} times the speed of DeepSpeed's defaults at {load}; see below why it was chosen all the same."


def _judgement(best: Best, chosen: Setting) -> str:
    """How the chosen setting stands to the control: "same", "faster", "slower" or "alike" when the interval cannot tell."""
    if chosen == DEEPSPEED_DEFAULTS:
        return "same"
    if best.relative_low > 1:
        return "faster"
    return "slower" if best.relative_high < 1 else "alike"


def _interval(best: Best) -> str:
    low, high = f"{best.relative_low:.2f}", f"{best.relative_high:.2f}"
    return f"{low}{_TIMES}" if low == high else f"{low}{_DASH}{high}{_TIMES}"


def _decimal_bytes(count: float) -> str:
    return f"{count / 1e12:.3g}{_SPACE}TB" if count >= 1e12 else f"{count / 1e9:.3g}{_SPACE}GB"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g}{_SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{_SPACE}h {minutes}{_SPACE}min" if hours else f"{minutes}{_SPACE}min {rest}{_SPACE}s"


def _label(key: str) -> str:
    """A key of the profile in words, without the unit that `_shown` gives to the value."""
    for unit in _UNITS:
        key = key.removesuffix(unit)
    words = key.replace("_", " ")
    return words[:1].upper() + words[1:]


def _shown(value: Any, key: str) -> str:
    """A value of the profile for people, in the unit that its key names."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        if key.endswith("_bytes_per_second"):
            return f"{value / 1e9:.3g}{_SPACE}GB/s"
        if key.endswith(("size_bytes", "free_bytes")):
            return _decimal_bytes(value)
        if key.endswith("_bytes"):
            return format_bytes(int(value)).replace(" ", _SPACE)
        if key.endswith("_seconds"):
            return _duration(value)
        if key.endswith("_celsius"):
            return f"{value:.0f}{_SPACE}\N{DEGREE SIGN}C"
        if key.endswith("_kib"):
            return format_bytes(int(value) * 1024).replace(" ", _SPACE)
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    if isinstance(value, dict):
        # {"file_bytes": {"read": n}}: the unit may stand in the outer key.
        return ", ".join(f"{inner} {_shown(item, key if key.endswith(_UNITS) else inner)}" for inner, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(item, key) for item in value)
    return "not known" if value in (None, "") else str(value)


def _code_spans(text: str) -> Markup:
    """A sentence as HTML, with what stands between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _markdown_cell(value: Any) -> str:
    """*value* as text in a Markdown table or line: no cell ends early, and no markup begins."""
    text = " ".join(html.escape(str(value), quote=False).split(" ")).replace("\n", " ")
    return "".join(f"\\{letter}" if letter in "\\|*_`[]" else letter for letter in text)


def _markdown_prose(text: str) -> str:
    """A sentence as Markdown outside of a table: plain text, but for its code between backticks."""
    return "".join(part if index % 2 else _markdown_cell(part) for index, part in enumerate(re.split(r"(`[^`\n]+`)", text)))
