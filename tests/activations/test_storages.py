"""A storage is saved once, however many tensors share it; sizes, strides and dtypes of the tensors
are restored.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from offloading import Make, left
from torch import nn

from nvme_offload import save_on_nvme

PAGE = 4096


class Keep(torch.autograd.Function):
    """Saves its inputs, and shows the tensors that backward unpacks; the gradient of the first
    input is ones.
    """

    seen: list[torch.Tensor]

    @staticmethod
    def forward(ctx: Any, through: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.count = len(tensors)
        return through.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Keep.seen = list(ctx.saved_tensors)
        return (gradient, *[None] * ctx.count)


def there_and_back(
    offload: save_on_nvme, tensors: list[torch.Tensor], evict: bool = True
) -> list[torch.Tensor]:
    """What backward gets for *tensors*, which are saved together; with *evict* they are dropped,
    and on the drive meanwhile.
    """
    through = torch.zeros((), requires_grad=True)
    with offload:
        result = Keep.apply(through, *tensors)
        if evict:
            tensors.clear()
            result = Keep.apply(
                result, *(torch.full((PAGE,), float(number)) for number in range(8))
            )
    assert not evict or offload.stats().bytes_written > 0
    result.backward()
    del result
    return Keep.seen


def described(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.layout,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.requires_grad,
    )


def storage(elements: int = 4 * PAGE) -> torch.Tensor:
    return torch.randn(elements) * 1.0


TENSORS = {
    "plain": lambda: storage(),
    "transposed": lambda: storage().view(64, -1).t(),
    "permuted": lambda: storage().view(4, 8, 16, 32).permute(3, 1, 0, 2),
    "channels last": lambda: (
        storage().view(4, 8, 16, 32).contiguous(memory_format=torch.channels_last)
    ),
    "expanded": lambda: storage().view(64, 1, -1).expand(64, 50, -1),
    "strided": lambda: storage()[5::7],
    "a far part": lambda: storage(16 * PAGE)[9 * PAGE + 3 : 11 * PAGE],
    "overlapping": lambda: storage().as_strided((PAGE, 8), (1, 3), 17),
    "bfloat16": lambda: storage().bfloat16(),
    "float64": lambda: storage(PAGE).double()[1:],
    "int8": lambda: torch.randint(-128, 127, (PAGE * 4,), dtype=torch.int8)[3:],
    "bool": lambda: storage() > 0,
    "complex": lambda: torch.randn(PAGE, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(PAGE, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(PAGE, dtype=torch.complex64).conj().imag,
    "real part": lambda: torch.view_as_real(torch.randn(PAGE, dtype=torch.complex64))[:, 1],
    "other type": lambda: storage()[2:].view(torch.int32),
    "empty": lambda: torch.empty(0, 7),
    "scalar": lambda: torch.tensor(3.0),
    "not a number": lambda: torch.full((PAGE,), float("nan")),
    "sparse": lambda: torch.eye(100).to_sparse(),
    "requires grad": lambda: storage().requires_grad_(),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_comes_back_as_it_was(kind: str, make: Make) -> None:
    torch.manual_seed(5)
    original = TENSORS[kind]()
    copy = original.detach().clone()
    looks, alignment = (
        described(original),
        original.data_ptr() % 64 if original.layout is torch.strided else 0,
    )
    tensors = [original]
    del original
    (back,) = there_and_back(make(), tensors)
    assert described(back) == looks
    if back.layout is torch.strided:
        assert back.data_ptr() % 64 == alignment
    assert bits(back) == bits(copy)
    Keep.seen.clear()


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_has_no_size_or_no_memory_stays(make: Make) -> None:
    nested = torch.nested.nested_tensor([torch.randn(20, 64), torch.randn(30, 64)])
    cache = make()._cache
    back = cache.unpack(cache.pack(nested))
    assert all(
        torch.equal(one, other) for one, other in zip(back.unbind(), nested.unbind(), strict=True)
    )
    assert cache.unpack(cache.pack(torch._efficientzerotensor((PAGE,))))._is_zerotensor()


def test_parts_of_one_tensor_are_one_write(make: Make) -> None:
    offload = make(host_memory=1 << 20)
    whole = storage(12 * PAGE).view(64, -1)
    nbytes = whole.nbytes
    parts = whole.split(whole.shape[1] // 3, dim=-1)
    copies = [part.clone() for part in parts]
    back = there_and_back(
        offload, [*parts, parts[0].t(), whole, whole.view(-1).expand(9, -1)], evict=False
    )
    stats = offload.stats()
    assert stats.saved_bytes == nbytes
    assert stats.shared_bytes == 5 * nbytes
    assert all(torch.equal(one, other) for one, other in zip(back, copies, strict=False))


def test_parts_that_come_back_share_their_memory_as_they_did(make: Make) -> None:
    offload = make()
    whole = storage()
    parts = [whole[: 2 * PAGE], whole[PAGE:], whole]
    del whole
    back = there_and_back(offload, parts)
    assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == 1
    assert [tensor.storage_offset() for tensor in back] == [0, PAGE, 0]


def test_of_a_small_part_only_that_is_saved(make: Make) -> None:
    offload = make(host_memory=1 << 20)
    whole = storage(64 * PAGE)
    there_and_back(
        offload, [whole[PAGE : 2 * PAGE], whole[10 * PAGE : 11 * PAGE].expand(5, -1)], evict=False
    )
    assert offload.stats().saved_bytes == 2 * PAGE * 4


def test_a_tensor_that_was_changed_between_its_saves_is_saved_again(make: Make) -> None:
    offload = make(host_memory=1 << 20)
    held = storage(PAGE)
    first = held.clone()
    through = torch.zeros((), requires_grad=True)
    with offload:
        result = Keep.apply(through, held)
        held.add_(1)
        result = Keep.apply(result, held)
    assert offload.stats().saved_bytes == 2 * held.nbytes
    # of the first, once the second has come back
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    assert torch.equal(Keep.seen[0], first + 1)
    del result
    Keep.seen.clear()


def test_what_is_modified_behind_a_tensor_that_was_saved_is_saved_again(make: Make) -> None:
    offload = make(host_memory=1 << 20)
    first = storage(PAGE)
    second = first.data  # the same memory, and another count
    through = torch.zeros((), requires_grad=True)
    with offload:
        Keep.apply(through, first)
        first.add_(1)
        result = Keep.apply(through, second)
    expected = first.clone()
    del first, second
    result.backward()
    assert torch.equal(Keep.seen[0], expected)
    del result
    Keep.seen.clear()


class Doubling(torch.autograd.Function):
    """Its backward modifies its saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.mul_(2)


@pytest.mark.parametrize("size", [PAGE, 10])
@pytest.mark.parametrize("held", [True, False])
def test_what_a_backward_modifies_in_place_is_an_error_for_who_needs_it_later_as_without_hooks(
    size: int, held: bool, make: Make
) -> None:
    def step() -> torch.Tensor:
        y = torch.randn(size, requires_grad=True) * 1.0
        if held:
            keep.append(y)
        return (y.sin().sum() + Doubling.apply(y).sum()) * 1.0  # Doubling goes back first

    keep: list[torch.Tensor] = []
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step().backward()
    with make(host_memory=1 << 20):
        loss = step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("size", [PAGE, 10])
@pytest.mark.parametrize("copied", [True, False])
def test_what_was_changed_in_place_since_is_an_error_as_without_hooks(
    size: int, copied: bool, make: Make
) -> None:
    offload = make(host_memory=1 << 20)

    def step() -> torch.Tensor:
        x = torch.randn(size, requires_grad=True)
        y = x * 1.0
        z = y.sin()
        (y if copied else y.view(-1)[:1]).mul_(2)
        return z.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step().backward()
    with offload:
        loss = step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_was_updated_since_is_an_error_as_without_hooks(make: Make) -> None:
    layer = nn.Linear(64, 64)
    with make():
        loss = layer(layer(torch.randn(64, 64))).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_outlives_its_graph_is_written_once_and_then_stays(make: Make) -> None:
    offload = make(host_memory=1 << 20)
    table = torch.randn(8 * PAGE)
    x = torch.randn(8 * PAGE, requires_grad=True)
    saved = []
    for _ in range(3):
        before = offload.stats().saved_bytes
        with offload:
            loss = (x * table).sum()
        loss.backward()
        saved.append(offload.stats().saved_bytes - before)
    assert saved == [table.nbytes, 0, 0]
    table.add_(1)
    with offload:
        loss = (x * table).sum()
        table.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_with_another_owner_is_not_read_back(make: Make) -> None:
    offload = make(host_memory=PAGE * 4)
    held = [storage(PAGE) for _ in range(5)]
    back = there_and_back(offload, held, evict=False)
    assert offload.stats().bytes_written > 0
    assert offload.stats().bytes_read == 0
    assert [tensor.data_ptr() for tensor in back] == [tensor.data_ptr() for tensor in held]


def test_small_tensors_stay(make: Make) -> None:
    offload = make(min_bytes="16 KiB", host_memory=1 << 20)
    small, large = storage(PAGE - 1), storage(PAGE)
    there_and_back(offload, [small, large], evict=False)
    stats = offload.stats()
    assert (stats.saved_bytes, stats.kept_bytes) == (large.nbytes, small.nbytes)


def test_a_tensor_larger_than_the_memory_stays_and_is_warned_of_once(make: Make) -> None:
    offload = make(host_memory=8 * PAGE)
    large = storage(4 * PAGE)
    copy = large.clone()
    for expectation in (
        pytest.warns(
            RuntimeWarning,
            match="64 KiB stays on its device: it is larger than host_memory, 32 KiB",
        ),
        contextlib.nullcontext(),
    ):
        with expectation:
            (back,) = there_and_back(offload, [large], evict=False)
        assert torch.equal(back, copy)
    assert offload.stats().kept_bytes == 2 * large.nbytes
    assert left(offload) == (0, 0, [])
