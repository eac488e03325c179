"""Made-up profiles of every shape that a sweep may leave, and a page taken apart."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import profiles
import pytest

from nvme_offload.hardware.profile import (
    DEEPSPEED_DEFAULTS,
    PHASES,
    Beside,
    Best,
    Health,
    Latency,
    Profile,
    Setting,
    StripePath,
    Sustained,
    Trial,
)

CHOSEN = Setting(block_size=1 << 20, queue_depth=16, thread_count=2)
FASTEST = Setting(block_size=2 << 20, queue_depth=16, thread_count=4)
FINALISTS = (CHOSEN, FASTEST, Setting(1 << 20, 32, 1), Setting(512 << 10, 32, 2))

# GB/s of the control, and the MiB in flight at which the drive reaches half of its speed.
CONTROL_SPEED = {"read": 3.1, "write": 2.6, "mixed": 2.2}
HALFWAY = {"read": 6, "write": 2, "mixed": 4}
VOID_ELEMENTS = {"meta", "br", "img", "link", "input", "hr", "path", "use", "rect"}


def relative(setting: Setting, phase: str) -> float:
    def reach(of: Setting) -> float:
        mebibytes = of.bytes_in_flight / (1 << 20)
        return mebibytes / (mebibytes + HALFWAY[phase]) * 0.98 ** abs(math.log2(of.block_size) - 20)

    return reach(setting) / reach(DEEPSPEED_DEFAULTS)


def best(setting: Setting, phase: str) -> Best:
    ratio = relative(setting, phase)
    low, high = (1.0, 1.0) if setting == DEEPSPEED_DEFAULTS else (ratio * 0.96, ratio * 1.05)
    found = profiles.best(CONTROL_SPEED[phase] * ratio, setting, low, high)
    return dataclasses.replace(found, relative=ratio)


@functools.cache
def _trials() -> list[Trial]:
    chance = random.Random(7)
    trials: list[Trial] = []

    def run(setting: Setting, phase: str, stage: str, seconds: float, **changes: Any) -> None:
        started = sum(trial.seconds + 0.02 for trial in trials)
        drift = 1 + 0.05 * math.sin(started / 9)
        ratio = relative(setting, phase) * chance.gauss(1, 0.015)
        speed = CONTROL_SPEED[phase] * drift * ratio
        changes = {"relative": 1.0 if changes.get("control") else ratio, **changes}
        more = {"stage": stage, "started_seconds": started}
        trials.append(profiles.trial(phase, setting, speed, seconds, **more, **changes))

    grid = [
        Setting(1 << block, 1 << depth, threads)
        for block in range(17, 24, 2)
        for depth in range(0, 7, 2)
        for threads in (1, 4)
        if block + depth < 28
    ]
    for index, setting in enumerate(grid):
        if index % 5 == 0:
            for phase in PHASES:
                run(DEEPSPEED_DEFAULTS, phase, "screen", 0.1, control=True)
        run(setting, "mixed", "screen", 0.15)
        if index % 3 == 0:
            run(setting, "read", "screen", 0.1)
            run(setting, "write", "screen", 0.1)
    run(grid[3], "mixed", "screen", 0.1, flaw="drifted")
    for _ in range(4):
        for setting in FINALISTS:
            for phase in PHASES:
                run(setting, phase, "final", 1.0)
        for phase in PHASES:
            run(DEEPSPEED_DEFAULTS, phase, "final", 1.0, control=True)
    return trials


DRIVE = {
    "path": "/local_nvme",
    "model": "Made-Up Drive 2TB",
    "filesystem": "ext4",
    "device": "/dev/nvme0n1p1",
    "mount_options": ["rw", "noatime"],
    "physical_devices": ["/dev/nvme0n1"],
    "layers": ["partition"],
    "firmware": "4B2QJXD7",
    "size_bytes": 1_967_397_240_832,
    "free_bytes": 1_203_000_000_000,
    "pcie_link": "16.0 GT/s x4",
    "link_bytes_per_second": 7_876_923_076,
    "scheduler": "none",
    "max_block_kib": 128,
    "temperature_celsius": 41.85,
    "numa_node": None,
    "identity": "S3CR3T-SERIAL",
}


def finals(*settings: Setting) -> dict[str, tuple[Best, ...]]:
    return {phase: tuple(best(setting, phase) for setting in settings) for phase in PHASES}


def profile(**changes: Any) -> Profile:
    """A complete profile of one drive, without the optional measurements."""
    whole = Profile(
        tool_version="0.0.0",
        created="2001-02-03T04:05:06+00:00",
        command="nvme-sweep /local_nvme",
        drive=DRIVE,
        workload={
            "file_bytes": {"read": 1 << 30, "write": 3 << 29},
            "request_bytes": 64 << 20,
            "ranks": 1,
            "direct": True,
            "verified": True,
            "seconds": 60,
        },
        engine={
            "name": "native",
            "backend": "libaio",
            "kernel": "6.8.0-made-up",
            "versions": {"nvme_offload": "0.0.0", "python": "3.11.9"},
        },
        trials=tuple(_trials()),
        best={phase: best(FASTEST if phase != "write" else CHOSEN, phase) for phase in PHASES},
        chosen=CHOSEN,
        performance={phase: best(CHOSEN, phase) for phase in PHASES},
        finals=finals(*FINALISTS, DEEPSPEED_DEFAULTS),
        reasons=(
            "Chosen from 5 finalists of 120 settings tried: its training step takes at most 3 % longer than the fastest.",
        ),
        steady=True,
        warnings=(
            "/local_nvme is mounted with discard: deleting a file stalls other transfers. Run `mount -o remount,nodiscard /local_nvme`.",
        ),
    )
    return dataclasses.replace(whole, **changes)


def brief(**changes: Any) -> Profile:
    """A whole profile with few trials, which is quickly drawn."""
    few = [
        trial
        for trial in _trials()
        if trial.stage == "final" and trial.setting in (CHOSEN, FASTEST, DEEPSPEED_DEFAULTS)
    ]
    found = {"finals": finals(CHOSEN, FASTEST, DEEPSPEED_DEFAULTS), **changes}
    return profile(trials=tuple(few), **found)


def with_io_uring() -> Profile:
    speeds = {phase: best(CHOSEN, phase).gb_per_s for phase in PHASES}
    found = (Beside("io_uring", "", phase, s, s, 1.0, 0.97, 1.03) for phase, s in speeds.items())
    return brief(beside=tuple(found))


def with_latencies() -> Profile:
    settings = {CHOSEN: 4.0, FASTEST: 9.0, DEEPSPEED_DEFAULTS: 1.25}
    shares = {"read": 1.0, "write": 1.2, "mixed": 2.0}

    def latency(phase: str, setting: Setting) -> Latency:
        times = (share * settings[setting] * shares[phase] for share in (1, 1.3, 2.1))
        return Latency(phase, setting, 3000, *times, 40.0)

    found = (latency(phase, setting) for phase in PHASES for setting in settings)
    return brief(latencies=tuple(found))


def with_sustained(cache_ends: bool = True) -> Profile:
    samples, done = [(0.0, 0)], 0
    for second in range(1, 61):
        done += int((4.5 if done < 72e9 or not cache_ends else 0.5) * 1e9)
        samples.append((float(second), done))
    steady, ends = (0.5, 72_000_000_000) if cache_ends else (4.5, None)
    run = Sustained(done, 60.0, tuple(samples), 4.5, steady, cache_ends, ends)
    return brief(sustained=run)


def with_stripe() -> Profile:
    speeds = {phase: best(CHOSEN, phase).gb_per_s for phase in PHASES}
    half = {phase: speed / 2 for phase, speed in speeds.items()}
    together = {phase: 0.98 * speed for phase, speed in speeds.items()}
    first = "/local_nvme", "/dev/nvme0n1p1", "Made-Up Drive 2TB", CHOSEN
    second = "/mnt/second", "/dev/nvme1n1", "", FASTEST
    paths = StripePath(*first, speeds, together, 0.6667), StripePath(*second, half, half, 0.3333)
    return brief(stripe=paths)


def with_health(wear: float = 0.05) -> Profile:
    before = Health("SMART log", 41.0, wear, 60_000_000_000_000, 0)
    changes = {"temperature_celsius": 67.0, "throttled_seconds": 12, "critical": "too hot"}
    return brief(health_before=before, health_after=dataclasses.replace(before, **changes))


def by_ranks(ranks: int) -> Profile:
    return brief(workload={**profile().workload, "ranks": ranks})


def by_deepspeed() -> Profile:
    engine = {"backend": "libaio", "deepspeed": "0.19.8", "kernel": "6.8.0-made-up"}
    return brief(engine={"name": "deepspeed", **engine})


def minimal() -> Profile:
    """Ten seconds: one setting and the control, hardly any trials."""
    few = [
        trial
        for trial in _trials()
        if trial.stage == "final" and trial.setting in (CHOSEN, DEEPSPEED_DEFAULTS)
    ][:12]
    return profile(
        trials=tuple(few),
        best={phase: best(CHOSEN, phase) for phase in PHASES},
        finals=finals(CHOSEN, DEEPSPEED_DEFAULTS),
        steady=False,
    )


def everything() -> Profile:
    parts = {
        "beside": with_io_uring(),
        "latencies": with_latencies(),
        "sustained": with_sustained(),
        "stripe": with_stripe(),
    }
    worn = with_health()
    found = {name: getattr(part, name) for name, part in parts.items()}
    return profile(**found, health_before=worn.health_before, health_after=worn.health_after)


SHAPES: dict[str, Callable[[], Profile]] = {
    "one path": profile,
    "io_uring": with_io_uring,
    "latencies": with_latencies,
    "sustained, a cache that ends": with_sustained,
    "sustained, no end": lambda: with_sustained(cache_ends=False),
    "several paths": with_stripe,
    "worn": with_health,
    "hardly worn": lambda: with_health(0.01),
    "8 ranks": lambda: by_ranks(8),
    "DeepSpeed's op": by_deepspeed,
    "ten seconds, not steady": minimal,
    "everything": everything,
    "bare": lambda: profile(
        workload={}, engine={}, drive={"path": "/x", "model": "", "filesystem": "nfs", "device": ""}
    ),
}


class Page(HTMLParser):
    """A page taken apart: every element with its attributes, its text, and whether its tags close
    in order.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = text
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice"
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID_ELEMENTS:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and "script" not in self.open:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of every element of this name."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        """Its text, with every kind of space as one."""
        return " ".join(" ".join(self.text).split())


@functools.cache
def page_of(shape: str) -> Page:
    """The page of one of SHAPES, taken apart."""
    from nvme_offload.report.render import html

    return Page(html(SHAPES[shape]()))


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    """Each of SHAPES."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def made_up() -> SimpleNamespace:
    """Functions that make profiles and parse their reports."""
    return SimpleNamespace(
        profile=profile,
        brief=brief,
        best=best,
        shapes=SHAPES,
        chosen=CHOSEN,
        fastest=FASTEST,
        control_speed=CONTROL_SPEED,
        page=Page,
        page_of=page_of,
    )
