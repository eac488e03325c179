"""Attributes have other values in a context, and are as before after it."""

from __future__ import annotations

import pytest
from interrupts import places, raising

from nvme_offload.zero3.replacing import replaced


class Owner:
    inherited = "of the class"

    def __init__(self) -> None:
        self.own = "of the object"
        self._kept = "kept"

    @property
    def kept(self) -> str:
        return self._kept

    @kept.setter
    def kept(self, value: str) -> None:
        self._kept = value


@pytest.mark.parametrize("fails", [False, True])
def test_attributes_are_as_before_after_the_context(fails: bool) -> None:
    owner = Owner()
    before = dict(vars(owner))
    names = "own", "inherited", "kept"
    with (
        pytest.raises(KeyError) if fails else replaced(owner),
        replaced(owner, **dict.fromkeys(names, "other")),
    ):
        assert [getattr(owner, name) for name in names] == ["other"] * 3
        assert owner._kept == "other"
        if fails:
            raise KeyError
    assert vars(owner) == before
    assert Owner.inherited == owner.inherited == "of the class"


def test_attributes_are_as_before_after_an_exception_at_any_line() -> None:
    def use(owner: Owner) -> None:
        with replaced(owner, own="other", inherited="other", kept="other"):
            pass

    for place in places(lambda: use(Owner())):
        owner = Owner()
        before = dict(vars(owner))
        with raising(place, KeyboardInterrupt()) as raised, pytest.raises(KeyboardInterrupt):
            use(owner)
        assert raised.where is not None
        assert vars(owner) == before, place
