from __future__ import annotations

import dataclasses
import json

import pytest

from sweeps.peers.latency import Latencies
from sweeps.peers.plan import Case, Contest, Job, Plan
from sweeps.peers.report import Results, Round, as_json, render, row
from sweeps.peers.stopwatch import Measurement
from sweeps.report import percentile, spread, verdict

GIB = 1 << 30
JOB = Job("read", "libaio", 1 << 20, 16, 1, "huge", GIB, GIB, 1, 1)
CONTEST = Contest(("ours", "fio"), (JOB, JOB), None)


def rounds(*seconds: tuple[float, float]) -> list[Round]:
    made = []
    for number, (first, second) in enumerate(seconds):
        sides = (
            Measurement(GIB, first, 0.2 * first, (1e-5, 3e-5)),
            Measurement(GIB, second, 0.1 * second),
        )
        made.append(Round(number, number % 2, float(number), sides))
    return made


def results(held: list[Round], speed_target: float | None = 0.97) -> Results:
    case = Case("One request", (CONTEST,), speed_target, 1.1)
    latencies = [Latencies("libaio", "/drive", [20e-6] * 3, [30e-6] * 3, [36e-6] * 3, [3e-6])]
    return Results(
        {"kernel": "Linux 6"},
        Plan(3, 3, (case,)),
        {CONTEST: held},
        {"deepspeed": "not installed"},
        latencies,
        ["Shared machine."],
    )


def test_spread_is_all_of_few_and_the_middle_of_many() -> None:
    assert spread([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert spread([float(value) for value in range(11)]) == (1.0, 5.0, 9.0)


def test_percentile() -> None:
    assert percentile([float(value) for value in range(200)], 99) == 198
    assert percentile([2.0, 1.0], 99) == 2.0


def test_a_ratio_is_the_median_of_those_of_each_round() -> None:
    found = row(CONTEST, rounds((1.0, 0.5), (4.0, 3.0), (2.0, 1.0)))
    assert found.speed == (0.5, 0.5, 0.75)
    assert found.cpu == pytest.approx((4 * 2 / 3, 4.0, 4.0))
    # The medians of the sides are of different rounds, and their ratio is not what counts.
    assert found.gb_per_second == pytest.approx((GIB / 2e9, GIB / 1e9))
    assert found.cpu_seconds_per_gib == pytest.approx((0.4, 0.1))


def test_verdict() -> None:
    assert verdict(spread([0.9, 1.0, 1.1]), least=0.97) == "met?"
    assert verdict(spread([0.98, 1.0, 1.1]), least=0.97) == "met"
    assert verdict(spread([0.8, 0.9, 1.1]), least=0.97) == "missed?"
    assert verdict(spread([1.2, 1.3, 1.4]), most=1.1) == "missed"
    assert verdict(spread([1.0])) == ""


def test_report_says_what_was_found_and_where() -> None:
    text = render(results(rounds((1.0, 1.0), (1.0, 0.5), (1.0, 0.5))))
    assert "| One request | ours / fio | 1 | 0.50 | >= 0.97 | 0 of 1 |" in text
    assert "| 1.07 | 2.15 | 0.50 [0.50 to 1.00] | missed? |" in text
    assert "deepspeed was skipped: not installed" in text
    assert "- kernel: Linux 6" in text
    assert "Shared machine." in text
    assert "| libaio | 1 GiB | 6 | 20.0 | 30.0 | 30.0 |" in text
    assert "| /drive | libaio | 20.0 | 30.0 | 36.0 | 36.0 | 6.0 | 3.0 | 3.0 |" in text


def test_only_settings_that_vary_have_a_column() -> None:
    text = render(results(rounds((1.0, 1.0)), speed_target=None))
    assert "| ours GB/s | fio GB/s | speed ratio | ours CPU s/GiB |" in text
    assert (
        "1 request of 1 GiB, read, backend libaio, block 1 MiB, depth 16, threads 1; 1 rounds."
        in text
    )


def test_what_the_other_side_has_instead_is_said() -> None:
    found = results([])
    uneven = Contest(
        CONTEST.sides, (JOB, dataclasses.replace(JOB, backend="posix", thread_count=2)), None
    )
    found.plan = Plan(1, 1, (Case("Uneven", (uneven,), None, None),))
    found.rounds = {uneven: rounds((1.0, 1.0))}
    assert "fio has backend posix, threads 2." in render(found)


def test_a_case_that_was_not_held_is_said() -> None:
    assert "Skipped: a side is missing." in render(results([]))


def test_json_holds_every_run() -> None:
    document = json.loads(json.dumps(as_json(results(rounds((1.0, 1.0), (1.5, 0.5))))))
    held = document["cases"][0]["contests"][0]["rounds"]
    assert [[side["seconds"] for side in entry["sides"]] for entry in held] == [
        [1.0, 1.0],
        [1.5, 0.5],
    ]
    assert [entry["first"] for entry in held] == [0, 1]
    assert held[0]["sides"][0]["submit_seconds"] == {
        "count": 2,
        "median": 2e-5,
        "percentile_99": 3e-5,
        "most": 3e-5,
    }
    assert document["latencies"][0]["waited"] == {
        "count": 3,
        "median": 3.6e-5,
        "percentile_99": 3.6e-5,
        "most": 3.6e-5,
    }
