"""The predicted uses: the period before, from the current position in it."""

from __future__ import annotations

import pytest

from nvme_offload.swap.access_order import AccessOrder


def use(order: AccessOrder, names: str) -> None:
    for name in names:
        order.use(name, 1, False)


def order_of(names: str) -> AccessOrder:
    order = AccessOrder()
    use(order, names)
    order.step()
    return order


def expected(order: AccessOrder) -> str:
    return "".join(order.at(order.now + ahead).name for ahead in range(len(order.period)))


@pytest.mark.parametrize(
    ("learned", "used", "then"),
    [
        ("abcdef", "ab", "cdefab"),
        ("abcdef", "abx", "cdefab"),  # something new changes nothing
        ("abcdef", "abd", "efabcd"),  # one left out
        ("abcdef", "abfab", "cdefab"),  # back to the beginning
        # the forward pass once more: at first it looks like the end of the backward pass
        ("abccba", "abca", "abccba"),
        ("abccba", "abcab", "ccbaab"),
    ],
)
def test_another_order_is_followed_as_soon_as_it_is_known_again(
    learned: str, used: str, then: str
) -> None:
    order = order_of(learned)
    before = order.now
    use(order, used)
    assert order.now >= before, "positions count on"
    assert expected(order) == then


def test_an_order_that_is_not_followed_is_known_as_such() -> None:
    order = order_of("abcdefgh")
    use(order, "abcdefgh")
    assert order.followed
    use(order, "hgfedcba" * 3)
    assert not order.followed
    use(order, "abcdefgh" * 3)
    assert order.followed


def test_an_order_that_differs_from_period_to_period_is_not_followed() -> None:
    order = order_of("abcdefgh")
    for names in "hgfedcba", "badcfehg", "efabghcd", "gchbfaed":
        use(order, names)
        order.step()
    assert not order.followed
    for _ in range(3):
        use(order, "gchbfaed")
        order.step()
    assert order.followed


def test_an_evaluation_between_teaches_nothing_unless_it_comes_again() -> None:
    order = order_of("abcdef")
    use(order, "abcabcdef")
    assert not order.step()
    assert expected(order) == "abcdef"
    use(order, "abcabcdef")
    assert order.step()
    assert expected(order) == "abcabcdef"


def test_what_was_changed_and_dropped_is_learned() -> None:
    order = AccessOrder()
    use(order, "ab")
    order.changed("a")
    order.dropped("b")
    order.step()
    assert [(one.changed, one.dropped) for one in order.period.uses] == [
        (True, False),
        (False, True),
    ]


def test_hints_are_over_with_their_use_or_after_the_next_period() -> None:
    order = order_of("abcd")
    order.hint("dz")
    order.hint("zc")
    assert order.hinted("d") == 0
    use(order, "z")  # d was not needed
    assert [order.hinted(name) for name in "dzc"] == [None, None, 3]
    order.step()
    assert order.hinted("c") == 3
    order.step()
    assert order.hinted("c") is None


def test_a_record_that_never_ends_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvme_offload.swap.access_order._LONGEST_PERIOD", 5)
    order = AccessOrder()
    use(order, "abcd")
    assert not order.full
    use(order, "e")
    assert order.full


# Predictions


@pytest.mark.parametrize("used", ["abc", "cab"])
def test_the_first_period_replaces_a_predicted_order(used: str) -> None:
    """Its order and ends are expected from there on."""
    order = AccessOrder()
    order.foretell(dict.fromkeys("abc", 1), at_once=3)
    for name in used:
        order.use(name, 1, created=False)
        order.changed(name)
        order.ended(name)
    assert order.step()
    assert [(use.name, use.created) for use in order.period.uses] == [
        (name, False) for name in used
    ]
    assert order.period.ends == [1, 2, 3]
    for name in used:
        order.use(name, 1, created=False)
        order.changed(name)
    assert not order.step()
