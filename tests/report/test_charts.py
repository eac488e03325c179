from __future__ import annotations

import dataclasses
import re
import statistics

import pytest

from nvme_offload.hardware.profile import PHASES
from nvme_offload.report import charts, summary
from nvme_offload.report.charts import canvas, grid, over_time

TIMES = "\N{MULTIPLICATION SIGN}"
ALWAYS = ["heat-map", "trials"]


@pytest.fixture(scope="module")
def drawn(made_up) -> dict[str, canvas.Chart]:
    return charts.of(made_up.shapes["everything"]())


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ("one path", ALWAYS),
        ("everything", [*ALWAYS, "sustained"]),
        ("latencies", ALWAYS),
        ("no trials", []),
        ("aborted", ALWAYS),
        ("one thread count", ALWAYS),
        ("ten seconds, not steady", ALWAYS),
        ("one phase", ALWAYS),
    ],
)
def test_what_can_be_drawn_is(made_up, shape, names):
    assert sorted(charts.of(made_up.shapes[shape]())) == sorted(names)


def test_a_chart_says_in_words_what_it_shows(drawn):
    for chart in drawn.values():
        assert re.search(r"\d", chart.finding), chart.name
        assert chart.finding.endswith("."), chart.name
        assert chart.reading.endswith("."), chart.name
        assert chart.rows, chart.name
        assert {len(row) for row in chart.rows} == {len(chart.columns)}, chart.name


def test_charts_use_the_colours_and_the_font_of_the_page(made_up):
    source = made_up.page_of("everything").source
    declared = set(re.findall(r"(--[\w-]+):", source))
    for drawing in re.findall(r"<svg.*?</svg>", source, re.DOTALL):
        assert "var(--" in drawing
        colours = {value.strip() for value in re.findall(r"(?:fill|stroke): ([^;\"]*)", drawing)}
        assert {value for value in colours if not value.startswith("var(--")} <= {"none"}
        assert {value[4:-1] for value in colours if value.startswith("var(")} <= declared
        assert "font-family" not in drawing
        assert "<script" not in drawing


def test_text_of_a_chart_is_inside_it(drawn):
    for chart in drawn.values():
        svg = chart.svg()
        width, height = (
            float(value) for value in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()
        )
        assert width == canvas.WIDTH
        for x, y in re.findall(r'<text [^>]*?x="([-\d.]+)" y="([-\d.]+)"', svg):
            assert 0 <= float(x) <= width, chart.name
            assert 0 <= float(y) <= height, chart.name


def test_the_heat_map_has_a_number_for_each_pair_measured(made_up):
    profile = made_up.profile()
    reached = summary.reached(profile, "mixed")
    pairs = {(setting.block_size, setting.queue_depth) for setting in reached}
    best = [
        max(
            median.relative
            for setting, median in reached.items()
            if (setting.block_size, setting.queue_depth) == pair
        )
        for pair in pairs
    ]
    chart = grid.heat_map(profile)
    assert sorted(re.findall(r">(\d\.\d\d)<", chart.svg())) == sorted(
        f"{value:.2f}" for value in best
    )
    assert sorted(row[-1] for row in chart.rows) == sorted(f"{value:.2f}{TIMES}" for value in best)
    assert f"{max(best):.2f}{TIMES} DeepSpeed's defaults" in chart.finding


def test_flawed_trials_count_nowhere(made_up):
    honest = made_up.profile()
    wild = dataclasses.replace(
        honest.trials[-1],
        flaw="impossible",
        gb_per_s=900.0,
        relative=300.0,
        control=False,
        thread_count=64,
    )
    profile = made_up.profile(trials=(*honest.trials, wild))
    assert grid.heat_map(profile).rows == grid.heat_map(honest).rows
    before, after = over_time.trials(honest), over_time.trials(profile)
    # Counted as left out, in the last column, and nowhere drawn.
    assert [row[:-2] for row in after.rows] == [row[:-2] for row in before.rows]
    assert sum(int(row[-1]) for row in after.rows) == sum(int(row[-1]) for row in before.rows) + 1
    assert after.svg().count("<use") == before.svg().count("<use")


def test_every_trial_is_a_dot(made_up):
    profile = made_up.profile()
    drawing = over_time.trials(profile).svg()
    ticks = drawing.count("<use") - len(profile.trials)
    assert 0 < ticks < 60  # ticks are drawn with the same element


def test_the_noise_is_that_of_the_trials(made_up):
    profile = made_up.profile()
    control = [row for row in over_time.trials(profile).rows if row[0] == "read"]
    runs = [speed for _, speed in summary.control_runs(profile, "read")]
    assert control[0][1:5] == (
        str(len(runs)),
        *(f"{value:#.3g}" for value in (min(runs), statistics.median(runs), max(runs))),
    )


def test_the_cache_ends_where_it_was_found(made_up):
    run = made_up.shapes["sustained, a cache that ends"]().sustained
    rows = dict(over_time.sustained(made_up.shapes["sustained, a cache that ends"]()).rows)
    assert rows["Cache ends after"].replace("\xa0", " ") == "72 GB"
    assert rows["First round, GB/s"] == f"{run.first_gb_per_s:#.3g}"
    assert rows["Last five rounds, GB/s"] == f"{run.steady_gb_per_s:#.3g}"
    assert (
        dict(over_time.sustained(made_up.shapes["sustained, no end"]()).rows)["Cache ends after"]
        == "not seen"
    )


def test_directions_under_the_mixed_load_have_the_shares_of_the_last_stage(made_up):
    profile = made_up.profile()
    read, write = summary.both_directions(profile)[made_up.chosen]
    trials = [
        trial
        for trial in profile.trials
        if trial.setting == made_up.chosen and trial.phase == "mixed" and trial.stage == "final"
    ]
    assert read + write == pytest.approx(profile.performance["mixed"].gb_per_s)
    assert read / write == pytest.approx(
        statistics.median(trial.read_gb_per_s for trial in trials)
        / statistics.median(trial.write_gb_per_s for trial in trials)
    )
    assert set(PHASES) == set(profile.performance)
