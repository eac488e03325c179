"""ZeRO-3 with updates on a GPU: events order the copies of states, gradients and partitions and the
kernels that use them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import Case, differences, train

Settings = tuple[str, dict[str, Any], dict[str, Any]]
FEW: list[Settings] = [
    ("none", {"step_in_backward": True}, {}),
    ("nvme", {"overlap_step": True}, {"fragments": True}),
]
OTHERS: list[Settings] = [
    ("none", {"overlap_step": True}, {}),
    ("cpu", {}, {"accumulation": 2}),
    ("nvme", {}, {"evaluate": True, "persistence": 100, "zero_init": True}),
    ("nvme", {"state_format": "split"}, {}),
]


def _cases(settings: list[Settings], host_memory: str) -> list[Case]:
    return [
        Case(
            name=f"parameters {parameters}, {section}, {host_memory}",
            model="blocks",
            optimizer="momentum",
            parameters=parameters,
            sub_group_size=9000,
            steps=4,
            section={"host_memory": host_memory, **section},
            **options,
        )
        for parameters, section, options in settings
    ]


def _trained(cases: list[Case], directory: Path, virtual_gpu: bool) -> list[dict[str, Any]]:
    directory.mkdir()
    results = train(cases, directory, virtual_gpu=virtual_gpu)
    for result in results:
        assert "error" not in result, result["message"]
    return results


def _compare(settings: list[Settings], directory: Path, *host_memory: str) -> None:
    on_cpu = _trained(_cases(settings, "64MB"), directory / "cpu", False)
    for size in host_memory:
        on_gpu = _trained(_cases(settings, size), directory / size, True)
        for one, other in zip(on_gpu, on_cpu, strict=True):
            # a GPU sums norms in fp32
            assert [each for each in differences(one, other) if ": norms" not in each] == [], size


def test_events_order_all_accesses(tmp_path: Path) -> None:
    _compare(FEW, tmp_path, "64MB")


@pytest.mark.slow
def test_events_order_all_accesses_in_other_settings(tmp_path: Path) -> None:
    _compare(OTHERS, tmp_path, "64MB", "smallest", "double")


@pytest.mark.slow
def test_events_order_all_accesses_in_little_memory(tmp_path: Path) -> None:
    _compare(FEW, tmp_path, "smallest", "double")
