from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas
import pytest

from nvme_offload.profile import DEEPSPEED_DEFAULTS, PHASES, Best, Profile, Setting, Trial
from nvme_offload.report import charts, render, summary

CHOSEN = Setting(block_size=1 << 20, queue_depth=16, thread_count=2)
FASTEST = Setting(block_size=2 << 20, queue_depth=16, thread_count=4)
TIMES, DASH = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
VOID_ELEMENTS = {"meta", "br", "img", "link", "input", "hr", "path", "use", "rect"}

# Made up, as all numbers in this file: GB/s of the control, and the MiB in flight that reach half of what the drive has.
CONTROL_SPEED = {"read": 3.1, "write": 2.6, "mixed": 2.2}
HALFWAY = {"read": 6, "write": 2, "mixed": 4}


def made_up_relative(setting: Setting, phase: str) -> float:
    def reach(of: Setting) -> float:
        mebibytes = of.bytes_in_flight / (1 << 20)
        return mebibytes / (mebibytes + HALFWAY[phase]) * 0.98 ** abs(math.log2(of.block_size) - 20)

    return reach(setting) / reach(DEEPSPEED_DEFAULTS)


def made_up_best(setting: Setting, phase: str) -> Best:
    relative = made_up_relative(setting, phase)
    speed = CONTROL_SPEED[phase] * relative
    return Best(**dataclasses.asdict(setting), gb_per_s=speed, relative=relative, relative_low=relative * 0.96, relative_high=relative * 1.05)


def made_up_profile(**changes: Any) -> Profile:
    chance = random.Random(7)
    trials: list[Trial] = []

    def run(setting: Setting, phase: str, stage: str, seconds: float, control: bool = False, samples: bool = False, flaw: str = "") -> None:
        started = sum(trial.seconds + 0.02 for trial in trials)
        drift = 1 + 0.05 * math.sin(started / 9)
        relative = made_up_relative(setting, phase) * chance.gauss(1, 0.015)
        speed = CONTROL_SPEED[phase] * drift * relative
        moments = [seconds * (index + 1) / 20 for index in range(20)] if samples else []
        phase_of_wobble = 7 * chance.random()
        wobble = [0.008 * seconds * math.sin(11 * moment + phase_of_wobble) for moment in moments]
        trials.append(
            Trial(
                phase=phase,
                **dataclasses.asdict(setting),
                bytes=int(speed * seconds * 1e9),
                seconds=seconds,
                gb_per_s=speed,
                read_gb_per_s=speed * {"read": 1, "write": 0, "mixed": 0.5}[phase],
                write_gb_per_s=speed * {"read": 0, "write": 1, "mixed": 0.5}[phase],
                stage=stage,
                control=control,
                relative=1.0 if control else relative,
                started_seconds=started,
                flaw=flaw,
                samples=tuple((moment, int(speed * (moment + late) * 1e9)) for moment, late in zip(moments, wobble, strict=True)),
            )
        )

    grid = [Setting(1 << block, 1 << depth, threads) for block in range(17, 24) for depth in range(7) for threads in (1, 2, 4) if block + depth < 28]
    for index, setting in enumerate(grid):
        if index % 12 == 0:
            for phase in PHASES:
                run(DEEPSPEED_DEFAULTS, phase, "screen", 0.1, control=True)
        run(setting, "mixed", "screen", 0.15)
        if index % 3 == 0:
            run(setting, "read", "screen", 0.1)
            run(setting, "write", "screen", 0.1)
    run(grid[3], "mixed", "screen", 0.1, flaw="drifted")
    for _ in range(4):
        for setting in (CHOSEN, FASTEST, Setting(1 << 20, 32, 1), Setting(512 << 10, 32, 2)):
            for phase in PHASES:
                run(setting, phase, "final", 1.0, samples=True)
        for phase in PHASES:
            run(DEEPSPEED_DEFAULTS, phase, "final", 1.0, control=True, samples=True)
    profile = Profile(
        tool_version="0.0.0",
        created="2001-02-03T04:05:06+00:00",
        command="nvme-sweep /local_nvme",
        drive={
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
        },
        workload={"file_bytes": {"read": 1 << 30, "write": 3 << 29}, "request_bytes": 64 << 20, "direct": True, "verified": True, "budget_seconds": 60},
        engine={"name": "native", "backend": "libaio", "kernel": "6.8.0-made-up", "versions": {"nvme_offload": "0.0.0", "python": "3.11.9"}},
        trials=tuple(trials),
        best={phase: made_up_best(FASTEST if phase != "write" else CHOSEN, phase) for phase in PHASES},
        chosen=CHOSEN,
        performance={phase: made_up_best(CHOSEN, phase) for phase in PHASES},
        reasons=("Of 120 settings tried, 5 went to the finals; 3 of those cannot be told from the best, and this is the cheapest of them.",),
        steady=True,
        warnings=("/local_nvme is mounted with discard: deleting a file stalls other transfers. Run `mount -o remount,nodiscard /local_nvme`.",),
    )
    return dataclasses.replace(profile, **changes)


class Page(HTMLParser):
    """A page taken apart: every element with its attributes, its text, and whether its tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
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
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def rendered(profile: Profile, directory: Path) -> tuple[Page, str, pandas.DataFrame]:
    html, markdown, csv = render.write(profile, directory)
    assert [path.name for path in (html, markdown, csv)] == ["report.html", "report.md", "trials.csv"]
    return Page(html.read_text(encoding="utf-8")), markdown.read_text(encoding="utf-8"), pandas.read_csv(csv, keep_default_na=False)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str, pandas.DataFrame, str]:
    directory = tmp_path_factory.mktemp("report") / "new" / "directory"
    page, markdown, table = rendered(made_up_profile(), directory)
    return page, markdown, table, (directory / "report.html").read_text(encoding="utf-8")


def check_markdown_tables(markdown: str) -> int:
    """Every row of every table has as many cells as its header; the number of tables."""
    tables = 0
    lines = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL).split("\n")
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if not line.startswith("|"):
            continue
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        assert line.endswith("|"), line
        if before.startswith("|"):
            assert cells == len(re.findall(r"(?<!\\)\|", before)) - 1, line
        else:
            assert before == "", "a table begins after an empty line"
            assert re.fullmatch(r"\|(:?-+:?\|)+", after), after
            tables += 1
    return tables


def test_the_page_says_what_to_use_and_what_it_gains(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    words = outcome[0].words
    assert "Use 1 MiB blocks, queue depth 16, 2 threads" in words
    mixed = made_up_best(CHOSEN, "mixed")
    assert f"{mixed.relative:.2f} times as fast as DeepSpeed's defaults at reading and writing at once" in words
    for phase in PHASES:
        best = made_up_best(CHOSEN, phase)
        assert f"{best.gb_per_s:#.3g} GB/s {best.relative:.2f}{TIMES} the defaults ({CONTROL_SPEED[phase]:#.3g} GB/s)" in words
        assert f"90 % interval {best.relative_low:.2f}{DASH}{best.relative_high:.2f}{TIMES}" in words
    assert "The drive was steady while it was judged" in words
    assert "mounted with discard" in words
    assert "File read 1 GiB, write 1.5 GiB Request 64 MiB Direct yes" in words
    assert "Versions nvme_offload 0.0.0, python 3.11.9" in words
    assert f"Of that the setting uses {100 * made_up_best(CHOSEN, 'read').gb_per_s / 7.876923076:.0f} % reading" in words


def test_the_block_to_copy_is_what_deepspeed_reads(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    expected = {"aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 2, "single_submit": False, "overlap_events": True}}
    page, markdown, _, _ = outcome
    text = "".join(page.text)
    assert json.loads(text[text.index('{\n  "aio"') : text.index("\n}", text.index('{\n  "aio"')) + 2]) == expected
    block = re.search(r"```json\n(.*?)```", markdown, re.DOTALL)
    assert block is not None
    assert json.loads(block[1]) == expected


def test_the_python_to_copy_gives_the_setting(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    page, markdown, _, _ = outcome
    for text in ("".join(page.text), markdown):
        call = re.search(r"AioConfig\((.*?)\)", text, re.DOTALL)
        assert call is not None
        assert eval(f"dict({call[1]})") == dataclasses.asdict(CHOSEN)
    assert 'DeepSpeedStrategy(config="ds_config.json")' in page.words
    assert 'deepspeed="ds_config.json"' in page.words
    assert "you would run 1 thread instead of 2" in page.words


def test_step_times_are_bytes_over_the_mixed_bandwidth(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    page, markdown, _, _ = outcome
    seconds = 7e9 * 32 / (made_up_best(CHOSEN, "mixed").gb_per_s * 1e9)
    default_seconds = 7e9 * 32 / (CONTROL_SPEED["mixed"] * 1e9)
    words = page.words.replace("\xa0", " ")
    minutes = f"{default_seconds // 60:.0f} min {default_seconds % 60:.0f} s"
    assert f"7 B 224 GB {minutes} {seconds:.3g} s {seconds / 8:.3g} s" in words
    assert f"| 7 B | 224 GB | {minutes} | {seconds:.3g} s | {seconds / 8:.3g} s |" in markdown.replace("\xa0", " ")
    assert "70 B 2.24 TB" in words
    assert "estimated" in words


def test_the_page_stands_alone(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    page, _, _, text = outcome
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action", "srcset", "poster", "data"):
                assert value.startswith("#") or value in ("report.md", "trials.csv", "profile.json", "ds_config.json"), f"<{tag} {name}={value}>"
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert not re.search(r"https?:|//[a-z]|@import|@font-face", text)
    assert not {"link", "iframe", "object", "embed"} & {tag for tag, _ in page.elements}


def test_the_page_can_be_read_by_everyone(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    page, _, _, text = outcome
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    drawings = page.all("svg")
    assert len(drawings) == 6
    for drawing in drawings:
        assert drawing["role"] == "img"
        assert len(drawing["aria-label"]) > 40
    assert len(page.all("h1")) == 1
    assert page.all("th")
    assert all(header.get("scope") in ("col", "row") for header in page.all("th"))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert levels[0] == 1


def test_every_reference_in_a_chart_is_to_itself(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    page, _, _, text = outcome
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    references = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    assert references
    assert references <= ids


def test_charts_use_the_colours_of_the_page(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    text = outcome[3]
    declared = set(re.findall(r"^ *(--[\w-]+):|(?<=; )(--[\w-]+):", text, re.MULTILINE))
    names = {name for pair in declared for name in pair if name}
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= names
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert "var(--" in drawing
        colours = {value.strip() for value in re.findall(r"(?:fill|stroke): ([^;\"]*)", drawing)}
        assert {value for value in colours if not value.startswith("var(--")} <= {"none"}
        assert "font-family" not in drawing


def test_the_same_profile_gives_the_same_files(tmp_path: Path, outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    render.write(made_up_profile(), tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == outcome[3]


def test_the_heat_map_has_a_number_for_each_pair_measured(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    profile = made_up_profile()
    drawing = charts.heat_map(profile)
    reached = summary.medians(profile.trials, "mixed")
    pairs = {(setting.block_size, setting.queue_depth) for setting in reached}
    numbers = re.findall(r">(\d\.\d\d)<", drawing)
    best = [max(median.relative for setting, median in reached.items() if (setting.block_size, setting.queue_depth) == pair) for pair in pairs]
    assert sorted(numbers) == sorted(f"{value:.2f}" for value in best)


def test_the_table_of_trials_reads_back_equal(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    table, trials = outcome[2], made_up_profile().trials
    names = [field.name for field in dataclasses.fields(Trial) if field.name != "samples"]
    assert list(table.columns) == names
    assert table.to_dict("records") == [{name: getattr(trial, name) for name in names} for trial in trials]


def test_the_markdown_says_the_same(outcome: tuple[Page, str, pandas.DataFrame, str]) -> None:
    markdown = outcome[1]
    assert check_markdown_tables(markdown) == 6
    best = made_up_best(CHOSEN, "mixed")
    assert f"| mixed | {best.gb_per_s:#.3g} | 2.20 | {best.relative:.2f}{TIMES} | {best.relative_low:.2f}{DASH}{best.relative_high:.2f}{TIMES} |" in markdown
    assert (
        "**Warning:** /local\\_nvme is mounted with discard: deleting a file stalls other transfers. Run `mount -o remount,nodiscard /local_nvme`." in markdown
    )
    assert "\n\n\n" not in markdown


def test_flawed_trials_count_nowhere() -> None:
    honest = made_up_profile()
    wild = dataclasses.replace(honest.trials[-1], flaw="impossible", gb_per_s=900.0, relative=300.0, control=False, thread_count=64)
    profile = made_up_profile(trials=(*honest.trials, wild))
    assert summary.last_stage(profile.trials) == "final"
    for chart in (charts.heat_map, charts.by_threads, charts.by_bytes_in_flight, charts.drift, charts.over_time):
        assert chart(profile) == chart(honest), chart.__name__
    assert summary.finalists(profile) == summary.finalists(honest)


def test_a_gain_that_cannot_be_told_is_not_claimed(tmp_path: Path) -> None:
    doubtful = {phase: dataclasses.replace(made_up_best(CHOSEN, phase), relative=1.01, relative_low=0.98, relative_high=1.04) for phase in PHASES}
    page, markdown, _ = rendered(made_up_profile(performance=doubtful), tmp_path)
    for words in (page.words, markdown):
        assert "the trials cannot tell the two apart" in words
        assert "times as fast" not in words
    assert page.words.count("no difference that the trials can tell") == 3


def test_the_defaults_chosen_are_named_so(tmp_path: Path) -> None:
    same = {phase: dataclasses.replace(made_up_best(DEEPSPEED_DEFAULTS, phase), relative_low=1.0, relative_high=1.0) for phase in PHASES}
    page, _, _ = rendered(made_up_profile(chosen=DEEPSPEED_DEFAULTS, performance=same), tmp_path)
    assert "nothing that was tried is better" in page.words
    assert "times as fast" not in page.words
    assert "chosen, defaults" in page.words


def test_an_unsteady_drive_is_said_to_be_so(tmp_path: Path) -> None:
    page, markdown, _ = rendered(made_up_profile(steady=False), tmp_path)
    assert "The drive was not steady while it was judged" in page.words
    assert "**The drive was not steady while it was judged.**" in markdown


def only(profile: Profile, keep: Any) -> Profile:
    return dataclasses.replace(profile, trials=tuple(trial for trial in profile.trials if keep(trial)))


@pytest.mark.parametrize(
    ("profile", "drawings", "said"),
    [
        pytest.param(made_up_profile(trials=(), best={}, performance={}, warnings=(), reasons=()), 0, "No trial was completed", id="no trials"),
        pytest.param(only(made_up_profile(best={}, performance={}), lambda t: t.stage == "screen" and t.started_seconds < 2), 3, "Made-Up", id="aborted"),
        pytest.param(only(made_up_profile(), lambda t: t.stage == "final"), 6, "last stage (final)", id="one stage"),
        pytest.param(only(made_up_profile(), lambda t: t.thread_count == 1), 5, "Only one number of threads was tried", id="one thread count"),
        pytest.param(only(made_up_profile(), lambda t: t.phase == "read" and t.stage != "final"), 4, "of the last stage (screen)", id="one phase"),
        pytest.param(only(made_up_profile(), lambda t: t.control and t.stage == "screen"), 3, "kept no samples", id="only the control"),
        pytest.param(dataclasses.replace(made_up_profile(), trials=made_up_profile().trials[:1]), 2, "1 trial,", id="one trial"),
        pytest.param(made_up_profile(workload={}, engine={}, drive={"path": "/x", "model": "", "filesystem": "nfs", "device": ""}), 6, "/x", id="bare"),
    ],
)
def test_less_than_a_whole_profile_renders(tmp_path: Path, profile: Profile, drawings: int, said: str) -> None:
    page, markdown, table = rendered(profile, tmp_path)
    assert len(page.all("svg")) == drawings
    assert said in page.words
    check_markdown_tables(markdown)
    assert len(table) == len(profile.trials)


def test_text_from_outside_stays_text(tmp_path: Path) -> None:
    drive = {**made_up_profile().drive, "model": "<script>alert(1)</script> | *x*", "path": "/it's a `path`"}
    page, markdown, _ = rendered(made_up_profile(drive=drive, warnings=("a | b <img src=x>",)), tmp_path)
    assert len(page.all("script")) == 1
    assert page.all("img") == []
    assert "<script>" not in markdown
    assert "<img" not in markdown
    check_markdown_tables(markdown)


def test_throughput_is_the_slope_between_samples() -> None:
    trial = dataclasses.replace(made_up_profile().trials[0], samples=((1.0, 2 * 10**9), (2.0, 3 * 10**9), (4.0, 11 * 10**9)))
    assert summary.throughput(trial) == [(0.5, 2.0), (1.5, 1.0), (3.0, 4.0)]
    assert summary.throughput(dataclasses.replace(trial, samples=())) == []
    many = tuple((index / 1024, index << 20) for index in range(1, 1025))
    steps = summary.throughput(dataclasses.replace(trial, samples=many), most_points=8)
    assert steps == [((2 * index + 1) / 16, 2**30 / 1e9) for index in range(8)]


def test_finalists_keep_the_chosen_and_the_control() -> None:
    few = summary.finalists(made_up_profile(), most=1)
    assert [finalist.setting for finalist in few] == [FASTEST, CHOSEN, DEEPSPEED_DEFAULTS]
    assert few[1].phases["read"].trials == 4
