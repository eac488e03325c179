"""What backward is expected to ask for next."""

from __future__ import annotations

from nvme_offload.activations.order import BackwardOrder


def saved(order: BackwardOrder, *nodes: str) -> list[int]:
    return [order.save(node) for node in nodes]


def test_backward_goes_back_node_by_node_and_through_each_as_it_was_saved() -> None:
    order = BackwardOrder()
    a, b, c, d, e, f = saved(order, "linear", "norm", "norm", "attention", "attention", "attention")
    order.ask(d)
    assert order.after(d, 9) == [e, f, b, c, a]
    assert order.after(d, 2) == [e, f]
    assert order.next_node(d, 0) == [e, f, b, c]
    assert order.next_node(d, 5) == [e, f, b, c, a]
    for number in (e, f, b):
        order.ask(number)
    assert order.after(b, 9) == [c, a]
    assert order.next_node(b, 1) == [c, a]


def test_what_was_asked_for_or_is_gone_does_not_come_next() -> None:
    order = BackwardOrder()
    a, b, c, d = saved(order, *"abcd")
    order.ask(d)
    order.ask(b)
    order.forget(a)
    assert order.after(d, 9) == [c]
    order.forget(c)
    order.forget(c)
    assert order.after(d, 9) == []


def test_who_asks_for_the_second_time_goes_through_all_of_it_again() -> None:
    order = BackwardOrder()
    a, b, c = saved(order, *"abc")
    for number in (c, b, a):
        order.ask(number)
    assert order.after(c, 9) == []
    order.ask(c)
    assert order.after(c, 9) == [b, a]


def test_the_earlier_of_two_graphs_goes_back_through_itself() -> None:
    order = BackwardOrder()
    first = saved(order, *"abc")
    second = saved(order, *"def")
    order.ask(first[-1])
    assert order.after(first[-1], 9) == [first[1], first[0]]
    order.ask(second[-1])
    assert order.after(second[-1], 9) == [second[1], second[0], first[1], first[0]]


def test_a_node_may_come_again() -> None:
    order = BackwardOrder()
    a, b, c = saved(order, "x", "y", "x")
    assert a < b < c
