"""`HostStager` and `Returns`: a value is in use until its user, or the copy engine of a GPU, is done
with it, also after an exception.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from nvme_offload.device.staging import HostStager, Returns  # noqa: E402  # where there is torch
from nvme_offload.errors import UsageError  # noqa: E402
from nvme_offload.hardware.config import AioConfig  # noqa: E402
from nvme_offload.swap.tier import Tier  # noqa: E402


class Event:
    """An event of a GPU that *ends* now, or once it is waited for."""

    def __init__(self, ends=False):
        self.ended = ends

    def query(self):
        return self.ended

    def synchronize(self):
        self.ended = True


@pytest.fixture
def tier(tmp_path):
    made = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=1 << 20)
    made.require(1 << 20)
    yield made
    made.close()


def in_use(tier, name):
    """Whether the value *name* is in use: then it cannot be brought again."""
    try:
        tier.swapper.swap_in(name)
    except UsageError:
        return True
    tier.swapper.release(name, changed=False)
    return False


def held(tier, *names):
    for number, name in enumerate(names):
        tier.swapper.create(name, 4096).fill_(number)


def test_values_are_released_when_their_copies_end(tier):
    held(tier, "one", "two", "three")
    returns = Returns(tier)
    events = [Event(ends=True), Event(), Event()]
    for name, event in zip(("one", "two", "three"), events, strict=True):
        returns.add(name, changed=True, done=event)
    returns.release(at_most=3)
    assert [in_use(tier, name) for name in ("one", "two", "three")] == [False, True, True]
    assert "two" in returns
    assert "one" not in returns
    returns.release(at_most=1)
    assert events[1].ended
    assert not events[2].ended
    assert not in_use(tier, "two")
    assert in_use(tier, "three")
    returns.release(at_most=0)
    assert len(returns) == 0
    assert not in_use(tier, "three")
    assert tier.swapper.swap_in("three").unique().tolist() == [2]


def test_the_end_of_one_copy_does_not_wait_for_the_others(tier):
    held(tier, "one", "two", "three")
    returns = Returns(tier)
    events = {name: Event() for name in ("one", "two", "three")}
    for name, event in events.items():
        returns.add(name, changed=True, done=event)
    returns.end("two")
    returns.end("another")
    assert [event.ended for event in events.values()] == [False, True, False]
    assert [in_use(tier, name) for name in events] == [True, False, True]
    assert len(returns) == 2
    returns.release(at_most=0)


def test_after_an_exception_all_are_released_whatever_was_released_before(tier):
    held(tier, "one", "two")
    returns = Returns(tier)
    for name in ("one", "two"):
        returns.add(name, changed=True, done=Event())
    tier.swapper.release("one", changed=True)  # the exception came right after it
    returns.cancel()
    assert not in_use(tier, "one")
    assert not in_use(tier, "two")
    assert len(returns) == 0


def test_a_host_stager_releases_what_it_holds(tier):
    stager = HostStager(tier)
    stager.renew("value", 4096).fill_(1)
    stager.give_back(changed=True, nbytes=100)
    assert not in_use(tier, "value")
    assert stager.fetch("value", 50).tolist() == [1] * 50
    stager.cancel()
    assert not in_use(tier, "value")
    with pytest.raises(UsageError):
        stager.fetch("none", 1)
    stager.cancel()  # nothing is in use
    stager.give_back(changed=True)
    stager.renew("value", 4096).fill_(2)
    stager.renew("value", 8192).fill_(3)  # replaces the value that it holds
    stager.give_back(changed=True)
    assert tier.swapper.swap_in("value").unique().tolist() == [3]


def test_a_use_that_is_continued_is_released_once_and_after_its_last_copy(tier):
    held(tier, "one")
    returns, first, last = Returns(tier), Event(ends=True), Event()
    returns.add("one", changed=True, done=first)
    continued = returns.in_flight("one")
    assert continued.done is first
    assert "one" in returns  # so that an exception here does not lose it
    returns.add("one", changed=True, done=last)
    assert len(returns) == 1
    returns.release(at_most=1)
    assert in_use(tier, "one")
    returns.release(at_most=0)
    assert last.ended
    assert not in_use(tier, "one")
