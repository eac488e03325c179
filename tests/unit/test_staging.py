"""`HostStager` and `Returns`: a value is in use until its user, or the copy engine of a GPU, is done
with it, also after an exception.
"""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from virtual_gpu import VirtualDevice, VirtualGpu, virtual_gpu  # noqa: E402  # where there is torch

from nvme_offload.device.room import DeviceRoom, memory_of  # noqa: E402
from nvme_offload.device.staging import DeviceStager, HostStager, Returns  # noqa: E402
from nvme_offload.errors import UsageError  # noqa: E402
from nvme_offload.hardware.config import AioConfig  # noqa: E402
from nvme_offload.sizes import AHEAD_PARTS, PLACES  # noqa: E402
from nvme_offload.swap.tier import Tier  # noqa: E402


@pytest.mark.parametrize(
    ("fraction", "found"), [(None, (60, 100)), (1.0, (60, 100)), (0.5, (20, 50)), (0.2, (0, 20))]
)
def test_a_process_may_take_its_fraction_of_the_gpus_memory(monkeypatch, fraction, found):
    """Here 30 bytes of the GPU's 100, where another process has 10."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30)
    name = "get_per_process_memory_fraction"
    if fraction is None:
        monkeypatch.delattr(torch.cuda, name, raising=False)
    else:
        monkeypatch.setattr(torch.cuda, name, lambda _: fraction, raising=False)
    assert memory_of() == found


def test_room_is_left_for_the_peak_without_the_callers_values(monkeypatch):
    """On a GPU of 1000 bytes, of which a tenth stays free."""
    statistics = {"allocated_bytes": {"all": {}}, "reserved_bytes": {"all": {"current": 700}}}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (300, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: statistics)
    whole = "get_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, whole, lambda _: 1.0, raising=False)
    room = DeviceRoom(torch.device("cuda"), aside=50)
    peaks = statistics["allocated_bytes"]["all"]
    peaks["peak"] = 500  # 400 of the passes and 100 of the caller
    assert room.suffices(100, 350)
    assert not room.suffices(100, 351)
    assert not room.has_new_peak()
    peaks["peak"] = 950  # 500 of the passes and 450 of the caller
    assert room.has_new_peak()
    assert not room.suffices(450)
    assert room.suffices(350)  # the peak still counts 450 bytes of the caller
    assert not room.suffices(351)


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


@pytest.fixture
def gpu(tier):
    """Host memory in place of a GPU's, with streams whose work ends immediately."""
    made = VirtualGpu(lambda: True)
    made.watch(tier.swapper._runner.memory, is_host=True)
    with virtual_gpu(made):
        yield VirtualDevice("cpu")


def steps(tier, stager, names, contents, count=1):
    """Steps that add 1 to each value, in order."""
    for _ in range(count):
        for name in names:
            memory = stager.fetch(name, 4096)
            assert memory[0] == contents[name]
            memory.add_(1)
            contents[name] += 1
            stager.give_back(changed=True)
        stager.ease()
        tier.swapper.step()


def used_copies(stager, monkeypatch):
    """For each use of a value that was copied before it, whether the copy was used."""
    swapper, found = stager._tier.swapper, []
    real = swapper.is_as_glimpsed

    def is_as_glimpsed(glimpse):
        found.append(real(glimpse))
        return found[-1]

    monkeypatch.setattr(swapper, "is_as_glimpsed", is_as_glimpsed)
    return found


def test_values_are_copied_before_their_use_and_are_those_of_the_time(tier, gpu, monkeypatch):
    names = [f"n{number}" for number in range(6 * AHEAD_PARTS)]
    stager = DeviceStager(tier, gpu, looks_ahead=True)
    contents = dict.fromkeys(names, 0)
    held(tier, *names)
    for name in names:
        tier.swapper.release(name, changed=True)
        tier.swapper.swap_in(name).zero_()
        tier.swapper.release(name, changed=True)
    tier.swapper.step()
    steps(tier, stager, names, contents, count=2)
    used = used_copies(stager, monkeypatch)
    steps(tier, stager, names, contents)
    assert used == [True] * len(names)
    assert PLACES < len(stager._places) <= len(tier.swapper.upcoming(1000))
    # a pass has needed more memory than before
    with monkeypatch.context() as patch:
        patch.setattr(DeviceRoom, "has_new_peak", lambda _: True)
        patch.setattr(DeviceRoom, "suffices", lambda _, held, more: held + more <= 4 * 4096)
        steps(tier, stager, names, contents)
        assert len(stager._places) == 4
    steps(tier, stager, names, contents, count=2)
    stager.drain()
    # another user changes a value that was copied already
    tier.swapper.swap_in("n0").fill_(40)
    tier.swapper.release("n0", changed=True)
    contents["n0"] = 40
    used.clear()
    steps(tier, stager, names, contents)  # which checks the contents
    assert used == [False, *[True] * (len(names) - 1)]
    stager.drain()
    stager.renew("n1", 4096).fill_(50)  # takes the place of a value that was copied
    stager.give_back(changed=True)
    contents["n1"] = 50
    steps(tier, stager, names, contents, count=3)
    stager.drain()
    # a user reads all values, and the next order is another
    for name in names:
        tier.swapper.swap_in(name, in_order=False)
        tier.swapper.release(name, changed=False)
    steps(tier, stager, names[::-1], contents)
    stager.cancel()
    steps(tier, stager, names[::-1], contents, count=3)
    stager.drain()
    assert [int(tier.swapper.swap_in(name)[0]) for name in names] == list(contents.values())


def test_a_newer_version_of_a_value_leaves_the_old_one(tier, gpu):
    for stager in (HostStager(tier), DeviceStager(tier, gpu)):
        tier.swapper.swap_out("n", torch.full((4096,), 3, dtype=torch.uint8))
        memory = stager.renew_beside(stager.fetch("n", 4096))
        assert memory[0] == 3
        memory.add_(1)
        stager.give_back(changed=True)
        stager.drain()
        assert tier.swapper.swap_in("n")[0] == 3
        tier.swapper.release("n", changed=False)
        tier.swapper.commit("n")
        assert tier.swapper.swap_in("n")[0] == 4
        tier.swapper.discard("n")


def test_a_stager_keeps_no_host_memory(tier, gpu):
    stager = DeviceStager(tier, gpu, looks_ahead=True)
    tier.swapper.swap_out("n", torch.zeros(4096, dtype=torch.uint8))
    memory = weakref.ref(tier._pool._arena)
    stager.fetch("n", 4096)
    stager.give_back(changed=True)
    stager.drain()
    tier.close()
    gc.collect()
    assert memory() is None
