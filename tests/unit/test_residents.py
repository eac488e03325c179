"""Who stays in memory, and through how much of it the others pass."""

from __future__ import annotations

import pytest

from nvme_offload.swap.access_order import AccessOrder, Period
from nvme_offload.swap.residents import Chooser


def period(told: str) -> Period:
    """Of a letter, a value is used from there on; of a letter in capitals, its use ends."""
    order = AccessOrder()
    for letter in told:
        if letter.islower():
            order.use(letter, 1, created=False)
        else:
            order.ended(letter.lower())
    order.step()
    return order.period


def chooser(
    told: str, sizes: dict[str, int], carried: int = 0, ahead: int | None = None
) -> Chooser:
    return Chooser(period(told), sizes, carried, ahead)


@pytest.mark.parametrize(
    ("told", "stay", "wanted"),
    [
        ("aAbBcC", "", (4, 7)),  # whoever is in use, the next two are read meanwhile
        ("aAbBcC", "c", (2, 3)),  # a, and b; there is nobody else
        ("abBcCA", "", (5, 8)),  # a is in use beside the others
        ("abBcCA", "b", (5, 6)),
        ("aAbBcCcC", "", (4, 7)),  # c is not read again for its second use
        ("aAbBcC", "abc", (0, 0)),
    ],
)
def test_the_room_for_those_who_pass(told: str, stay: str, wanted: tuple[int, int]) -> None:
    assert chooser(told, {"a": 1, "b": 2, "c": 4}).transient(stay) == wanted


def test_what_is_in_use_when_a_period_ends_has_its_room_all_the_time() -> None:
    # a is read beside b and c; c itself is what is carried
    assert chooser("aAbBc", {"a": 1, "b": 2, "c": 4}, carried=4).transient("") == (6, 11)
    assert chooser("aAbBcC", {"a": 1, "b": 2, "c": 4}, ahead=10).transient("") == (4, 14)


def test_a_value_far_larger_than_all_others_stays_so_that_these_pass_through_little() -> None:
    small = "bcdefghijklmnopqrstuvwxyz"
    sizes = {"a": 40, **dict.fromkeys(small, 1)}
    found = chooser("".join(f"{letter}{letter.upper()}" for letter in sizes), sizes).choose(48)
    assert "a" in found.names
    assert found.transient_bytes == 3
    assert sum(sizes[name] for name in found.names) == 45
    assert found.saved_bytes == 45


@pytest.mark.parametrize("nbytes", range(0, 40, 3))
def test_who_stays_and_who_passes_have_room_beside_each_other(nbytes: int) -> None:
    sizes = {letter: 1 + number * 7 % 5 for number, letter in enumerate("abcdefghijklm")}
    found = chooser("".join(f"{letter}{letter.upper()}" for letter in sizes), sizes)
    choice = found.choose(nbytes)
    assert len(set(choice.names)) == len(choice.names)
    assert choice.transient_bytes == found.transient(choice.names).nbytes
    assert choice.saved_bytes == found.saved(choice.names)
    assert (
        not choice.names
        or sum(sizes[name] for name in choice.names) + choice.transient_bytes <= nbytes
    )
