"""Who stays in memory, and through how much of it the others pass."""

from __future__ import annotations

import itertools
import random

from nvme_offload.swap.schedule import Schedule


def run_period(schedule, order, sizes):
    """Use the values once in this *order*, on an immediate drive. A gradient is discarded
    after its use, so that it has no reason to stay.
    """

    def transfer():
        while transfers := schedule.plan():
            for one in transfers:
                schedule.finished(one, succeeded=True)

    for name in order:
        if name in schedule:
            schedule.need(name)
        else:
            schedule.create(name, sizes[name])
        transfer()
        schedule.take(name)
        if name.endswith("gradient"):
            schedule.discard(name)
        else:
            schedule.release(name, changed=True, nbytes=None)
        transfer()
    schedule.step()
    transfer()


def test_residents_stay_where_they_are_when_the_others_need_a_little_more_memory():
    states = [f"state {number}" for number in range(40)]
    sizes = {**dict.fromkeys(states, 2), "gradient": 4, "larger gradient": 5}
    schedule = Schedule(60, granule=1)
    apart = ["gradient", *states[:20], "larger gradient", *states[20:]]
    for _ in range(3):
        run_period(schedule, apart, sizes)
    before = dict(schedule._residency.homes)
    # one is read ahead while the other is in use
    together = ["gradient", "larger gradient", *states]
    for _ in range(3):
        run_period(schedule, together, sizes)
    kept = dict(schedule._residency.homes)
    assert 0 < len(before) - len(kept) <= 2
    assert kept.items() < before.items()
    run_period(schedule, together, sizes)
    assert schedule._residency.homes == kept


def test_values_that_stay_are_chosen_before_they_are_made_and_never_move() -> None:
    """The first step writes what does not fit, once; each later one reads and writes it."""
    sizes = {f"n{number}": 4096 for number in range(40)}
    schedule = Schedule(25 * 4096)
    schedule.foretell(sizes, 1, stay=False)
    staying = [name for name in sizes if schedule.stays(name)]
    assert len(staying) == 25 - 3
    places: dict[str, int] = {}
    moved = []
    for step in range(5):
        transfers = 0
        for name, nbytes in sizes.items():
            if step:
                schedule.need(name)
            else:
                schedule.create(name, nbytes, once=True)
            while True:
                started = schedule.plan()
                transfers += len(started)
                for transfer in started:
                    schedule.finished(transfer, succeeded=True)
                if not started:
                    break
            place, was_read = schedule.take(name)
            if name in staying:
                assert places.setdefault(name, place) == place
                assert not was_read
            schedule.release(name, changed=True, nbytes=None)
        schedule.step()
        moved.append(transfers)
        assert [name for name in sizes if schedule.stays(name)] == staying
    assert moved[0] <= 18 + 3  # including prefetched values
    assert max(moved[1:]) <= 2 * 18, moved


def test_values_in_memory_stay_in_place_when_the_first_order_is_learned() -> None:
    """A move goes by way of the drive: the second step moves hardly more than later ones."""
    generator = random.Random(0)
    sizes = {f"n{number}": 4096 * generator.randint(3, 40) for number in range(80)}
    schedule = Schedule(sum(sizes.values()) * 15 // 16 // 4096 * 4096)
    moved = []
    for step in range(5):
        nbytes = 0
        for name, size in sizes.items():
            if step:
                schedule.need(name)
            else:
                schedule.create(name, size, once=True)
            while started := schedule.plan():
                for transfer in started:
                    nbytes += sizes[transfer.name]
                    schedule.finished(transfer, succeeded=True)
            schedule.take(name)
            schedule.release(name, changed=True, nbytes=None)
        schedule.step()
        moved.append(nbytes)
    assert max(moved[1:]) < sum(sizes.values()) // 2, moved
    assert moved[1] < 2 * moved[-1], moved


def test_what_stays_is_not_chosen_anew_where_now_more_and_now_fewer_are_in_use() -> None:
    """As many as the timing has it: the order of uses depends on which values stay."""
    names = [f"n{number}" for number in range(60)]
    schedule = Schedule(18, granule=1)

    def transfer() -> None:
        while transfers := schedule.plan():
            for one in transfers:
                schedule.finished(one, succeeded=True)

    staying = []
    for period in range(12):
        passing = [name for name in names if not schedule.stays(name)]
        in_use: list[str] = []
        for name in [*passing, *(name for name in names if name not in passing)]:
            if period:
                schedule.need(name)
            else:
                schedule.create(name, 1)
            transfer()
            schedule.take(name)
            in_use.append(name)
            if len(in_use) > 1 + period % 2:
                schedule.release(in_use.pop(0), changed=True, nbytes=None)
                transfer()
        for name in in_use:
            schedule.release(name, changed=True, nbytes=None)
        schedule.step()
        transfer()
        staying.append({name for name in names if schedule.stays(name)})
    for before, after in itertools.pairwise(staying[3:]):
        assert len(before ^ after) <= 1
    assert len(staying[-1]) >= 12
