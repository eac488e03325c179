from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_coarse_has_the_defaults_and_the_deepest() -> None:
    settings = space.grid("libaio", 2, 1e9)
    found = space.coarse(settings)
    assert Setting(1 << 20, 8, 1) in found
    assert max(setting.bytes_in_flight for setting in found) == max(
        setting.bytes_in_flight for setting in settings
    )
    assert len(found) < len(settings) / 4


@given(st.sampled_from(space.grid("libaio", 4, FAST)))
def test_neighbours_differ_by_a_factor_of_two_in_one_direction(setting: Setting) -> None:
    settings = space.grid("libaio", 4, FAST)
    found = space.neighbours(setting, settings)
    assert found
    for other in found:
        factors = sorted(
            getattr(setting, name) / getattr(other, name)
            for name in ("block_size", "queue_depth", "thread_count")
        )
        assert factors in ([0.5, 1, 1], [1, 1, 2])
        assert setting in space.neighbours(other, settings)
    assert found == sorted(found, key=space.cost)


def test_cost_goes_by_bytes_in_flight_then_threads_then_blocks_near_a_mebibyte() -> None:
    mebibyte = 1 << 20
    ordered = [
        Setting(4 * mebibyte, 1, 1),
        Setting(mebibyte, 8, 1),
        Setting(mebibyte // 2, 16, 1),
        Setting(2 * mebibyte, 4, 1),
        Setting(mebibyte, 4, 2),
        Setting(mebibyte, 16, 1),
    ]
    assert sorted(set(ordered), key=space.cost) == ordered


@given(st.lists(st.integers(), unique=True, min_size=1), st.integers(1, 50))
def test_spread_takes_that_many_in_order_with_both_ends(items: list[int], count: int) -> None:
    taken = space.spread(items, count)
    assert len(taken) == min(count, len(items))
    assert [item for item in items if item in taken] == taken
    if len(taken) > 1:
        assert (taken[0], taken[-1]) == (items[0], items[-1])
