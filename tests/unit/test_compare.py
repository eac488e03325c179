from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nvme_offload.errors import CorruptionError, UsageError
from sweeps.compare import state
from sweeps.compare.plan import fastest, read_plan
from sweeps.compare.report import Results, Run, SideFacts, Skipped, TaskFacts, render, rows
from sweeps.peers.buffers import fill, require_filled
from sweeps.peers.page_cache import cached_bytes, evict

MIB = 1 << 20
PLAN = Path(__file__).parents[2] / "sweeps" / "plans" / "compare.toml"


def results(rounds: int = 3) -> Results:
    tasks = [
        TaskFacts("read-1MiB", "read", "read", 64 * MIB, 64),
        TaskFacts("write-1MiB", "write", "write", 64 * MIB, 64),
        TaskFacts("checkpoint-write", "write", "write", 128 * MIB, 484, True),
    ]
    sides = [
        SideFacts("ours-libaio", "ours, libaio", "1", "sync", {"block_size": MIB}),
        SideFacts("other", "The <Other> | one", "2", "sync", {}),
        SideFacts("fio", "fio, the ceiling", "3", "sync", {}),
    ]
    found = Results({"date": "2026-01-01"}, 64 * MIB, "ours-libaio", tasks, sides)
    found.skipped.append(Skipped("Absent", "", "no driver"))
    found.notes.append("Shared.")
    seconds = {"ours-libaio": 0.1, "other": 0.2, "fio": 0.08}
    for number in range(rounds):
        for task in tasks:
            for position, (side, took) in enumerate(seconds.items()):
                if (task.name, side) == ("write-1MiB", "other"):
                    continue
                other = side == "other"
                seconds_taken = took * (1 + number * other)
                place = task.name, side, number, position
                found.runs.append(Run(*place, task.nbytes, seconds_taken))
    return found


def test_the_plan_that_is_shipped_can_be_read() -> None:
    with pytest.raises(UsageError, match="'other' is none of"):
        read_plan(PLAN).narrowed(["other"], None)


def test_the_fastest_setting_is_the_first_of_those_that_are_as_good() -> None:
    assert fastest([{"read": [2.0, 2.0], "write": [1.0]}, {"read": [2.01], "write": [1.01]}]) == 0
    assert fastest([{"read": [2.0], "write": [1.0]}, {"read": [4.0], "write": [0.6]}]) == 1
    assert fastest([{}, {"read": [0.1]}]) == 1
    assert fastest([{"read": [9.0], "write": []}, {"read": [0.1], "write": [0.1]}]) == 1


def test_a_ratio_is_to_the_reference_of_the_same_round() -> None:
    found = rows(results(), results().tasks[0])
    assert found["other"].advantage == pytest.approx((2.0, 4.0, 6.0))
    assert found["fio"].advantage == pytest.approx((0.8, 0.8, 0.8))
    assert found["other"].gb_per_second.median == pytest.approx(64 * MIB / 0.4 / 1e9)


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
