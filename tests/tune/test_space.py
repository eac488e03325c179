from __future__ import annotations

import pytest

from nvme_offload.hardware.profile import Setting
from nvme_offload.tune import space

FAST = 10e9


def test_grid_covers_every_combination_within_the_bytes_in_flight() -> None:
    settings = space.grid("libaio", 8, FAST)
    assert len(set(settings)) == len(settings)
    assert {setting.block_size for setting in settings} == set(space.BLOCK_SIZES)
    assert {setting.queue_depth for setting in settings} == set(space.QUEUE_DEPTHS)
    assert {setting.thread_count for setting in settings} == {1, 2, 4, 8}
    assert max(setting.bytes_in_flight for setting in settings) == 128 << 20
    assert Setting(1 << 20, 32, 4) in settings
    assert Setting(2 << 20, 32, 4) not in settings


@pytest.mark.parametrize(
    ("cpu_count", "threads"), [(1, {1, 2}), (2, {1, 2, 4}), (64, {1, 2, 4, 8})]
)
def test_threads_follow_the_cores(cpu_count: int, threads: set[int]) -> None:
    assert {setting.thread_count for setting in space.grid("libaio", cpu_count, FAST)} == threads


def test_a_slow_drive_gets_no_queue_that_takes_it_longer_than_a_tenth_of_a_second() -> None:
    assert max(setting.bytes_in_flight for setting in space.grid("libaio", 2, 400e6)) == 32 << 20
    assert max(setting.bytes_in_flight for setting in space.grid("libaio", 2, 1e6)) == 16 << 20
    assert (
        max(
            setting.bytes_in_flight
            for setting in space.grid("libaio", 2, FAST, most_bytes_in_flight=64 << 20)
        )
        == 64 << 20
    )


def test_posix_has_one_block_a_thread() -> None:
    settings = space.grid("posix", 2, FAST)
    assert {(setting.queue_depth, setting.backend) for setting in settings} == {(1, "posix")}
    assert {setting.thread_count for setting in space.coarse(settings)} == {1, 4}
