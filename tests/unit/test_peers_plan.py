from __future__ import annotations

from pathlib import Path

import pytest

from nvme_offload.errors import UsageError
from sweeps.peers.plan import Job, read_plan

PLANS = sorted((Path(__file__).parents[2] / "sweeps" / "plans").glob("engine*.toml"))

CASE = """
rounds = 2
round_trips = 10
[[case]]
title = "t"
sides = ["ours", "fio"]
directions = ["read", "mixed"]
backends = ["libaio"]
memory = ["huge"]
threads = [1]
grid = [["1MiB", 4], ["128KiB", 16]]
request = "4MiB"
requests = 8
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "plan.toml"
    path.write_text(text)
    return path


def test_a_case_is_every_combination(tmp_path: Path) -> None:
    plan = read_plan(
        write(
            tmp_path,
            CASE
            + 'footprint = "8MiB"\npasses = 3\nopponent = {block_size = "64KiB", thread_count = 2}\nspeed_target = 0.9\n',
        )
    )
    (case,) = plan.cases
    assert (plan.rounds, plan.round_trips, case.speed_target, case.cpu_target) == (2, 10, 0.9, None)
    first = Job("read", "libaio", 1 << 20, 4, 1, "huge", 8 << 20, 4 << 20, 8, 3)
    assert case.contests[0].jobs[0] == first
    assert [
        (contest.jobs[0].direction, contest.jobs[0].block_size, contest.jobs[0].queue_depth)
        for contest in case.contests
    ] == [
        ("read", 1 << 20, 4),
        ("read", 128 << 10, 16),
        ("mixed", 1 << 20, 4),
        ("mixed", 128 << 10, 16),
    ]
    assert {
        (contest.jobs[1].block_size, contest.jobs[1].thread_count) for contest in case.contests
    } == {(64 << 10, 2)}
    assert [contest.jobs[0].nbytes for contest in case.contests] == [
        96 << 20,
        96 << 20,
        192 << 20,
        192 << 20,
    ]


def test_all_memory_is_used_unless_a_footprint_is_given(tmp_path: Path) -> None:
    (case,) = read_plan(write(tmp_path, CASE)).cases
    assert case.contests[0].jobs[0].footprint_bytes == 32 << 20


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (CASE.replace("title", "name"), "name"),
        (CASE.replace('title = "t"\n', ""), "title"),
        (CASE.replace('"mixed"', '"both"'), "both"),
        (CASE.replace('"huge"', '"vast"'), "vast"),
        (CASE.replace('"1MiB"', '"1 mile"'), "1 mile"),
        (CASE + "opponent = {depth = 1}\n", "depth"),
        (CASE + "[[", "end of document"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, broken: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_plan(write(tmp_path, broken))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_are_possible(path: Path) -> None:
    for case in read_plan(path).cases:
        for contest in case.contests:
            for job in contest.jobs:
                assert job.request_bytes % job.block_size == 0
                assert job.footprint_bytes % job.request_bytes == 0
                assert job.file_bytes % job.footprint_bytes == 0
