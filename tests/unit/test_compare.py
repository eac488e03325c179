from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nvme_offload.errors import CorruptionError, UsageError
from sweeps.compare import state
from sweeps.compare.plan import Task, describe, fastest, read_plan
from sweeps.compare.report import Results, Run, SideFacts, Skipped, TaskFacts, render, rows
from sweeps.peers.buffers import fill, require_filled
from sweeps.peers.page_cache import cached_bytes, evict

MIB = 1 << 20
PLAN = Path(__file__).parents[2] / "sweeps" / "plans" / "compare.toml"


def results(rounds: int = 3) -> Results:
    facts = {
        "processor": "A processor, 2 cores, 8 GiB of memory",
        "drive": "/dev/x; requests",
        "filesystem": "ext4 (rw)",
        "date": "2026-01-01",
        "command": "c",
    }
    tasks = [
        TaskFacts("read-1MiB", "read", "read", 64 * MIB, 64),
        TaskFacts("write-1MiB", "write", "write", 64 * MIB, 64),
        TaskFacts("checkpoint-write", "write", "write", 128 * MIB, 484, True),
    ]
    sides = [
        SideFacts(
            "ours-libaio",
            "ours, libaio",
            "1",
            "sync",
            {"block_size": MIB},
            ({"setting": {"block_size": MIB}, "gb_per_second": {"read-1MiB": 2.0}},),
        ),
        SideFacts("other", "The <Other> | one", "2", "sync", {}),
        SideFacts("fio", "fio, the ceiling", "3", "sync", {}),
    ]
    found = Results(
        facts,
        64 * MIB,
        "ours-libaio",
        tasks,
        sides,
        skipped=[Skipped("Absent", "", "no driver")],
        notes=["Shared."],
    )
    seconds = {"ours-libaio": 0.1, "other": 0.2, "fio": 0.08}
    for number in range(rounds):
        for task in tasks:
            for position, (side, took) in enumerate(seconds.items()):
                if (task.name, side) != ("write-1MiB", "other"):
                    longer = took * (1 + number * (side == "other"))
                    found.runs.append(
                        Run(
                            task.name,
                            side,
                            number,
                            position,
                            task.nbytes,
                            longer,
                            took / 10,
                            5 * MIB,
                            MIB * (side == "other"),
                            64 * MIB,
                        )
                    )
    return found


def test_the_fastest_setting_is_the_first_of_those_that_are_as_good() -> None:
    assert fastest([{"read": [2.0, 2.0], "write": [1.0]}, {"read": [2.01], "write": [1.01]}]) == 0
    assert fastest([{"read": [2.0], "write": [1.0]}, {"read": [4.0], "write": [0.6]}]) == 1
    assert fastest([{}, {"read": [0.1]}]) == 1
    assert fastest([{"read": [9.0], "write": []}, {"read": [0.1], "write": [0.1]}]) == 1


def test_sizes_of_tasks_are_whole_and_half_each_way_for_both() -> None:
    task = Task("many", "read", "read", 0.25, 64 << 10)
    assert (task.nbytes(1 << 30), task.requests(1 << 30)) == (256 * MIB, 4096)
    both = Task("both", "both", "mixed")
    assert (both.nbytes(1 << 30), both.requests(1 << 30)) == (512 * MIB, 1)
    assert both.nbytes(3 * MIB + 5) % MIB == 0


def test_the_plan_that_is_shipped_is_sound() -> None:
    plan = read_plan(PLAN)
    assert {side.name for side in plan.sides} >= {
        "ours-libaio",
        "ours-io_uring",
        "ours-posix",
        "deepspeed",
        "fast-file-writer",
        "tensornvme",
        "kvikio",
        "fio",
    }
    for side in plan.sides:
        for name in side.tasks:
            assert (
                side.checkpoint
                if plan.task(name).checkpoint and side.name != "fio"
                else side.transfer
            )
    assert [side.name for side in plan.narrowed(["fio"], ["read"]).sides_of(plan.task("read"))] == [
        "fio"
    ]
    with pytest.raises(UsageError, match="'other' is none of"):
        plan.narrowed(["other"], None)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('direction = "read"', 'direction = "sideways"', "'sideways' is none of"),
        ('reference = "ours-libaio"', 'reference = "theirs"', "'theirs' is none of"),
        ('reference = "ours-libaio"', "", "'reference' is missing"),
        ("queue_depth = 32", "depth = 32", "'depth' is none of"),
        ('tuned_by = ["read"', 'tuned_by = ["reed"', "'reed' is none of"),
    ],
)
def test_a_plan_that_is_wrong_is_refused_in_one_line(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.read_text().replace(before, after))
    with pytest.raises(UsageError, match=said):
        read_plan(path)


def test_settings_in_words() -> None:
    setting = {
        "backend": "libaio",
        "block_size": MIB,
        "queue_depth": 8,
        "thread_count": 1,
        "sequential": True,
    }
    assert describe(setting) == "libaio, block 1 MiB, depth 8, 1 thread, sequential"
    assert describe({"crc32": False, "buffer_size": 64 * MIB}) == "no crc32, buffer 64 MiB"
    assert describe({}) == "defaults"


def test_a_ratio_is_to_the_reference_of_the_same_round() -> None:
    found = rows(results(), results().tasks[0])
    assert found["other"].advantage == pytest.approx((2.0, 4.0, 6.0))
    assert found["fio"].advantage == pytest.approx((0.8, 0.8, 0.8))
    assert found["other"].gb_per_second.median == pytest.approx(64 * MIB / 0.4 / 1e9)
    assert found["other"].cpu_seconds_per_gib == pytest.approx(0.02 * 16)
    assert (
        found["other"].extra_bytes,
        found["other"].locked_bytes,
        found["other"].cached_bytes,
    ) == (5 * MIB, MIB, 64 * MIB)


def test_the_report_has_ratios_and_skipped_sides() -> None:
    text = render(results())
    ratio = "4.00\N{MULTIPLICATION SIGN} (2.00\N{EN DASH}6.00)"
    assert f"| read 64 x 1 MiB | 0.67 | {ratio} | 0.80\N{MULTIPLICATION SIGN} |" in text
    assert r"| The <Other> \| one | 0.168 |  |" in text  # it did not write
    assert "| Absent | all | no driver |" in text
    assert "Shared." in text


def test_a_wrong_byte_is_found_wherever_it_is() -> None:
    buffer = np.zeros(MIB, np.uint8)
    fill(buffer, 7)
    require_filled(buffer, 7, "other")
    with pytest.raises(CorruptionError, match="did not move this byte"):
        require_filled(buffer, 8, "a side")
    buffer[MIB - 1] ^= 1
    with pytest.raises(CorruptionError, match="did not move this byte"):
        require_filled(buffer, 7, "a side")
    fill(buffer, 7)
    buffer.view(np.uint64)[512 * 3] += 256  # the page of another place
    with pytest.raises(CorruptionError, match="did not read this page"):
        require_filled(buffer, 7, "a side")


def test_a_part_of_a_file_is_filled_as_the_whole_is() -> None:
    part, whole = np.zeros(MIB, np.uint8), np.zeros(3 * MIB, np.uint8)
    fill(part, 7)
    fill(whole, 7)
    assert np.array_equal(part, whole[:MIB])


def test_a_state_has_tensors_of_many_sizes_and_never_more_than_asked_for() -> None:
    for nbytes in (MIB, 10 * MIB, 1 << 31):
        sizes = [shape.nbytes for shape in state.shapes(nbytes)]
        assert 0.8 * nbytes < sum(sizes) <= nbytes
        assert max(sizes) > 1000 * min(sizes)
    assert sum(shape.nbytes for shape in state.shapes(1 << 31)) > 0.99 * (1 << 31)


def test_a_wrong_state_is_found() -> None:
    import torch

    built = state.build(MIB)
    state.require_same(built, MIB, "other")
    name = "layers.3.up.exp_avg"
    built[name].view(torch.uint8)[-1] ^= 1
    with pytest.raises(CorruptionError, match=name):
        state.require_same(built, MIB, "a side")
    with pytest.raises(CorruptionError, match="other tensors"):
        state.require_same({}, MIB, "a side")


def test_a_file_leaves_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    if cached_bytes(path) == 0:
        pytest.skip("this filesystem has no page cache")
    assert cached_bytes(path) == MIB
    if path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("a tmpfs is nothing but page cache")
    evict(path)
    assert cached_bytes(path) == 0
    assert path.read_bytes() == bytes(MIB)
    (tmp_path / "empty").touch()
    assert cached_bytes(tmp_path / "empty") == 0
