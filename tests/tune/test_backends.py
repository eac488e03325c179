"""A comparison interleaved with the engine: a drift does not move its ratios."""

from __future__ import annotations

import pytest

from nvme_offload.hardware.profile import Beside, Setting
from nvme_offload.tune import sweep
from nvme_offload.tune.progress import Progress
from nvme_offload.tune.verdict import Result

SETTING = Setting(1 << 20, 16, 2)


def test_a_steady_drift_cancels() -> None:
    now = [1.0]

    def run(factor: float) -> float:
        now[0] *= 0.8
        return 1e9 * now[0] * factor

    speeds = [run(1.5 if number % 2 else 1.0) for number in range(7)]
    ones, others = speeds[::2], speeds[1::2]
    found = sweep.judged("io_uring", "mixed", ones, others)
    interval = found.relative_low, found.relative, found.relative_high
    assert interval == pytest.approx((1.5, 1.5, 1.5))
    assert (found.name, found.phase) == ("io_uring", "mixed")


@pytest.mark.parametrize("seconds", [40, 60, 300])
def test_the_other_backend_runs_more_than_once_for_half_a_second_at_least(
    monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    monkeypatch.setattr(sweep, "_other_backend", lambda options: "io_uring")
    options = sweep.Options(seconds=seconds)
    ran: list[tuple[str, str, float]] = []

    class Counting:
        def run(self, setting: Setting, phase: str, window: float) -> Result:
            ran.append((setting.backend, phase, window))
            return Result((3 + len(ran) % 4) * 10**9, 10**9, 1.0)

    found = sweep._compare_backends(Counting(), SETTING, options, Progress(None))  # type: ignore[arg-type]
    assert [(one.name, one.phase) for one in found] == [
        ("io_uring", phase) for phase in ("read", "write", "mixed")
    ]
    assert all(one.relative_low < one.relative_high for one in found)
    assert sum(backend == "io_uring" for backend, _, _ in ran) >= 6
    assert {window for _, _, window in ran} == {0.5}
    for phase in ("read", "write", "mixed"):
        turns = [backend for backend, under, _ in ran if under == phase]
        assert turns == ["libaio", *["io_uring", "libaio"] * (len(turns) // 2)]
    assert sweep._seconds_after(options) < 0.5 * seconds


@pytest.mark.parametrize(
    ("low", "said"),
    [
        (1.02, "libaio stays: the gain of the mixed load is not certain to reach 3%."),
        (1.04, "This package's engine uses it with AioConfig(backend="),
    ],
)
def test_the_mixed_load_decides_whether_another_backend_is_recommended(
    low: float, said: str
) -> None:
    beside = [
        Beside("io_uring", "", "write", 4.5, 4.0, 1.13, 1.12, 1.23),
        Beside("io_uring", "", "mixed", 2.9, 2.8, 1.05, low, 1.1),
    ]
    (reason,) = sweep._backend_reasons(beside, sweep.Options())
    assert said in reason
