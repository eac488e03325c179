"""ZeRO-3 with updates on a GPU: events order the copies of states, gradients and partitions and the
kernels that use them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import Case, differences, train

SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("none", {"step_in_backward": True}, {}),
    ("none", {"overlap_step": True}, {}),
    ("cpu", {}, {"accumulation": 2}),
    ("nvme", {}, {"evaluate": True, "persistence": 100, "zero_init": True}),
    ("nvme", {"overlap_step": True}, {"fragments": True}),
    ("nvme", {"state_format": "split"}, {}),
]


def _cases(host_memory: dict[str, str]) -> list[Case]:
    return [
        Case(
            name=f"parameters {parameters}, {section}, {host_memory}",
            model="blocks",
            optimizer="momentum",
            parameters=parameters,
            sub_group_size=9000,
            steps=4,
            section={**host_memory, **section},
            **options,
        )
        for parameters, section, options in SETTINGS
    ]


def _trained(cases: list[Case], directory: Path, virtual_gpu: bool) -> list[dict[str, Any]]:
    directory.mkdir()
    results = train(cases, directory, virtual_gpu=virtual_gpu)
    for result in results:
        assert "error" not in result, result["message"]
    return results


@pytest.mark.parametrize(
    "host_memory",
    [
        pytest.param({"host_memory": "smallest"}, id="on the drive", marks=pytest.mark.slow),
        pytest.param({"host_memory": "double"}, id="partly in memory", marks=pytest.mark.slow),
        pytest.param({}, id="in memory"),
    ],
)
def test_events_order_all_accesses(tmp_path: Path, host_memory: dict[str, str]) -> None:
    cases = _cases(host_memory)
    on_cpu = _trained(cases, tmp_path / "cpu", False)
    for one, other in zip(_trained(cases, tmp_path / "gpu", True), on_cpu, strict=True):
        # a GPU sums norms in fp32
        assert [each for each in differences(one, other) if ": norms" not in each] == []
