"""What backward is expected to ask for next."""

from __future__ import annotations

from nvme_offload.activations.order import BackwardOrder


def saved(order: BackwardOrder, *nodes: str) -> list[int]:
    return [order.save(node) for node in nodes]


def test_backward_goes_back_node_by_node_and_through_each_as_it_was_saved() -> None:
    order = BackwardOrder()
    a, b, c, d, e, f = saved(order, "linear", "norm", "norm", "attention", "attention", "attention")
    order.ask(d)
    assert list(order.after(d, 9)) == [e, f, b, c, a]
    assert list(order.after(d, 2)) == [e, f]
    assert order.next_node(d, 0) == [e, f, b, c]
    assert order.next_node(d, 5) == [e, f, b, c, a]
    for number in (e, f, b):
        order.ask(number)
    assert list(order.after(b, 9)) == [c, a]
    assert order.next_node(b, 1) == [c, a]
