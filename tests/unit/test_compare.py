from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from nvme_offload.errors import CorruptionError, UsageError
from sweeps.compare import page, readme, state, training
from sweeps.compare.plan import Task, describe, fastest, read_plan, turns
from sweeps.compare.results import (
    Results,
    Run,
    SideFacts,
    Skipped,
    TaskFacts,
    as_json,
    from_json,
    rows,
)
from sweeps.peers.page_cache import cached_bytes, evict
from sweeps.peers.rig import fill, require_filled

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
PLAN = ROOT / "sweeps" / "plans" / "compare.toml"


def results(rounds: int = 3) -> Results:
    facts = {
        "processor": "A processor, 2 cores, 8 GiB of memory",
        "drive": "/dev/x; requests",
        "filesystem": "ext4 (rw)",
        "date": "2026-01-01",
        "command": "c",
    }
    tasks = [
        TaskFacts("read-1MiB", "read", "Tensors of 1 MiB", "read", 64 * MIB, 64),
        TaskFacts("write-1MiB", "write", "Tensors of 1 MiB", "write", 64 * MIB, 64),
        TaskFacts("checkpoint-write", "write", "A checkpoint", "write", 128 * MIB, 484, True),
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
        "fio",
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


def test_everybody_begins_elsewhere_in_every_round() -> None:
    names = list("abcdefg")
    orders = [turns(names, number, 3) for number in range(3)]
    assert [order[0] for order in orders] == ["a", "c", "e"]
    assert all(sorted(order) == names for order in orders)
    assert orders[1] == list("cbagfed")
    assert turns(["a", "b"], 1, 5) == ["b", "a"]
    assert turns([], 1, 5) == []


def test_the_fastest_setting_is_the_first_of_those_that_are_as_good() -> None:
    assert fastest([{"read": [2.0, 2.0], "write": [1.0]}, {"read": [2.01], "write": [1.01]}]) == 0
    assert fastest([{"read": [2.0], "write": [1.0]}, {"read": [4.0], "write": [0.6]}]) == 1
    assert fastest([{}, {"read": [0.1]}]) == 1
    assert fastest([{"read": [9.0], "write": []}, {"read": [0.1], "write": [0.1]}]) == 1


def test_sizes_of_tasks_are_whole_and_half_each_way_for_both() -> None:
    task = Task("many", "read", "Many", "read", 0.25, 64 << 10)
    assert (task.nbytes(1 << 30), task.requests(1 << 30)) == (256 * MIB, 4096)
    both = Task("both", "both", "Both", "mixed")
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
    with pytest.raises(UsageError, match="'nobody' is none of"):
        plan.narrowed(["nobody"], None)


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
        "options": ["sync"],
    }
    assert describe(setting) == "libaio, block 1 MiB, depth 8, 1 thread, sync"
    assert describe({"crc32": False, "buffer_size": 64 * MIB}) == "no crc32, buffer 64 MiB"
    assert describe({}) == "as it comes"


def test_a_ratio_is_to_the_reference_of_the_same_round() -> None:
    found = {row.side.name: row for row in rows(results(), results().tasks[0])}
    assert found["other"].advantage == pytest.approx((2.0, 4.0, 6.0))
    assert found["fio"].advantage == pytest.approx((0.8, 0.8, 0.8))
    assert found["other"].gb_per_second.median == pytest.approx(64 * MIB / 0.4 / 1e9)
    assert found["other"].cpu_seconds_per_gib == pytest.approx(0.02 * 16)
    assert (
        found["other"].extra_bytes,
        found["other"].locked_bytes,
        found["other"].cached_bytes,
    ) == (5 * MIB, MIB, 64 * MIB)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    path.write_text(as_json(results()))
    again = from_json(path)
    assert as_json(again) == as_json(results())
    assert page.markdown(again) == page.markdown(results())
    path.write_text('{"schema": 0}')
    with pytest.raises(UsageError, match="another version"):
        from_json(path)
    path.write_text('{"schema": 1, "facts": {}}')
    with pytest.raises(UsageError, match="is not what"):
        from_json(path)


def test_markdown_says_who_was_how_fast_and_who_is_missing() -> None:
    text = page.markdown(results())
    assert r"| The \<Other\> \| one |" in text or r"The &lt;Other&gt; \| one" in text
    assert "| Absent | everything | no driver |" in text
    assert "4.00 (2.00\N{EN DASH}6.00)" in text
    assert "Shared." in text
    assert (
        "over the fastest of the others each time: 4.00\N{MULTIPLICATION SIGN} at reading 64 tensors of 1\N{NO-BREAK SPACE}MiB"
        in text
    )


def test_the_headline_has_the_worst_case_too() -> None:
    """A loss at a task that the headline does not name otherwise."""
    found = results()
    reading = TaskFacts("checkpoint-read", "read", "A checkpoint", "read", 128 * MIB, 484, True)
    found.tasks.append(reading)
    wins = [run for run in found.runs if run.task == "read-1MiB"]
    for run in wins:
        seconds = 0.06 if run.side == "other" else run.seconds
        found.runs.append(
            dataclasses.replace(run, task="checkpoint-read", nbytes=128 * MIB, seconds=seconds)
        )
    worst = "The worst of all 3 cases: 0.60\N{MULTIPLICATION SIGN} at reading a checkpoint (The <Other> | one)."
    lead = page._lead(found)
    assert worst in lead
    assert "4.00\N{MULTIPLICATION SIGN} at reading 64 tensors" in lead
    # fio, the ceiling, is no competitor
    assert "0.80\N{MULTIPLICATION SIGN}" not in lead
    assert "The worst of all 2 cases: 4.00\N{MULTIPLICATION SIGN}" in page._lead(results())


def test_the_page_asks_for_nothing_and_escapes_what_it_is_given() -> None:
    text = page.html(results())
    assert "http:" not in text.replace("http://www.w3.org/", "")
    assert "https:" not in text
    assert "<Other>" not in text
    assert "&lt;Other&gt;" in text
    assert text.count("<svg") == 5  # two of speed, two of CPU, one of memory
    assert "prefers-color-scheme: dark" in text


def test_the_readme_is_written_between_its_marks(tmp_path: Path) -> None:
    text = f"# Head\n\n{readme.BEGIN}\nold\n{readme.END}\n\nTail.\n"
    written = readme.replaced(text, readme.block({"reports/compare-x": results()}))
    assert written.startswith("# Head\n")
    assert written.endswith("\nTail.\n")
    assert "old" not in written
    assert "4.00\N{MULTIPLICATION SIGN} (2.00\N{EN DASH}6.00)" in written
    assert "[report](reports/compare-x/report.md)" in written
    assert readme.replaced(written, readme.block({"reports/compare-x": results()})) == written
    for broken in ("# Head\n", f"{readme.END}\n{readme.BEGIN}\n", text + readme.BEGIN + "\n"):
        with pytest.raises(UsageError, match="once each"):
            readme.replaced(broken, "")
    with pytest.raises(UsageError, match="there is no report"):
        readme.block({})


def test_readme_check_tells_and_changes_nothing(tmp_path: Path) -> None:
    from click.testing import CliRunner

    place = tmp_path / "reports" / "compare-x"
    page.write(results(), place)
    path = tmp_path / "page.md"
    path.write_text(f"{readme.BEGIN}\n{readme.END}\n")
    asked = ["--page", str(path), "--reports", str(place.parent)]
    checked = CliRunner().invoke(readme.main, [*asked, "--check"])
    assert checked.exit_code == 1
    assert "is not as the reports have it" in checked.output
    assert path.read_text() == f"{readme.BEGIN}\n{readme.END}\n"
    assert CliRunner().invoke(readme.main, asked).exit_code == 0
    assert CliRunner().invoke(readme.main, [*asked, "--check"]).exit_code == 0


def test_the_page_is_as_the_committed_reports_have_it() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    found = {
        f"../reports/{path.parent.name}": from_json(path)
        for path in sorted((ROOT / "reports").glob("compare-*/compare.json"))
    }
    if not found or readme.BEGIN not in text:
        pytest.skip("no comparison is committed, or the page has no place for it")
    assert readme.replaced(text, readme.block(found)) == text, "run python -m sweeps.compare.readme"


def test_training_rows_are_ratios_of_the_same_round(tmp_path: Path) -> None:
    plan = {
        "baseline": "a",
        "model": {"hidden": 1024, "blocks": 6},
        "variants": [{"name": "a", "title": "A"}, {"name": "b", "title": "B"}],
    }
    runs = [
        {
            "variant": name,
            "number": number,
            "error": None,
            "measures": {"step": step * (number + 1), "peak": 1e9},
        }
        for name, step in (("a", 2.0), ("b", 1.0))
        for number in range(3)
    ]
    runs.append(
        {"variant": "b", "number": 3, "error": "killed", "measures": {"step": None, "peak": None}}
    )
    path = tmp_path / "training-x.json"
    facts = {"date": "2026-01-02", "processor": "P, 2 cores, 8 GiB of memory"}
    path.write_text(json.dumps({"facts": facts, "plan": plan, "runs": runs}))
    first, second = training.read(path, "x")
    assert (first.step_ratio, first.step_seconds, first.rounds) == (None, 4.0, 3)
    assert second.step_ratio == (0.5, 0.5, 0.5)
    assert second.peak_ratio == (1.0, 1.0, 1.0)
    assert training.of_this_machine([path], {"processor": "P, 2 cores, 31 GiB of memory"}) == [path]
    assert training.of_this_machine([path], {"processor": "P, 4 cores, 8 GiB of memory"}) == []
    path.write_text("{}")
    with pytest.raises(UsageError, match="is not a report"):
        training.read(path, "x")


def test_committed_training_reports_can_be_read() -> None:
    for path in (ROOT / "reports").glob("training-*.json"):
        assert training.read(path, path.name)


def test_a_wrong_byte_is_found_wherever_it_is() -> None:
    buffer = np.zeros(MIB, np.uint8)
    fill(buffer, 7)
    require_filled(buffer, 7, "nobody")
    with pytest.raises(CorruptionError, match="did not bring this byte"):
        require_filled(buffer, 8, "somebody")
    buffer[MIB - 1] ^= 1
    with pytest.raises(CorruptionError, match="did not bring this byte"):
        require_filled(buffer, 7, "somebody")
    fill(buffer, 7)
    buffer.view(np.uint64)[512 * 3] += 256  # the page of another place
    with pytest.raises(CorruptionError, match="pages of another place"):
        require_filled(buffer, 7, "somebody")


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
    state.require_same(built, MIB, "nobody")
    name = "layers.3.up.exp_avg"
    built[name].view(torch.uint8)[-1] ^= 1
    with pytest.raises(CorruptionError, match=name):
        state.require_same(built, MIB, "somebody")
    with pytest.raises(CorruptionError, match="other tensors"):
        state.require_same({}, MIB, "somebody")


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


def test_rounds_count_those_that_were_begun() -> None:
    assert results(2).rounds == 2
    assert dataclasses.replace(results(2), runs=[]).rounds == 0
