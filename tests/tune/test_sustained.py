"""Where a cache ends is seen in the speeds of the rounds, and in nothing else; and the writing
itself writes.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nvme_offload.errors import NoSpaceError
from nvme_offload.hardware.profile import Setting
from nvme_offload.tune import sustained

GIB = 1 << 30


def samples(speeds: list[float], each: int = 2 * GIB) -> list[tuple[float, int]]:
    found = [(0.0, 0)]
    for speed in speeds:
        found.append((found[-1][0] + each / speed, found[-1][1] + each))
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("end", [3, 14, 29])
def test_the_end_of_a_cache_is_found_through_noise(seed: int, end: int) -> None:
    chance = random.Random(seed)
    speeds = [chance.gauss(4.5e9, 0.3e9) for _ in range(end)] + [
        chance.gauss(1.2e9, 0.15e9) for _ in range(32 - end)
    ]
    found = sustained.judged(samples(speeds))
    assert found.cache_ends_bytes == end * 2 * GIB
    assert found.first_gb_per_s == pytest.approx(4.5, rel=0.15)
    if end < 27:
        assert found.steady_gb_per_s == pytest.approx(1.2, rel=0.2)
    (said,) = sustained.warnings(found)
    assert f"after {end * 2} GiB" in said
    assert "84 GB" in said


@pytest.mark.parametrize("seed", range(10))
def test_noise_slow_drift_and_a_dip_are_no_end(seed: int) -> None:
    chance = random.Random(seed)
    noisy = [chance.gauss(2e9, 0.3e9) for _ in range(32)]
    drifting = [2e9 * (1 - 0.006 * index) * chance.gauss(1, 0.02) for index in range(32)]
    dip = [2e9 if not 10 <= index < 16 else 0.5e9 for index in range(32)]
    for speeds in (noisy, drifting, dip, [2e9], [2e9, 1e9]):
        found = sustained.judged(samples(speeds))
        assert found.cache_ends_bytes is None, speeds
        assert sustained.warnings(found) == []


def test_steady_is_the_last_five_rounds() -> None:
    assert sustained.judged(samples([4e9] * 10 + [1e9] * 5)).steady
    assert not sustained.judged(samples([4e9] * 11 + [1e9] * 4)).steady


def test_it_writes_what_was_asked_for_and_leaves_nothing(disk: Path) -> None:
    reported: list[int] = []
    total = 96 << 20
    found = sustained.write_on(
        disk,
        Setting(1 << 20, 8, 1),
        total,
        32 << 20,
        True,
        lambda done, speed: reported.append(done),
    )
    assert total <= found.bytes <= sustained.MOST * total + (16 << 20)
    assert reported == [done for _, done in found.samples[1:]]
    assert reported == sorted(reported)
    assert found.samples[-1] == (found.seconds, found.bytes)
    assert list(disk.iterdir()) == []
    with pytest.raises(NoSpaceError):
        sustained.write_on(
            disk, Setting(1 << 20, 8, 1), total, 1 << 40, True, lambda done, speed: None
        )
