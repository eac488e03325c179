from __future__ import annotations

import dataclasses
import statistics

import pytest

from nvme_offload.hardware.profile import PHASES, Profile
from nvme_offload.planning import traffic
from nvme_offload.report import charts, tables, wording

TIMES = "\N{MULTIPLICATION SIGN}"


def plain(cells) -> list[str]:
    return [cell.replace("\xa0", " ") for cell in cells]


def test_a_step_takes_as_long_as_its_tightest_bound():
    speeds = {"read": 4.0, "write": 1.0, "mixed": 3.0}
    # Writing alone: 16 bytes at 1 GB/s, more than 32 at 3.
    assert traffic.floor(traffic.GRADIENTS, 1e9, speeds) == (16.0, "write")
    assert traffic.floor(traffic.GRADIENTS, 1e9, {**speeds, "write": 4.0}) == (
        pytest.approx(32 / 3),
        "mixed",
    )
    assert traffic.floor(traffic.STATES, 1e9, {**speeds, "write": 4.0}) == (8.0, "mixed")
    # as many reads as writes concurrently, and 18 GB of reads alone
    found = traffic.transfer(20e9, 2e9, {"read": 7.0, "write": 2.0, "mixed": 3.0})
    assert found == (pytest.approx(4 / 3 + 18 / 7), "mixed")
    # Parameters: 2 bytes more are written, and 4 read before the step.
    assert traffic.floor(traffic.PARAMETERS, 1e9, speeds) == (18.0 + 4 / 4.0, "write")


def test_the_page_has_the_steps(made_up):
    page = made_up.page_of("one path")
    table = tables.training(made_up.profile())
    seconds = 7e9 * 24 / (made_up.best(made_up.chosen, "mixed").gb_per_s * 1e9)
    before = 7e9 * 24 / (made_up.control_speed["mixed"] * 1e9)
    assert plain(table.rows[0]) == plain(
        [
            "7 B",
            "168 GB",
            "84 GB",
            *map(wording.duration, (seconds, before)),
        ]
    )
    assert [plain(row)[0] for row in table.rows] == ["7 B", "13 B", "70 B"]
    for row in table.rows:
        assert " ".join(" ".join(row).split()) in page.words
    assert "estimated" in page.words
    assert "Every parameter costs 12 bytes read and 12 written" in page.words
    assert "gradients stay in host memory" in page.words
    assert "nvme-offload plan --params 7B --path" in page.words


def test_several_paths_share_a_step(made_up):
    profile = made_up.shapes["several paths"]()
    together = {phase: sum(path.together[phase] for path in profile.stripe) for phase in PHASES}
    assert traffic.stripe_speeds(profile) == together
    table = tables.training(profile)
    column = plain(table.columns).index("On these\n2 paths")
    assert table.rows[0][column] == wording.duration(7e9 * 24 / together["mixed"] / 1e9)
    assert plain(tables.stripe(profile).rows[-1])[-3:] == [
        f"{together[phase]:#.3g}" for phase in PHASES
    ]


def test_wear_is_bytes_over_bytes(made_up):
    assert traffic.rated_bytes(made_up.shapes["worn"]()) == pytest.approx(1.2e15)
    # whole per cents say nothing there
    assert traffic.rated_bytes(made_up.shapes["hardly worn"]()) is None
    assert traffic.rated_bytes(made_up.profile()) is None


def test_tables_are_rectangles(made_up):
    for shape, make in made_up.shapes.items():
        for name, table in tables.of(make()).items():
            assert {len(row) for row in table.rows} <= {len(table.columns)}, (shape, name)
            assert table.caption, name


def test_a_setting_has_one_ratio_and_one_speed_wherever_it_is_shown(made_up):
    """A report shows the estimate of the finals, not the median of a setting's trials."""
    profile = made_up.shapes["everything"]()
    for phase, name in (("read", "Read"), ("write", "Write"), ("mixed", "Mixed")):
        judged = {one.setting: one for one in (profile.best[phase], profile.performance[phase])}
        trials = [
            trial.relative
            for trial in profile.trials
            if (trial.phase, trial.setting, trial.stage) == (phase, profile.chosen, "final")
        ]
        assert statistics.median(trials) != judged[profile.chosen].relative
        table = tables.finalists(profile)
        column = plain(table.columns).index(name)
        cells = {plain(row)[-1]: plain(row)[column] for row in table.rows}
        reached = judged[profile.chosen]
        assert cells["chosen"] == f"{reached.gb_per_s:#.3g} ({reached.relative:.2f}{TIMES})"
        assert cells["defaults"] == f"{made_up.control_speed[phase]:#.3g} (1.00{TIMES})"
    mixed = profile.performance["mixed"]
    assert charts.mixed_ratios(profile)[profile.chosen] == mixed.relative


def test_latencies_have_the_rate_of_the_speed_that_is_shown(made_up):
    whole = made_up.shapes["latencies"]()
    timed = [one for one in whole.latencies if one.setting == whole.chosen]
    rare = dataclasses.replace(timed[0], p999_ms=39.5)
    others = [one for one in whole.latencies if one is not timed[0]]
    profile = dataclasses.replace(whole, latencies=(rare, *others))
    table = tables.latency(profile)
    read, write, _ = map(plain, table.rows)
    rate = 1e9 * profile.performance["read"].gb_per_s / profile.chosen.block_size
    assert read[:2] == ["read", f"{rate:,.0f}"]
    assert (read[5], write[5]) == ("39.5 ms", "\N{EN DASH}")
    assert read[-1] == "3,000"
    assert "p99.9" in table.columns
    assert tables.latency(made_up.profile()).rows == ()


def test_the_page_says_how_good_its_evidence_is(made_up):
    assert "The evidence is good" in made_up.page_of("one path").words
    weak = made_up.page_of("ten seconds, not steady").words
    assert "The evidence is weak" in weak
    assert "mixed: 2 of 4 final trials of at least 0.5 s" in weak


def test_health_before_and_after(made_up):
    table = tables.health(made_up.shapes["worn"]())
    absent = "not reported by this drive"
    assert [plain(row) for row in table.rows] == [
        ["Temperature", "41 \N{DEGREE SIGN}C", "67 \N{DEGREE SIGN}C"],
        ["Highest seen in the sweep", absent, ""],
        ["Warns from", absent, ""],
        ["Slowed by heat in its life", "0 s", "12 s"],
        ["Rated life used", "5 %", "5 %"],
        ["Written in its life", "60 TB", "60 TB"],
        ["Its warnings", "none", "too hot"],
    ]
    silent = tables.health(made_up.profile())
    assert [plain(row)[1] for row in silent.rows] == [absent]
    assert "SMART log" in table.caption


def test_finalists_are_sorted_by_mixed_speed(made_up):
    table = tables.finalists(made_up.brief())
    assert [row[-1] for row in table.rows] == ["", "chosen", "defaults"]
    assert table.strong == {1}
    assert [row[-2] for row in table.rows] == ["12"] * 3
    assert plain(table.rows[0])[:4] == ["2 MiB", "16", "4", "128 MiB"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.1, "0.1 s"),
        (55.06, "55.1 s"),
        (99.4, "99.4 s"),
        (100, "1 min 40 s"),
        (3599, "59 min 59 s"),
        (7260, "2 h 1 min"),
        (864000, "10 days"),
    ],
)
def test_durations_in_words(seconds, text):
    assert wording.duration(seconds).replace("\xa0", " ") == text


@pytest.mark.parametrize(
    ("value", "key", "text"),
    [
        (True, "direct", "yes"),
        (1 << 30, "file_bytes", "1 GiB"),
        (1_967_397_240_832, "size_bytes", "1.97 TB"),
        (7_876_923_076, "link_bytes_per_second", "7.88 GB/s"),
        ({"read": 4096}, "file_bytes", "read 4 KiB"),
        (41.85, "temperature_celsius", "42 \N{DEGREE SIGN}C"),
        (128, "max_block_kib", "128 KiB"),
        (None, "numa_node", "not known"),
        ([], "layers", ""),
        (0, "numa_node", "0"),
    ],
)
def test_values_in_words(value, key, text):
    assert wording.shown(value, key).replace("\xa0", " ") == text


def test_a_profile_that_was_written_and_read_gives_the_same_page(made_up):
    whole = made_up.shapes["everything"]()
    again = Profile.from_json(whole.to_json())
    assert tables.of(again) == tables.of(whole)
